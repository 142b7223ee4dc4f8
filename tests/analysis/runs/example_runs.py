"""Runs for tests: made-up tokens whose statistics, bounds, weights and metrics are the plugin's own."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pandas
import torch
from torch import Tensor

from verl_clipx.losses.applying.loss import apply, token_loss
from verl_clipx.losses.applying.metrics import TOKENS, replace_sums_with_metrics, token_metrics
from verl_clipx.losses.applying.token_trace import token_trace
from verl_clipx.losses.base.method import find_declarations
from verl_clipx.losses.base.tokens import Inputs
from verl_clipx.losses.methods import method_named
from verl_clipx.losses.modifiers.masks import Mask, apply_mask_rule
from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.run.run_files import METRICS, traces_path
from verl_clipx.run.trace_format import Shard, UpdateFacts, read_shards, regions_of, write_shard
from verl_clipx.training.trainer.log import write_record
from verl_clipx.training.worker.policy_loss import split_by_sign

OWN = "actor/clipx/"
PROMPTS, SAMPLES, LENGTH, UPDATES = 8, 8, 12, 4
WHOLE = UpdateFacts(1, 1, DecidedFrom.MINI_BATCH)
WORDS = ("<answer>", " 12", " +", " 7", " -", " 3", " 16", "</answer>", "\n", " ", "so", "<|end|>")
UNSAFE = "</script><img src=x onerror=document.title='unsafe'>"


def log_line(step: int, **data: float) -> str:
    """A line of verl's file log."""
    return json.dumps({"step": step, "data": data}) + "\n"


def write_log(path: Path, rows: list[dict[str, float]], first: int = 1) -> Path:
    """Writes a log of one row a step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(log_line(step, **row) for step, row in enumerate(rows, first)))
    return path


def write_validation(folder: Path, scores: dict[int, list[tuple[float, ...]]]) -> None:
    """Writes validations: by step, the scores of each problem's samples."""
    folder.mkdir(parents=True, exist_ok=True)
    for step, problems in scores.items():
        lines = [
            json.dumps({"input": f"problem {index}", "score": score})
            for index, samples in enumerate(problems)
            for score in samples
        ]
        (folder / f"{step}.jsonl").write_text("\n".join(lines))


def write_run(
    folder: Path,
    method: str,
    *,
    seed: int = 1,
    steps: int = 6,
    traced: bool = True,
    facts: UpdateFacts = WHOLE,
    mask: Mask | None = None,
    policies: Mapping[int, tuple[Tensor, Tensor]] = MappingProxyType({}),
    **parameters,
) -> Path:
    """Writes a run of a method with parameters: log, record, and traces of every other step, each of which has every
    token and says `facts` of its update; a mask takes out tokens whose ratio to the sampler is far from 1. `policies`:
    from a step to old and current log-probabilities, (PROMPTS * SAMPLES, LENGTH) each, in place of made-up ones.
    """
    log, built = folder / METRICS, method_named(method)(**parameters)
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for step in range(1, steps + 1):
        batch = _rollout(generator, step) | dict(zip(("old", "current"), policies.get(step, ()), strict=False))
        updates = [_update(built, batch, update, generator, mask) for update in range(UPDATES)]
        by_name = {name: [metrics[name] for metrics, _ in updates] for name in updates[0][0]}
        of_method = {name.removeprefix(OWN): values for name, values in by_name.items() if name.startswith(OWN)}
        summary = built.over_updates(of_method) if built.statistics_size else {}
        logged = {name: sum(values) / UPDATES for name, values in by_name.items()}
        logged |= {f"{OWN}{name}": value for name, value in summary.items()}
        reward = float(batch["score"][:, 0].mean())
        rows.append(logged | {"critic/score/mean": reward, "actor/entropy": 0.9 - 0.05 * step})
        if traced and step % 2 == 0:
            for update, (_, tokens) in enumerate(updates):
                write_shard(traces_path(log), Shard(step, update, 0), _columns(batch, update, tokens), facts)
    write_log(log, rows)
    clipx = {"method": method, **built.parameters, **({"mask": vars(mask) | {"rule": mask.rule}} if mask else {})}
    write_record(log, {"clipx": clipx, "data": {"seed": seed, "train_batch_size": PROMPTS}})
    return folder


def read_columns(folder: Path, shard: Shard) -> dict[str, list]:
    """The columns of one file of a trace, as `write_shard` takes them."""
    return read_shards(folder, [shard]).drop_columns(["step", "update", "rank"]).to_pydict()


def _rollout(generator: torch.Generator, step: int) -> dict[str, Tensor]:
    shape = (PROMPTS * SAMPLES, LENGTH)
    score = (torch.rand(PROMPTS, SAMPLES, generator=generator) < 0.2 + 0.03 * step).float()
    score[0] = 0.0
    spread = score.std(1, keepdim=True).clamp(min=1e-6)
    advantage = ((score - score.mean(1, keepdim=True)) / spread).view(-1, 1).expand(shape).contiguous()
    probability = torch.rand(shape, generator=generator) ** 0.4
    words = torch.randint(len(WORDS), shape, generator=generator)
    return {
        "old": probability.clamp(min=1e-3).log(),
        "advantage": advantage,
        "score": score.view(-1, 1).expand(shape),
        "words": words,
    }


def _update(method, batch: dict[str, Tensor], update: int, generator: torch.Generator, mask: Mask | None):
    """Metrics as verl logs them, and the tokens' fields of a trace, of a mini-batch that has moved from the old one."""
    rows = slice(update * len(batch["old"]) // UPDATES, (update + 1) * len(batch["old"]) // UPDATES)
    old, advantage = batch["old"][rows], batch["advantage"][rows]
    noise = torch.randn(old.shape, generator=generator)
    made_up = (old + 0.13 * update * noise * (1.1 - old.exp())).clamp(max=0)
    current = batch["current"][rows] if "current" in batch else made_up
    inputs = Inputs(current, old, advantage, torch.ones_like(old, dtype=torch.bool))
    every, out = inputs, torch.zeros_like(inputs.mask)
    if mask is not None:
        every = inputs._replace(rollout_log_prob=old + 0.2 * torch.randn(old.shape, generator=generator))
        inputs = every._replace(mask=apply_mask_rule(mask, every))
        out = every.mask & ~inputs.mask
    applied = apply(method, None, inputs)
    metrics = token_metrics(token_loss(method, None, inputs, applied.decision).sums)
    count = float(metrics.pop(TOKENS))
    means = replace_sums_with_metrics({name: [float(value) / count] for name, value in metrics.items()})
    logged = {name if name.startswith("actor/") else f"actor/{name}": value for name, (value,) in means.items()}
    for _, members in find_declarations(method, method.metrics(applied.statistics, applied.decision)):
        logged |= {f"{OWN}{name}": float(value) for name, value in members.items()}
    if mask is None:
        return logged, token_trace(method, applied, 1.0)._asdict()
    for sign, masked in split_by_sign(out, advantage).items():
        logged[f"{OWN}masked_fraction/{sign}"] = float(masked.float().mean())
        logged[f"{OWN}masked_sequences/{sign}"] = float((masked.all(-1)).sum())
    fields = token_trace(method, apply(method, None, every, applied.decision), 1.0)._asdict()
    more = {"rejected": out, "selected": ~out, "rollout_log_prob": every.rollout_log_prob}
    return logged, fields | more | {"weight": torch.where(out, 0.0, fields["weight"])}


def _columns(batch: dict[str, Tensor], update: int, fields: dict[str, Tensor]) -> dict[str, list]:
    count, length = fields["ratio"].shape
    start = update * count
    columns = {name: values.flatten().tolist() for name, values in fields.items()}
    sides = (pandas.Series(columns[name]) for name in ("bounded", "low", "high", "advantage"))
    places = [(row, position) for row in range(start, start + count) for position in range(length)]
    words = [int(batch["words"][place]) for place in places]
    prompts = [f"problem {row // SAMPLES}" for row, _ in places]
    return columns | {
        "region": regions_of(*sides).tolist(),
        "prompt": [hashlib.sha256(prompt.encode()).hexdigest()[:16] for prompt in prompts],
        "prompt_text": prompts,
        "sample": [row % SAMPLES for row, _ in places],
        "score": [float(batch["score"][place]) for place in places],
        "unshaped_advantage": columns["advantage"],
        "micro_batch": [0] * len(places),
        "entropy": [float(1.5 - fields["old_log_prob"][row - start, position].exp()) for row, position in places],
        "position": [position for _, position in places],
        "token_id": words,
        "text": [UNSAFE if place == (start, 0) else WORDS[word] for place, word in zip(places, words, strict=True)],
    }
