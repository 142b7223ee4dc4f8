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
from verl_clipx.losses.base.method import Method, find_declarations
from verl_clipx.losses.base.tokens import Inputs
from verl_clipx.losses.methods import method_named
from verl_clipx.losses.modifiers.masks import Mask, apply_mask_rule
from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.run.run_files import METRICS, traces_path
from verl_clipx.run.trace_format import Shard, UpdateFacts, read_shards, regions_of, write_shard
from verl_clipx.training.trainer.log import write_record
from verl_clipx.training.worker.policy_loss import split_by_sign

# Begins the keys of the plugin's metrics.
PLUGIN_METRICS = "actor/clipx/"
# Of a rollout batch: its prompts, the samples of each, the tokens of each sample, the updates on it.
PROMPTS = 8
SAMPLES = 8
LENGTH = 12
UPDATES = 4
# What the trace of an update says of it if one rank traced every token.
WHOLE_UPDATE = UpdateFacts(fraction=1, ranks=1, decided_from=DecidedFrom.MINI_BATCH)
WORDS = ("<answer>", " 12", " +", " 7", " -", " 3", " 16", "</answer>", "\n", " ", "so", "<|end|>")
# The text of a token that is no markup.
UNSAFE = "</script><img src=x onerror=document.title='unsafe'>"


def log_line(step: int, **data: float) -> str:
    """A line of verl's file log."""
    return json.dumps({"step": step, "data": data}) + "\n"


def write_log(path: Path, rows: list[dict[str, float]], first_step: int = 1) -> Path:
    """Write a log of one row a step, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(log_line(step, **row) for step, row in enumerate(rows, first_step)))
    return path


def write_validation(folder: Path, scores: dict[int, list[tuple[float, ...]]]) -> None:
    """Write validations: by step, the scores of each problem's samples."""
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
    facts: UpdateFacts = WHOLE_UPDATE,
    mask: Mask | None = None,
    policies: Mapping[int, tuple[Tensor, Tensor]] = MappingProxyType({}),
    **parameters,
) -> Path:
    """Write a run: its log, its record, and traces of every other step that have every token.

    Args:
        folder: the run's, which is returned.
        method: its name.
        seed: of the made-up tokens, and the run's.
        steps: how many it has.
        traced: whether it has traces.
        facts: what these say of their updates.
        mask: if given, it takes out tokens whose ratio to the sampler is far from 1.
        policies: from a step to old and current log-probabilities in place of made-up ones, each
            (PROMPTS * SAMPLES, LENGTH).
        parameters: the method's.
    """
    log = folder / METRICS
    built = method_named(method)(**parameters)
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for step in range(1, steps + 1):
        batch = _make_rollout_batch(generator, step)
        if step in policies:
            batch["old"], batch["current"] = policies[step]
        updates = [_make_update(built, batch, update, generator, mask) for update in range(UPDATES)]
        values_by_name = {name: [metrics[name] for metrics, _ in updates] for name in updates[0][0]}
        row = {name: sum(values) / UPDATES for name, values in values_by_name.items()}
        if built.statistics_size:
            of_plugin = {
                name.removeprefix(PLUGIN_METRICS): values
                for name, values in values_by_name.items()
                if name.startswith(PLUGIN_METRICS)
            }
            for name, value in built.over_updates(of_plugin).items():
                row[f"{PLUGIN_METRICS}{name}"] = value
        row["critic/score/mean"] = float(batch["score"][:, 0].mean())
        row["actor/entropy"] = 0.9 - 0.05 * step
        rows.append(row)
        if traced and step % 2 == 0:
            for update, (_, fields) in enumerate(updates):
                write_shard(traces_path(log), Shard(step, update, 0), _make_columns(batch, update, fields), facts)
    write_log(log, rows)
    node = {"method": method, **built.parameters}
    if mask is not None:
        node["mask"] = vars(mask) | {"rule": mask.rule}
    write_record(log, {"clipx": node, "data": {"seed": seed, "train_batch_size": PROMPTS}})
    return folder


def read_columns(folder: Path, shard: Shard) -> dict[str, list]:
    """Return the columns of one file of a trace, as `write_shard` takes them."""
    return read_shards(folder, [shard]).drop_columns(["step", "update", "rank"]).to_pydict()


def _make_rollout_batch(generator: torch.Generator, step: int) -> dict[str, Tensor]:
    """Return the old log-probabilities, advantages, scores and words of each token, (PROMPTS * SAMPLES, LENGTH)."""
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


def _make_update(
    method: Method, batch: dict[str, Tensor], update: int, generator: torch.Generator, mask_rule: Mask | None
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return an update's metrics by their names in verl's log, and the fields of its trace by name.

    Args:
        method: the method that is applied.
        batch: a rollout batch of `_make_rollout_batch`. If it has "current", these are the current log-probabilities.
            Otherwise the policy is the old one in the first update, and further from it in each later one.
        update: the update's number in the rollout batch, from 0.
        generator: draws the current log-probabilities and the sampler's.
        mask_rule: takes tokens out; None: all tokens are trained on.

    Returns:
        The metrics, and the fields, each (rows of the update, LENGTH).
    """
    size = len(batch["old"]) // UPDATES
    rows = slice(update * size, (update + 1) * size)
    old = batch["old"][rows]
    advantage = batch["advantage"][rows]
    noise = torch.randn(old.shape, generator=generator)
    if "current" in batch:
        current = batch["current"][rows]
    else:
        # Unlikely tokens move further than likely ones, up or down at random.
        current = (old + 0.13 * update * noise * (1.1 - old.exp())).clamp(max=0)
    all_tokens = Inputs(
        log_prob=current,
        old_log_prob=old,
        advantages=advantage,
        mask=torch.ones_like(old, dtype=torch.bool),
    )
    if mask_rule is None:
        applied = apply(method, shaping=None, inputs=all_tokens)
        return _compute_metrics(method, all_tokens, applied), token_trace(method, applied, factor=1.0)._asdict()
    # The sampler's probabilities are near the old policy's, so that a rule on their ratio takes some tokens out.
    sampler = old + 0.2 * torch.randn(old.shape, generator=generator)
    all_tokens = all_tokens._replace(rollout_log_prob=sampler)
    trained_tokens = all_tokens._replace(mask=apply_mask_rule(mask_rule, all_tokens))
    applied = apply(method, shaping=None, inputs=trained_tokens)
    metrics = _compute_metrics(method, trained_tokens, applied)
    taken_out = ~trained_tokens.mask
    for sign, taken_out_of_sign in split_by_sign(taken_out, advantage).items():
        metrics[f"{PLUGIN_METRICS}masked_fraction/{sign}"] = float(taken_out_of_sign.float().mean())
        metrics[f"{PLUGIN_METRICS}masked_sequences/{sign}"] = float(taken_out_of_sign.all(-1).sum())
    # The trace also has the tokens that the rule takes out, under the bounds that the trained tokens decided.
    traced = apply(method, shaping=None, inputs=all_tokens, decision=applied.decision)
    fields = token_trace(method, traced, factor=1.0)._asdict()
    fields["rejected"] = taken_out
    fields["selected"] = ~taken_out
    fields["rollout_log_prob"] = all_tokens.rollout_log_prob
    fields["weight"] = torch.where(taken_out, 0.0, fields["weight"])
    return metrics, fields


def _compute_metrics(method, inputs: Inputs, applied) -> dict[str, float]:
    """Return an update's metrics by the names in verl's log."""
    sums = token_metrics(token_loss(method, None, inputs, applied.decision).sums)
    count = float(sums.pop(TOKENS))
    means = replace_sums_with_metrics({name: [float(value) / count] for name, value in sums.items()})
    metrics = {}
    for name, (value,) in means.items():
        metrics[name if name.startswith("actor/") else f"actor/{name}"] = value
    for _, members in find_declarations(method, method.metrics(applied.statistics, applied.decision)):
        for name, value in members.items():
            metrics[f"{PLUGIN_METRICS}{name}"] = float(value)
    return metrics


def _make_columns(batch: dict[str, Tensor], update: int, fields: dict[str, Tensor]) -> dict[str, list]:
    """Return the columns of an update's trace."""
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
