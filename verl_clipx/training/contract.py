"""The contract that every policy loss of the plugin keeps, as checks that a user can run on a loss of their own."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_clipx.losses.bounds import Bounds
from verl_clipx.losses.policy_gradient import per_token_loss
from verl_clipx.training.config import MethodConfig
from verl_clipx.training.methods import Method, controller_of
from verl_clipx.training.policy_loss import Tokens, statistics_of, token_loss, tokens_of

SEQUENCES, LENGTH = 6, 9


def example(dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    """Ragged sequences with ratios on both sides of any usual bound.

    Args:
        dtype: of the log-probabilities and advantages.
        seed: of the generator.

    Returns:
        old_log_prob, log_prob, advantages and mask, (sequences, length); the last sequence is fully masked.
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
    }


class Evaluated(NamedTuple):
    """A method's loss per token.

    Args:
        loss: (sequences, length), differentiable with respect to log_prob.
        weight: gradient weight F, (sequences, length).
        bounds: clip bounds on the ratio.
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
    config: MethodConfig,
    *,
    log_prob: Tensor,
    statistics: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    **inputs: Tensor,
) -> Evaluated:
    """A method's loss per token.

    Args:
        method: the method.
        config: its configuration.
        log_prob: under the current policy, (sequences, length).
        statistics: behind the bounds; None: those of these tokens.
        rollout_is_weights: factors on every token's loss and gradient, or None.
        **inputs: the other arguments of `tokens_of`.
    """
    tokens = tokens_of(config, log_prob=log_prob, **inputs)
    if statistics is None:
        statistics = statistics_of(method, config, tokens)
    decision = controller_of(method, config).decide(statistics)
    value, weighted, weight, bounds = token_loss(method, config, tokens, decision, rollout_is_weights)
    return Evaluated(per_token_loss(log_prob, value, weighted), weight, bounds, tokens, statistics)


def gradient(method: Method, config: MethodConfig, tensors: dict[str, Tensor]) -> tuple[Evaluated, Tensor]:
    """The loss per token, and the gradient of its sum with respect to log_prob."""
    log_prob = tensors["log_prob"].clone().requires_grad_(True)
    rest = {name: tensor for name, tensor in tensors.items() if name != "log_prob"}
    result = evaluate(method, config, log_prob=log_prob, rollout_log_prob=tensors["old_log_prob"], **rest)
    result.loss.sum().backward()
    return result, log_prob.grad


def require(condition: bool, message: str) -> None:
    """Raises AssertionError with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def one_weight_per_token(method: Method, config: MethodConfig) -> None:
    """The weight has one value per token, in the precision of the ratio."""
    tensors = example()
    result, _ = gradient(method, config, tensors)
    shape, expected = tuple(result.weight.shape), tuple(tensors["mask"].shape)
    require(shape == expected, f"the weight has shape {shape}, the tokens {expected}")
    require(result.weight.dtype == result.tokens.ratio.dtype, f"the weight is {result.weight.dtype}")


def gradient_is_weight_times_advantage(method: Method, config: MethodConfig) -> None:
    """The gradient with respect to log_prob is exactly -F*A inside the mask and 0 outside."""
    tensors = example()
    result, actual = gradient(method, config, tensors)
    expected = torch.where(tensors["mask"], -result.weight * tensors["advantages"], 0)
    require(torch.equal(actual, expected), "the gradient differs from -F*A")


def finite_for_every_finite_input(method: Method, config: MethodConfig) -> None:
    """Log ratios up to ±1e4 give finite losses and gradients, in float64, float32, bfloat16 and float16."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        tensors = example(dtype)
        extremes = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4, -1.0, 1.0], dtype=dtype)
        tensors["log_prob"] = tensors["old_log_prob"] + extremes
        result, actual = gradient(method, config, tensors)
        require(bool(result.loss.isfinite().all()), f"a loss is not finite in {dtype}")
        require(bool(result.weight.isfinite().all()), f"a weight is not finite in {dtype}")
        require(bool(actual.isfinite().all()), f"a gradient is not finite in {dtype}")


def nothing_outside_the_mask_is_read(method: Method, config: MethodConfig) -> None:
    """NaN and infinity outside the mask change nothing."""
    clean = example()
    dirty = dict(clean)
    for name, value in (("old_log_prob", float("nan")), ("log_prob", float("inf")), ("advantages", float("nan"))):
        dirty[name] = torch.where(clean["mask"], clean[name], value)
    compare(gradient(method, config, clean), gradient(method, config, dirty), "values outside the mask are read")


def order_of_sequences_does_not_matter(method: Method, config: MethodConfig) -> None:
    """Permuting the sequences permutes loss and gradient."""
    tensors = example()
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    result, actual = gradient(method, config, tensors)
    permuted = gradient(method, config, {name: tensor[order] for name, tensor in tensors.items()})
    inverse = order.argsort()
    restored = (permuted[0]._replace(loss=permuted[0].loss[inverse]), permuted[1][inverse])
    compare((result, actual), restored, "the order of the sequences matters")


def padding_does_not_matter(method: Method, config: MethodConfig) -> None:
    """Three more masked positions change nothing."""
    tensors = example()
    padded = {name: torch.nn.functional.pad(tensor, (0, 3)) for name, tensor in tensors.items()}
    result, actual = gradient(method, config, padded)
    cut = (result._replace(loss=result.loss[:, :LENGTH]), actual[:, :LENGTH])
    compare(gradient(method, config, tensors), cut, "padding matters")


def inputs_stay_unchanged(method: Method, config: MethodConfig) -> None:
    """No input tensor is written to."""
    tensors = example()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    gradient(method, config, tensors)
    for name, tensor in tensors.items():
        require(torch.equal(tensor, before[name]), f"{name} was written to")


def compare(first: tuple[Evaluated, Tensor], second: tuple[Evaluated, Tensor], message: str) -> None:
    """Raises AssertionError unless losses and gradients agree to 1e-12."""
    for one, other in ((first[0].loss, second[0].loss), (first[1], second[1])):
        require(torch.allclose(one, other, rtol=1e-12, atol=1e-14), message)


CHECKS: tuple[Callable[[Method, MethodConfig], None], ...] = (
    one_weight_per_token,
    gradient_is_weight_times_advantage,
    finite_for_every_finite_input,
    nothing_outside_the_mask_is_read,
    order_of_sequences_does_not_matter,
    padding_does_not_matter,
    inputs_stay_unchanged,
)


def check_method(method: Method, config: MethodConfig | None = None) -> Iterator[tuple[str, str | None]]:
    """Runs the contract on a method.

    Args:
        method: the method.
        config: its configuration; None for its defaults.

    Yields:
        What was checked, and how it failed or None.
    """
    config = method.config() if config is None else config
    for check in CHECKS:
        name = (check.__doc__ or check.__name__).strip()
        try:
            check(method, config)
        except Exception as failure:
            yield name, f"{type(failure).__name__}: {failure}"
        else:
            yield name, None


def check_loss(gradient_weight: Callable[..., Any]) -> None:
    """Runs the contract on a function decorated with `register_loss`, for a test of your own.

    Args:
        gradient_weight: the decorated function.

    Raises:
        AssertionError: names what is broken.
    """
    from verl_clipx.training.user_loss import method_of

    failures = [f"{name} {failure}" for name, failure in check_method(method_of(gradient_weight)) if failure]
    if failures:
        raise AssertionError("\n".join(failures))
