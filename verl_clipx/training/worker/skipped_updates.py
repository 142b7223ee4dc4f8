"""Counts the updates that verl skips because their gradient is not finite, and finds and names what was not finite."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl_clipx.losses.base.shared_metrics import NOT_FINITE_LOG_PROBS, NOT_FINITE_RANK, SKIPPED_UPDATES
from verl_clipx.training.observing import Observers
from verl_clipx.training.worker.layout import pad_rows, response_part
from verl_clipx.training.worker.step import NotFinite, OptimizerStep, RolloutBatch

logger = logging.getLogger(__name__)

NAMING = "naming what was not finite"

# The fields of verl's mini-batch and of the model's output, causes before what is computed from them. Each has an
# explanation for the log.
REWARDS = ("rm_scores", "token_level_scores", "token_level_rewards")
FIELDS = {
    **dict.fromkeys(REWARDS, "rewards"),
    "values": "values of the critic",
    "old_log_probs": "log-probabilities of the old policy",
    "rollout_log_probs": "log-probabilities of the rollout",
    "ref_log_prob": "log-probabilities of the reference",
    "rollout_is_weights": "weights of the rollout correction",
    "advantages": "advantages",
    "log_probs": "log-probabilities of the current policy",
    "entropy": "entropies of the current policy",
}

# Those of the model's output. They are not read from the data, where verl's v1 trainer has the old policy's under these
# names, over prompt and response.
OF_OUTPUT = ("log_probs", "entropy")

# The fields that a model computes.
OF_LOG_PROBS = ("old_log_probs", "rollout_log_probs", "ref_log_prob", "log_probs", "entropy")
# Stands among the fields' names for a gradient that is not finite although every field is.
GRADIENT = "gradient"


def not_finite_in(data: Any, log_probs: Tensor | None = None, entropy: Tensor | None = None) -> dict[str, NotFinite]:
    """Return what is not finite in a mini-batch or micro-batch. It waits for the accelerator.

    Rewards are checked in every token, because verl sums all of them; other fields only within response_mask.

    Args:
        data: verl's.
        log_probs: the model's output, in verl's layout; None: it is not checked.
        entropy: (sequences, response length); None: it is not checked.

    Returns:
        By the keys of `FIELDS` and in their order. A field whose values are all finite is left out.
    """
    mask = pad_rows(data["response_mask"]).bool()
    values = {name: pad_rows(data[name]) for name in FIELDS if name in data and name not in OF_OUTPUT}
    if log_probs is not None:
        values["log_probs"] = response_part(log_probs, data, mask.shape[1])
    if entropy is not None:
        values["entropy"] = entropy
    prompts = None
    if "uid" in data:
        # TensorDict wraps values that are not tensors.
        prompts = [str(getattr(name, "data", name)) for name in data["uid"]]
    counts = {}
    for name in FIELDS:
        if name not in values:
            continue
        is_wrong = ~values[name].isfinite()
        if name not in REWARDS:
            is_wrong = is_wrong & mask
        # How many tokens of each sequence are not finite.
        tokens_of_sequences = is_wrong.sum(1).tolist()
        wrong_sequences = [index for index, tokens in enumerate(tokens_of_sequences) if tokens]
        if wrong_sequences:
            counts[name] = NotFinite(
                tokens=sum(tokens_of_sequences),
                sequences=len(wrong_sequences),
                prompt=None if prompts is None else prompts[wrong_sequences[0]],
            )
    return counts


def merge_counts(first: dict[str, NotFinite], second: dict[str, NotFinite]) -> dict[str, NotFinite]:
    """Add up what is not finite in two micro-batches or mini-batches, of which the first comes earlier.

    Args:
        first, second: by the keys of `FIELDS`, as `not_finite_in` returns them.

    Returns:
        By the keys of `FIELDS` and in their order.
    """
    merged = dict(first)
    for name, later in second.items():
        earlier = merged.get(name, NotFinite(tokens=0, sequences=0, prompt=later.prompt))
        merged[name] = NotFinite(
            tokens=earlier.tokens + later.tokens,
            sequences=earlier.sequences + later.sequences,
            prompt=earlier.prompt,
        )
    return {name: merged[name] for name in FIELDS if name in merged}


def describe_not_finite(not_finite: dict[str, NotFinite]) -> str:
    """Return what is not finite, in words for the log."""
    parts = []
    for name, counts in not_finite.items():
        tokens = with_noun(counts.tokens, "token")
        sequences = with_noun(counts.sequences, "sequence")
        part = f"{name} ({FIELDS[name]}) in {tokens} of {sequences}"
        if counts.prompt is not None:
            part += f", first in a response to the prompt with uid {counts.prompt}"
        parts.append(part)
    return "; ".join(parts)


def with_noun(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural unless the number is 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def record_gradient_norm(
    optimizer_step: Callable[..., Any], current_step: Callable[[], OptimizerStep | None]
) -> Callable[..., Any]:
    """Wrap an engine's optimizer step, so that the worker's step knows the norm of its gradient on every rank.

    verl's metrics have the norm only on ranks with outputs, but every rank must know whether the step was taken.

    Args:
        optimizer_step: the engine's, which returns the norm.
        current_step: returns the worker's step; None outside of one.

    Returns:
        A function that is called as `optimizer_step` and returns what that returns.
    """

    def recording(*args: Any, **kwargs: Any) -> Any:
        """Take the engine's optimizer step, and note its norm in the worker's step."""
        norm = optimizer_step(*args, **kwargs)
        step = current_step()
        if step is not None:
            step.optimizer_stepped = True
            step.gradient_norm = None if norm is None else float(norm)
        return norm

    return recording


def check_gradient_norm(engine: Any, step: OptimizerStep) -> None:
    """Raise RuntimeError if an update has passed by the wrapped optimizer step."""
    if not step.optimizer_stepped:
        raise RuntimeError(NORM_UNKNOWN.format(engine=type(engine).__name__))


class SkippedUpdates:
    """Counts skipped updates over a rollout batch, and names what was not finite in this rank's mini-batches once.

    Args:
        engine: verl's.
        rank: the rank of this process, for the warnings. Only rank 0 warns of a gradient without a cause.
        all_reduce: sums a float64 vector over the data-parallel ranks.
        observers: the observers of the run, among which naming may fail and be switched off.
    """

    def __init__(self, engine: Any, rank: int, all_reduce: Callable[[Tensor], Tensor], observers: Observers):
        self._engine = engine
        self._rank = rank
        self._all_reduce = all_reduce
        self._observers = observers
        # The fields that a warning has named, and perhaps GRADIENT.
        self._named: set[str] = set()
        # What verl does with an update whose gradient is not finite: its Megatron engine takes every step.
        strategy = getattr(getattr(engine, "engine_config", None), "strategy", None)
        self._verb = "takes" if strategy == "megatron" else "skips"

    def end_update(self, step: OptimizerStep, batch: RolloutBatch, data: Any) -> None:
        """Count the update that ends if verl skipped it, and warn of what no earlier warning named.

        Args:
            step: the update's step.
            batch: the rollout batch, in which the skipped updates are counted.
            data: verl's data of this rank's mini-batch.
        """
        if not step.taken:
            batch.skipped += 1
        self._observers.run(NAMING, lambda: self._name(step, batch, data))

    def _name(self, step: OptimizerStep, batch: RolloutBatch, data: Any) -> None:
        """Note in the rollout batch what was not finite in a skipped update, and warn of what no warning named yet."""
        not_finite = step.not_finite
        if not step.taken and not not_finite and self._engine.is_mp_src_rank_with_outputs():
            # The policy's loss was finite, but another term, such as verl's KL loss, may not be.
            not_finite = not_finite_in(data)
        if not step.taken:
            batch.not_finite = merge_counts(batch.not_finite, not_finite)
        new_names = not_finite.keys() - self._named
        if new_names:
            self._named |= new_names
            verb = "takes" if step.taken else self._verb
            logger.warning(NOT_FINITE, verb, step.gradient_norm, self._rank, describe_not_finite(not_finite))
        elif not step.taken and not not_finite and self._rank == 0 and GRADIENT not in self._named:
            self._named.add(GRADIENT)
            logger.warning(GRADIENT_NOT_FINITE, self._verb, step.gradient_norm)

    def end_rollout_batch(self, batch: RolloutBatch) -> dict[str, list[float]]:
        """Return metrics by key: how many updates verl skipped and, if any, on which rank values were not finite."""
        skipped = {SKIPPED_UPDATES.key: [float(batch.skipped)]}
        if not batch.skipped:
            return skipped
        # All ranks come here together, because the gradient's norm is the same on all of them. The vector has a number
        # for each data-parallel rank, 1 if something of its mini-batches was not finite, and the number of sequences
        # with a log-probability or entropy that was not.
        one_rank = torch.zeros(self._engine.get_data_parallel_size() + 1, dtype=torch.float64)
        one_rank[self._engine.get_data_parallel_rank()] = float(bool(batch.not_finite))
        sequences_by_field = [batch.not_finite[name].sequences for name in OF_LOG_PROBS if name in batch.not_finite]
        one_rank[-1] = max(sequences_by_field, default=0)
        over_ranks = self._all_reduce(one_rank).tolist()
        is_wrong_on_ranks = over_ranks[:-1]
        sequences = over_ranks[-1]
        first_rank = next((rank for rank, is_wrong in enumerate(is_wrong_on_ranks) if is_wrong), -1)
        return {**skipped, NOT_FINITE_RANK.key: [float(first_rank)], NOT_FINITE_LOG_PROBS.key: [sequences]}


NORM_UNKNOWN = (
    "clipx: the first update was made without engine.optimizer_step, which {engine} had when the worker got its loss "
    "function. So no rank can know whether verl skips an update because its gradient is not finite, and the bounds "
    "would be decided from such an update too. Call self.optimizer_step() in the engine's train_batch, and replace it "
    "only before set_loss_fn."
)
NOT_FINITE = (
    "clipx: verl %s an update whose gradient's norm is %s. Not finite in rank %s's part of its mini-batch: %s. Each is "
    "named only once; clipx/skipped_updates counts such updates."
)
GRADIENT_NOT_FINITE = (
    "clipx: verl %s an update whose gradient's norm is %s, although everything that the loss is computed from is "
    "finite on rank 0. Either another rank names what is not finite, or it arose in the backward pass through the "
    "model. This is said only once; clipx/skipped_updates counts such updates."
)
