"""How far bounds at ratio 1 are from the training pass's where the two passes pack differently: docs/scopes.md.

Run: python benchmarks/half_precision_bounds.py --model 2x128x16xbf16    (one rank, FSDP2, one CPU thread)

What the closed form's tolerance rests on (TOLERATED_IN_HALF in verl_clipx/worker/planner.py). ACPO's first update of
random Qwen2 models by verl's own worker: old_log_probs computed in some micro-batches, the update made in others.
"""

import os
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer

from verl_clipx.gpu_check.engine import ACTOR, MODEL, ROLLOUT, Bench, composed, precision, rank_environment, update
from verl_clipx.gpu_check.machine import Machine
from verl_clipx.gpu_check.sample import SEED, make_row, save_model

MODELS = ["2x128x16xfp32", "2x128x16xbf16", "2x128x64xbf16", "8x256x16xbf16", "16x512x16xbf16"]
MACHINE = Machine("cpu", 1)
PACKED = f"{MODEL}.use_remove_padding=True"


def sizes(inferred: int, trained: int) -> tuple[str, ...]:
    """Sequences of a micro-batch in the two passes."""
    log_prob = f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={inferred}"
    return log_prob, f"{ACTOR}.ppo_micro_batch_size_per_gpu={trained}"


PACKINGS = {
    "packed, 256 and 64 tokens": (
        *(PACKED, f"{ACTOR}.use_dynamic_bsz=True", f"{ROLLOUT}.log_prob_use_dynamic_bsz=True"),
        *(f"{ACTOR}.ppo_max_token_len_per_gpu=64", f"{ROLLOUT}.log_prob_max_token_len_per_gpu=256"),
    ),
    "packed, 8 and 1 sequences": (PACKED, *sizes(8, 1)),
    "padded, 8 and 1 sequences": sizes(8, 1),
    "equal micro-batches": (PACKED, *sizes(8, 8)),
}


def main(
    model: Annotated[list[str], typer.Option(help="LAYERSxWIDTHxSEQUENCESxTYPE.")] = MODELS,
) -> None:
    """Print a row for each model: in each packing how far the bounds are apart, of epsilon."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.update(rank_environment(MACHINE, 0, folder))
        torch.set_num_threads(1)
        Bench(MACHINE, folder)
        print(f"| layers, width, sequences | {' | '.join(PACKINGS)} |\n|---|{'---|' * len(PACKINGS)}")
        for words in model:
            layers, width, sequences, dtype = words.split("x")
            path = folder / words
            saved = save_model(path, hidden_size=int(width), layers=int(layers), tied=False).double()
            generator = torch.Generator().manual_seed(SEED)
            rows = [make_row(saved, generator) for _ in range(int(sequences))]
            announced = ("data.train_batch_size=1", f"{ACTOR}.ppo_mini_batch_size=1", "+clipx=acpo")
            found = [
                update(composed(MACHINE, path, (*announced, *precision(dtype), *of)), rows, recomputed=True)
                for of in PACKINGS.values()
            ]
            cells = " | ".join(f"{one.closed_form_difference:.2g}" for one in found)
            print(f"| {layers}, {width}, {sequences}, {dtype} | {cells} |", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
