"""`clipx recompute`: scores a run's traced tokens with checkpoints, and says which of them the sampler used."""

from collections.abc import Sequence
from dataclasses import dataclass
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
UNROUNDED = ("float32", "fp32", "float64")
ROLLOUT = "actor_rollout_ref.rollout"
# Two passes in float32 differ by less, in nats: on average, and for 99 % of the tokens.
LIMITS = (1e-4, 1e-3)
# Two engines round apart by √2 of what rounding to bfloat16 does to these tokens.
ENGINES_APART = 2.0
REPLICATES = 200


class Response(NamedTuple):
    """A traced response with all that was before it; the sampler's `log_probs` are of the tokens at `places`."""

    tokens: tuple[int, ...]
    places: numpy.ndarray
    log_probs: numpy.ndarray


@dataclass(frozen=True)
class Distance:
    """The distance of a checkpoint's log-probabilities from the sampler's, in nats.

    Args:
        mean, most: of the sizes: their mean, and what 99 % of the tokens don't exceed.
        remains: whether the sampler may have answered from it: it is as near as the precision allows, and its responses
            are not farther than the nearest checkpoint's by more than chance explains.
    """

    checkpoint: str
    version: int | None
    mean: float
    most: float
    remains: bool

    def __str__(self) -> str:
        far = f"{self.mean:.2g} nats away on average, 99 % of the tokens within {self.most:.2g}"
        return f"{self.checkpoint} ({far})"


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
    same: bool

    @property
    def remaining(self) -> list[Distance]:
        """The checkpoints that the sampler may have answered from."""
        return [one for one in self.distances if one.remains]

    @property
    def is_rounded(self) -> bool:
        """Returns whether the sampler rounds although its configuration says that it does not."""
        return self.announced in UNROUNDED and self.precision != PRECISIONS[0] and bool(self.remaining)

    @property
    def verdict(self) -> str:
        """Says whether the sampler answered as the trace and the configuration say: passed, failed or undecided."""
        said = [one for one in self.distances if one.version == self.version is not None]
        # Without the checkpoint of that version nothing rules it out.
        if said and (self.is_rounded or not any(one.remains for one in said)):
            return "failed"
        return "passed" if said and said == self.remaining else "undecided"


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
    groups = {
        (step, version): responses
        for step in steps or traced
        for version, responses in responses_by_version(run, step).items()
    }
    temperature = float(run.configuration.get(f"{ROLLOUT}.temperature") or 1)
    scores: dict[Any, list[numpy.ndarray]] = {group: [] for group in groups}
    for checkpoint in checkpoints:
        model = load_model(checkpoint).to("cuda" if torch.cuda.is_available() else "cpu")
        for precision in PRECISIONS:
            # Not the frequencies of its positions, which engines keep in float32.
            for weight in model.parameters():
                weight.data = weight.to(getattr(torch, precision))
            for group, responses in groups.items():
                scores[group].append(numpy.concatenate([score(model, one, temperature) for one in responses]))
    announced = run.configuration.get(f"{ROLLOUT}.dtype")
    return [_answer(group, groups[group], announced, [*map(str, checkpoints)], scores[group]) for group in groups]


def responses_by_version(run: Run, step: int) -> dict[int | None, list[Response]]:
    """Returns the traced responses of a step by the version of the weights that the trace says sampled them.

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
    # Several updates may have a response, which is scored once.
    found: dict[int | None, dict[tuple[int, ...], Response]] = {}
    for _, rows in table.groupby(first.cumsum()):
        contexts = [[] if context is None else [*context] for context in rows.context]
        tokens = [token for before, of in zip(contexts, rows.token_id, strict=True) for token in (*before, of)]
        places = numpy.cumsum([len(before) + 1 for before in contexts]) - 1
        age = rows.age.iloc[0]
        version = None if pandas.isna(age) else step - 1 - int(age)
        response = Response((*tokens,), places, rows.rollout_log_prob.to_numpy(dtype=float))
        found.setdefault(version, {})[response.tokens] = response
    return {version: [*responses.values()] for version, responses in found.items()}


@torch.inference_mode()
def score(model: Any, response: Response, temperature: float) -> numpy.ndarray:
    """Returns the log-probabilities of a response's counted tokens under a model, in nats."""
    tokens = torch.tensor([response.tokens], device=model.device)
    places = torch.tensor(response.places, device=model.device)
    logits = model(input_ids=tokens, use_cache=False).logits[0, places - 1].float() / temperature
    return logits.log_softmax(-1).gather(-1, tokens[0, places, None])[:, 0].double().cpu().numpy()


def _answer(
    group: tuple[int, int | None],
    responses: Sequence[Response],
    announced: str | None,
    checkpoints: Sequence[str],
    scores: Sequence[numpy.ndarray],
) -> Answer:
    """Returns the answer for these responses; `scores` has each checkpoint's in the order of PRECISIONS."""
    sampled = numpy.concatenate([one.log_probs for one in responses])
    starts = numpy.cumsum([0, *(len(one.log_probs) for one in responses[:-1])])
    exact, rounded = numpy.array(scores).reshape(len(checkpoints), len(PRECISIONS), -1).swapaxes(0, 1)
    apart, nearer = numpy.abs(exact - sampled), numpy.abs(rounded - sampled)
    # A sampler whose kernels round in another order is nearer to what is not rounded.
    nearer = numpy.where(apart.mean(1, keepdims=True) <= nearer.mean(1, keepdims=True), apart, nearer)
    limits = (numpy.array(LIMITS), ENGINES_APART * _sizes(numpy.abs(rounded - exact)))
    for precision, distances, limit in zip(PRECISIONS, (apart, nearer), limits, strict=True):  # noqa: B007
        sizes = _sizes(distances)
        # By response, since its tokens are not independent of each other.
        of_responses, nearest = numpy.add.reduceat(distances, starts, axis=1), sizes[:, 0].argmin()
        farther = numpy.array([_exceeds(of - of_responses[nearest]) for of in of_responses])
        within = (sizes <= limit).all(1)
        remains = within & ~farther & within[nearest]
        if remains.any():
            break
    versions = [STEP_FOLDER.findall(path) for path in checkpoints]
    known = [int(found[-1]) if found else None for found in versions]
    rows = zip(checkpoints, known, *sizes.T.tolist(), remains.tolist(), strict=True)
    distances = tuple(sorted((Distance(*row) for row in rows), key=lambda one: one.mean))
    same = remains.sum() > 1 and bool((rounded[remains] == rounded[remains][0]).all())
    return Answer(*group, len(sampled), precision, announced, distances, bool(same))


def _sizes(apart: numpy.ndarray) -> numpy.ndarray:
    """Returns the mean of each checkpoint's sizes, and what 99 % of them don't exceed, (checkpoints, 2)."""
    return numpy.stack([apart.mean(1), numpy.quantile(apart, 0.99, axis=1)], axis=1)


def _exceeds(values: numpy.ndarray) -> bool:
    """Returns whether responses' values are above 0 on average by more than chance; not with too few of them."""
    if len(values) < FEWEST_UNITS:
        return False
    return bool(percentile_interval(values[resamples(len(values), REPLICATES)].mean(1))[0] > 0)


def say(answer: Answer) -> str:
    """Returns a line on the tokens of a step: what the trace says, which checkpoints remain, and how far they are."""
    said = "a version that the trace doesn't say" if answer.version is None else f"version {answer.version}"
    head = f"{answer.verdict + ':':11}step {answer.step}, {answer.tokens} tokens, by the trace of {said}"
    if not answer.remaining:
        nearest = answer.distances[0]
        return f"{head}: none of these weights sampled them, in float32 or bfloat16. The nearest are {nearest}."
    others = [one for one in answer.distances if not one.remains]
    return (
        f"{head}: sampled in {answer.precision} from {' or '.join(map(str, answer.remaining))}"
        + (f"; the next are {others[0]}" if others else "")
        + (", which these tokens can't tell apart" * (len(answer.remaining) > 1))
        + (": in bfloat16 they are one, so that no step between them reached the sampler" * answer.same)
        + (f". {ROLLOUT}.dtype says {answer.announced}" * answer.is_rounded)
        + "."
    )
