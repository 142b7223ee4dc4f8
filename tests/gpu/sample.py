"""A tiny model, rows for one update of it, and the loss and gradient that the update should have.

The expected values are computed here in float64 on the CPU, sequence by sequence, without padding and without verl.
"""

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from worker_update import Row

from tests.training.cpu.policy import random_policy
from verl_clipx.papers.tasks.tiny_policy.tokenizer import build_tokenizer

# verl's and GRPO's defaults.
CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 0.8, 1.2, 3.0

ROWS = 16
SEED = 3
# Log-ratios, drawn with equal probability. Some are within the bounds and some outside, and none is so near a bound
# that rounding to bfloat16 would move a token across it.
LOG_RATIOS = (-0.6, -0.05, 0.0, 0.05, 0.6)


@dataclass(frozen=True)
class Sample:
    """Rows, and what GRPO's update on all of them should be."""

    rows: tuple[Row, ...]
    # The mean over the tokens in the mask.
    loss: float
    # The mean of the losses' sizes, relative to which differences of the loss are reported.
    loss_scale: float
    # The share of tokens without a gradient.
    clipped: float
    # By parameter, float64.
    gradients: dict[str, Tensor]


def make_sample(folder: Path, *, tied: bool) -> Sample:
    """Save a random model and its tokenizer into a folder, and make a sample for it; every rank makes the same ones.

    Its weights are large enough for its distributions to be far from uniform.
    """
    tokenizer = build_tokenizer()
    model = random_policy(
        SEED,
        tied=tied,
        dtype="float32",
        size=len(tokenizer),
        end=tokenizer.eos_token_id,
        padding=tokenizer.pad_token_id,
        hidden_size=128,
        intermediate_size=384,
        initializer_range=0.08,
        max_position_embeddings=256,
    )
    # transformers shows a progress bar for a file.
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model = model.double()
    generator = torch.Generator().manual_seed(SEED)
    return compute_update(model, tuple(make_row(model, generator) for _ in range(ROWS)))


def make_row(model: torch.nn.Module, generator: torch.Generator) -> Row:
    """Return a row of random tokens whose old log-probabilities differ from the model's by one of `LOG_RATIOS`."""
    prompt_length = int(torch.randint(3, 9, (1,), generator=generator))
    response_length = int(torch.randint(4, 25, (1,), generator=generator))
    ids = torch.randint(model.config.vocab_size, (prompt_length + response_length,), generator=generator)
    with torch.no_grad():
        log_prob = compute_log_probs(model, ids, prompt_length)
    drawn = torch.randint(len(LOG_RATIOS), (response_length,), generator=generator)
    old_log_prob = log_prob - torch.tensor(LOG_RATIOS, dtype=torch.float64)[drawn]
    mask = (torch.rand(response_length, generator=generator) > 0.1).long()
    advantage = float(torch.randn(1, generator=generator))
    return Row(ids, prompt_length, old_log_prob.clamp(max=-1e-3).float(), mask, advantage)


def compute_log_probs(model: torch.nn.Module, ids: Tensor, prompt_length: int) -> Tensor:
    """Return the log-probabilities of a response's tokens, (response length,)."""
    of_vocabulary = model(ids[None]).logits[0, prompt_length - 1 : -1].log_softmax(-1)
    return of_vocabulary.gather(1, ids[prompt_length:, None])[:, 0]


def compute_update(model: torch.nn.Module, rows: tuple[Row, ...]) -> Sample:
    """Return the rows with the loss and gradient of GRPO over all of them, computed by PPO's formula as printed."""
    losses = []
    clipped = []
    for row in rows:
        log_prob = compute_log_probs(model, row.ids, row.prompt)
        ratio = (log_prob - row.old_log_prob.double()).exp()
        loss = torch.maximum(-row.advantage * ratio, -row.advantage * ratio.clamp(CLIP_LOW, CLIP_HIGH))
        if row.advantage < 0:
            loss = loss.clamp(max=-row.advantage * DUAL_CLIP)
        losses.append(loss[row.mask.bool()])
        if row.advantage > 0:
            is_clipped = ratio > CLIP_HIGH
        elif row.advantage < 0:
            is_clipped = (ratio < CLIP_LOW) | (ratio > DUAL_CLIP)
        else:
            is_clipped = torch.zeros_like(ratio, dtype=torch.bool)
        clipped.append(is_clipped[row.mask.bool()])
    loss_of_tokens = torch.cat(losses)
    model.zero_grad()
    loss_of_tokens.mean().backward()
    return Sample(
        rows=rows,
        loss=float(loss_of_tokens.detach().mean()),
        loss_scale=float(loss_of_tokens.detach().abs().mean()),
        clipped=float(torch.cat(clipped).double().mean()),
        gradients={name: parameter.grad.clone() for name, parameter in model.named_parameters()},
    )
