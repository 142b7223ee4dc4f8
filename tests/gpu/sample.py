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
    # Mean over the tokens in the mask, and that of its size, relative to which differences of the loss are reported.
    loss: float
    loss_scale: float
    # Share of tokens without a gradient.
    clipped: float
    # In float64, by parameter.
    gradients: dict[str, Tensor]


def make_sample(folder: Path, *, tied: bool) -> Sample:
    """Save a random model and its tokenizer into a folder, and make a sample for it; every rank makes the same ones.

    Its weights are large enough for its distributions to be far from uniform.
    """
    tokenizer = build_tokenizer()
    ends = {"end": tokenizer.eos_token_id, "padding": tokenizer.pad_token_id, "max_position_embeddings": 256}
    sizes = {"size": len(tokenizer), "hidden_size": 128, "intermediate_size": 384, "initializer_range": 0.08}
    model = random_policy(SEED, tied=tied, dtype="float32", **ends, **sizes)
    # transformers shows a progress bar for a file.
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model, generator = model.double(), torch.Generator().manual_seed(SEED)
    return expected(model, tuple(make_row(model, generator) for _ in range(ROWS)))


def make_row(model: torch.nn.Module, generator: torch.Generator) -> Row:
    """A row of random tokens whose old log-probabilities differ from the model's by one of `LOG_RATIOS`."""
    prompt, response = (int(torch.randint(*ends, (1,), generator=generator)) for ends in ((3, 9), (4, 25)))
    ids = torch.randint(model.config.vocab_size, (prompt + response,), generator=generator)
    with torch.no_grad():
        own = log_probs(model, ids, prompt)
    chosen = torch.randint(len(LOG_RATIOS), (response,), generator=generator)
    old = own - torch.tensor(LOG_RATIOS, dtype=torch.float64)[chosen]
    mask = (torch.rand(response, generator=generator) > 0.1).long()
    advantage = float(torch.randn(1, generator=generator))
    return Row(ids, prompt, old.clamp(max=-1e-3).float(), mask, advantage)


def log_probs(model: torch.nn.Module, ids: Tensor, prompt: int) -> Tensor:
    """The log-probabilities of a response's tokens, (response length,)."""
    found = model(ids[None]).logits[0, prompt - 1 : -1].log_softmax(-1)
    return found.gather(1, ids[prompt:, None])[:, 0]


def expected(model: torch.nn.Module, rows: tuple[Row, ...]) -> Sample:
    """The rows with the loss and gradient of GRPO over all of them, computed by PPO's formula as printed."""
    losses, clipped = [], []
    for row in rows:
        log_prob = log_probs(model, row.ids, row.prompt)
        ratio = (log_prob - row.old_log_prob.double()).exp()
        loss = torch.maximum(-row.advantage * ratio, -row.advantage * ratio.clamp(CLIP_LOW, CLIP_HIGH))
        if row.advantage < 0:
            loss = loss.clamp(max=-row.advantage * DUAL_CLIP)
        losses.append(loss[row.mask.bool()])
        high, low = row.advantage > 0, row.advantage < 0
        outside = (ratio > CLIP_HIGH) & high | ((ratio < CLIP_LOW) | (ratio > DUAL_CLIP)) & low
        clipped.append(outside[row.mask.bool()])
    tokens = torch.cat(losses)
    model.zero_grad()
    tokens.mean().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    means = (float(values.detach().double().mean()) for values in (tokens, tokens.abs(), torch.cat(clipped)))
    return Sample(rows, *means, gradients)
