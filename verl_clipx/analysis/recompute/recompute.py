"""`clipx recompute`: scores a run's traced tokens with checkpoints, and says which of them the sampler used."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pandas
import torch

from verl_clipx.analysis.recompute.checkpoints import load_model
from verl_clipx.analysis.recompute.sampler import (
    LEFT_OUT,
    PRECISIONS,
    UNROUNDED,
    Judgement,
    Scores,
    judge,
    temperature_changes,
)
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.analysis.runs.run import Run
from verl_clipx.common.sentences import percent
from verl_clipx.run.keys import CALCULATE_LOG_PROBS, ROLLOUT_PRECISION
from verl_clipx.run.record import RunRecord
from verl_clipx.run.run_files import STEP_FOLDER
from verl_clipx.run.trace_format import read_shards


@dataclass(frozen=True)
class Sampling:
    """How a run's sampler turns logits into the distribution whose log-probabilities it records.

    Args:
        temperature: the logits' divisor, above 0.
        top_k: keeps this many of the likeliest tokens; below 1: all.
        top_p: keeps the likeliest tokens until their probabilities reach this, in (0, 1].
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


def sampling_of(record: RunRecord) -> Sampling:
    """Returns the sampling that a run's record states; verl's defaults for what it doesn't."""
    given = record.sampling
    # vLLM's log-probabilities of this kind are those before temperature and truncation.
    if str(given.log_probs).startswith("raw"):
        return Sampling()
    return Sampling(
        temperature=float(given.temperature or 1),
        top_k=-1 if given.top_k is None else int(given.top_k),
        top_p=float(given.top_p or 1),
    )


class Response(NamedTuple):
    """A traced response with all that was before it.

    Args:
        tokens: the prompt and the response, from its first token to the last one that counts.
        places: the indices of the tokens that count.
        log_probs: the sampler's log-probabilities of these.
    """

    tokens: tuple[int, ...]
    places: numpy.ndarray
    log_probs: numpy.ndarray


@dataclass(frozen=True)
class Distance:
    """The distance of a checkpoint's log-probabilities from the sampler's, in nats.

    Args:
        mean, most: of the sizes: their mean, and what 99 % of the tokens don't exceed; after the answer's shift.
        remains: whether the sampler may have answered all responses from it: it is as near as the precision allows, and
            its responses are not farther than the nearest checkpoint's by more than chance explains.
        responses: how many responses it explains, where several checkpoints explain them together; else all or none.
    """

    checkpoint: str
    version: int | None
    mean: float
    most: float
    remains: bool
    responses: int

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
        responses: how many there are.
        unexplained: how many of them none of the checkpoints explains.
        shift: how the sampler's distribution differs from the configured one; None: it doesn't.
    """

    step: int
    version: int | None
    tokens: int
    precision: str
    announced: str | None
    distances: tuple[Distance, ...]
    same: bool
    responses: int
    unexplained: int
    shift: str | None

    @property
    def remaining(self) -> list[Distance]:
        """The checkpoints that the sampler may have answered all responses from."""
        return [distance for distance in self.distances if distance.remains]

    @property
    def parts(self) -> list[Distance]:
        """The checkpoints that explain a part of the responses each, where none explains all of them."""
        return [distance for distance in self.distances if distance.responses and not distance.remains]

    @property
    def is_rounded(self) -> bool:
        """Returns whether the sampler rounds although its configuration says that it does not."""
        return self.announced in UNROUNDED and self.precision == PRECISIONS[1] and bool(self.remaining)

    @property
    def verdict(self) -> str:
        """Says whether the sampler answered as the trace and the configuration say: passed, failed or undecided."""
        traced = [distance for distance in self.distances if distance.version == self.version is not None]
        # Without the checkpoint of that version nothing rules it out.
        if not traced:
            return "undecided"
        if self.is_rounded or self.shift is not None or not any(distance.remains for distance in traced):
            return "failed"
        return "passed" if traced == self.remaining else "undecided"


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
        for version, responses in responses_by_version(run, step).items():
            groups[step, version] = responses
    sampling = sampling_of(run.record)
    scores: dict[Any, list[numpy.ndarray]] = {group: [] for group in groups}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for checkpoint in checkpoints:
        model = load_model(checkpoint).to(device)
        check_vocabulary(checkpoint, model, list(itertools.chain(*groups.values())))
        for precision in PRECISIONS:
            # Not the frequencies of its positions, which engines keep in float32.
            for weight in model.parameters():
                weight.data = weight.to(getattr(torch, precision))
            for group, responses in groups.items():
                scored = [score(model, response, sampling) for response in responses]
                scores[group].append(numpy.concatenate(scored, axis=1))
    announced = run.record.rollout.precision
    names = [str(checkpoint) for checkpoint in checkpoints]
    return [
        _answer(
            group=group,
            scores=scores_of(responses, scores[group]),
            announced=announced,
            checkpoints=names,
            temperature=sampling.temperature,
        )
        for group, responses in groups.items()
    ]


def responses_by_version(run: Run, step: int) -> dict[int | None, list[Response]]:
    """Returns the traced responses of a step by the version of the weights that the trace says sampled them.

    Raises:
        ValueError: the trace lacks the prompts or the sampler's log-probabilities.
    """
    table = read_shards(run.traces, run.shards_at(step)).to_pandas()
    if table.context.isna().all():
        raise ValueError(f"{run.traces}: step {step} was traced without the prompts' tokens. Train again.")
    if table.rollout_log_prob.isna().any():
        key = f"{CALCULATE_LOG_PROBS}=true"
        raise ValueError(f"{run.traces}: step {step} has no log-probabilities of the sampler. Train with {key}.")
    of_row = table[["rank", "update", "micro_batch", "prompt", "sample"]]
    first = of_row.ne(of_row.shift()).any(axis=1) | (table.position <= table.position.shift(fill_value=-1))
    # Several updates may have a response, which is scored once.
    by_version: dict[int | None, dict[tuple[int, ...], Response]] = {}
    for _, rows in table.groupby(first.cumsum()):
        tokens: list[int] = []
        places = []
        for context, token in zip(rows.context, rows.token_id, strict=True):
            if context is not None:
                tokens.extend(context)
            places.append(len(tokens))
            tokens.append(token)
        age = rows.age.iloc[0]
        version = None if pandas.isna(age) else step - 1 - int(age)
        response = Response(
            tokens=tuple(tokens),
            places=numpy.array(places),
            log_probs=rows.rollout_log_prob.to_numpy(dtype=float),
        )
        by_version.setdefault(version, {})[response.tokens] = response
    return {version: [*responses.values()] for version, responses in by_version.items()}


def check_vocabulary(checkpoint: Path, model: Any, responses: Sequence[Response]) -> None:
    """Refuses a checkpoint that lacks a traced token; raises ValueError, which names it."""
    size = model.get_input_embeddings().num_embeddings
    largest = max(token for response in responses for token in response.tokens)
    if largest >= size:
        raise ValueError(
            f"{checkpoint}: its vocabulary has {size} tokens, and the run traced the token {largest}: it is not a "
            "model of this run"
        )


# The rows of what `score` returns.
LOG_PROB_ROW = 0
SLOPE_ROW = 1


@torch.inference_mode()
def score(model: Any, response: Response, sampling: Sampling) -> numpy.ndarray:
    """Scores a response's counted tokens with a model.

    Returns:
        (2, tokens): the log-probabilities in nats, and how they change with the logarithm of the inverse temperature.
    """
    tokens = torch.tensor([response.tokens], device=model.device)
    places = torch.tensor(response.places, device=model.device)
    logits = model(input_ids=tokens, use_cache=False).logits[0, places - 1].float() / sampling.temperature
    kept = truncate(logits, sampling)
    # Not from `kept`: a token at its edge, which another engine kept, would have minus infinity.
    own = logits.gather(-1, tokens[0, places, None])[:, 0]
    expected = (kept.softmax(-1) * logits).sum(-1)
    return torch.stack([own - kept.logsumexp(-1), own - expected]).double().cpu().numpy()


def truncate(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Returns the logits with minus infinity for the tokens that the sampling leaves out, (tokens, vocabulary)."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    if 0 < sampling.top_k < logits.shape[-1]:
        logits = TopKLogitsWarper(sampling.top_k)(None, logits)
    if sampling.top_p < 1:
        logits = TopPLogitsWarper(sampling.top_p)(None, logits)
    return logits


def scores_of(responses: Sequence[Response], scored: Sequence[numpy.ndarray]) -> Scores:
    """Joins the sampler's and the checkpoints' log-probabilities of all tokens of some responses.

    Args:
        responses: whose tokens were scored, one after the other.
        scored: what `score` returns, joined over the responses, (2, tokens): one for each checkpoint and precision, in
            the order of PRECISIONS within a checkpoint.
    """
    lengths = [len(response.log_probs) for response in responses]
    rows, tokens = scored[0].shape
    by_checkpoint = numpy.array(scored).reshape(-1, len(PRECISIONS), rows, tokens)
    # (checkpoints, rows, tokens) each.
    in_float32, in_bfloat16 = numpy.moveaxis(by_checkpoint, 1, 0)
    return Scores(
        sampled=numpy.concatenate([response.log_probs for response in responses]),
        starts=numpy.cumsum([0, *lengths[:-1]]),
        exact=in_float32[:, LOG_PROB_ROW],
        rounded=in_bfloat16[:, LOG_PROB_ROW],
        slopes=in_float32[:, SLOPE_ROW],
    )


def _answer(
    *,
    group: tuple[int, int | None],
    scores: Scores,
    announced: str | None,
    checkpoints: Sequence[str],
    temperature: float,
) -> Answer:
    """Judges the scores of a group of responses.

    Args:
        group: their step, and the version of the weights that the trace says sampled them.
        scores: from the sampler and the checkpoints.
        announced: the precision in which the configuration says that the sampler computes.
        checkpoints: the paths of the checkpoints, in the order of the scores.
        temperature: at which the configuration says that the sampler draws.
    """
    judgement = judge(scores, announced)
    distances = [_distance(path, judgement, index, len(scores.starts)) for index, path in enumerate(checkpoints)]
    explaining_first = sorted(
        distances, key=lambda distance: (not distance.remains, -distance.responses, distance.mean)
    )
    rounded = scores.rounded[judgement.remains]
    step, version = group
    return Answer(
        step=step,
        version=version,
        tokens=len(scores.sampled),
        precision=judgement.precision,
        announced=announced,
        distances=tuple(explaining_first),
        same=len(rounded) > 1 and bool((rounded == rounded[0]).all()),
        responses=len(scores.starts),
        unexplained=int(judgement.unexplained.sum()),
        shift=_shift(judgement, scores, temperature),
    )


def _distance(path: str, judgement: Judgement, index: int, responses: int) -> Distance:
    """Returns how far the checkpoint with an index is from the sampler, and how many of the responses it explains."""
    sizes = judgement.distances[index]
    steps = STEP_FOLDER.findall(path)
    explained = responses if judgement.remains[index] else 0
    if index in judgement.parts:
        explained = int(judgement.parts[index].sum())
    return Distance(
        checkpoint=path,
        version=int(steps[-1]) if steps else None,
        mean=float(sizes.mean()),
        most=float(numpy.quantile(sizes, 0.99)),
        remains=bool(judgement.remains[index]),
        responses=explained,
    )


def _shift(judgement: Judgement, scores: Scores, temperature: float) -> str | None:
    """Returns in words how the sampler's distribution differs from the configured one; None: it doesn't."""
    if judgement.shift is None:
        return None
    if judgement.shift == LEFT_OUT:
        return (
            "with tokens left out, as top_p and top_k do, unlike the configuration: the log-probabilities of the "
            "others are raised, and none is lowered"
        )
    change = temperature_changes(scores)[judgement.remains][0]
    return (
        f"at a temperature of about {temperature * numpy.exp(-change):.4g}, where the configuration has {temperature:g}"
    )


def say(answer: Answer) -> str:
    """Returns a line on the tokens of a step: what the trace says, which checkpoints remain, and how far they are."""
    traced = "a version that the trace doesn't say" if answer.version is None else f"version {answer.version}"
    head = f"{answer.verdict + ':':11}step {answer.step}, {answer.tokens} tokens, by the trace of {traced}"
    if answer.parts:
        return f"{head}: {_say_parts(answer)}."
    if not answer.remaining:
        nearest = answer.distances[0]
        return f"{head}: none of these weights sampled them, in float32 or bfloat16. The nearest are {nearest}."
    text = f"{head}: {_begin(answer)} {answer.precision} from {' or '.join(map(str, answer.remaining))}"
    others = [distance for distance in answer.distances if not distance.remains]
    if others:
        text += f"; the next are {others[0]}"
    if len(answer.remaining) > 1:
        text += ", which these tokens can't tell apart"
    if answer.same:
        text += ": in bfloat16 they are one, so that no step between them reached the sampler"
    if answer.shift is not None:
        text += f", {answer.shift}"
    if answer.is_rounded:
        text += f". {ROLLOUT_PRECISION} says {answer.announced}"
    return f"{text}."


def _begin(answer: Answer) -> str:
    if answer.shift is None:
        return "sampled in"
    return "none of these weights sampled them as configured. They were sampled in"


def _say_parts(answer: Answer) -> str:
    """Returns which share of the responses each checkpoint explains, and which none of them does."""
    shares = [f"{_share(part.responses, answer.responses)} from {part.checkpoint}" for part in answer.parts]
    if answer.unexplained:
        shares.append(f"{_share(answer.unexplained, answer.responses)} from none of these weights")
    text = f"{_begin(answer)} {answer.precision} from several weights: {', '.join(shares)}"
    if answer.shift is not None:
        text += f", {answer.shift}"
    return text


def _share(responses: int, total: int) -> str:
    return f"{percent(responses / total)} of the responses ({responses} of {total})"
