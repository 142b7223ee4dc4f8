"""+clipx=observe: verl's own policy loss as it is, and what it does to each token, told by its gradient on log_prob.

verl adds the KL and entropy terms to what the policy loss returns, so the gradient of the policy term alone can be
taken only inside: the loss's entry in verl's registry is wrapped. This module is all that relies on that.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, where

from verl_clipx.compiled import EXAMPLE_LENGTH, EXAMPLE_SEQUENCES, alike, compile_alone
from verl_clipx.methods.method import Bounds
from verl_clipx.metrics import COUNTED, REGIONS, SUMMED, to_host, token_metrics, token_sums
from verl_clipx.tokens import tokens_of
from verl_clipx.training.config import Observe
from verl_clipx.training.step import current_micro_batch

logger = logging.getLogger(__name__)

# Losses whose clip decides over a whole sequence by its mean log-ratio. geo_mean is not one of them: its ratio is the
# sequence's, but verl clamps each token's own log-ratio. tests/training/test_observe.py tells them apart by experiment.
SEQUENCE_LEVEL = frozenset({"gspo"})

# As for the plugin's own losses by default.
LOG_RATIO_CLAMP = 20.0

MASS, SHARE = "clipx/gradient_mass/", "clipx/gradient_share/"
TOKEN_SUMS = len(COUNTED) + len(SUMMED)


class ObservedTokens(NamedTuple):
    """A micro-batch's tokens and what the loss does to them.

    Args:
        log_prob, old_log_prob, advantages: (sequences, length).
        mask: bool, (sequences, length); values outside are never used.
        gradient: of the policy term with respect to log_prob, (sequences, length).
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    gradient: Tensor


def observed_sums(tokens: ObservedTokens, bounds: Bounds, by_sequence: bool) -> Tensor:
    """Sums over tokens from which `observed_metrics` makes the metrics.

    Args:
        tokens: the tokens.
        bounds: on the ratio, between the regions.
        by_sequence: whether the loss clips by the sequence's mean log-ratio.

    Returns:
        Those of `token_sums`, then the numbers of tokens without a gradient though A is not 0: all, with a ratio below
        1, above 1. float64; additive over any split of the tokens.
    """
    t = tokens_of(
        log_prob=tokens.log_prob,
        old_log_prob=tokens.old_log_prob,
        advantages=tokens.advantages,
        mask=tokens.mask,
        log_ratio_clamp=LOG_RATIO_CLAMP,
    )
    gradient = where(t.mask, tokens.gradient.to(t.ratio.dtype), 0.0)
    moved, ratio = t.log_prob - t.old_log_prob, t.ratio
    if by_sequence:
        moved = t.sequence_mean(moved)
        ratio = moved.exp()
    clipped = t.mask & (t.advantages != 0) & (gradient == 0)
    counts = [members.sum(dtype=torch.float64) for members in (clipped, clipped & (moved < 0), clipped & (moved > 0))]
    return torch.cat([token_sums(t, ratio, bounds, gradient, None, None), torch.stack(counts)])


def observed_metrics(sums: Tensor) -> dict[str, Tensor]:
    """Sums over the tokens of a micro-batch that become means when divided by the number of tokens.

    Args:
        sums: from `observed_sums`.

    Returns:
        Metric name to a 0-d float64 tensor. None has the name of one of verl's own, which stay as verl computes them.
    """
    found = token_metrics(sums[:TOKEN_SUMS])
    metrics = {name: total for name, total in found.items() if not name.startswith("actor/")}
    metrics["clipx/ppo_kl"] = found["actor/ppo_kl"]
    names = ("clipx/clip_fraction", "clipx/clip_fraction_low", "clipx/clip_fraction_high")
    return {**metrics, **dict(zip(names, sums[TOKEN_SUMS:].unbind(), strict=True))}


def gradient_shares(metrics: dict[str, list[float]]) -> dict[str, list[float]]:
    """Each region's share of the gradient mass, from the masses over the whole mini-batch.

    Args:
        metrics: metric name to its value in each update.

    Returns:
        `clipx/gradient_share/<region>` to its value in each update; 0 where no token got a gradient. Empty if there
        are no masses.
    """
    if MASS + REGIONS[0] not in metrics:
        return {}
    updates = list(zip(*(metrics[MASS + region] for region in REGIONS), strict=True))
    shares = [[mass / sum(masses) if sum(masses) != 0 else 0.0 for mass in masses] for masses in updates]
    return {SHARE + region: list(values) for region, values in zip(REGIONS, zip(*shares, strict=True), strict=True)}


def clip_range(actor: Any) -> Bounds:
    """What verl's clip_ratio_low and clip_ratio_high, or else its clip_ratio, are for PPO's ratio."""
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    return Bounds(1 - (actor.clip_ratio if low is None else low), 1 + (actor.clip_ratio if high is None else high))


def observe_registered(loss_mode: str) -> None:
    """Wraps a loss of verl's registry, once: in a micro-batch of a run with +clipx=observe it leaves its sums there.

    Args:
        loss_mode: the loss's name in the registry.

    Raises:
        ValueError: the registry has no such name.
    """
    from verl.trainer.ppo import core_algos

    function = core_algos.get_policy_loss_fn(loss_mode)
    if not getattr(function, "observed_by_clipx", False):
        core_algos.POLICY_LOSS_REGISTRY[loss_mode] = observed(function, by_sequence=loss_mode in SEQUENCE_LEVEL)


def observed(function: Callable[..., Any], *, by_sequence: bool) -> Callable[..., Any]:
    """A policy loss that returns what it always did, to the last bit, and leaves sums in the current micro-batch.

    Args:
        function: verl's PolicyLossFn, called by keywords.
        by_sequence: as for `observed_sums`.
    """

    @functools.wraps(function)
    def with_metrics(*arguments: Any, **named: Any) -> tuple[Tensor, dict[str, Any]]:
        loss, metrics = function(*arguments, **named)
        micro_batch, config = current_micro_batch(), named.get("config")
        node = getattr(getattr(config, "policy_loss", None), "clipx", None)
        if micro_batch is not None and isinstance(node, Observe) and loss.requires_grad:
            # log_prob itself: an alias of it would group the gradient's terms in another way, which rounds otherwise.
            # The graph behind log_prob is not entered.
            with torch.autocast(loss.device.type, enabled=False):
                (gradient,) = torch.autograd.grad(loss, named["log_prob"], retain_graph=True, materialize_grads=True)
            tokens = ObservedTokens(
                *(named[name].detach() for name in ("log_prob", "old_log_prob", "advantages")),
                named["response_mask"].bool(),
                gradient,
            )
            (sums,) = to_host(observed_metrics(sums_of(node, tokens, clip_range(config), by_sequence)))
            # In units of |F*A|: under token-mean each token's weight in the loss is ranks / tokens of the mini-batch.
            shared = config.global_batch_info
            unit = max(shared["batch_num_tokens"], 1) / shared["dp_size"]
            micro_batch.sums |= {key: value * unit if key.startswith(MASS) else value for key, value in sums.items()}
        return loss, metrics

    with_metrics.observed_by_clipx = True
    return with_metrics


@functools.cache
def fused_sums() -> Callable[..., Tensor]:
    """`observed_sums` as one graph, made once a process."""
    return compile_alone(observed_sums)


def sums_of(node: Observe, tokens: ObservedTokens, bounds: Bounds, by_sequence: bool) -> Tensor:
    """As `observed_sums`, compiled if the node says so; where the compiler is missing or fails, a warning says so."""
    with torch.no_grad(), torch.autocast(tokens.mask.device.type, enabled=False):
        if node.compiled(tokens.mask.device):
            try:
                return fused_sums()(alike(tokens), bounds, by_sequence)
            except Exception as error:
                warn_once(f"{type(error).__name__}: {error}")
        return observed_sums(tokens, bounds, by_sequence)


@functools.cache
def warn_once(reason: str) -> None:
    """Says why the sums are not compiled."""
    logger.warning("clipx.compile: the metrics of +clipx=observe stay uncompiled, the compiler failed: %s", reason)


def prepare(node: Observe, actor: Any, device: torch.device | str) -> None:
    """Compiles now, so that no step waits for it.

    Args:
        node: the clipx node.
        actor: verl's ActorConfig.
        device: where the tokens will be.
    """
    example = torch.full((EXAMPLE_SEQUENCES, EXAMPLE_LENGTH), -1.0, device=device)
    tokens = ObservedTokens(example, example.clone(), example.clone(), example.bool(), example.clone())
    sums_of(node, tokens, clip_range(actor), actor.policy_loss.loss_mode in SEQUENCE_LEVEL)
