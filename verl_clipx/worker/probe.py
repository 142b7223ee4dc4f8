"""Makes micro-batches on which any two losses differ, and compares gradients."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_clipx.base.method import Method
from verl_clipx.base.tokens import Inputs, Tokens
from verl_clipx.loss.loss import tokens_in
from verl_clipx.modifiers.advantage_reweighting import AdvantageReweighting
from verl_clipx.worker.layout import flat, padded, response_part

# How far two gradients may differ, relative to a token's, by the dtype of log_prob.
RESOLVED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}

# A token's gradient counts as at least this share of what it is at F = 1: a clipped token's is 0.
LEAST = 0.01

# A token whose gradient changes by more than the second number's share when log_prob moves by the first, in nats, is at
# a bound, beyond which rounding alone may put it. It is not compared.
ROUNDING, STEADY = 1e-6, 0.05

# Probes are chosen so that a parameter or a decision that is moved by this share is seen: some lie between the bound
# and the moved one.
MOVED = 0.025

# The log-ratio to the rollout policy, as a share of that to the old one, so that the two are told apart.
OF_ROLLOUT = 0.8

# How many probes are searched, on how many tokens at most; how many are always taken: one of each kind, and several if
# the run rejects; and how many are searched for those from which a neighbour decides otherwise.
TRIED, MOST_TOKENS, KINDS, OF_REJECTION, DECISIONS = 400, 1 << 20, 6, 15, 100


class Probe(NamedTuple):
    """Log-ratios and advantages that the receipt makes up, (sequences, response length) each, float32."""

    log_ratio: Tensor
    advantages: Tensor


def probes(mask: Tensor) -> Iterator[Probe]:
    """Probes without end, the same for the same mask: both signs of A, |A| from 0.1 to 10, ratios near 1 and far away.

    Args:
        mask: bool, (sequences, response length).
    """
    generator = torch.Generator().manual_seed(0)

    def draw(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(shape or mask.shape, generator=generator) * (high - low) + low

    rows, count = (mask.shape[0], 1), mask.cpu().sum(-1, keepdim=True).clamp(min=1)
    for number in itertools.count():
        # A bound on a sequence's ratio may be on the mean or on the sum of its tokens' log-ratios, or reject by both.
        size, noise = 10 ** draw(-3, 1.5, *rows), draw(-1, 1)
        noise = noise - torch.where(mask.cpu(), noise, 0.0).sum(-1, keepdim=True) / count
        of_sequences = draw(-1, 1, *rows) * size
        far = of_sequences / count if number % 2 else draw(-12, 12, *rows)
        wide, near = draw(-2.5, 2.5), draw(-0.5, 0.5)
        # A narrow band around any ratio: of what adapts to the spread, the spread is then small beside the distance.
        band = draw(-1, 1, 1, 1) + 10 ** draw(-2, 0, 1, 1) * draw(-1, 1)
        for log_ratio in (wide, near, of_sequences + noise * size, band, draw(-30, 30), far):
            # What adapts to the balance of the signs is decided by all of them, from hardly any above 0 to all.
            share = draw(-1.2, 1.2, 1, 1) if number else torch.zeros(1, 1)
            advantages = 10 ** draw(-1, 1) * (draw(-1, 1) > share).float().mul(2).sub(1)
            yield Probe(log_ratio.expand(mask.shape).to(mask.device), advantages.to(mask.device))


def probed(model_output: Any, data: Any, probe: Probe) -> Any:
    """A copy of a micro-batch with a probe's old log-probabilities, the rollout's, and advantages.

    Args:
        model_output, data: the arguments of verl's loss function.
    """
    copy = data.copy()
    current = response_part(model_output["log_probs"], data, probe.log_ratio.shape[1]).float()
    copy["old_log_probs"] = current - probe.log_ratio
    if "rollout_log_probs" in data:
        copy["rollout_log_probs"] = current - OF_ROLLOUT * probe.log_ratio
    copy["advantages"] = probe.advantages.to(padded(data["advantages"]).dtype)
    return copy


def neighbours(method: Method, share: float = MOVED) -> list[Method]:
    """The method with each of its numbers in turn a little larger and a little smaller, a whole number by 1.

    Args:
        share: by which they are moved.
    """
    near = []
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        for step in (share, -share):
            try:
                changed = value + (1 if step > 0 else -1) if isinstance(value, int) else value * (1 + step)
                if changed != value:
                    near.append(dataclasses.replace(method, **{field.name: changed}))
            except ValueError:
                # Outside the parameter's range, or at odds with another one.
                continue
    return near


def on_probes(inputs: Inputs, made_up: Sequence[Probe]) -> Inputs:
    """The same sequences once for each of the probes, one below the other.

    Args:
        inputs: of a micro-batch.
    """

    def repeated(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.repeat(len(made_up), *[1] * (values.ndim - 1))

    log_ratio, advantages = (torch.cat(part) for part in zip(*made_up, strict=True))
    log_prob = repeated(inputs.log_prob).float()
    rollout = None if inputs.rollout_log_prob is None else log_prob - OF_ROLLOUT * log_ratio
    others = {name: repeated(getattr(inputs, name)) for name in ("mask", "entropy", "group")}
    return Inputs(log_prob, log_prob - log_ratio, advantages, rollout_log_prob=rollout, **others)


def telling(
    method: Method, shaping: AdvantageReweighting | None, inputs: Inputs, decision: Tensor, made_up: Sequence[Probe]
) -> set[int]:
    """The probes on which each of the method's neighbours has another gradient, as far as there are any.

    Args:
        inputs: of a micro-batch.
        decision: under which the bounds are; it is also moved itself.
    """
    inputs = on_probes(inputs, made_up)

    def gradient(of: Method, decision: Tensor, moved: float = 0.0) -> Tensor:
        t = tokens_in(of, shaping, inputs._replace(log_prob=inputs.log_prob + moved))
        return of.gradient(t, of.gradient_weight(t, of.bounds(t, decision)))

    others = [(other, decision) for other in neighbours(method) if other.statistics_size == method.statistics_size]
    if len(decision):
        others += [(method, decision * (1 + by)) for by in (MOVED, -MOVED)]
    differs = difference_from(gradient(method, decision), inputs, lambda by: gradient(method, decision, by))
    chosen: set[int] = set()
    for other, moved in others:
        seen = differs(gradient(other, moved))
        probes_that_tell = seen.view(len(made_up), -1).any(1).nonzero().flatten().tolist()
        if probes_that_tell and chosen.isdisjoint(probes_that_tell):
            chosen.add(probes_that_tell[0])
    return chosen


def deciding(
    method: Method, shaping: AdvantageReweighting | None, inputs: Inputs, made_up: Sequence[Probe]
) -> set[int]:
    """The probes from whose own statistics each of the method's neighbours decides on another gradient.

    Args:
        inputs: of a micro-batch.
    """
    left, chosen = neighbours(method), set()
    for number, probe in enumerate(made_up):
        of_probe = on_probes(inputs, [probe])

        def gradient(of: Method, moved: float = 0.0, of_probe: Inputs = of_probe) -> Tensor:
            t = tokens_in(of, shaping, of_probe._replace(log_prob=of_probe.log_prob + moved))
            return of.gradient(t, of.gradient_weight(t, of.bounds(t, of.decide(of.statistics(t)))))

        differs = difference_from(gradient(method), of_probe, lambda by, gradient=gradient: gradient(method, by))
        unseen = [other for other in left if not bool(differs(gradient(other)).any())]
        if len(unseen) < len(left):
            chosen.add(number)
        left = unseen
        if not left:
            break
    return chosen


def difference_from(expected: Tensor, inputs: Inputs, moved: Callable[[float], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function that says which tokens' gradients the receipt would tell from the expected ones: bool, like them.

    Args:
        expected: gradients of the inputs' tokens.
        moved: as for `steady`.
    """
    unit = inputs.advantages.abs()
    looked_at = inputs.mask & steady(expected, unit, moved)
    resolved = 2 * RESOLVED[inputs.log_prob.dtype] * torch.maximum(expected.abs(), LEAST * unit)
    return lambda gradient: looked_at & ((gradient - expected).abs() > resolved)


def bounds_of(method: Method, tokens: Tokens, decision: Tensor) -> Tensor:
    """The lower and the upper bound of each token, (2, sequences, length), float64."""
    ones = torch.ones_like(tokens.ratio, dtype=torch.float64)
    return torch.stack([ones * bound for bound in method.bounds(tokens, decision)])


def bounds_apart(first: Tensor, second: Tensor) -> Tensor:
    """The largest difference of bounds, relative to half the first ones' width, 0-d; 0 for equal infinite ones.

    Args:
        first, second: from `bounds_of`.
    """
    half = ((first[1] - first[0]) / 2).nan_to_num(1.0, posinf=1.0).clamp(min=1e-12)
    return torch.where(first == second, 0.0, (first - second).abs() / half).max()


def leaf_of(model_output: Any) -> tuple[dict[str, Any], Tensor]:
    """The model's output without its graph, and its log-probabilities as a new leaf, (tokens,)."""
    output = {key: value.detach() if isinstance(value, Tensor) else value for key, value in model_output.items()}
    log_probs = output["log_probs"]
    leaf = flat(log_probs).clone().requires_grad_()
    nested = log_probs.is_nested
    output["log_probs"] = torch.nested.nested_tensor_from_jagged(leaf, offsets=log_probs.offsets()) if nested else leaf
    return output, leaf


@contextmanager
def no_policy_loss() -> Iterator[None]:
    """Makes each of the plugin's registered losses return 0 for the duration of the block."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    ours = {name: loss for name, loss in POLICY_LOSS_REGISTRY.items() if name.startswith("clipx_")}
    POLICY_LOSS_REGISTRY.update(dict.fromkeys(ours, lambda *, log_prob, **_: (log_prob.sum() * 0.0, {})))
    try:
        yield
    finally:
        POLICY_LOSS_REGISTRY.update(ours)


class Expected(NamedTuple):
    """What a gradient on the model's log-probabilities is compared with; every tensor is (tokens,).

    Args:
        gradient: the policy's term as announced.
        besides: what verl adds to it, such as a KL term.
        unit: the size of the policy's term at F = 1.
        steady: bool; False for tokens that rounding may put on the other side of a bound.
    """

    gradient: Tensor
    besides: Tensor
    unit: Tensor
    steady: Tensor

    def difference(self, gradient: Tensor) -> Tensor:
        """The largest difference of a token's gradient, relative to the token's, 0-d float64.

        It is infinite if the gradient is not finite where all that is expected is; if that is not finite either,
        nothing is compared and it is 0, because verl skips such an update.

        Args:
            gradient: of the whole loss, (tokens,).
        """
        largest = torch.finfo(gradient.dtype).max
        whole = (self.gradient + self.besides).clamp(-largest, largest)
        size = torch.maximum(torch.maximum(self.gradient.abs(), self.besides.abs()), LEAST * self.unit)
        smallest = torch.finfo(gradient.dtype).smallest_normal
        apart = (gradient.to(whole.dtype) - whole).abs() / size.clamp(min=smallest)
        apart = torch.where(self.steady, apart, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
        return torch.where(whole.isfinite().all(), apart.max(), 0.0).double() if apart.numel() else apart.sum().double()


def steady(expected: Tensor, unit: Tensor, moved: Callable[[float], Tensor]) -> Tensor:
    """Which tokens are not at a bound: bool, like `expected`.

    Args:
        expected: gradients.
        unit: the gradients' sizes at F = 1.
        moved: the gradients once log_prob has moved by so many nats.
    """
    size = STEADY * torch.maximum(expected.abs(), LEAST * unit)
    # Not finite: compared, because the gradient must not be finite there either.
    return ~torch.stack([(moved(by) - expected).abs() > size for by in (ROUNDING, -ROUNDING)]).any(0)
