"""What a scope costs: verl's update of the actor with each of them, against verl's vanilla: docs/dev/measurements.md.

Run: python benchmarks/update_actor.py    (one rank, FSDP2; float32 on the CPU, bfloat16 on a GPU)

A rollout batch is made from random tokens and trained on by the real training worker. The model is large enough that
forward and backward dominate. Each variant has its turn in every repeat, so that a busy machine slows all alike. On the
CPU the process's own time is measured, without that of other work.
"""

import os
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from one_process.only_rank import become_only_rank
from shared import actor_config, seconds_of, table
from worker_update import DEVICE, HARDWARE, Row, build_worker, compose_run, rollout_batch

from verl_clipx.common.files import write_json

# A run's first rollout batch has a receipt (docs/swap.md), the others have none.
LATER = "clipx.receipt=off"
# The old log-probabilities are made up, and not recomputed as the line says.
FIRST = "clipx.receipt=warn"
IN_LARGER = "acpo, mini_batch, larger extra pass"
VARIANTS = {
    "vanilla": (),
    "acpo, micro_batch": ("+clipx=acpo", "clipx.scope=micro_batch", LATER),
    "acpo, lagged": ("+clipx=acpo", "clipx.scope=lagged", LATER),
    "acpo, mini_batch": ("+clipx=acpo", LATER),
    IN_LARGER: ("+clipx=acpo", LATER),
    "acpo, mini_batch, a run's first": ("+clipx=acpo", FIRST),
    "bapo, mini_batch": ("+clipx=bapo", LATER),
    "grpo, a run's first": ("+clipx=grpo", FIRST),
    "grpo, lopti": ("+clipx=grpo", "+clipx/update=lopti", LATER),
    "observe": ("+clipx=observe",),
}
# The extra pass keeps no activations, so that micro-batches of so many times the size may fit it.
LARGER = 4
VOCABULARY = 512
PROMPT = 8
STRATEGY = "actor_rollout_ref.actor.strategy=fsdp2"
ENGINE = (
    STRATEGY,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.model.use_remove_padding=false",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    "++actor_rollout_ref.model.override_config.attn_implementation=sdpa",
)


def save_model(folder: Path, *, width: int, layers: int) -> int:
    """Saves a random model with a tokenizer; returns its number of parameters."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=4096,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"t{index}": index for index in range(VOCABULARY)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", pad_token="t0").save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def random_batch(sequences: int, prompt: int, response: int, mini_batch: int, micro_batch: int):
    """A rollout batch of random tokens in verl's jagged layout."""
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCABULARY, (sequences, prompt + response), generator=generator)
    old = torch.full((sequences, response), -6.2) + 0.2 * torch.randn(sequences, response, generator=generator)
    advantages = torch.randn(sequences, generator=generator).tolist()
    ones = torch.ones(response, dtype=torch.int64)
    rows = [Row(ids[row], prompt, old[row], ones, advantages[row]) for row in range(sequences)]
    data = rollout_batch(rows, mini_batch=mini_batch)
    tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=micro_batch)
    return data


def pass_in_larger_micro_batches(extra_pass, data, *rest):
    """Makes the extra pass over a mini-batch in `LARGER` times larger micro-batches."""
    from verl.utils import tensordict_utils as tu

    size = min(LARGER * tu.get(data, "micro_batch_size_per_gpu"), len(data))
    return extra_pass(tu.assign_non_tensor(data.copy(), micro_batch_size_per_gpu=size), *rest)


def seconds_of_update(worker, batch, name: str, updates: int) -> float:
    """Trains on the rollout batch in some optimizer steps under a variant; returns the seconds of that."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import ppo_loss

    # verl's own worker under the plugin's class: the loss function decides.
    worker.policy_loss = None
    announced = (f"data.train_batch_size={updates}", "actor_rollout_ref.actor.ppo_mini_batch_size=1")
    worker.set_loss_fn(partial(ppo_loss, config=actor_config(*HARDWARE, STRATEGY, *announced, *VARIANTS[name])))
    if name == IN_LARGER:
        worker.extra_pass = partial(pass_in_larger_micro_batches, worker.extra_pass)
    # As in a run, where old_log_probs are computed first.
    worker.infer_batch(tu.assign_non_tensor(batch.copy(), compute_loss=False))
    data = batch.copy()
    return seconds_of(lambda: worker.train_mini_batch(data), DEVICE, calls=1)


def main(
    width: Annotated[int, typer.Option(help="Width of the model, a multiple of 64.")] = 512,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 10,
    updates: Annotated[list[int] | None, typer.Option(help="Updates per rollout batch.")] = None,
    repeats: Annotated[int, typer.Option(help="Measurements of each variant, interleaved.")] = 5,
    sequences: Annotated[int, typer.Option(help="Sequences of the rollout batch.")] = 16,
    response: Annotated[int, typer.Option(help="Tokens of a response.")] = 56,
    micro_batch: Annotated[int | None, typer.Option(help="Sequences of a micro-batch; half a mini-batch.")] = None,
    chosen: Annotated[list[str] | None, typer.Option("--variant", help="Beside vanilla; all by default.")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="A file for the figures.")] = None,
) -> None:
    """Print a table for each number of updates: median seconds, spread, and the ratio to vanilla."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        become_only_rank(DEVICE)
        os.environ |= {"HF_HUB_OFFLINE": "1", "RAY_ADDRESS": os.environ.get("RAY_ADDRESS", "127.0.0.1:6379")}
        parameters = save_model(Path(name), width=width, layers=layers)
        worker = build_worker(compose_run(Path(name), 1, ENGINE)).actor
    results = {}
    for count in updates or [2, 16]:
        mini_batch = sequences // count
        batch = random_batch(sequences, PROMPT, response, mini_batch, micro_batch or max(mini_batch // 2, 1))
        names = [name for name in VARIANTS if name == "vanilla" or not chosen or name in chosen]
        # The first round warms up.
        rounds = [[seconds_of_update(worker, batch, name, count) for name in names] for _ in range(repeats + 1)][1:]
        times = dict(zip(names, zip(*rounds, strict=True), strict=True))
        print(
            f"\n{DEVICE}, {parameters / 1e6:.0f} M parameters, {count} updates of {mini_batch} x {response} "
            f"tokens, torch {torch.__version__}\n"
        )
        rows = []
        for name, seconds in times.items():
            ratio = statistics.median(a / b for a, b in zip(seconds, times["vanilla"], strict=True))
            rows.append(
                [name, f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f}-{max(seconds):.2f}", f"{ratio:.3f}"]
            )
            results.setdefault(str(count), {})[name] = {"seconds": seconds, "of_vanilla": ratio}
        heads = ["variant", "median s", "range s", "of vanilla (median of the repeats' ratios)"]
        print(table(heads, rows), flush=True)
        if output:
            write_json(output, {"device": DEVICE, "parameters": parameters, "updates": results})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
