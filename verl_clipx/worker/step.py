"""What is known about an optimizer step and a micro-batch beyond the arguments of verl's policy losses."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from verl_clipx.base.tokens import Inputs
from verl_clipx.common.decided_from import DecidedFrom
from verl_clipx.driver.config import Settings
from verl_clipx.worker.layout import TokenPass, padded
from verl_clipx.worker.not_finite import NotFinite
from verl_clipx.worker.rows import AGE, prompt_groups
from verl_clipx.worker.sampling import Sample

if TYPE_CHECKING:
    from verl_clipx.worker.anatomy import AnatomySums

    # Tracing needs pyarrow, which an installation that traces nothing may lack.
    from verl_clipx.worker.tracer import TracedRows


class Kept(NamedTuple):
    """What of a micro-batch is kept until its update has seen the last one.

    Args:
        inputs: with every optional field that is at hand; detached.
        factor: of rollout correction and entropy selection on F, (sequences, length), or None.
        weighted: F * A of the loss that trains, (sequences, length).
    """

    inputs: Inputs
    factor: Tensor | None
    weighted: Tensor


@dataclass
class OptimizerStep:
    """One optimizer step of the worker.

    Args:
        position: names the update within the rollout batch: the statistics of `scope=lagged` belong to a position.
        token_pass: Lopti's pass, or None.
        statistics: what the bounds are decided from, (statistics_size,), float64; None: each micro-batch's own.
        decision: what the method decided from them; None: decide from each micro-batch's own.
        decided_from: the tokens that the statistics are of.
        counted_tokens: tokens of the pass in the mini-batch over all ranks; None where they are all that verl counts.
        selected_tokens: selected tokens in the mini-batch over all ranks, 0-d; None without entropy selection.
        entropy_bucket: where entropy selection over the mini-batch ends, 0-d; None without it.
        entropy_wanted: whether the run itself asks for the entropy, for its metric or its bonus.
        collect: whether the training pass adds up its own statistics although others are given.
        collected: this rank's statistics of the training pass so far, float64; None before the first micro-batch.
        assumed: this rank's statistics under the assumption that the ratio is 1, where they were used.
        sample: the sequences of this rank that the extra pass takes; None: all, and nothing is said of an error.
        passed: share of the mini-batch's sequences that the extra pass took; None without clipx.precision.
        predicted_error: standard error of the bounds, over half their width; None without an extra pass.
        next_share: share of the sequences that the next update at the position takes; None where none is chosen.
        error_before: how far the bounds of the update before, if they were of a sample, turned out to be from the exact
            ones, over half their width.
        of_rollout_batch: whether it is one of a rollout batch's, whose end makes metrics of sums over each mini-batch.
        not_finite: by name, what of this rank's mini-batch is not finite, as far as it is known.
        kept: what methods in the shadow need of each micro-batch of the update so far; None: there are none.
        equal_weights: whether it is a rollout batch's first update, whose weights computed the old log-probabilities
            or, in bypass mode, would have.
        anatomy: adds up where the ratio comes from; None: nothing does.
    """

    position: str = ""
    token_pass: TokenPass | None = None
    statistics: Tensor | None = None
    decision: Tensor | None = None
    decided_from: DecidedFrom = DecidedFrom.MICRO_BATCH
    counted_tokens: float | None = None
    selected_tokens: Tensor | None = None
    entropy_bucket: Tensor | None = None
    entropy_wanted: bool = False
    collect: bool = False
    collected: Tensor | None = None
    assumed: Tensor | None = None
    sample: Sample | None = None
    passed: float | None = None
    predicted_error: float | None = None
    next_share: float | None = None
    error_before: float | None = None
    of_rollout_batch: bool = True
    not_finite: dict[str, NotFinite] = field(default_factory=dict)
    kept: "list[Kept] | None" = None
    equal_weights: bool = False
    anatomy: "AnatomySums | None" = None

    @property
    def estimated(self) -> bool:
        """Whether the extra pass took a part of the mini-batch only."""
        return self.sample is not None and self.passed < 1


@dataclass
class RolloutBatch:
    """A rollout batch that a worker trains on: made with it, dropped with it.

    Args:
        token_pass: Lopti's pass that is under way, or None.
        last_pass: whether no pass comes after it.
        update: which update of the pass is next.
        updates_before_pass: how many updates earlier passes made.
        skipped: how many updates verl has skipped.
        not_finite: of those, by name what was not finite in this rank's mini-batches.
    """

    token_pass: TokenPass | None = None
    last_pass: bool = True
    update: int = 0
    updates_before_pass: int = 0
    skipped: int = 0
    not_finite: dict[str, NotFinite] = field(default_factory=dict)

    def begin(self, token_pass: TokenPass | None, *, last: bool) -> None:
        """The next pass over its tokens begins.

        Args:
            token_pass: Lopti's, or None.
            last: whether no other comes after it.
        """
        self.updates_before_pass += self.update
        self.token_pass, self.last_pass, self.update = token_pass, last, 0

    @property
    def position(self) -> str:
        """Names the next update within the rollout batch."""
        return ("" if self.token_pass is None else f"{self.token_pass.name}/") + f"update_{self.update}"

    @property
    def at_start(self) -> bool:
        """Whether no update was made yet."""
        return self.update == 0 and self.updates_before_pass == 0


# Where a worker gets no rollout batch: each of its updates is the first.
FIRST = RolloutBatch()


class UpdateObserver(Protocol):
    """Looks on at every update of a rollout batch; every rank calls each method."""

    def begin_update(self, step: OptimizerStep, batch: RolloutBatch) -> None:
        """An optimizer step is planned, and says from now on what its micro-batches have to keep."""

    def end_update(self, step: OptimizerStep) -> None:
        """It has seen its last micro-batch."""

    def end_rollout_batch(self, batch: RolloutBatch) -> dict[str, list[float]]:
        """Its updates are made; returns the metrics of them, by key."""


@dataclass
class MicroBatch:
    """One micro-batch inside a training worker's loss call.

    Args:
        step: the optimizer step that it belongs to.
        rollout_log_prob: the rollout policy's log-probabilities, (sequences, response length), padded; None if the
            rollout did not return them.
        entropy: the current policy's entropy in nats, (sequences, response length); None if nothing needs it.
        group: int64, (sequences,): equal numbers for the responses to one prompt; None if nothing needs it.
        age: weight versions since each sequence was generated, int64, (sequences,); None if unknown.
        counted: bool, (sequences, response length): the tokens of Lopti's pass; None without Lopti.
        traced: its rows that are traced, which the loss adds to; None without any.
        kept: where the loss adds what methods in the shadow need; None without any.
        anatomy: as in its step; None in a call that is not of training.
        sums: filled by the loss: metric name to a sum over this micro-batch's tokens.
        values: filled by the loss: metric name to a value that is not a sum over tokens.
        counts: filled by the loss: metric name to a number of this micro-batch, which adds up over the mini-batch.
        loss: filled by the loss: its own value.
    """

    step: OptimizerStep = field(default_factory=OptimizerStep)
    rollout_log_prob: Tensor | None = None
    entropy: Tensor | None = None
    group: Tensor | None = None
    age: Tensor | None = None
    counted: Tensor | None = None
    traced: "TracedRows | None" = None
    kept: list[Kept] | None = None
    anatomy: "AnatomySums | None" = None
    sums: dict[str, float] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    loss: float = 0.0


_current: ContextVar[MicroBatch | None] = ContextVar("verl_clipx_micro_batch", default=None)


def current_micro_batch() -> MicroBatch | None:
    """The micro-batch whose loss is being computed; None outside a training worker."""
    return _current.get()


@contextmanager
def in_micro_batch(micro_batch: MicroBatch) -> Iterator[MicroBatch]:
    """Makes a micro-batch the current one for the duration of the block."""
    token = _current.set(micro_batch)
    try:
        yield micro_batch
    finally:
        _current.reset(token)


def micro_batch_of(settings: Settings, data: Any, step: OptimizerStep) -> MicroBatch:
    """What verl's data say of a mini-batch or micro-batch beyond verl's own arguments to a loss.

    Args:
        settings: the clipx node.
        data: verl's mini-batch or micro-batch.
        step: the optimizer step that it belongs to.
    """
    return MicroBatch(
        step,
        rollout_log_prob=padded(data["rollout_log_probs"]) if "rollout_log_probs" in data else None,
        group=prompt_groups(data) if any("group" in method.asks_for for method in settings.methods) else None,
        age=data.get(AGE, None),
        counted=None if step.token_pass is None else step.token_pass.tokens(data),
    )
