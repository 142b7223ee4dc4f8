"""A method on tensors of your own, and the contract that every method keeps, as checks to run on yours."""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_clipx.loss import per_token_loss, token_loss, token_statistics, tokens_in
from verl_clipx.methods import Bounds, Method
from verl_clipx.methods.method import declared
from verl_clipx.metric import Over, wrong_names
from verl_clipx.modifiers import AdvantageReweighting
from verl_clipx.shared_metrics import METRICS
from verl_clipx.tokens import Inputs, Tokens
from verl_clipx.user_method import method_of


class Evaluated(NamedTuple):
    """A method's loss per token, with what it was made of.

    Args:
        loss: (sequences, length), differentiable with respect to log_prob.
        weight: gradient weight F, (sequences, length).
        bounds: clip bounds.
        tokens: what they were computed from.
        statistics: behind the bounds.
    """

    loss: Tensor
    weight: Tensor
    bounds: Bounds
    tokens: Tokens
    statistics: Tensor


def evaluate(
    method: Method,
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    statistics: Tensor | None = None,
    shaping: AdvantageReweighting | None = None,
    **optional: Tensor | None,
) -> Evaluated:
    """A method's loss per token, to look at: uncompiled, and with everything that it is made of.

    Args:
        method: a method with its parameters, for example METHODS["acpo"](alpha=2.0).
        log_prob: under the current policy, (sequences, length); the loss is differentiable with respect to it.
        old_log_prob, advantages, mask: (sequences, length).
        statistics: behind the bounds; None: those of these tokens.
        shaping: advantage reweighting, or None.
        **optional: the other fields of `Inputs`.
    """
    inputs = Inputs(log_prob, old_log_prob, advantages, mask, **optional)
    if statistics is None:
        statistics = token_statistics(method, shaping, inputs)
    decision = method.decide(statistics)
    value, weighted, _ = token_loss(method, shaping, inputs, decision)
    t = tokens_in(method, shaping, inputs)
    bounds = method.bounds(t, decision)
    return Evaluated(
        per_token_loss(log_prob, value, weighted), method.gradient_weight(t, bounds), bounds, t, statistics
    )


SEQUENCES, LENGTH = 6, 9


def example(dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    """Ragged sequences with ratios on both sides of any usual bound.

    Args:
        dtype: of the log-probabilities and advantages.
        seed: of the generator.

    Returns:
        The fields of `Inputs` that a method may ask for; the last sequence is fully masked.
    """
    generator = torch.Generator().manual_seed(seed)
    old_log_prob = -torch.rand(SEQUENCES, LENGTH, generator=generator, dtype=torch.float64) * 3
    drift = torch.randn(SEQUENCES, LENGTH, generator=generator, dtype=torch.float64) * 0.5
    advantages = torch.randn(SEQUENCES, 1, generator=generator, dtype=torch.float64).expand(-1, LENGTH)
    lengths = torch.tensor([LENGTH, 7, 5, 3, 1, 0])
    return {
        "old_log_prob": old_log_prob.to(dtype),
        "log_prob": (old_log_prob + drift).clamp(max=0).to(dtype),
        "advantages": advantages.clone().to(dtype),
        "mask": torch.arange(LENGTH) < lengths[:, None],
        "rollout_log_prob": (old_log_prob + drift / 10).clamp(max=0).to(dtype),
        "entropy": (drift.abs() + 0.1).to(dtype),
        "group": torch.tensor([7, 3, 7, 3, 7, 3]),
    }


def inputs_of(method: Method, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of the tensors that a method's loss is called with."""
    asked_for = ("log_prob", "old_log_prob", "advantages", "mask", *method.asks_for)
    return {name: tensors[name] for name in asked_for}


def gradient(method: Method, tensors: dict[str, Tensor]) -> tuple[Evaluated, Tensor]:
    """The loss per token, and the gradient of its sum with respect to log_prob."""
    inputs = inputs_of(method, tensors)
    inputs["log_prob"] = inputs["log_prob"].clone().requires_grad_(True)
    result = evaluate(method, **inputs)
    result.loss.sum().backward()
    return result, inputs["log_prob"].grad


def require(condition: bool, message: str) -> None:
    """Raises AssertionError with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def one_weight_per_token(method: Method) -> None:
    """The weight has one value per token, in the precision of the ratio."""
    tensors = example()
    result, _ = gradient(method, tensors)
    shape, expected = tuple(result.weight.shape), tuple(tensors["mask"].shape)
    require(shape == expected, f"the weight has shape {shape}, the tokens {expected}")
    require(result.weight.dtype == result.tokens.ratio.dtype, f"the weight is {result.weight.dtype}")


def gradient_is_weight_times_advantage(method: Method) -> None:
    """The gradient with respect to log_prob is exactly -F*A inside the mask and 0 outside."""
    tensors = example()
    result, actual = gradient(method, tensors)
    expected = torch.where(tensors["mask"], -result.weight * result.tokens.advantages, 0)
    require(torch.equal(actual, expected), "the gradient differs from -F*A")


def finite_for_every_finite_input(method: Method) -> None:
    """Log ratios up to ±1e4 give finite losses and gradients, in float64, float32, bfloat16 and float16."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        tensors = example(dtype)
        extremes = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4, -1.0, 1.0], dtype=dtype)
        tensors["log_prob"] = tensors["old_log_prob"] + extremes
        result, actual = gradient(method, tensors)
        require(bool(result.loss.isfinite().all()), f"a loss is not finite in {dtype}")
        require(bool(result.weight.isfinite().all()), f"a weight is not finite in {dtype}")
        require(bool(actual.isfinite().all()), f"a gradient is not finite in {dtype}")


def nothing_outside_the_mask_is_read(method: Method) -> None:
    """NaN and infinity outside the mask change nothing."""
    clean = example()
    dirty = dict(clean)
    for name, value in JUNK.items():
        dirty[name] = torch.where(clean["mask"], clean[name], value)
    compare(gradient(method, clean), gradient(method, dirty), "values outside the mask are read")


def order_of_sequences_does_not_matter(method: Method) -> None:
    """Permuting the sequences permutes loss and gradient."""
    tensors = example()
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    result, actual = gradient(method, tensors)
    permuted = gradient(method, {name: tensor[order] for name, tensor in tensors.items()})
    inverse = order.argsort()
    restored = (permuted[0]._replace(loss=permuted[0].loss[inverse]), permuted[1][inverse])
    compare((result, actual), restored, "the order of the sequences matters")


def padding_does_not_matter(method: Method) -> None:
    """Three more masked positions change nothing."""
    tensors = example()
    padded = {
        name: torch.nn.functional.pad(tensor, (0, 3)) if tensor.ndim == 2 else tensor
        for name, tensor in tensors.items()
    }
    result, actual = gradient(method, padded)
    cut = (result._replace(loss=result.loss[:, :LENGTH]), actual[:, :LENGTH])
    compare(gradient(method, tensors), cut, "padding matters")


def inputs_stay_unchanged(method: Method) -> None:
    """No input tensor is written to."""
    tensors = example()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    gradient(method, tensors)
    for name, tensor in tensors.items():
        require(torch.equal(tensor, before[name]), f"{name} was written to")


def compare(first: tuple[Evaluated, Tensor], second: tuple[Evaluated, Tensor], message: str) -> None:
    """Raises AssertionError unless losses and gradients agree to 1e-12."""
    for one, other in ((first[0].loss, second[0].loss), (first[1], second[1])):
        require(torch.allclose(one, other, rtol=1e-12, atol=1e-14), message)


def not_finite_inside_the_mask_reaches_the_gradient(method: Method) -> None:
    """NaN and infinity inside the mask make the loss and the gradient of their token not finite, so that verl skips."""
    for name in ("log_prob", "old_log_prob", "advantages", *method.asks_for):
        for value in (float("nan"), float("inf"), -float("inf")):
            tensors = example()
            if not tensors[name].is_floating_point():
                continue
            tensors[name] = tensors[name].clone()
            tensors[name][1, 2] = value
            result, actual = gradient(method, tensors)
            require(not bool(result.loss[1, 2].isfinite()), f"{name}={value}: the loss is finite")
            require(not bool(actual[1, 2].isfinite()), f"{name}={value}: the gradient is finite")


def statistics_are_the_same_each_time(method: Method) -> None:
    """The statistics of the same tokens are the same to the last bit."""
    inputs = Inputs(**inputs_of(method, example()))
    first, second = token_statistics(method, None, inputs), token_statistics(method, None, inputs)
    require(tuple(first.shape) == (method.statistics_size,), f"statistics of shape {tuple(first.shape)}")
    require(first.dtype == torch.float64, f"the statistics are {first.dtype}, use float64")
    require(torch.equal(first, second), "the statistics of the same tokens differ")


def statistics_add_up_over_any_split(method: Method) -> None:
    """Statistics and bounds are the same however the sequences are split, groups of one prompt included."""
    tensors = inputs_of(method, example())
    whole = token_statistics(method, None, Inputs(**tensors))
    everyone = example_decision(method, whole, tensors)
    for cut in ([0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 1], [0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 2, 2]):
        part = torch.tensor(cut)
        split = sum(
            token_statistics(method, None, Inputs(**{name: tensor[part == k] for name, tensor in tensors.items()}))
            for k in range(max(cut) + 1)
        )
        require(torch.allclose(split, whole, rtol=1e-9, atol=1e-9), "the statistics do not add up over a split")
        for one, other in zip(everyone, example_decision(method, split, tensors), strict=True):
            require(torch.allclose(one, other, rtol=1e-12, atol=1e-14), "a split changes the bounds")


def tokens_outside_the_statistics_mask_do_not_count(method: Method) -> None:
    """Tokens that do not count, such as those of Lopti's other pass, change no statistics."""
    tensors = inputs_of(method, example())
    counted = (torch.arange(LENGTH) % 2 == 0).expand(SEQUENCES, LENGTH)
    others = {
        name: torch.where(counted, tensor, tensor - 1) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    first, second = (token_statistics(method, None, Inputs(**given, counted=counted)) for given in (tensors, others))
    require(torch.equal(first, second), "the statistics count tokens outside t.mask")


def example_decision(method: Method, statistics: Tensor, tensors: dict[str, Tensor]) -> list[Tensor]:
    """Both bounds that statistics lead to, as tensors."""
    result = evaluate(method, statistics=statistics, **tensors)
    return [torch.as_tensor(bound, dtype=torch.float64) for bound in result.bounds]


def metrics_keep_their_keys(method: Method) -> None:
    """The metrics are those that the class declares, and have the same keys whatever the data."""
    for wrong in wrong_names(method.logs, METRICS):
        require(False, wrong)
    keys = []
    for mask in (example()["mask"], torch.zeros(SEQUENCES, LENGTH, dtype=torch.bool)):
        statistics = token_statistics(method, None, Inputs(**{**inputs_of(method, example()), "mask": mask}))
        metrics = method.metrics(statistics, method.decide(statistics))
        keys.append([name for _, members in declared(method, metrics) for name in members])
    require(keys[0] == keys[1], f"the keys depend on the data: {keys[0]}, {keys[1]}")
    summary = method.over_updates({name: [1.0, 1.0] for name in keys[0]})
    known = [re.compile(metric.pattern) for metric in method.logs if metric.over is Over.ROLLOUT_BATCH]
    undeclared = [name for name in summary if not any(one.fullmatch(f"clipx/{name}") for one in known)]
    require(not undeclared, f"over_updates returns {undeclared}, which logs does not declare: add of_rollout_batch")


def no_value_is_read_on_the_host(method: Method) -> None:
    """Nothing waits for an accelerator: the formulas run on tensors that have no values."""
    tensors = {name: tensor.to("meta") for name, tensor in inputs_of(method, example(torch.float32)).items()}
    statistics = token_statistics(method, None, Inputs(**tensors))
    decision = method.decide(statistics)
    method.metrics(statistics, decision)
    token_loss(method, None, Inputs(**tensors), decision)


# What stands outside the mask in `nothing_outside_the_mask_is_read`.
JUNK = {
    "old_log_prob": float("nan"),
    "log_prob": float("inf"),
    "advantages": float("nan"),
    "rollout_log_prob": float("nan"),
    "entropy": -float("inf"),
}

CHECKS: tuple[Callable[[Method], None], ...] = (
    one_weight_per_token,
    gradient_is_weight_times_advantage,
    finite_for_every_finite_input,
    not_finite_inside_the_mask_reaches_the_gradient,
    nothing_outside_the_mask_is_read,
    order_of_sequences_does_not_matter,
    padding_does_not_matter,
    inputs_stay_unchanged,
    statistics_are_the_same_each_time,
    statistics_add_up_over_any_split,
    tokens_outside_the_statistics_mask_do_not_count,
    metrics_keep_their_keys,
    no_value_is_read_on_the_host,
)


def check_method(method: Method) -> Iterator[tuple[str, str | None]]:
    """Runs the contract on a method.

    Args:
        method: the method with its parameters.

    Yields:
        What was checked, and how it failed or None.
    """
    for check in CHECKS:
        name = (check.__doc__ or check.__name__).strip()
        try:
            check(method)
        except Exception as failure:
            yield name, f"{type(failure).__name__}: {failure}"
        else:
            yield name, None


def check_loss(loss: type[Method] | Callable[..., Any]) -> None:
    """Runs the contract on a loss of your own, for a test of your own.

    Args:
        loss: a subclass of `Method`, or a function decorated with `register_loss`.

    Raises:
        AssertionError: names what is broken.
    """
    failures = [f"{name} {failure}" for name, failure in check_method(method_of(loss)()) if failure]
    if failures:
        raise AssertionError("\n".join(failures))
