"""What is known about an optimizer step and a micro-batch beyond the arguments of verl's policy losses."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_clipx.losses.base.method import Bounds
from verl_clipx.losses.base.tokens import Inputs
from verl_clipx.losses.modifiers.masks import remaining
from verl_clipx.run.config import Observe, Settings
from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.run.keys import CALCULATE_LOG_PROBS
from verl_clipx.run.schedule import position
from verl_clipx.training.observing import Observers
from verl_clipx.training.worker.layout import AGE, TokenPass, pad_rows, prompt_groups, response_part, restrict


class NotFinite(NamedTuple):
    """How much of a field is not finite in this rank's part of the mini-batch, and the uid of the first such prompt."""

    tokens: int
    sequences: int
    prompt: str | None


class MeasuredFloor(NamedTuple):
    """This rank's second measurement of the floor.

    Args:
        sums: the sums that become means over tokens, by metric key.
        bins: the sums that stay as they are, by metric key.
        log_probs: by the hash of a row's old_log_probs (`rows.hashes`), what the pass gave the tokens of its response,
            (tokens,).
    """

    sums: dict[str, float]
    bins: dict[str, float]
    log_probs: dict[int, Tensor]


@dataclass
class OptimizerStep:
    """One optimizer step of the worker; numbers of tokens are over all ranks.

    Args:
        token_pass: Lopti's pass, or None.
        statistics: what the bounds are decided from, (statistics_size,), float64; None: each micro-batch's own.
        decision: what the method decided from the statistics; None: each micro-batch decides from its own.
        decided_from: the tokens that the statistics were computed from.
        counted_tokens: how many tokens of the mini-batch count, as the extra pass saw them if there is one; None: as
            many as verl says.
        selected_tokens: how many tokens of the mini-batch are selected, 0-d; None without selection.
        entropy_bucket: the bucket at which entropy selection over the mini-batch ends, 0-d; None without it.
        entropy_wanted: whether the run itself asks for the entropy, for its metric or its bonus.
        collected: the statistics of each micro-batch of this rank's training pass; None if nobody needs them.
        of_rollout_batch: whether the update is one of a rollout batch, at whose end sums become metrics.
        at_ratio_one: whether the weights are those of old_log_probs, so that the ratio is 1 but for rounding.
        row_hashes: the hashes of this rank's rows of the mini-batch, int64, (rows,); None if there are none.
        recut: the floor as it was measured beforehand with other micro-batches; None if it was not.
        not_finite: by field, what is known not to be finite in this rank's mini-batch.
        optimizer_stepped: whether the engine's optimizer step was called, on every rank.
        gradient_norm: the norm of the step's gradient, on every rank; None before the optimizer's step.
    """

    token_pass: TokenPass | None = None
    statistics: Tensor | None = None
    decision: Tensor | None = None
    decided_from: DecidedFrom = DecidedFrom.MICRO_BATCH
    counted_tokens: float | None = None
    selected_tokens: Tensor | None = None
    entropy_bucket: Tensor | None = None
    entropy_wanted: bool = False
    collected: list[Tensor] | None = None
    of_rollout_batch: bool = True
    at_ratio_one: bool = False
    row_hashes: Tensor | None = None
    recut: MeasuredFloor | None = None
    not_finite: dict[str, NotFinite] = field(default_factory=dict)
    optimizer_stepped: bool = False
    gradient_norm: float | None = None

    @property
    def taken(self) -> bool:
        """Returns whether the optimizer takes the step: verl skips one whose gradient is not finite."""
        return self.gradient_norm is None or math.isfinite(self.gradient_norm)


@dataclass
class RolloutBatch:
    """How far a worker has come with the rollout batch that it trains on.

    Args:
        number: how many rollout batches verl counted before this one.
        token_pass: Lopti's current pass, or None.
        last_pass: whether no other pass follows.
        update: the number of the pass's next update, from 0.
        updates_before_pass: how many updates the earlier passes made.
        skipped: how many updates verl has skipped.
        not_finite: by field, what was not finite in this rank's mini-batches of the skipped updates.
    """

    number: int = 0
    token_pass: TokenPass | None = None
    last_pass: bool = True
    update: int = 0
    updates_before_pass: int = 0
    skipped: int = 0
    not_finite: dict[str, NotFinite] = field(default_factory=dict)

    def begin(self, token_pass: TokenPass | None, *, last: bool) -> None:
        """Begins the next pass over the rollout batch; `last`: no other one follows."""
        self.updates_before_pass += self.update
        self.token_pass = token_pass
        self.last_pass = last
        self.update = 0

    @property
    def is_first(self) -> bool:
        """Returns whether no update on the rollout batch was made yet."""
        return self.update == 0 and self.updates_before_pass == 0

    @property
    def position(self) -> str:
        """Returns the name of the next update within the rollout batch."""
        pass_name = None if self.token_pass is None else self.token_pass.name
        return position(self.update, pass_name)


class Observer:
    """Observes the updates on rollout batches; what it does not override does nothing. Every rank calls each method.

    Once it is `finished` at the end of a rollout batch, it is not called any more.
    """

    finished = False

    def begin_rollout_batch(self, data: Any, batch: RolloutBatch) -> None:
        """Called before the first update; `data`, on the host, may get further fields."""

    def begin_update(self, step: OptimizerStep, batch: RolloutBatch) -> None:
        """Called when an optimizer step is planned; may set what its micro-batches have to keep."""

    def end_micro_batch(
        self, micro_batch: "MicroBatch", loss: Tensor, model_output: Any, data: Any, dp_group: Any
    ) -> None:
        """Called after the loss of a micro-batch, which has filled it in, and before its backward pass.

        `loss` is what verl's loss function returned, the others its arguments as verl's engine gives them.
        """

    def report(self) -> Any:
        """Called with each micro-batch; returns what all ranks hear of it after the update.

        It may not wait for the accelerator. An observer that may end the run is not asked.
        """
        return None

    def hear(self, reports: list[Any]) -> None:
        """Called after the update on ranks with outputs, with what each rank reported last."""

    def end_update(self, step: OptimizerStep) -> None:
        """Called after the optimizer's step."""

    def end_rollout_batch(self, batch: RolloutBatch) -> dict[str, list[Any]]:
        """Called after the last update; returns the rollout batch's metrics by key."""
        return {}

    def flush(self) -> None:
        """Called when a checkpoint is saved: what was observed so far has to be on the disk."""


class AppliedMethod(NamedTuple):
    """What a method of the plugin did to a micro-batch's tokens; tensors are (sequences, length).

    Args:
        inputs: what the method saw.
        correction: the factor of verl's rollout correction on F, or None.
        kept: the tokens that selection and mask keep and bypass mode does not reject, bool; `whole` itself if all are.
        unmasked: the tokens before +clipx/mask, bool.
        whole: the mask including the tokens that bypass mode rejects, bool.
    """

    settings: Settings
    inputs: Inputs
    decision: Tensor
    correction: Tensor | None
    kept: Tensor
    unmasked: Tensor
    whole: Tensor


class AppliedLoss(NamedTuple):
    """What one of verl's losses did to a micro-batch's tokens; `config` is verl's ActorConfig."""

    inputs: Inputs
    gradient: Tensor
    bounds: Bounds
    by_sequence: bool
    loss_agg_mode: str
    config: Any


@dataclass
class MicroBatch:
    """One micro-batch inside a training worker's loss call.

    Args:
        step: the optimizer step that it belongs to.
        rollout_log_prob: the rollout policy's, (sequences, response length), padded; None if the rollout has none.
        entropy: the current policy's in nats, (sequences, response length); None if nothing needs it.
        group: int64, (sequences,): equal numbers for the responses to one prompt; None if nothing needs it.
        age: weight versions since each sequence's first and last token were generated, int64, (sequences, 2); None if
            unknown.
        counted: bool, (sequences, response length): the tokens of Lopti's pass; None without Lopti.
        applied: filled by the loss: what it did to the tokens.
        sums, values, counts: filled by the loss, from metric key to a sum over this micro-batch's tokens; to a value
            that is not one; to a number that adds up over the mini-batch's micro-batches.
        loss: filled by the loss: its value.
        observers: what the sums, values and counts are filled in under; outside a training worker its own, under which
            exceptions end the call.
    """

    step: OptimizerStep = field(default_factory=OptimizerStep)
    rollout_log_prob: Tensor | None = None
    entropy: Tensor | None = None
    group: Tensor | None = None
    age: Tensor | None = None
    counted: Tensor | None = None
    applied: AppliedMethod | AppliedLoss | None = None
    sums: dict[str, float] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    loss: float = 0.0
    observers: Observers = field(default_factory=Observers)


_current: ContextVar[MicroBatch | None] = ContextVar("verl_clipx_micro_batch", default=None)


def current_micro_batch() -> MicroBatch | None:
    """Returns the micro-batch whose loss is being computed; None outside a training worker."""
    return _current.get()


@contextmanager
def in_micro_batch(micro_batch: MicroBatch) -> Iterator[MicroBatch]:
    """Makes a micro-batch the current one within a block."""
    token = _current.set(micro_batch)
    try:
        yield micro_batch
    finally:
        _current.reset(token)


def micro_batch_of(
    settings: Settings | Observe, step: OptimizerStep, data: Any, model_output: Any = None
) -> MicroBatch:
    """Returns what is known of a mini-batch or micro-batch beyond the arguments of verl's policy losses.

    `model_output` is None before a pass.
    """
    micro_batch = MicroBatch(step)
    if model_output is not None and model_output.get("entropy", None) is not None:
        micro_batch.entropy = response_part(model_output["entropy"], data, pad_rows(data["response_mask"]).shape[1])
    if isinstance(settings, Observe):
        return micro_batch
    if "rollout_log_probs" in data:
        micro_batch.rollout_log_prob = pad_rows(data["rollout_log_probs"])
    if "group" in settings.method.asks_for:
        micro_batch.group = prompt_groups(data)
    if step.token_pass is not None:
        micro_batch.counted = step.token_pass.tokens(data)
    micro_batch.age = data.get(AGE, None)
    return micro_batch


def inputs_of(settings: Settings, micro_batch: MicroBatch, **tensors: Tensor) -> Inputs:
    """Returns the inputs of a method's formulas for one micro-batch: the tensors, each (sequences, length), and more.

    Tokens outside Lopti's pass have no advantage, as in the loss; those that +clipx/mask takes out are not in the mask.

    Raises:
        ValueError: the method needs a field that is missing; says how to provide it.
    """
    optional = {name: getattr(micro_batch, name) for name in settings.asks_for}
    for name, tensor in optional.items():
        if tensor is None:
            raise ValueError(f"clipx_{settings.method.name} needs {name}: {REMEDIES[name]}.")
    if micro_batch.counted is not None:
        tensors["advantages"] = torch.where(micro_batch.counted, tensors["advantages"], 0.0)
    inputs = Inputs(**tensors, counted=micro_batch.counted, **optional)
    return inputs._replace(mask=remaining(settings.mask, inputs))


def call_of(
    settings: Settings | Observe, step: OptimizerStep, model_output: Any, data: Any
) -> tuple[MicroBatch, Any, Any]:
    """Returns what the policy loss knows of a micro-batch, and the output and data that verl's loss function gets."""
    micro_batch = micro_batch_of(settings, step, data, model_output)
    if isinstance(settings, Settings) and settings.needs_entropy and not step.entropy_wanted:
        model_output = {key: value for key, value in model_output.items() if key != "entropy"}
    if step.token_pass is not None:
        model_output, data = restrict(model_output, data, micro_batch.counted)
    return micro_batch, model_output, data


REMEDIES = {
    "rollout_log_prob": f"have the rollout return its log-probabilities ({CALCULATE_LOG_PROBS}="
    "True), or, outside verl, pass rollout_log_prob=",
    "entropy": "the plugin's training worker provides it; outside verl, pass entropy=",
    "group": "the plugin's training worker numbers the prompts; outside verl, pass group=",
}
