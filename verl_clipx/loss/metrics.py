"""The metrics of a policy loss: sums over tokens, their single transfer to the host, and the metrics made of them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, where

from verl_clipx.base.method import Bounds
from verl_clipx.base.metric import Metric, Over
from verl_clipx.base.shared_metrics import OF_TOKENS
from verl_clipx.base.tokens import Tokens, number_in, parts

TOKENS = "tokens"

# A token's region as a number: the sign of A, times 1 below the bounds, 2 between them, 3 above. 0, if A is 0, is in M.
NUMBERS = {"LN": -1, "HP": 3, "LP": 1, "HN": -3, "M, A < 0": -2, "M, A > 0": 2}

# The number for tokens that do not count.
OUTSIDE = 9.0


@dataclass
class Seen:
    """The tokens of a micro-batch and what the loss does to them. Everything else is computed when it is first needed.

    Args:
        t: the tokens.
        bounded: the values that the bounds act on, (sequences, length).
        bounds: the clip bounds on these values, broadcastable.
        weighted: F * A, (sequences, length), 0 outside the mask.
        dual_clip: the dual clip, or None.
        counted: the tokens that count, bool, (sequences, length).
        kept: what has been computed so far, by name.
    """

    t: Tokens
    bounded: Tensor
    bounds: Bounds
    weighted: Tensor
    dual_clip: float | None
    counted: Tensor
    kept: dict[str, Tensor] = field(default_factory=dict)

    def once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Computes a value once and keeps it. functools.cached_property has a lock, which the compiler cannot trace."""
        if name not in self.kept:
            self.kept[name] = compute()
        return self.kept[name]

    @property
    def region(self) -> Tensor:
        """Each token's region: one of `NUMBERS`, 0, or `OUTSIDE` for tokens that do not count, (sequences, length)."""
        return self.once("region", self._region)

    def _region(self) -> Tensor:
        # One number per token, because masks that several sums use would each be stored, one byte per token.
        side = where(self.bounded > self.bounds.high, 3.0, where(self.bounded < self.bounds.low, 1.0, 2.0))
        return where(self.counted, self.t.advantages.sign() * side, OUTSIDE).to(self.t.ratio.dtype)

    @property
    def mass(self) -> Tensor:
        """|F * A|, (sequences, length)."""
        return self.once("mass", self.weighted.abs)

    @property
    def above_dual_clip(self) -> Tensor:
        """Where the dual clip acts, bool, (sequences, length); nowhere without a dual clip."""
        if self.dual_clip is None:
            # Not a constant, because a sum of constant zeros would be another launch.
            return self.counted & (self.t.ratio < 0)
        return self.counted & (self.t.advantages < 0) & (self.t.ratio > self.dual_clip)


# The values to add up, or None to count tokens; and a mask of the tokens that take part.
Summand = tuple[Tensor | None, Tensor]


class TokenSum(NamedTuple):
    """A sum over tokens from which metrics are made; additive over any split of the tokens.

    Args:
        of: returns what is added up.
        of_gradient: whether the sum is linear in |F * A| or F * A.
    """

    of: Callable[[Seen], Summand]
    of_gradient: bool = False


def members(number: int) -> TokenSum:
    """The number of tokens in a region."""
    return TokenSum(lambda seen: (None, seen.region == number))


def mass(number: int) -> TokenSum:
    """The gradient mass of the tokens in a region."""
    return TokenSum(lambda seen: (seen.mass, seen.region == number), of_gradient=True)


# Sums that need neither the region nor the mass of a token come first. Uncompiled, both are stored once computed.
SUMS: dict[str, TokenSum] = {
    TOKENS: TokenSum(lambda seen: (None, seen.counted)),
    "dual_clipped": TokenSum(lambda seen: (None, seen.above_dual_clip)),
    "log_ratio": TokenSum(lambda seen: (seen.t.log_ratio, seen.counted)),
    "ratio": TokenSum(lambda seen: (seen.t.ratio, seen.counted)),
    "squared_ratio": TokenSum(lambda seen: (seen.t.ratio.square(), seen.counted)),
    **{region: members(NUMBERS[region]) for region in ("LN", "HP", "LP", "HN")},
    **{f"mass/{region}": mass(number) for region, number in NUMBERS.items()},
}


# Sums from which metrics are made only once they cover the whole mini-batch, by the keys under which verl adds them up.
SUM_KEYS = {f"clipx_sum/{name}": name for metric in OF_TOKENS if metric.over is Over.UPDATE for name in metric.sums}

# The keys of everything that is linear in |F * A| or F * A.
OF_GRADIENT = frozenset(
    [metric.key for metric in OF_TOKENS if any(SUMS[name].of_gradient for name in metric.sums)]
    + [key for key, name in SUM_KEYS.items() if SUMS[name].of_gradient]
)


def token_sums(
    t: Tokens,
    bounded: Tensor,
    bounds: Bounds,
    weighted: Tensor,
    dual_clip: float | None,
    counted: Tensor | None,
) -> Tensor:
    """Sums over tokens from which `token_metrics` makes the metrics.

    Args:
        bounded: what the bounds act on, (sequences, length).
        bounds: clip bounds on it, broadcastable.
        weighted: F * A, (sequences, length), 0 outside the mask.
        dual_clip: tokens with A < 0 and a ratio above it are counted as dual_clipped; None: none are.
        counted: bool, (sequences, length): the tokens that count; None: those in the mask.

    Returns:
        (len(SUMS),), float64, in the order of `SUMS`; additive over any split of the tokens.
    """
    seen = Seen(t, bounded, bounds, weighted, dual_clip, t.mask if counted is None else t.mask & counted)
    return torch.stack([sum_members(*one.of(seen)) for one in SUMS.values()]).sum(-1, dtype=torch.float64)


def sum_members(values: Tensor | None, members: Tensor) -> Tensor:
    """The sum over each part's members, or their number, (parts,).

    Each part is summed in the values' precision and only the parts in float64, without a float64 copy of all tokens.
    """
    return number_in(members) if values is None else parts(where(members, values, 0.0)).sum(-1)


def named_sums(sums: Iterable[Any]) -> dict[str, Any]:
    """The sums of `token_sums` by their names, as 0-d tensors or, from the host, as floats."""
    return dict(zip(SUMS, sums, strict=True))


def token_metrics(sums: Iterable[Any], *, dual_clipped: bool = False) -> dict[str, Any]:
    """Sums over the tokens of a micro-batch that become means when divided by the number of tokens.

    Args:
        sums: from `token_sums`: a tensor or, so that the accelerator has nothing to add up, the floats on the host.
        dual_clipped: whether the method has a dual clip.

    Returns:
        From key to a number of the same kind as in `sums`: the metrics over tokens, the sums of `SUM_KEYS`, and
        `tokens`, the number of tokens.
    """
    found = named_sums(sums)
    if not dual_clipped:
        del found["dual_clipped"]
    return {TOKENS: found[TOKENS], **means_of_tokens(OF_TOKENS, found), **carry(found)}


def means_of_tokens(metrics: Iterable[Metric], sums: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics over tokens for which all sums are given: from key to the sum over a micro-batch's tokens."""
    return {
        metric.key: metric.of(*(sums[name] for name in metric.sums))
        for metric in metrics
        if metric.over is Over.TOKENS and all(name in sums for name in metric.sums)
    }


def carry(sums: Mapping[str, Any]) -> dict[str, Any]:
    """The sums that `with_ratios_of_sums` needs over the whole mini-batch, by their keys."""
    return {key: sums[name] for key, name in SUM_KEYS.items() if name in sums}


def with_ratios_of_sums(metrics: dict[str, list[float]]) -> dict[str, list[float]]:
    """Replaces the sums of `SUM_KEYS` by the metrics that are made of them.

    Args:
        metrics: from key to its value in each update: sums over the mini-batch's tokens, divided by their number.
    """
    sums = {name: metrics[key] for key, name in SUM_KEYS.items() if key in metrics}
    result = {key: values for key, values in metrics.items() if key not in SUM_KEYS}
    for metric in OF_TOKENS:
        if metric.over is not Over.UPDATE or not all(name in sums for name in metric.sums):
            continue
        result[metric.key] = [metric.of(*means) for means in zip(*(sums[name] for name in metric.sums), strict=True)]
    return result


def to_host(*groups: dict[str, Tensor]) -> list[dict[str, float]]:
    """Groups of 0-d tensors of one device, by their names, as Python floats: moved to the host in one transfer."""
    tensors = [tensor.to(torch.float64) for group in groups for tensor in group.values()]
    numbers = iter(torch.stack(tensors).tolist() if tensors else [])
    return [{name: next(numbers) for name in group} for group in groups]
