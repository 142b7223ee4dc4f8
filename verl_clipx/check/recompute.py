"""`clipx recompute`: scores a run's traced tokens with checkpoints, and says which of them the sampler used."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pandas
import torch

from verl_clipx.check.checkpoints import load_model
from verl_clipx.common.run_files import STEP_FOLDER
from verl_clipx.common.statistics.bootstrap import FEWEST_UNITS, percentile_interval, resamples
from verl_clipx.common.traces import read_shards
from verl_clipx.runs.folder import read_run
from verl_clipx.runs.run import Run

PRECISIONS = ("float32", "bfloat16")
ROUNDED = PRECISIONS[1]
UNROUNDED = ("float32", "fp32", "float64")
ROLLOUT = "actor_rollout_ref.rollout"
# Two passes in float32 differ by less, in nats: on average, and for 99 % of the tokens.
LIMITS = (1e-4, 1e-3)
# Two engines round apart by √2 of what rounding to bfloat16 does to these tokens.
ENGINES_APART = 2.0
REPLICATES = 200


class Response(NamedTuple):
    """A traced response with all that was before it, and which weights sampled it by the trace.

    Args:
        places: in `tokens`, of those that the loss counts, which have the sampler's `log_probs`.
    """

    tokens: tuple[int, ...]
    places: numpy.ndarray
    log_probs: numpy.ndarray
    version: int | None


@dataclass(frozen=True)
class Distance:
    """How far a checkpoint's log-probabilities are from the sampler's, in nats.

    Args:
        mean, most: of the sizes: their mean, and what 99 % of the tokens don't exceed.
        within: whether that is as near as the sampler's precision allows.
        farther: whether its responses are farther than the nearest checkpoint's by more than chance explains.
    """

    checkpoint: str
    version: int | None
    mean: float
    most: float
    within: bool
    farther: bool


@dataclass(frozen=True)
class Answer:
    """The answer for the tokens of a step that the trace says were sampled from one version of the weights.

    Args:
        precision: of the sampler, as far as its log-probabilities show it.
        announced: the run's `rollout.dtype`, None if unknown.
        distances: of all checkpoints at that precision, the nearest first.
        same: whether several remain, which in bfloat16 give every token one log-probability.
    """

    step: int
    version: int | None
    tokens: int
    precision: str
    announced: str | None
    distances: tuple[Distance, ...]
    same: bool = False

    @property
    def remaining(self) -> list[Distance]:
        """The checkpoints that the sampler may have answered from; none if not even the nearest is near enough."""
        near = [one for one in self.distances if one.within and not one.farther]
        return near if self.distances[0].within else []

    @property
    def is_rounded(self) -> bool:
        """Whether the sampler rounds although its configuration says that it does not."""
        return self.announced in UNROUNDED and self.precision == ROUNDED and bool(self.remaining)

    @property
    def verdict(self) -> str:
        """Whether the sampler answered as the trace and the configuration say: passed, failed or undecided."""
        names = {one.checkpoint for one in self.remaining}
        said = {one.checkpoint for one in self.distances if one.version == self.version}
        # Without the checkpoint of that version nothing rules it out.
        if self.version is None or not said:
            return "undecided"
        if not names & said or self.is_rounded:
            return "failed"
        return "passed" if names == said else "undecided"


def recompute(path: Path, checkpoints: Sequence[Path], steps: Sequence[int] = ()) -> list[Answer]:
    """Scores the traced tokens of a run with checkpoints.

    Args:
        checkpoints: as for `load_model`; a folder `global_step_N` in a path says its version.
        steps: by default all that were traced.

    Raises:
        OSError, ValueError: no such trace, or one that can't be scored, or a checkpoint that can't be loaded.
    """
    run = read_run(path)
    traced = sorted({shard.step for shard in run.shards})
    if not traced or not {*steps} <= {*traced}:
        raise ValueError(f"{run.traces}: has traces of these steps: {traced}. +clipx/trace=prompts makes a run trace.")
    groups: dict[tuple[int, int | None], list[Response]] = {}
    for step in steps or traced:
        for response in responses_in(run, step):
            groups.setdefault((step, response.version), []).append(response)
    scores: dict[Any, list[numpy.ndarray]] = {group: [] for group in groups}
    temperature = float(run.configuration.get(f"{ROLLOUT}.temperature") or 1)
    for checkpoint in checkpoints:
        model = load_model(checkpoint).to("cuda" if torch.cuda.is_available() else "cpu")
        for precision in PRECISIONS:
            # Not the frequencies of its positions, which engines keep in float32.
            for weight in model.parameters():
                weight.data = weight.to(getattr(torch, precision))
            for group, responses in groups.items():
                scores[group].append(score(model, responses, temperature))
    announced = run.configuration.get(f"{ROLLOUT}.dtype")
    return [_answer(*group, groups[group], announced, checkpoints, scores[group]) for group in groups]


def responses_in(run: Run, step: int) -> list[Response]:
    """The traced responses of a step, each once, although several updates may have it.

    Raises:
        ValueError: the trace lacks the prompts or the sampler's log-probabilities.
    """
    table = read_shards(run.traces, run.shards_at(step)).to_pandas()
    if table.context.isna().all():
        raise ValueError(f"{run.traces}: step {step} was traced without the prompts' tokens. Train again.")
    if table.rollout_log_prob.isna().any():
        key = f"{ROLLOUT}.calculate_log_probs=true"
        raise ValueError(f"{run.traces}: step {step} has no log-probabilities of the sampler. Train with {key}.")
    of_row = table[["rank", "update", "micro_batch", "prompt", "sample"]]
    first = of_row.ne(of_row.shift()).any(axis=1) | (table.position <= table.position.shift(fill_value=-1))
    found = (_response(rows, step) for _, rows in table.groupby(first.cumsum()))
    return [*{(one.version, one.tokens): one for one in found}.values()]


def _response(rows: pandas.DataFrame, step: int) -> Response:
    tokens: list[int] = []
    places = []
    for context, token in zip(rows.context, rows.token_id, strict=True):
        tokens += [] if context is None else context.tolist()
        places.append(len(tokens))
        tokens.append(token)
    version = None if pandas.isna(rows.age.iloc[0]) else step - 1 - int(rows.age.iloc[0])
    return Response(tuple(tokens), numpy.array(places), rows.rollout_log_prob.to_numpy(dtype=float), version)


@torch.inference_mode()
def score(model: Any, responses: Sequence[Response], temperature: float) -> numpy.ndarray:
    """The log-probabilities of the responses' counted tokens, one response after another, under a model, in nats."""
    scores = []
    for one in responses:
        tokens = torch.tensor([one.tokens], device=model.device)
        places = torch.tensor(one.places, device=model.device)
        logits = model(input_ids=tokens, use_cache=False).logits[0, places - 1].float() / temperature
        scores.append(logits.log_softmax(-1).gather(-1, tokens[0, places, None])[:, 0].double().cpu().numpy())
    return numpy.concatenate(scores)


def _answer(
    step: int,
    version: int | None,
    responses: Sequence[Response],
    announced: str | None,
    checkpoints: Sequence[Path],
    scores: Sequence[numpy.ndarray],
) -> Answer:
    """The answer for these responses; `scores` has each checkpoint's in the order of PRECISIONS."""
    sampled = numpy.concatenate([one.log_probs for one in responses])
    starts = numpy.cumsum([0, *(len(one.log_probs) for one in responses[:-1])])
    exact, rounded = numpy.array(scores).reshape(len(checkpoints), len(PRECISIONS), -1).swapaxes(0, 1)
    apart, limits = numpy.abs(exact - sampled), numpy.broadcast_to(LIMITS, (len(checkpoints), 2))
    of_exact = _distances(checkpoints, apart, starts, limits)
    # A sampler whose kernels round in another order is nearer to what is not rounded.
    nearer = numpy.abs(rounded - sampled)
    nearer = numpy.where(apart.mean(1, keepdims=True) <= nearer.mean(1, keepdims=True), apart, nearer)
    of_rounded = _distances(checkpoints, nearer, starts, ENGINES_APART * _size(numpy.abs(rounded - exact)))
    answers = [
        Answer(step, version, len(sampled), precision, announced, distances)
        for precision, distances in zip(PRECISIONS, (of_exact, of_rounded), strict=True)
    ]
    answer = next((one for one in answers if one.remaining), answers[-1])
    names = {one.checkpoint for one in answer.remaining}
    left = rounded[[str(path) in names for path in checkpoints]]
    return replace(answer, same=len(left) > 1 and bool((left == left[0]).all()))


def _distances(
    checkpoints: Sequence[Path], apart: numpy.ndarray, starts: numpy.ndarray, limits: numpy.ndarray
) -> tuple[Distance, ...]:
    """The distance of each checkpoint, the nearest first, from how far its tokens are apart, (checkpoints, tokens)."""
    # By response, since its tokens are not independent of each other.
    of_responses, distances = numpy.add.reduceat(apart, starts, axis=1), []
    nearest = of_responses[of_responses.sum(1).argmin()]
    for path, size, limit, sums in zip(checkpoints, _size(apart), limits, of_responses, strict=True):
        steps, (mean, most) = STEP_FOLDER.findall(str(path)), size.tolist()
        within, farther = bool((size <= limit).all()), _exceeds(sums - nearest)
        distances.append(Distance(str(path), int(steps[-1]) if steps else None, mean, most, within, farther))
    return tuple(sorted(distances, key=lambda one: one.mean))


def _size(apart: numpy.ndarray) -> numpy.ndarray:
    """The mean of each checkpoint's sizes, and what 99 % of them don't exceed, (checkpoints, 2)."""
    return numpy.stack([apart.mean(1), numpy.quantile(apart, 0.99, axis=1)], axis=1)


def _exceeds(values: numpy.ndarray) -> bool:
    """Whether responses' values are above 0 on average by more than chance explains; not with too few of them."""
    if len(values) < FEWEST_UNITS:
        return False
    return bool(percentile_interval(values[resamples(len(values), REPLICATES)].mean(1))[0] > 0)


def say(answer: Answer) -> str:
    """Returns a line on the tokens of a step: what the trace says, which checkpoints remain, and how far they are."""
    said = "a version that the trace doesn't say" if answer.version is None else f"version {answer.version}"
    head = f"{answer.verdict + ':':11}step {answer.step}, {answer.tokens} tokens, by the trace of {said}"
    if not answer.remaining:
        nearest = _far(answer.distances[0])
        return f"{head}: none of these weights sampled them, in float32 or bfloat16. The nearest are {nearest}."
    others = [one for one in answer.distances if one not in answer.remaining]
    return (
        f"{head}: sampled in {answer.precision} from {' or '.join(map(_far, answer.remaining))}"
        + (f"; the next are {_far(others[0])}" if others else "")
        + (", which these tokens can't tell apart" * (len(answer.remaining) > 1))
        + (": in bfloat16 they are one, so that no step between them reached the sampler" * answer.same)
        + (f". {ROLLOUT}.dtype says {answer.announced}" * answer.is_rounded)
        + "."
    )


def _far(one: Distance) -> str:
    return f"{one.checkpoint} ({one.mean:.2g} nats away on average, 99 % of the tokens within {one.most:.2g})"
