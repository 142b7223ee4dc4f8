"""`clipx recompute`: scores a run's traced tokens with checkpoints, and says which of them the sampler used."""

import dataclasses
import itertools
from collections.abc import Sequence
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

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# A run's key for the sampler's precision, and how its values are judged.
DTYPE, TEMPERATURE = (f"actor_rollout_ref.rollout.{key}" for key in ("dtype", "temperature"))
ANNOUNCED = {"float32": "float32", "fp32": "float32"} | dict.fromkeys(("bfloat16", "bf16", "float16"), "bfloat16")
# Two passes in float32 differ by less, in nats: on average, and for 99 % of the tokens.
ROUNDING = (1e-4, 1e-3)
# Two engines round apart by √2 of what rounding to bfloat16 does to these tokens.
ENGINES_APART = 2.0
# The share of tokens from which on a sampler that leaves tokens out shows.
MASKED, REPLICATES = 0.98, 200

# By response, the log-probabilities of its counted tokens.
Scores = Sequence[numpy.ndarray]


class Response(NamedTuple):
    """A traced response with all that was before it.

    Args:
        places: of the tokens that count, in `tokens`, with the sampler's `log_probs`.
        version: of the weights that sampled it by the trace, None if unknown.
    """

    tokens: tuple[int, ...]
    places: numpy.ndarray
    log_probs: numpy.ndarray
    version: int | None


@dataclasses.dataclass(frozen=True)
class Distance:
    """How far a checkpoint's log-probabilities are from the sampler's, in nats.

    Args:
        mean, most: of the sizes: their mean, and what 99 % of the tokens don't exceed.
        within: whether that is as near as the sampler's precision allows.
        farther: whether its responses are farther than the nearest checkpoint's by more than chance explains.
        lower: the share of tokens to which the checkpoint gives a lower probability than the sampler.
    """

    checkpoint: str
    version: int | None
    mean: float
    most: float
    within: bool
    farther: bool
    lower: float


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer for the tokens of a step that the trace says were sampled from one version of the weights.

    Args:
        precision: of the sampler, as far as its log-probabilities show it; `announced` by the run's configuration.
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
    def verdict(self) -> str:
        """Whether the sampler answered as the trace and the configuration say: passed, failed or undecided."""
        names = {one.checkpoint for one in self.remaining}
        said = {one.checkpoint for one in self.distances if one.version == self.version}
        if names and self.announced not in (None, self.precision):
            return "failed"
        # Without the checkpoint of that version nothing rules it out.
        if self.version is None or not said or (names & said and names != said):
            return "undecided"
        return "passed" if names == said else "failed"


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
    by_step = {step: responses_in(run, step) for step in steps or traced}
    scores: dict[tuple[int, int, str], Scores] = {}
    for number, checkpoint in enumerate(checkpoints):
        model = load_model(checkpoint).to("cuda" if torch.cuda.is_available() else "cpu")
        for name, precision in PRECISIONS.items():
            # Not the frequencies of its positions, which engines keep in float32.
            for weight in model.parameters():
                weight.data = weight.to(precision)
            for step, responses in by_step.items():
                scores[step, number, name] = score(model, responses, float(run.configuration.get(TEMPERATURE) or 1))
    return [
        _answer(run, step, version, responses, checkpoints, scores)
        for step, responses in by_step.items()
        for version in sorted({one.version for one in responses}, key=str)
    ]


def responses_in(run: Run, step: int) -> list[Response]:
    """The traced responses of a step, each once, although several updates may have it.

    Raises:
        ValueError: the trace has neither prompts nor the sampler's log-probabilities.
    """
    table = read_shards(run.traces, run.shards_at(step)).to_pandas()
    if table.context.isna().all():
        raise ValueError(f"{run.traces}: step {step} was traced without the prompts' tokens. Train again.")
    if table.rollout_log_prob.isna().any():
        key = "actor_rollout_ref.rollout.calculate_log_probs=true"
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
    age = rows.age.iloc[0]
    version = None if pandas.isna(age) else step - 1 - int(age)
    return Response(tuple(tokens), numpy.array(places), rows.rollout_log_prob.to_numpy(dtype=float), version)


@torch.inference_mode()
def score(model: Any, responses: Sequence[Response], temperature: float) -> Scores:
    """The log-probabilities of each response's counted tokens under a model, in nats."""
    scores = []
    for one in responses:
        tokens = torch.tensor([one.tokens], device=model.device)
        places = torch.tensor(one.places, device=model.device)
        logits = model(input_ids=tokens, use_cache=False).logits[0, places - 1].float() / temperature
        scores.append(logits.log_softmax(-1).gather(-1, tokens[0, places, None])[:, 0].double().cpu().numpy())
    return scores


def _answer(
    run: Run,
    step: int,
    version: int | None,
    responses: Sequence[Response],
    checkpoints: Sequence[Path],
    scores: dict[tuple[int, int, str], Scores],
) -> Answer:
    chosen = [index for index, one in enumerate(responses) if one.version == version]
    sampled = [responses[index].log_probs for index in chosen]
    kept = [
        {name: [scores[step, number, name][index] for index in chosen] for name in PRECISIONS}
        for number in range(len(checkpoints))
    ]
    announced = ANNOUNCED.get(str(run.configuration.get(DTYPE)))
    answers = [
        Answer(step, version, sum(map(len, sampled)), name, announced, _distances(name, checkpoints, sampled, kept))
        for name in sorted(PRECISIONS, key=lambda name: (name != announced, name != "float32"))
    ]
    answer = next((one for one in answers if one.remaining), answers[0])
    names = {one.checkpoint for one in answer.remaining}
    rounded = [of["bfloat16"] for of, path in zip(kept, checkpoints, strict=True) if str(path) in names]
    same = len(rounded) > 1 and all(map(numpy.array_equal, itertools.chain(*rounded), itertools.cycle(rounded[0])))
    return dataclasses.replace(answer, same=same)


def _distances(
    precision: str, checkpoints: Sequence[Path], sampled: Scores, kept: Sequence[dict[str, Scores]]
) -> tuple[Distance, ...]:
    """The distance of each checkpoint from a sampler of this precision, the nearest first."""
    apart, limits = [], []
    for scores in kept:
        exact, rounded = scores.values()
        # A sampler whose kernels round in another order is nearer to what is not rounded.
        tried = [_minus(exact, sampled)] + [_minus(rounded, sampled)] * (precision != "float32")
        apart.append(min(tried, key=_size))
        rounding = [ENGINES_APART * size for size in _size(_minus(rounded, exact))]
        limits.append(ROUNDING if precision == "float32" else rounding)
    # By response, since its tokens are not independent of each other.
    sums = [numpy.array([numpy.abs(one).sum() for one in of]) for of in apart]
    nearest = min(sums, key=numpy.sum)
    distances = []
    for path, differences, (mean_limit, limit), of_responses in zip(checkpoints, apart, limits, sums, strict=True):
        (mean, most), steps = _size(differences), STEP_FOLDER.findall(str(path))
        within, farther = mean <= mean_limit and most <= limit, _exceeds(of_responses - nearest)
        lower = float((numpy.concatenate(differences) < 0).mean())
        distances.append(Distance(str(path), int(steps[-1]) if steps else None, mean, most, within, farther, lower))
    return tuple(sorted(distances, key=lambda one: one.mean))


def _minus(scores: Scores, others: Scores) -> Scores:
    return [mine - other for mine, other in zip(scores, others, strict=True)]


def _size(differences: Scores) -> tuple[float, float]:
    sizes = numpy.abs(numpy.concatenate(differences))
    return float(sizes.mean()), float(numpy.quantile(sizes, 0.99))


def _exceeds(values: numpy.ndarray) -> bool:
    """Whether responses' values are above 0 on average by more than chance explains; not with too few of them."""
    if len(values) < FEWEST_UNITS:
        return False
    return percentile_interval(values[resamples(len(values), REPLICATES)].mean(1))[0] > 0


def exit_code(answers: Sequence[Answer]) -> int:
    """Returns 0 if every answer is the version that the trace says, 1 if one is not, else 3: some are undecided."""
    verdicts = {answer.verdict for answer in answers}
    return 1 if "failed" in verdicts else 3 if "undecided" in verdicts else 0


def say(answer: Answer) -> str:
    """Returns a line on the tokens of a step: what the trace says, which checkpoints remain, and how far they are."""
    said = "a version that the trace doesn't say" if answer.version is None else f"version {answer.version}"
    head = f"{answer.verdict + ':':11}step {answer.step}, {answer.tokens} tokens, by the trace of {said}"
    if not answer.remaining:
        first = answer.distances[0]
        masked = " Nearly every token has a higher probability there, as where top_p or top_k leaves others out."
        return (
            f"{head}: the sampler answered from none of these weights, in float32 or bfloat16. The nearest are "
            f"{_far(first)}.{masked * (first.lower >= MASKED)}"
        )
    next_ones = [one for one in answer.distances if one not in answer.remaining]
    return (
        f"{head}: the sampler answered in {answer.precision} from {' or '.join(map(_far, answer.remaining))}"
        + (f"; the next are {_far(next_ones[0])}" if next_ones else "")
        + (", which these tokens can't tell apart" * (len(answer.remaining) > 1))
        + (": in bfloat16 they are one, so that no step between them reached the sampler" * answer.same)
        + (f". {DTYPE} says {answer.announced}" * (answer.announced not in (None, answer.precision)))
        + "."
    )


def _far(one: Distance) -> str:
    return f"{one.checkpoint} ({one.mean:.2g} nats away on average, 99 % of the tokens within {one.most:.2g})"
