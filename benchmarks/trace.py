"""Time that traces and all metrics take on the training thread: docs/dev/measurements.md.

Run: python benchmarks/trace.py    (a micro-batch of 64 x 4096 tokens, float32, one thread; on a GPU where there is one)

The time is the training thread's own, which the writer's thread and others on the machine cannot stretch by taking
turns; on a GPU, which works by itself, it is what the thread is busy with and not how long the GPU is. It has the loss
with its backward pass, as the training worker calls it, and what a rollout batch of that one micro-batch adds: choosing
prompts and handing the traced tokens over. The files go to a temporary folder, and the writer has caught up before the
next measurement.
"""

import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from shared import actor_config
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

from verl_clipx.run.trace import Trace
from verl_clipx.worker.loss_function import with_micro_batch
from verl_clipx.worker.step import OptimizerStep, RolloutBatch
from verl_clipx.worker.tracer import Tracer

PROMPT_LENGTH, VOCABULARY = 64, 32_000
SEQUENCES, LENGTH, SAMPLES = 64, 4096, 8

# What else a run may compute beside its loss.
BESIDE = {
    "clipx.metrics=all": ("clipx.metrics=all",),
}


def jagged(values: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


def rollout_batch(sequences: int, length: int) -> tuple[TensorDict, list[Tensor]]:
    """A rollout batch on the host, ragged, and the log-probabilities of prompts and responses under another policy."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(length // 4, length + 1, (sequences,), generator=generator).tolist()
    prompts = torch.randint(VOCABULARY, (sequences // SAMPLES + 1, PROMPT_LENGTH), generator=generator)
    old = [-torch.rand(n, generator=generator) * 4 for n in lengths]
    data = TensorDict(
        {
            "prompts": jagged([prompts[row // SAMPLES] for row in range(sequences)]),
            "responses": jagged([torch.randint(VOCABULARY, (n,), generator=generator) for n in lengths]),
            "response_mask": jagged([torch.ones(n, dtype=torch.int64) for n in lengths]),
            "old_log_probs": jagged(old),
            "rollout_log_probs": jagged(old),
            "advantages": jagged([torch.randn(1, generator=generator).expand(n).contiguous() for n in lengths]),
            "rm_scores": jagged([torch.zeros(n) for n in lengths]),
        },
        batch_size=[sequences],
    )
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=sum(lengths), global_batch_size=sequences)
    moved = [values + 0.3 * torch.randn(len(values), generator=generator) for values in old]
    # The model's output for a response's token stands one position to its left.
    pad = torch.zeros(PROMPT_LENGTH - 1), torch.zeros(1)
    return data, [torch.cat([pad[0], values, pad[1]]) for values in moved]


def measure(config, data: TensorDict, log_probs: list[Tensor], device: str, tracer: Tracer | None) -> float:
    """Milliseconds of the training thread for one rollout batch of one micro-batch and one update."""
    leaf = jagged(log_probs).to(device).requires_grad_(True)
    settings, step = config.policy_loss.clipx, OptimizerStep()
    loss_function = with_micro_batch(
        partial(ppo_loss, config=config), settings, lambda: step, [tracer] if tracer else []
    )
    data = data.copy()

    def update() -> None:
        loss, _ = loss_function(model_output={"log_probs": leaf}, data=data.to(device))
        loss.backward()

    started = time.thread_time()
    if tracer is None:
        update()
    else:
        batch = RolloutBatch()
        tracer.begin_rollout_batch(data, batch)
        update()
        tracer.end_update(step)
        tracer.end_rollout_batch(batch)
    seconds = time.thread_time() - started
    if tracer is not None and not tracer.writer.flush(600):
        raise RuntimeError("the writer did not catch up within 600 s")
    return 1e3 * seconds


def main(
    repeats: Annotated[int, typer.Option(help="Measurements of each, interleaved.")] = 9,
) -> None:
    """Print a table: median time on the training thread and its range, by the share of the prompts that is traced."""
    torch.set_num_threads(1)
    # Nothing is launched, so the check for an accelerator has to look elsewhere.
    os.environ.setdefault("RAY_ADDRESS", "127.0.0.1:6379")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    configs = {name: actor_config("+clipx=grpo", *overrides) for name, overrides in BESIDE.items()}
    config = actor_config("+clipx=grpo")
    data, log_probs = rollout_batch(SEQUENCES, LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        tracers: dict[str, Tracer | None] = {"untraced": None}
        for fraction in (1 / 4, 1.0):
            trace = Trace(fraction=fraction, every=1, folder=str(Path(folder) / f"{fraction}"))
            tracers[f"{100 * fraction:g} % of the prompts"] = Tracer(trace, rank=0, ranks=1, tokenizer=None)
        tracers |= dict.fromkeys(configs)
        found: dict[str, list[float]] = {name: [] for name in tracers}
        # The first round warms up.
        for _ in range(repeats + 1):
            for name, tracer in tracers.items():
                found[name].append(measure(configs.get(name, config), data, log_probs, device, tracer))
        print(f"{SEQUENCES} x {LENGTH} tokens, grpo, {device}, {repeats} measurements each")
        print(f"{'':28s} {'median ms':>10s} {'range':>18s} {'ratio':>6s} {'MB a batch':>11s}")
        untraced = statistics.median(found["untraced"][1:])
        for name, tracer in tracers.items():
            times = found[name][1:]
            files = [] if tracer is None else list(Path(folder, f"{tracer.trace.fraction}").glob("*.parquet"))
            size = sum(file.stat().st_size for file in files) / max(len(files), 1) / 1e6
            middle, ends = statistics.median(times), f"{min(times):.1f} to {max(times):.1f}"
            print(f"{name:28s} {middle:10.1f} {ends:>18s} {middle / untraced:6.2f} {size:11.2f}")


if __name__ == "__main__":
    typer.run(main)
