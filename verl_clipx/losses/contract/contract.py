"""The contract that every method keeps. A rule is a function that raises AssertionError if a method breaks it."""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from verl_clipx.losses.applying.compiled import token_functions
from verl_clipx.losses.applying.loss import (
    Applied,
    apply,
    make_shaped_tokens,
    per_token_loss,
    token_loss,
    token_statistics,
)
from verl_clipx.losses.base.method import find_declarations
from verl_clipx.losses.base.metric import Over, wrong_names
from verl_clipx.losses.base.shared_metrics import METRICS
from verl_clipx.losses.base.tokens import Inputs, Tokens
from verl_clipx.losses.contract import examples
from verl_clipx.losses.contract.examples import (
    SPOILED,
    every_ratio,
    example,
    extreme_sequences,
    extreme_tokens,
    spoiled,
)
from verl_clipx.losses.contract.fresh import NoAnswer, call_in_fork
from verl_clipx.losses.contract.without_values import (
    COPIES,
    PRINTS,
    SYNCHRONIZES,
    Wait,
    WithoutValues,
    first_sentence,
)
from verl_clipx.losses.methods import Method
from verl_clipx.losses.modifiers import AdvantageReweighting, Shaping


def select_inputs(method: Method, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return those tensors of a mini-batch that a method's loss is called with, by the names of `Inputs`."""
    names = ("log_prob", "old_log_prob", "advantages", "mask", *method.asks_for)
    return {name: tensors[name] for name in names}


def evaluate(
    method: Method, statistics: Tensor | None = None, shaping: Shaping | None = None, **tensors: Tensor | None
) -> Applied:
    """Apply a method to the tokens of a mini-batch, uncompiled.

    Args:
        method: the method.
        statistics: the statistics from which the bounds follow; None: the statistics of these tokens.
        shaping: what changes the advantages first; None: they stay as they are.
        tensors: the fields of `Inputs`.

    Returns:
        What `apply` returns. Its field `statistics` has the statistics from which the bounds follow, given or not.
    """
    inputs = Inputs(**tensors)
    if statistics is None:
        statistics = token_statistics(method, shaping, inputs)
    applied = apply(method, shaping, inputs, method.decide(statistics))
    return applied._replace(statistics=statistics)


def apply_and_differentiate(
    method: Method, tensors: dict[str, Tensor], statistics: Tensor | None = None
) -> tuple[Applied, Tensor]:
    """Apply a method, and differentiate its loss by autograd.

    Args:
        method: the method.
        tensors: the tensors of a mini-batch by the names of `Inputs`; those that the method does not ask for are
            ignored. Each is (sequences, length), and `group` is (sequences,).
        statistics: as for `evaluate`.

    Returns:
        The applied method, as `evaluate` returns it, and the gradient of the summed loss with respect to log_prob,
        (sequences, length).
    """
    inputs = select_inputs(method, tensors)
    inputs["log_prob"] = inputs["log_prob"].clone().requires_grad_(True)
    result = evaluate(method, statistics=statistics, **inputs)
    per_token_loss(inputs["log_prob"], result.value, result.weighted).sum().backward()
    return result, inputs["log_prob"].grad


def batches_to_try(method: Method, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Tensor], Tensor | None]]:
    """Yield mini-batches that reach every part of a weight.

    Yields:
        A mini-batch's name, its tensors, and the statistics from which the bounds follow; None: the statistics of the
        mini-batch itself.
    """
    usual = evaluate(method, **select_inputs(method, example(dtype)))
    # The ratios of these two mini-batches are chosen around the bounds of a usual mini-batch, so the bounds must follow
    # from the statistics of that mini-batch.
    yield "every ratio within the usual bounds", every_ratio(dtype), usual.statistics
    yield "ratios at the usual bounds", examples.make_tokens_at_bounds(usual.bounds, dtype), usual.statistics
    for name, tensors in examples.mini_batches(dtype).items():
        yield name, tensors, None


# From each dtype to the relative and the absolute difference that are attributed to rounding.
ROUNDING = {torch.float64: (1e-9, 1e-12), torch.float32: (1e-4, 1e-6)}


def is_equal(first: Tensor, second: Tensor) -> Tensor:
    """Return where two tensors of numbers are equal: bool, of their shape. NaN counts as equal to NaN.

    A NaN is not reported here, because `finite_for_every_finite_input` reports it.
    """
    return is_close(first, second, rtol=0.0, atol=0.0)


def is_close(first: Tensor, second: Tensor, rtol: float, atol: float) -> Tensor:
    """Return where two tensors of numbers agree: bool, of their shape. NaN counts as equal to NaN, as in `is_equal`.

    Args:
        first, second: the tensors, of the same shape.
        rtol: the allowed difference, relative to `second`.
        atol: the allowed absolute difference, which is added to the relative one.
    """
    return torch.isclose(first, second, rtol=rtol, atol=atol, equal_nan=True)


def require(condition: bool, message: str) -> None:
    """Raise AssertionError with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def require_none(wrong: Tensor, message: str, **tensors: Tensor) -> None:
    """Raise AssertionError if any token is wrong.

    Args:
        wrong: the wrong tokens, bool, (sequences, length).
        message: the message. A field such as {weight:.3g} stands for the first wrong token's value in the tensor of
            that name.
        tensors: the tensors that the message names, (sequences, length).
    """
    if not bool(wrong.any()):
        return
    values_of_first_wrong = {name: float(values[wrong][0]) for name, values in tensors.items()}
    raise AssertionError(message.format(**values_of_first_wrong))


def one_weight_per_token(method: Method) -> None:
    """The weight has one value per token, in the precision of the ratio."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        tensors = select_inputs(method, example(dtype))
        # All tokens, the first sequence, and the first token of each.
        for rows, columns in ((slice(None), slice(None)), (slice(1), slice(None)), (slice(None), slice(1))):
            part = {}
            for name, tensor in tensors.items():
                # `group` has no columns.
                part[name] = tensor[rows] if tensor.ndim == 1 else tensor[rows, columns]
            result = evaluate(method, **part)
            weight = result.weight
            ratio = result.tokens.ratio
            shape = tuple(weight.shape)
            expected_shape = tuple(ratio.shape)
            require(shape == expected_shape, f"the weight has shape {shape}, the tokens {expected_shape}")
            has_dtype_of_ratio = weight.dtype == ratio.dtype
            message = f"the weight is {weight.dtype} where the ratio is {ratio.dtype}: use .to(ratio.dtype)"
            require(has_dtype_of_ratio, message)


def weight_is_the_same_at_each_call(method: Method) -> None:
    """The weight of the same tokens is the same at each of a thousand calls, with and without autograd."""
    result, _ = apply_and_differentiate(method, example())
    for call in range(2, 1001):
        with torch.set_grad_enabled(call % 2 == 0):
            weight = method.gradient_weight(result.tokens, result.bounds)
        has_changed = result.tokens.mask & ~is_equal(weight, result.weight)
        message = "F goes from {before:.3g} to {after:.3g} at call " + f"{call}."
        require_none(has_changed, message, before=result.weight, after=weight)


def gradient_is_weight_times_advantage(method: Method) -> None:
    """The gradient with respect to log_prob is -F*A where A is not 0, and 0 outside the mask.

    It is exactly minus what the method's `gradient` returns. That differs from F*A only by rounding, or where A is 0,
    as under a pull.
    """
    for dtype, (rtol, atol) in ROUNDING.items():
        for _, tensors, statistics in batches_to_try(method, dtype):
            # `loss_gradient` is of the loss, which is minus the objective J; `declared_gradient` is of J.
            result, loss_gradient = apply_and_differentiate(method, tensors, statistics)
            t = result.tokens
            inside = tensors["mask"]
            weight = method.gradient_weight(t, result.bounds)
            declared_gradient = method.gradient(t, result.bounds, weight)
            expected = torch.where(inside, -declared_gradient, 0)
            is_as_declared = bool(is_equal(loss_gradient, expected).all())
            require(is_as_declared, "the gradient differs from minus what `gradient` returns")
            differs = inside & (t.advantages != 0) & ~is_close(declared_gradient, weight * t.advantages, rtol, atol)
            require(not bool(differs.any()), "what `gradient` returns differs from F*A where A is not 0")


def finite_for_every_finite_input(method: Method) -> None:
    """Every finite input gives finite losses and gradients, in float64, float32, bfloat16 and float16."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for batch, tensors, statistics in batches_to_try(method, dtype):
            result, actual = apply_and_differentiate(method, tensors, statistics)
            t = result.tokens
            values_of_tokens = {"F": result.weight, "the loss": result.value, "the gradient": actual}
            for subject, values in values_of_tokens.items():
                wrong = t.mask & ~values.isfinite()
                if bool(wrong.any()):
                    raise AssertionError(explain_not_finite(subject, values, wrong, t, dtype))
            decision = method.decide(result.statistics)
            values_of_batch = {
                "a statistic": result.statistics,
                # A decision may be infinite, because an infinite bound bounds nothing.
                "a decision": decision.nan_to_num(posinf=0.0, neginf=0.0),
                **method.metrics(result.statistics, decision),
            }
            for subject, values in values_of_batch.items():
                is_finite = bool(values.isfinite().all())
                require(is_finite, f"{subject} is not finite for {dtype} inputs: {batch}. {ADVICE_FINITE}")


def explain_not_finite(subject: str, values: Tensor, wrong: Tensor, t: Tokens, dtype: torch.dtype) -> str:
    """Return the message about values that are not finite: at which token, and what to do.

    Args:
        subject: the subject of the message's first sentence, such as "the gradient".
        values: (sequences, length).
        wrong: the tokens whose values are not finite, bool, (sequences, length). The message names the one whose
            log-ratio is nearest to 0.
        t: the tokens.
        dtype: the dtype of the inputs. The values and the tokens may have a wider one.
    """
    log_ratios = t.log_prob - t.old_log_prob
    # In the flattened tensors.
    index = log_ratios.abs().where(wrong, torch.inf).argmin()

    def read_number(numbers: Tensor) -> float:
        return float(numbers.detach().reshape(-1)[index])

    value = read_number(values)
    log_ratio = read_number(log_ratios)
    ratio = read_number(t.ratio)
    advantage = read_number(t.advantages)
    log_prob = read_number(t.log_prob)
    return (
        f"{subject} is {value} for {dtype} inputs where log_prob - old_log_prob is {log_ratio:g} (the ratio is "
        f"{ratio:.3g}) and A = {advantage:.3g}, log_prob = {log_prob:.3g}. {ADVICE_FINITE}"
    )


def nothing_outside_the_mask_is_read(method: Method) -> None:
    """NaN and infinity outside the mask change nothing."""
    clean = example()
    with_junk = apply_and_differentiate(method, examples.with_junk(clean))
    require_same(apply_and_differentiate(method, clean), with_junk, "values outside the mask are read")


def order_of_sequences_does_not_matter(method: Method) -> None:
    """Permuting the sequences permutes loss and gradient, and numbering the groups otherwise changes nothing."""
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    inverse = order.argsort()
    for tensors in (example(), extreme_tokens(torch.float64)):
        usual = apply_and_differentiate(method, tensors)
        permuted = {name: tensor[order] for name, tensor in tensors.items()}
        result, actual = apply_and_differentiate(method, permuted)
        # Back in the original order, so that they can be compared.
        restored = (result._replace(value=result.value[inverse]), actual[inverse])
        require_same(usual, restored, "the order of the sequences matters")
        # The new numbers are in the opposite order, and all even, for a loss that reads the order or the remainders.
        other_numbers = {**tensors, "group": 1000 - 2 * tensors["group"]}
        renumbered = apply_and_differentiate(method, other_numbers)
        require_same(usual, renumbered, "the number that a group happens to have matters")


def padding_does_not_matter(method: Method) -> None:
    """A thousand more masked positions and a sequence without tokens change nothing, the statistics included."""
    # By a tensor's number of dimensions: how many entries `pad` adds at the left, right, top and bottom. `group` has no
    # columns.
    padding = {2: (0, 1000, 0, 1), 1: (0, 1)}
    for tensors in (example(), extreme_tokens(torch.float64), extreme_sequences(torch.float64)):
        padded = {name: torch.nn.functional.pad(tensor, padding[tensor.ndim]) for name, tensor in tensors.items()}
        usual, usual_gradient = apply_and_differentiate(method, tensors)
        result, gradient = apply_and_differentiate(method, padded)
        has_same_statistics = is_close(usual.statistics, result.statistics, rtol=1e-12, atol=0.0)
        require(bool(has_same_statistics.all()), "the statistics count padding")
        without_padding = (result._replace(value=result.value[:-1, :-1000]), gradient[:-1, :-1000])
        require_same((usual, usual_gradient), without_padding, "padding matters")


def weight_does_not_depend_on_the_micro_batch(method: Method) -> None:
    """The weight of a token is the same however a mini-batch is divided into micro-batches."""
    for dtype, tolerance in ROUNDING.items():
        usual = (example(dtype, spread=spread) for spread in (0.05, 0.5, 3.0))
        for tensors in (*usual, extreme_tokens(dtype), extreme_sequences(dtype), every_ratio(dtype)):
            inputs = select_inputs(method, tensors)
            whole = evaluate(method, **inputs)
            require_no_other_sequences(method, inputs, whole, tolerance)
            if not method.by_sequence:
                require_no_other_tokens(method, inputs, whole, tolerance)


def require_no_other_sequences(
    method: Method, inputs: dict[str, Tensor], whole: Applied, tolerance: tuple[float, float]
) -> None:
    """Raise AssertionError if a token's weight changes when the mini-batch is split into micro-batches.

    Args:
        method: the method.
        inputs: the tensors of the mini-batch that the method is called with.
        whole: the method applied to the whole mini-batch.
        tolerance: the relative and the absolute difference that are attributed to rounding.
    """
    message = f"{WEIGHT_MOVES} sequences of its micro-batch are taken away. {ADVICE_BATCH}"
    for split in split_sequences(len(whole.weight), micro_batch_counts=(6, 2)):
        for is_in_micro_batch in split:
            micro_batch = {name: tensor[is_in_micro_batch] for name, tensor in inputs.items()}
            before = whole.weight[is_in_micro_batch]
            after = evaluate(method, statistics=whole.statistics, **micro_batch).weight
            has_changed = micro_batch["mask"] & ~is_close(after, before, *tolerance)
            require_none(has_changed, message, before=before, after=after)


def require_no_other_tokens(
    method: Method, inputs: dict[str, Tensor], whole: Applied, tolerance: tuple[float, float]
) -> None:
    """Raise AssertionError if a token's weight changes when only every fourth token of the sequences is left.

    The arguments are as for `require_no_other_sequences`.
    """
    message = f"{WEIGHT_MOVES} tokens of its sequence are taken away. {ADVICE_SEQUENCE}"
    columns = torch.arange(whole.weight.shape[1])
    for remainder in range(4):
        is_left = inputs["mask"] & (columns % 4 == remainder)
        after = evaluate(method, statistics=whole.statistics, **{**inputs, "mask": is_left}).weight
        has_changed = is_left & ~is_close(after, whole.weight, *tolerance)
        require_none(has_changed, message, before=whole.weight, after=after)


def split_sequences(sequence_count: int, micro_batch_counts: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield several splits of a mini-batch into micro-batches.

    Args:
        sequence_count: the number of sequences in the mini-batch.
        micro_batch_counts: for each of these numbers there is a split into so many micro-batches of neighbouring
            sequences. One more split separates the sequences at even positions from those at odd ones.

    Yields:
        A split: the sequences that each micro-batch has, bool, (micro-batches, sequences).
    """
    row = torch.arange(sequence_count)
    micro_batch_of_row_in_splits = [row * count // sequence_count for count in micro_batch_counts]
    micro_batch_of_row_in_splits.append(row % 2)
    for micro_batch_of_row in micro_batch_of_row_in_splits:
        micro_batch = micro_batch_of_row.unique()[:, None]
        yield micro_batch_of_row == micro_batch


def inputs_stay_unchanged(method: Method) -> None:
    """No tensor that the method is given is written to."""
    for dtype in ROUNDING:
        for tensors in (example(dtype), extreme_tokens(dtype), every_ratio(dtype)):
            inputs = Inputs(**select_inputs(method, tensors))
            t = make_shaped_tokens(method, None, inputs)
            first = call_without_writes(method, "statistics", t)
            second = call_without_writes(method, "second_statistics", t, first)
            statistics = torch.cat([first, second])
            decision = call_without_writes(method, "decide", statistics)
            call_without_writes(method, "metrics", statistics, decision)
            bounds = call_without_writes(method, "bounds", t, decision)
            call_without_writes(method, "bounded", t)
            weight = call_without_writes(method, "gradient_weight", t, bounds)
            call_without_writes(method, "gradient", t, bounds, weight)
            call_without_writes(method, "loss_value", t, bounds, weight)


def call_without_writes(method: Method, function_name: str, *arguments: Any) -> Any:
    """Call one of a method's functions, and return what it returns.

    Args:
        method: the method.
        function_name: the name of its function.
        arguments: the function's arguments: tensors, or named tuples of tensors, numbers and None.

    Raises:
        AssertionError: the function wrote to one of the tensors; the message names the function and the tensor.
    """
    function = getattr(method, function_name)
    values_by_name = {}
    for name, argument in zip(inspect.signature(function).parameters, arguments, strict=True):
        if isinstance(argument, tuple):
            values_by_name.update(argument._asdict())
        else:
            values_by_name[name] = argument
    tensors = {name: value for name, value in values_by_name.items() if isinstance(value, Tensor)}
    versions = {name: tensor._version for name, tensor in tensors.items()}
    # Copies too, because a write through .data is not counted in a tensor's version.
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    result = function(*arguments)
    for name, tensor in tensors.items():
        is_unchanged = tensor._version == versions[name] and bool(is_equal(tensor, copies[name]).all())
        message = (
            f"{name} was written to by {function_name}, so what is logged would not be what was trained. "
            f"Write {name}.clamp(…) instead of {name}.clamp_(…), and no assignment to its entries."
        )
        require(is_unchanged, message)
    return result


def require_same(first: tuple[Applied, Tensor], second: tuple[Applied, Tensor], message: str) -> None:
    """Raise AssertionError unless losses and gradients agree to a relative 1e-12, and statistics to a relative 1e-9.

    For numbers near 0, absolute differences of 1e-14 and 1e-9 are allowed too.

    Args:
        first, second: two results of `apply_and_differentiate`.
        message: the message of the error.
    """
    first_result, first_gradient = first
    second_result, second_gradient = second
    require(bool(is_close(first_result.statistics, second_result.statistics, rtol=1e-9, atol=1e-9).all()), message)
    require(bool(is_close(first_result.value, second_result.value, rtol=1e-12, atol=1e-14).all()), message)
    require(bool(is_close(first_gradient, second_gradient, rtol=1e-12, atol=1e-14).all()), message)


def not_finite_inside_the_mask_reaches_the_gradient(method: Method) -> None:
    """NaN and infinity inside the mask make their token's loss and gradient not finite, so verl skips the step."""
    clean, _ = apply_and_differentiate(method, example())
    for case, tensors in spoiled(method, torch.float64):
        # Bounds that follow from the spoiled tokens, then bounds that follow from clean ones.
        for origin, statistics in {"its own": None, "given": clean.statistics}.items():
            result, actual = apply_and_differentiate(method, tensors, statistics)
            require_not_finite(f"{case}, statistics {origin}", result.value, actual)


class NotChecked(Exception):
    """A check could not be made; the message says why."""


def compiled_loss_is_the_same(method: Method, shaping: AdvantageReweighting | None = None) -> None:
    """The compiled loss, as on accelerators, is the same, and NaN and infinity reach it only from inside the mask.

    Args:
        method: the method.
        shaping: what changes the advantages first; None: they stay as they are. With shaping, the compiled loss is not
            compared with the uncompiled one.
    """
    functions = token_functions(method, shaping, compiled=True)

    def compute_loss(tensors: dict[str, Tensor], statistics: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the compiled loss and its gradient.

        Args:
            tensors: the tensors of a mini-batch.
            statistics: the statistics from which the bounds follow; None: the statistics of these tokens.
        """
        inputs = Inputs(**select_inputs(method, tensors))
        if statistics is None:
            statistics = functions.statistics(inputs)
        value, weighted, _ = functions.loss(inputs, method.decide(statistics))
        return value, -weighted

    clean = example(torch.float32)
    clean_statistics = functions.statistics(Inputs(**select_inputs(method, clean)))
    clean_loss = compute_loss(clean, clean_statistics)
    if not functions.compiled:
        raise NotChecked("the compiler is missing or failed, as the warning says; the loss then trains uncompiled")
    for case, tensors in spoiled(method, torch.float32):
        for origin, statistics in {"its own": None, "given": clean_statistics}.items():
            loss, gradient = compute_loss(tensors, statistics)
            require_not_finite(f"compiled, {case}, statistics {origin}", loss, gradient)
    loss_with_junk = compute_loss(examples.with_junk(clean))
    # In each pair, the loss is compared first, and then the gradient.
    for without_junk, with_junk in zip(clean_loss, loss_with_junk, strict=True):
        require(torch.equal(without_junk, with_junk), "compiled, values outside the mask are read")
        require(bool(without_junk.isfinite().all()), "compiled, a loss or a gradient is not finite")
    if shaping is not None:
        # `apply_and_differentiate` takes no shaping.
        return
    uncompiled, actual = apply_and_differentiate(method, clean, clean_statistics)
    for compiled, usual in zip(clean_loss, (uncompiled.value, actual), strict=True):
        is_same = is_close(compiled, usual.detach(), *ROUNDING[torch.float32])
        require(bool(is_same.all()), "compiled, it is another loss")


def require_not_finite(case: str, loss: Tensor, gradients: Tensor) -> None:
    """Raise AssertionError if the spoiled token's loss or gradient is finite. The message begins with `case`."""
    require(not bool(loss[SPOILED].isfinite()), f"{case}: the loss is finite")
    require(not bool(gradients[SPOILED].isfinite()), f"{case}: the gradient is finite")


# The log-probabilities between which the weight at ratio 1 has to be above 0. Where a method raises a small probability
# to a power, the weight may underflow to 0. A token of a probability of almost 1 has almost no gradient.
LEAST_JUDGED = -30.0
MOST_JUDGED = -1e-4


def weight_is_positive_at_ratio_1(method: Method) -> None:
    """At ratio 1, F is above 0 where A is not 0: tokens with A > 0 become likelier, those with A < 0 less likely.

    Tokens with a probability of almost 0 or almost 1 are not judged.
    """
    message = "F is {weight:.3g} at ratio 1 for a token with A = {advantage:.3g}, not above 0. " + ADVICE_WEIGHT
    for dtype in ROUNDING:
        for tensors in (example(dtype), extreme_tokens(dtype), every_ratio(dtype)):
            log_prob = tensors["old_log_prob"]
            tensors["log_prob"] = log_prob
            tensors["rollout_log_prob"] = log_prob
            is_of_usual_probability = (log_prob > LEAST_JUDGED) & (log_prob < MOST_JUDGED)
            is_judged = tensors["mask"] & (tensors["advantages"] != 0) & is_of_usual_probability
            for sign in (1, -1):
                advantages = sign * tensors["advantages"]
                result, _ = apply_and_differentiate(method, {**tensors, "advantages": advantages})
                is_wrong = is_judged & (result.weight <= 0)
                require_none(is_wrong, message, weight=result.weight, advantage=advantages)


def weight_is_nowhere_negative(method: Method) -> None:
    """The weight is below 0 at no ratio, so no token is pushed against its advantage."""
    message = "F is {weight:.3g} at ratio {ratio:.4g} for a token with A = {advantage:.3g}, below 0. " + ADVICE_WEIGHT
    for dtype, (_, absolute_tolerance) in ROUNDING.items():
        for _, tensors, statistics in batches_to_try(method, dtype):
            result, _ = apply_and_differentiate(method, tensors, statistics)
            t = result.tokens
            is_wrong = tensors["mask"] & (result.weight < -absolute_tolerance)
            # The message names the wrong token whose ratio is nearest to 1.
            distance = t.log_ratio.abs().where(is_wrong, torch.inf)
            is_nearest = is_wrong & (distance == distance.amin())
            require_none(is_nearest, message, weight=result.weight, ratio=t.ratio, advantage=t.advantages)


# What is added to log-probabilities, in nats. The shifts are so many that a weight which follows the ratio anywhere
# changes at one of them.
SHIFTS = (-3.0, -1.0, -0.3, -0.1, -0.03, 0.03, 0.1, 0.3, 1.0, 3.0)


def ignores_the_ratio(method: Method) -> bool:
    """Return whether the weight stays the same when only the current or only the old log-probabilities change.

    Such a method is no mistake by itself: REINFORCE's weight is 1. But nothing limits how far an update goes.
    """
    tensors = example(torch.float64)
    usual = evaluate(method, **select_inputs(method, tensors))

    def weight_changes(*names: str) -> bool:
        """Return whether any shift of the log-probabilities of these names changes the weight of a token."""
        # A different factor at each token, so that the mean over a sequence changes too.
        factors = torch.linspace(0.5, 1.5, tensors["log_prob"].numel(), dtype=torch.float64)
        factors = factors.view_as(tensors["log_prob"])
        for shift in SHIFTS:
            moved = {name: (tensors[name] + shift * factors).clamp(max=-1e-3) for name in names}
            inputs = select_inputs(method, {**tensors, **moved})
            weight = evaluate(method, statistics=usual.statistics, **inputs).weight
            is_same = is_close(weight, usual.weight, *ROUNDING[torch.float64])
            if not bool(is_same[tensors["mask"]].all()):
                return True
        return False

    # The sampler's log-probabilities change with the old ones, because the ratio of some methods is to the sampler.
    return not (weight_changes("log_prob") and weight_changes("old_log_prob", "rollout_log_prob"))


def weight_does_not_depend_on_the_size_of_advantages(method: Method) -> None:
    """The weight stays the same when all advantages are multiplied by a positive number."""
    for dtype in ROUNDING:
        usual = example(dtype)
        ratios = every_ratio(dtype)
        with_unit_advantages = {**ratios, "advantages": ratios["advantages"].sign()}
        factors_to_try = (
            (usual, (0.25, 4.0, 0.001, 0.03, 30.0, 1e3)),
            (with_unit_advantages, (0.25, 0.003, 1e3)),
        )
        for tensors, factors in factors_to_try:
            before, _ = apply_and_differentiate(method, tensors)
            for factor in factors:
                multiplied = {**tensors, "advantages": factor * tensors["advantages"]}
                after, _ = apply_and_differentiate(method, multiplied)
                # To 1e-3, because a weight may use A / (|A| + 1e-6) for the sign of A.
                has_changed = tensors["mask"] & ~is_close(after.weight, before.weight, rtol=1e-3, atol=1e-9)
                message = (
                    "F goes from {before:.3g} to {after:.3g} when A is multiplied by " + f"{factor:g}. {ADVICE_WEIGHT}"
                )
                require_none(has_changed, message, before=before.weight, after=after.weight)


def statistics_are_the_same_each_time(method: Method) -> None:
    """The statistics of the same tokens are the same to the last bit. They and the decision are float64 vectors."""
    size = method.statistics_size + method.second_statistics_size
    mini_batches = [tensors for dtype in ROUNDING for tensors in examples.mini_batches(dtype).values()]
    for tensors in mini_batches:
        inputs = Inputs(**select_inputs(method, tensors))
        first = token_statistics(method, None, inputs)
        with torch.no_grad():
            second = token_statistics(method, None, inputs)
        shape = tuple(first.shape)
        require(shape == (size,), f"the statistics have shape {shape}, but the class declares {(size,)}")
        require(first.dtype == torch.float64, f"the statistics are {first.dtype}, use float64")
        require(bool(is_equal(first, second).all()), "the statistics of the same tokens differ")
        is_negative = first[method.never_negative] < 0
        require(not bool(is_negative.any()), "a statistic that never_negative names is below 0")
        decision = method.decide(first)
        wrong_decision = f"the decision is {decision.dtype} with {decision.ndim} dimensions, use a float64 vector"
        require(decision.ndim == 1 and decision.dtype == torch.float64, wrong_decision)


def statistics_add_up_over_any_split(method: Method) -> None:
    """Statistics and bounds are the same however the sequences are split, groups of one prompt included."""
    mini_batches = [make(dtype) for dtype in ROUNDING for make in (example, extreme_tokens, every_ratio)]
    for tensors in mini_batches:
        tensors = select_inputs(method, tensors)
        whole = evaluate(method, **tensors)
        for split in split_sequences(len(tensors["mask"]), micro_batch_counts=(6, 2, 3)):
            micro_batches = []
            for is_in_micro_batch in split:
                inputs = Inputs(**{name: tensor[is_in_micro_batch] for name, tensor in tensors.items()})
                micro_batches.append(inputs)
            # The first stage is summed over the micro-batches before the second stage is computed from it.
            first = sum(token_statistics(method, None, inputs)[: method.statistics_size] for inputs in micro_batches)
            statistics_of_split = sum(token_statistics(method, None, inputs, first) for inputs in micro_batches)
            add_up = bool(is_close(statistics_of_split, whole.statistics, rtol=1e-9, atol=1e-9).all())
            require(add_up, "the statistics do not add up over a split")
            bounds_of_split = evaluate(method, statistics=statistics_of_split, **tensors).bounds
            for bound, bound_of_split in zip(whole.bounds, bounds_of_split, strict=True):
                before = torch.as_tensor(bound, dtype=torch.float64)
                after = torch.as_tensor(bound_of_split, dtype=torch.float64)
                require(bool(is_close(before, after, rtol=1e-12, atol=1e-14).all()), "a split changes the bounds")


def tokens_outside_the_statistics_mask_do_not_count(method: Method) -> None:
    """Tokens that do not count, such as those of Lopti's other pass, change no statistics."""
    tensors = select_inputs(method, example(seed=0))
    other = select_inputs(method, example(seed=1))
    counted = (torch.arange(tensors["mask"].shape[1]) % 2 == 0).expand_as(tensors["mask"])
    # The same tokens where they count, and another example's tokens elsewhere.
    others_elsewhere = dict(tensors)
    for name in tensors.keys() - {"mask", "group"}:
        others_elsewhere[name] = torch.where(counted, tensors[name], other[name])
    # The same tokens where they count, and no tokens elsewhere.
    counted_alone = {**tensors, "mask": tensors["mask"] & counted}
    first = token_statistics(method, None, Inputs(**tensors, counted=counted))
    for inputs in (Inputs(**others_elsewhere, counted=counted), Inputs(**counted_alone)):
        second = token_statistics(method, None, inputs)
        require(bool(is_close(first, second, rtol=1e-9, atol=1e-9).all()), "the statistics count tokens outside t.mask")


def metrics_keep_their_keys(method: Method) -> None:
    """`metrics` has the same keys whatever the data, and `metrics` and `over_updates` return only declared names."""
    mistakes = list(wrong_names(method.logs, METRICS))
    require(not mistakes, "\n".join(mistakes))
    usual = example()
    at_ratio_1 = compute_declared_metrics(method, {**usual, "log_prob": usual["old_log_prob"]})
    at_usual_ratios = compute_declared_metrics(method, usual)
    without_tokens = compute_declared_metrics(method, {**usual, "mask": torch.zeros_like(usual["mask"])})
    require(
        list(at_ratio_1) == list(at_usual_ratios) == list(without_tokens),
        f"the keys depend on the data, or their order does: {list(at_ratio_1)} if every ratio is 1, "
        f"{list(at_usual_ratios)} for other ratios, {list(without_tokens)} without tokens",
    )
    # One update, two, and more; an update without tokens is among them.
    require_declared_summaries(method, [at_ratio_1])
    require_declared_summaries(method, [at_usual_ratios, without_tokens])
    require_declared_summaries(method, [at_ratio_1, at_usual_ratios])
    require_declared_summaries(method, 2 * [at_ratio_1, at_usual_ratios, without_tokens])


def compute_declared_metrics(method: Method, tensors: dict[str, Tensor]) -> dict[str, float]:
    """Return what a method's `metrics` makes of a mini-batch, by the names of the metrics and of a family's members.

    Raises:
        ValueError: the method does not declare one of the metrics, or declares it differently.
    """
    statistics = token_statistics(method, None, Inputs(**select_inputs(method, tensors)))
    values = {}
    for _, members in find_declarations(method, method.metrics(statistics, method.decide(statistics))):
        for name, value in members.items():
            values[name] = float(value)
    return values


def require_declared_summaries(method: Method, metrics_of_updates: list[dict[str, float]]) -> None:
    """Raise AssertionError if `over_updates` returns an undeclared name, or a value that is not finite.

    Args:
        method: the method.
        metrics_of_updates: what `compute_declared_metrics` returns for each update of a rollout batch.
    """
    declared = [re.compile(metric.pattern) for metric in method.logs if metric.over is Over.ROLLOUT_BATCH]
    values_by_name = {name: [metrics[name] for metrics in metrics_of_updates] for name in metrics_of_updates[0]}
    for name, value in method.over_updates(values_by_name).items():
        is_declared = any(pattern.fullmatch(f"clipx/{name}") for pattern in declared)
        require(is_declared, f"over_updates returns {name!r}, which logs does not declare: add of_rollout_batch")
        update_count = len(metrics_of_updates)
        message = f"over_updates returns {name}={value} for {update_count} updates. {ADVICE_FINITE}"
        require(math.isfinite(value), message)


def the_loss_can_be_computed(method: Method) -> None:
    """The loss can be computed."""
    apply_and_differentiate(method, example())


def earlier_batches_do_not_matter(method: Method) -> None:
    """The loss of a mini-batch is the same whether it is the first one or comes after others."""

    def compute_all(tensors: dict[str, Tensor]) -> Tensor:
        """Return everything that the loss computes from a mini-batch, as one vector, float64."""
        result, actual = apply_and_differentiate(method, tensors)
        values = (result.weight.where(tensors["mask"], 0), result.value, actual, result.statistics, result.decision)
        return torch.cat([part.detach().double().flatten() for part in values])

    later = example(seed=1, spread=1.0)
    try:
        # The fork has not seen the other mini-batches below.
        first = torch.tensor(call_in_fork(lambda: compute_all(later).tolist()), dtype=torch.float64)
    except NoAnswer as reason:
        raise NotChecked(str(reason)) from None
    for tensors in (example(), example(seed=2, spread=3.0)):
        compute_all(tensors)
    after_others = compute_all(later)
    repeated = compute_all(later)
    if not bool(is_equal(after_others, repeated).all()):
        # A loss that changes at each call tells nothing about earlier batches. `weight_is_the_same_at_each_call` names
        # it.
        return
    is_same = is_close(first, after_others, rtol=1e-9, atol=1e-12)
    message = (
        "the loss of a mini-batch is another one after other mini-batches, so it keeps something of them. Make what it "
        "needs from the update's tokens a statistic, which is summed over ranks and saved with checkpoints."
    )
    require(bool(is_same.all()), message)


def no_value_is_read_on_the_host(method: Method) -> None:
    """Nothing waits for an accelerator: the formulas run on tensors that have no values."""
    usual = select_inputs(method, example(torch.float32))
    # Tensors without values take no memory, however large they are.
    batches = [without_values(usual, size) for size in (None, *LARGE)]
    for batch in batches:
        run_without_values(method, batch, accelerator=False)
    # Again with tensors that claim to be on an accelerator, for code such as that under `if ratio.is_cuda:`.
    for batch in batches:
        run_without_values(method, batch, accelerator=True)


# Numbers of sequences and lengths of large batches, which a loss may treat differently from small ones.
LARGE = ((64, 128), (1, 131_072), (2_048, 8_192))


def without_values(tensors: Mapping[str, Tensor], size: tuple[int, int] | None) -> dict[str, Tensor]:
    """Return tensors like the inputs of a method, but without values: on the device "meta".

    Args:
        tensors: the inputs.
        size: the number of sequences and the length that the new tensors have; a tensor of one dimension has the
            number of sequences alone. None: the shapes of the inputs.
    """
    empty = {}
    for name, tensor in tensors.items():
        shape = tensor.shape if size is None else size[: tensor.dim()]
        empty[name] = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return empty


def run_without_values(method: Method, tensors: Mapping[str, Tensor], *, accelerator: bool) -> None:
    """Run a method's functions on tensors without values.

    Args:
        method: the method.
        tensors: the inputs, as `without_values` returns them.
        accelerator: whether the tensors claim to be on an accelerator.

    Raises:
        AssertionError: a value is read on the host, even if the loss catches the error.
        NotChecked: what the loss does on an accelerator cannot be run without one.
    """
    mode = WithoutValues(accelerator=accelerator)
    failure = None
    try:
        with mode:
            statistics = token_statistics(method, None, Inputs(**tensors))
            decision = method.decide(statistics)
            method.metrics(statistics, decision)
            token_loss(method, None, Inputs(**tensors), decision)
    except Exception as error:
        failure = error
    # A wait is reported before any other failure, because the loss may catch the error of the wait, and because the
    # other failure may follow from it.
    wait = mode.first_wait
    if wait is not None:
        # The traceback is kept, because it contains the line of the loss.
        raise AssertionError(explain_wait(wait)).with_traceback(wait.__traceback__) from None
    if failure is None:
        return
    if accelerator:
        raise NotChecked(f"what the loss does on an accelerator could not be run without one: {failure}")
    raise failure


def explain_wait(error: Exception) -> str:
    """Return the message about something that would wait for an accelerator, with what to write instead.

    Args:
        error: what `WithoutValues` keeps as `first_wait`.
    """
    message = first_sentence(error)
    if isinstance(error, Wait):
        return f"{ADVICE_BY_WAIT[message]} The check saw: {message}"
    # PyTorch says "expected device" where tensors of two devices meet.
    advice = ADVICE_DEVICE if "expected device" in message else ADVICE_VALUES
    return f"{advice} PyTorch said: {message}"


# The ends of the messages above, which say what to do.
ADVICE_WEIGHT = (
    "Return the gradient weight F (for GRPO: the ratio), not a loss: the gradient is F*A, and the plugin multiplies by "
    "A. If such a weight is intended, set unconstrained_weight=True."
)

ADVICE_FINITE = (
    "Clamp what goes into an exponential, a logarithm, a power or a division, and avoid 0 times infinity. t.ratio is "
    "clamped unless log_ratio_clamp is null or a function has that parameter, t.free_ratio is not."
)

# The beginning of a message; `require_none` fills in the braces.
WEIGHT_MOVES = "F of a token goes from {before:.3g} to {after:.3g} when other"

ADVICE_BATCH = (
    "It depends on how verl divides the batch, which is a matter of memory. Use statistics, which are summed over the "
    "mini-batch. If the weight is meant to depend on it, set by_batch=True."
)

ADVICE_SEQUENCE = "A method that looks at a token's whole sequence sets by_sequence=True."

ADVICE_VALUES = (
    "a tensor's value is read on the host, for which an accelerator has to wait, or a shape depends on values. Keep it "
    "a tensor: write torch.where(condition, a, b) instead of `if` or an index by a mask, torch.minimum instead of min, "
    "and no .item(), float(…), .tolist() or print."
)

ADVICE_DEVICE = (
    "a tensor is made on another device than the ratio's, or copied there. Make it there, for example with "
    "torch.zeros_like(ratio) or torch.full((), 0.5, device=ratio.device)."
)

# From what `WithoutValues` refuses by itself to what to do.
ADVICE_BY_WAIT = {
    COPIES: ADVICE_DEVICE,
    PRINTS: ADVICE_VALUES,
    SYNCHRONIZES: "the loss waits for everything that the accelerator has to do. Remove the call that waits.",
}

CHECKS: tuple[Callable[[Method], None], ...] = (
    # First, because it needs a process in which the checks have not called the loss yet. A loss that was called before
    # the checks and keeps something of that call alone may pass.
    earlier_batches_do_not_matter,
    the_loss_can_be_computed,
    one_weight_per_token,
    weight_is_the_same_at_each_call,
    weight_is_positive_at_ratio_1,
    weight_is_nowhere_negative,
    weight_does_not_depend_on_the_size_of_advantages,
    gradient_is_weight_times_advantage,
    finite_for_every_finite_input,
    not_finite_inside_the_mask_reaches_the_gradient,
    nothing_outside_the_mask_is_read,
    order_of_sequences_does_not_matter,
    padding_does_not_matter,
    weight_does_not_depend_on_the_micro_batch,
    inputs_stay_unchanged,
    statistics_are_the_same_each_time,
    statistics_add_up_over_any_split,
    tokens_outside_the_statistics_mask_do_not_count,
    metrics_keep_their_keys,
    no_value_is_read_on_the_host,
)

# The checks that compile the loss and its statistics, which takes seconds.
COMPILED_CHECKS: tuple[Callable[[Method], None], ...] = (compiled_loss_is_the_same,)


# From each check to the flags that a method may set to be free of it.
LIFTED_BY = {
    weight_is_positive_at_ratio_1: ("unconstrained_weight",),
    weight_is_nowhere_negative: ("unconstrained_weight",),
    weight_does_not_depend_on_the_size_of_advantages: ("unconstrained_weight", "by_batch"),
    weight_does_not_depend_on_the_micro_batch: ("by_batch",),
}
