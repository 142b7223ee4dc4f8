"""How much of the clipping is rounding: verl's log-probabilities of the same tokens, computed twice: docs/floor.md.

Run: python benchmarks/floor.py --model FOLDER    (a few minutes on two cores; without --model a tiny policy alone)
     python benchmarks/floor.py --model FOLDER --standing    trainings at a learning rate of 0 instead
FOLDER is what `python -m verl_clipx.papers.tasks.pretrained CACHE` prints: SmolLM2-135M-Instruct.

Responses are sampled at temperature 1, and no step is taken. verl's own engine (FSDP2, one rank) then computes their
log-probabilities with the same weights and other micro-batches. On a CPU verl takes the logarithm of the softmax in the
precision of the logits; on a GPU with flash attention in float32. Both are measured.
"""

import contextlib
import gc
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import torch
import typer
from one_process.only_rank import become_only_rank
from shared import table
from standing import PROMPTS, RUNS, STEPS, Standing, train_standing
from torch import Tensor
from worker_update import DEVICE, Row, build_worker, compose_run, rollout_batch

ROOT = Path(__file__).parents[1]
TINY = ROOT / "docs/results/evidence_policy"
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
ENGINE = (
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    # The engine packs rows unless a mini-batch says otherwise.
    "actor_rollout_ref.model.use_remove_padding=true",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
)
TOPICS = ("a river", "the moon", "bread", "a lost key", "winter", "two friends", "an old ship", "a quiet street")
BINS = 5
HELD = {"clip_fraction": 0.02, "second_moment": 0.01}
CONTROLLERS = ("grpo", "acpo", "bapo", "m2po", "dcpo", "clip_cov", "kl_cov")
# Bounds on the ratio by the method that has them; a width w means 1 / (1 + w) to 1 + w.
BOUNDS = {"0.9 to 1.1": (0.9, 1.1), "GRPO": (0.8, 1.2), "DAPO": (0.8, 1.28), "width 1": (0.5, 2.0)}


class Cut(NamedTuple):
    """How rows are cut into micro-batches.

    Args:
        size: rows of a micro-batch.
        packed: whether its rows are packed into one, without padding.
        backwards: whether the last row comes first.
    """

    size: int
    packed: bool = False
    backwards: bool = False

    def __str__(self) -> str:
        kind = "packed" if self.packed else "padded"
        return f"{kind}, {self.size}{', reversed' if self.backwards else ''}"


REFERENCE = Cut(8)
OTHERS = (Cut(1), Cut(8, backwards=True), Cut(8, packed=True), Cut(1, packed=True))
# On a CPU the logarithm of the softmax adds the same to whatever the cut is.
OF_VERL = OTHERS[:1]


class Differences(NamedTuple):
    """Two passes' log-probabilities of the same response tokens, one after the other, (tokens,) each."""

    old: Tensor
    new: Tensor

    @property
    def log_ratio(self) -> Tensor:
        """Returns log r as a loss computes it, in float64."""
        return (self.new.float() - self.old.float()).double()


def stories(count: int) -> list[str]:
    """Returns prompts that ask for short stories."""
    return [f"Tell a short story about {TOPICS[number % len(TOPICS)]}, number {number}." for number in range(count)]


def prompts_of(tokenizer: Any, count: int, *, tiny: bool) -> list[list[int]]:
    """Returns prompts as tokens: sums for the tiny policy, which knows nothing else, and short stories."""
    texts = stories(count)
    if tiny:
        texts = [f"What is {2 + number % 17} + {3 + number % 13}?" for number in range(count)]
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        for text in texts
    ]


def sample_rows(folder: Path, *, count: int, response: int, tiny: bool) -> list[Row]:
    """Samples responses in float32 at temperature 1, to their end or to lengths that differ."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(DEVICE)
    prompts = prompts_of(tokenizer, count, tiny=tiny)
    padded = tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(DEVICE)
    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": response}
    with torch.no_grad():
        sampled = model.generate(**padded, **options)[:, padded["input_ids"].shape[1] :].cpu()
    rows = []
    for number, (prompt, ids) in enumerate(zip(prompts, sampled, strict=True)):
        ended = (ids == tokenizer.eos_token_id).nonzero()
        # Unequal lengths, so that padding and packing differ.
        most = max(4, response - 3 * (number % 8))
        length = min(most, int(ended[0]) + 1) if len(ended) else most
        whole = torch.cat([torch.tensor(prompt), ids[:length]])
        # GRPO's advantages of a group of two.
        advantage = 1.0 if number % 2 else -1.0
        mask = torch.ones(length, dtype=torch.int64)
        rows.append(
            Row(ids=whole, prompt=len(prompt), old_log_prob=torch.zeros(length), mask=mask, advantage=advantage)
        )
    return rows


@contextlib.contextmanager
def softmax_in_float32() -> Iterator[None]:
    """Has verl's engine take the logarithm of the softmax in float32, as flash attention's cross-entropy does."""
    from verl.workers.engine.fsdp import transformer_impl

    def log_probs_in_float32(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        return logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]

    with patch.object(transformer_impl, "logprobs_from_logits", log_probs_in_float32):
        yield


def log_probs_of(worker: Any, rows: list[Row], cut: Cut) -> Tensor:
    """Returns the log-probabilities of all response tokens, row after row, whatever the order of the pass."""
    from verl.utils import tensordict_utils as tu

    ordered = rows[::-1] if cut.backwards else rows
    data = rollout_batch(ordered, mini_batch=len(rows))
    keys = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": cut.size, "use_remove_padding": cut.packed}
    tu.assign_non_tensor(data, **keys, compute_loss=False, calculate_entropy=False)
    whole = worker.infer_batch(data)["log_probs"].unbind()
    parts = [values[row.prompt - 1 : -1] for row, values in zip(ordered, whole, strict=True)]
    return torch.cat(parts[::-1] if cut.backwards else parts).detach().cpu()


def passes_of(folder: Path, rows: list[Row], precision: str) -> dict[str, dict[str, Tensor]]:
    """Returns the log-probabilities by how the softmax is taken and by the cut."""
    dtype = PRECISIONS[precision]
    # Flash attention takes half precision alone.
    flash = DEVICE == "cuda" and precision != "float32" and importlib.util.find_spec("flash_attn") is not None
    attention = "flash_attention_2" if flash else "sdpa"
    overrides = [
        f"actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype={dtype}",
        f"++actor_rollout_ref.model.override_config.attn_implementation={attention}",
    ]
    worker = build_worker(compose_run(folder, 1, [*ENGINE, *overrides])).actor
    with softmax_in_float32():
        found = {"float32": {str(cut): log_probs_of(worker, rows, cut) for cut in (REFERENCE, *OTHERS)}}
    if precision != "float32":
        found["verl's own"] = {str(cut): log_probs_of(worker, rows, cut) for cut in (REFERENCE, *OF_VERL)}
    del worker
    gc.collect()
    return found


def outside(log_ratio: Tensor, low: float, high: float) -> float:
    """Returns the share of tokens whose ratio leaves two bounds."""
    ratio = log_ratio.exp()
    return float(((ratio < low) | (ratio > high)).double().mean())


def row_of(differences: Differences) -> dict[str, float]:
    """Returns the figures of two passes."""
    log_ratio = differences.log_ratio
    found = {"mean abs. log-ratio": float(log_ratio.abs().mean())}
    return found | {name: outside(log_ratio, *bounds) for name, bounds in BOUNDS.items()}


def bins_of(differences: Differences) -> list[dict[str, float]]:
    """Returns the figures of each bin of the first pass's probability."""
    bins = (differences.old.double().exp() * BINS).floor().clamp(0, BINS - 1)
    found = []
    for number in range(BINS):
        members = bins == number
        part = Differences(differences.old[members], differences.new[members])
        found.append({"tokens": int(members.sum()), **(row_of(part) if members.any() else {})})
    return found


def inputs_of(differences: Differences, rows: list[Row]) -> Any:
    """Returns two passes as a loss sees them, padded."""
    from torch.nn.utils.rnn import pad_sequence

    from verl_clipx.losses.base.tokens import Inputs

    lengths = [len(row.mask) for row in rows]
    padded = [
        pad_sequence(list(values.float().split(lengths)), batch_first=True)
        for values in (differences.new, differences.old)
    ]
    mask = pad_sequence([row.mask for row in rows], batch_first=True).bool()
    advantages = torch.tensor([[row.advantage] for row in rows]).expand(mask.shape)
    return Inputs(*padded, advantages, mask)


def controllers(differences: Differences, rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Returns what each method decides from tokens that have not moved, and how many of them it clips."""
    from verl_clipx.losses.applying.loss import apply
    from verl_clipx.losses.methods import METHODS
    from verl_clipx.losses.modifiers.hold import Hold, held

    inputs, found = inputs_of(differences, rows), {}
    # Clip-Cov clips a few tokens at any ratio; its covariances are those of these advantages.
    # M2PO measures to the sampler, whose log-probabilities would be those of another engine.
    methods = {name: METHODS[name](**({"behaviour": "old"} if name == "m2po" else {})) for name in CONTROLLERS}
    for target, value in HELD.items():
        methods[f"grpo, {target} held at {value}"] = held(METHODS["grpo"](), Hold(target=target, value=value))
    for name, method in methods.items():
        applied = apply(method, None, inputs)
        logged = method.metrics(applied.statistics, applied.decision) if method.statistics_size else {}
        bounded = method.bounded(applied.tokens)
        beyond = (bounded < applied.bounds.low) | (bounded > applied.bounds.high)
        taught = inputs.mask & (inputs.advantages != 0)
        found[name] = {
            "decided": {key: value.tolist() for key, value in logged.items()},
            "outside its bounds": float((beyond & inputs.mask).sum() / inputs.mask.sum()),
            "without a gradient": float(((applied.weighted == 0) & taught).sum() / inputs.mask.sum()),
        }
    return found


def measure(folder: Path, rows: list[Row], precisions: list[str]) -> dict[str, Any]:
    """Returns every figure of a model."""
    passes = {precision: passes_of(folder, rows, precision) for precision in precisions}
    exact = passes["float32"]["float32"][str(REFERENCE)]
    found: dict[str, Any] = {"tokens": len(exact), "rows": len(rows), "cuts": {}, "bins": {}, "controllers": {}}
    for precision, by_softmax in passes.items():
        for softmax, by_cut in by_softmax.items():
            name, first = f"{precision}, softmax: {softmax}", by_cut[str(REFERENCE)]
            pairs = {cut: Differences(first, other) for cut, other in by_cut.items() if cut != str(REFERENCE)}
            if precision != "float32":
                pairs["the same in float32"] = Differences(exact, first)
            found["cuts"][name] = {cut: row_of(differences) for cut, differences in pairs.items()}
            found["bins"][name] = bins_of(pairs[str(OTHERS[0])])
            found["controllers"][name] = controllers(pairs[str(OTHERS[0])], rows)
    return found


def cell_of(bin: dict[str, float]) -> str:
    """Returns a bin's cell: its tokens and, if it has any, their mean absolute log-ratio and the share outside."""
    if not bin["tokens"]:
        return "0"
    return f"{bin['tokens']}: {bin['mean abs. log-ratio']:.2g}, {100 * bin['0.9 to 1.1']:.2g} %"


def show(name: str, found: dict[str, Any]) -> None:
    """Prints a model's tables."""
    print(f"\n{name}: {found['tokens']} tokens of {found['rows']} responses; {REFERENCE} rows against\n")
    heads = ["precision", "against", "mean abs. log-ratio", *BOUNDS]
    lines = []
    for precision, by_cut in found["cuts"].items():
        for cut, row in by_cut.items():
            shares = [f"{100 * row[bound]:.2g} %" for bound in BOUNDS]
            lines.append([precision, cut, f"{row['mean abs. log-ratio']:.2g}", *shares])
    print(table(heads, lines))
    lines = []
    for precision, bins in found["bins"].items():
        cells = [cell_of(figures) for figures in bins]
        lines.append([precision, *cells])
    print()
    print(table(["tokens: mean abs. log-ratio, outside 0.9 to 1.1", *(f"bin {k}" for k in range(BINS))], lines))


def show_standing(name: str, found: dict[str, Standing]) -> None:
    """Prints what the updates of trainings saw that did not move."""
    print(f"\n{name}, {STEPS} rollout batches: mean absolute log-ratio (tokens)\n")
    heads = [
        "micro-batches",
        "first floor",
        "second floor",
        "later updates",
        "from",
        "to",
        "outside 0.8 to 1.2",
        "nearer",
    ]
    lines = []
    for cut, standing in found.items():
        first, second, later = standing.tokens
        mean = sum(standing.later) / len(standing.later)
        lines.append(
            [
                cut,
                f"{standing.first:.2g} ({first})",
                f"{standing.second:.2g} ({second})",
                f"{mean:.2g} ({later} in {len(standing.later)} updates)",
                f"{min(standing.later):.2g}",
                f"{max(standing.later):.2g}",
                f"{100 * standing.outside:.2g} %",
                standing.nearer,
            ]
        )
    print(table(heads, lines))


def main(
    model: Annotated[Path | None, typer.Option(help="Folder of a pretrained model.")] = None,
    count: Annotated[int, typer.Option(help="Responses, a multiple of 8.")] = 24,
    response: Annotated[int, typer.Option(help="Tokens of the longest response.")] = 56,
    precision: Annotated[list[str] | None, typer.Option(help="float32 and these; all by default.")] = None,
    standing: Annotated[bool, typer.Option(help="Train the model where it stands still instead.")] = False,
    output: Annotated[Path | None, typer.Option("--json", help="A file for the figures.")] = None,
) -> None:
    """Print, for a tiny policy and a model, how far two passes of the same weights lie apart."""
    torch.set_num_threads(int(os.environ.get("THREADS", "2")))
    become_only_rank(DEVICE)
    os.environ |= {"HF_HUB_OFFLINE": "1", "RAY_ADDRESS": os.environ.get("RAY_ADDRESS", "127.0.0.1:6379")}
    if standing:
        if model is None:
            raise typer.BadParameter("--standing trains a pretrained model: give its folder by --model")
        texts = stories(PROMPTS * STEPS)
        runs = {cut: train_standing(model, texts, overrides) for cut, overrides in RUNS.items()}
        show_standing(model.name, runs)
        return
    precisions = ["float32", *(name for name in precision or PRECISIONS if name != "float32")]
    figures = {"device": DEVICE, "torch": torch.__version__, "models": {}}
    for name, folder in (("tiny policy", TINY), ("model", model)):
        if folder is None:
            continue
        tiny = folder == TINY
        rows = sample_rows(folder, count=count * (4 if tiny else 1), response=16 if tiny else response, tiny=tiny)
        found = figures["models"][name if tiny else folder.name] = measure(folder, rows, precisions)
        show(name if tiny else folder.name, found)
        if output is not None:
            output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
