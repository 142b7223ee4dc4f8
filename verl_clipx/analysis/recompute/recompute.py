"""`clipx recompute`: scores a run's traced tokens with checkpoints, and says which of them the sampler used."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pandas
import torch

from verl_clipx.analysis.recompute.checkpoints import load_model
from verl_clipx.analysis.recompute.sampler import (
    BFLOAT16,
    FLOAT32,
    LEFT_OUT,
    PRECISIONS,
    UNROUNDED,
    SamplerJudgement,
    Scores,
    fit_temperature_changes,
    judge,
)
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.analysis.runs.run import Run
from verl_clipx.common.sentences import percent
from verl_clipx.run.keys import CALCULATE_LOG_PROBS, LOG_PROB_MODE, LOG_PROB_MODE_OF_VLLM, MIN_P, ROLLOUT_PRECISION
from verl_clipx.run.record import RunRecord
from verl_clipx.run.run_files import STEP_FOLDER
from verl_clipx.run.trace_format import read_shards

Group = tuple[int, int | None]
"""The responses that are judged together: those of a training step that were sampled by one version of the weights.

A pair of the step and of the version, which is None if the trace does not say it."""


@dataclass(frozen=True)
class ScoredDistribution:
    """The distribution whose log-probabilities a run's sampler records, as it follows from the model's logits.

    Args:
        temperature: the divisor of the logits, above 0.
        top_k: keeps this many of the likeliest tokens; below 1: all.
        top_p: keeps the likeliest tokens until their probabilities reach this, in (0, 1].
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


def find_scored_distribution(record: RunRecord) -> ScoredDistribution:
    """Return the distribution whose log-probabilities a run's sampler records.

    A setting that the record does not have is taken to be verl's default. Raw log-probabilities are those at
    temperature 1 over the whole vocabulary, whatever the configuration sets. So are those of a greedy sampler.

    Raises:
        ValueError: the sampler records logits, or truncates by min_p, with which `truncate` does not deal.
    """
    recorded = record.sampling
    mode_key = LOG_PROB_MODE
    mode = recorded.log_probs
    if record.rollout.name == "vllm" and recorded.log_probs_of_vllm:
        # verl's vLLM server prefers vLLM's own argument.
        mode_key = LOG_PROB_MODE_OF_VLLM
        mode = recorded.log_probs_of_vllm
    if mode == "raw_logprobs":
        return ScoredDistribution()
    # A record does not tell null from a key that is missing. For a missing key verl's default is processed_logprobs.
    if mode not in (None, "processed_logprobs"):
        raise ValueError(f"{mode_key}={mode}: the sampler recorded no log-probabilities that a checkpoint can score.")
    if recorded.temperature == 0:
        return ScoredDistribution()
    if "min_p" in recorded.truncates:
        raise ValueError(f"{MIN_P}={recorded.min_p}: clipx recompute can't score tokens that were sampled with min_p.")
    return ScoredDistribution(
        temperature=1.0 if recorded.temperature is None else float(recorded.temperature),
        top_k=-1 if recorded.top_k is None else int(recorded.top_k),
        top_p=1.0 if recorded.top_p is None else float(recorded.top_p),
    )


class TracedResponse(NamedTuple):
    """A traced response, and the prompt and the tools' tokens that were before it or between its turns.

    Args:
        tokens: the prompt and the response, up to the response's last traced token.
        places: the indices among `tokens` of the traced tokens, which the policy sampled and was trained on.
        log_probs: the sampler's log-probabilities of the traced tokens, in nats.
    """

    tokens: tuple[int, ...]
    places: numpy.ndarray
    log_probs: numpy.ndarray


@dataclass(frozen=True)
class Distance:
    """The distance of a checkpoint's log-probabilities from the sampler's, in nats.

    Args:
        checkpoint: the path of the checkpoint.
        version: the version of its weights, as its path says it; None if the path doesn't.
        mean: the mean of the absolute differences, without those that the answer's `shift` explains.
        most: the 99 % quantile of these differences.
        remains: whether the sampler may have used this checkpoint for all responses: it is as near as the precision
            allows, and it is not farther than the nearest checkpoint by more than chance explains.
        responses: how many responses it explains: all if it remains. If any checkpoint remains, it is 0 for the others.
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
class GroupAnswer:
    """Which checkpoints sampled the responses of a group. `clipx recompute --json` prints these fields.

    Args:
        step: the training step.
        version: the version of the weights that the trace says sampled the responses; None if it doesn't say.
        tokens: how many traced tokens the responses have.
        precision: the precision of the sampler's weights, as far as its log-probabilities show it.
        announced: the run's `rollout.dtype`; None if unknown.
        distances: the distance of every checkpoint at that precision. The checkpoints that remain come first, then
            those that explain more responses, then the nearer ones.
        same: whether several checkpoints remain, and all of them give the same log-probabilities in bfloat16.
        responses: how many different responses there are. Copies with the same tokens count once.
        unexplained: how many of them no checkpoint explains.
        shift: how the sampler's distribution differs from the configured one, in words; None if it doesn't.
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
        """The checkpoints each of which the sampler may have used for all responses."""
        return [distance for distance in self.distances if distance.remains]

    @property
    def partly_explaining(self) -> list[Distance]:
        """The checkpoints each of which explains some of the responses, where none explains all of them."""
        return [distance for distance in self.distances if distance.responses and not distance.remains]

    @property
    def is_rounded(self) -> bool:
        """Whether the sampler rounds its weights to bfloat16 although the configuration says that it does not."""
        return self.announced in UNROUNDED and self.precision == BFLOAT16 and bool(self.remaining)

    @property
    def verdict(self) -> str:
        """Whether the sampler did what the trace and the configuration say: passed, failed or undecided."""
        traced = []
        if self.version is not None:
            traced = [distance for distance in self.distances if distance.version == self.version]
        if not traced:
            # The checkpoint of the traced version was not given, so nothing can rule that version out.
            return "undecided"
        if self.is_rounded or self.shift is not None or not any(distance.remains for distance in traced):
            return "failed"
        return "passed" if traced == self.remaining else "undecided"


def recompute(path: Path, checkpoints: Sequence[Path], steps: Sequence[int] = ()) -> list[GroupAnswer]:
    """Judge which checkpoints sampled a run's traced tokens.

    Args:
        path: the run, as for `read_run`.
        checkpoints: folders, as for `load_model`. If a path contains `global_step_N`, N is the version of its weights.
        steps: the training steps to judge; empty for all traced steps.

    Returns:
        An answer for each step, and for each version of the weights that the trace says sampled tokens of that step.

    Raises:
        OSError, ValueError: the run has no traces of these steps, its traces can't be scored, or a checkpoint can't be
            loaded or is of another model.
    """
    run = read_run(path)
    traced_steps = sorted({shard.step for shard in run.shards})
    if not traced_steps:
        raise ValueError(f"{path}: the run has no traces. +clipx/trace=prompts makes a run trace.")
    missing_steps = sorted(set(steps) - set(traced_steps))
    if missing_steps:
        raise ValueError(f"{run.traces}: has no traces of the steps {missing_steps}, only of {traced_steps}.")
    distribution = find_scored_distribution(run.record)
    groups: dict[Group, list[TracedResponse]] = {}
    for step in steps or traced_steps:
        for version, responses in responses_by_version(run, step).items():
            groups[step, version] = responses
    scored_by_group: dict[Group, list[numpy.ndarray]] = {group: [] for group in groups}
    for checkpoint in checkpoints:
        scored_by_checkpoint = score_with_checkpoint(checkpoint, groups, distribution)
        for group, scored in scored_by_checkpoint.items():
            scored_by_group[group].extend(scored)
    names = [str(checkpoint) for checkpoint in checkpoints]
    return [
        _judge_group(
            group=group,
            scores=join_scores(responses, scored_by_group[group]),
            announced=run.record.rollout.precision,
            checkpoints=names,
            temperature=distribution.temperature,
        )
        for group, responses in groups.items()
    ]


def responses_by_version(run: Run, step: int) -> dict[int | None, list[TracedResponse]]:
    """Return the traced responses of a step by the version of the weights that the trace says sampled them.

    Responses of one version with the same tokens are returned once.

    Raises:
        ValueError: the trace lacks the prompts or the sampler's log-probabilities.
    """
    table = read_shards(run.traces, run.shards_at(step)).to_pandas()
    if table.context.isna().all():
        raise ValueError(f"{run.traces}: step {step} was traced without the prompts' tokens. Train again.")
    if table.rollout_log_prob.isna().any():
        key = f"{CALCULATE_LOG_PROBS}=true"
        raise ValueError(f"{run.traces}: step {step} has no log-probabilities of the sampler. Train with {key}.")
    place_in_batch = table[["rank", "update", "micro_batch", "prompt", "sample"]]
    is_at_next_place = place_in_batch.ne(place_in_batch.shift()).any(axis=1)
    goes_back = table.position <= table.position.shift(fill_value=-1)
    begins_response = is_at_next_place | goes_back
    # Several updates may train on the same response. The tokens are the key, so that it is scored once.
    by_version: dict[int | None, dict[tuple[int, ...], TracedResponse]] = {}
    for _, rows in table.groupby(begins_response.cumsum()):
        tokens: list[int] = []
        places: list[int] = []
        for context, token in zip(rows.context, rows.token_id, strict=True):
            if context is not None:
                tokens.extend(context)
            places.append(len(tokens))
            tokens.append(token)
        age = rows.age.iloc[0]
        # Step N trains the weights of version N - 1. The age counts the versions since those that sampled.
        version = None if pandas.isna(age) else step - 1 - int(age)
        response = TracedResponse(
            tokens=tuple(tokens),
            places=numpy.array(places),
            log_probs=rows.rollout_log_prob.to_numpy(dtype=float),
        )
        by_version.setdefault(version, {})[response.tokens] = response
    return {version: list(responses.values()) for version, responses in by_version.items()}


def score_with_checkpoint(
    checkpoint: Path, groups: Mapping[Group, Sequence[TracedResponse]], distribution: ScoredDistribution
) -> dict[Group, list[numpy.ndarray]]:
    """Score all responses with one checkpoint, on a GPU if there is one.

    Only one checkpoint is in memory at a time, since nothing here outlives the call but the scores.

    Returns:
        For each group an array (2, tokens) for each of PRECISIONS: the results of `score` for the group's responses,
        one after the other.

    Raises:
        OSError, ValueError: the checkpoint can't be loaded, or is not a model of this run.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(checkpoint).to(device)
    check_vocabulary(checkpoint, model, list(itertools.chain(*groups.values())))
    scored: dict[Group, list[numpy.ndarray]] = {group: [] for group in groups}
    for precision in PRECISIONS:
        # This overwrites the weights, so float32 must come first. The buffers stay in float32, as in inference engines:
        # they hold the frequencies of the rotary position embedding.
        for weight in model.parameters():
            weight.data = weight.to(getattr(torch, precision))
        for group, responses in groups.items():
            scored_responses = [score(model, response, distribution) for response in responses]
            scored[group].append(numpy.concatenate(scored_responses, axis=1))
    return scored


def check_vocabulary(checkpoint: Path, model: Any, responses: Sequence[TracedResponse]) -> None:
    """Refuse a checkpoint that lacks a traced token; raise ValueError, which names it."""
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
def score(model: Any, response: TracedResponse, distribution: ScoredDistribution) -> numpy.ndarray:
    """Score the traced tokens of a response with a model.

    Returns:
        (2, tokens): the log-probabilities in nats, and how they change with the logarithm of the inverse temperature.
    """
    tokens = torch.tensor([response.tokens], device=model.device)
    places = torch.tensor(response.places, device=model.device)
    logits = model(input_ids=tokens, use_cache=False).logits[0, places - 1].float() / distribution.temperature
    kept = truncate(logits, distribution)
    # `kept` has minus infinity for a token at the edge that truncation leaves out here and the sampler's engine kept.
    sampled_logits = logits.gather(-1, tokens[0, places, None])[:, 0]
    mean_logits = (kept.softmax(-1) * logits).sum(-1)
    return torch.stack([sampled_logits - kept.logsumexp(-1), sampled_logits - mean_logits]).double().cpu().numpy()


def truncate(logits: torch.Tensor, distribution: ScoredDistribution) -> torch.Tensor:
    """Return the logits with minus infinity for the tokens that a distribution leaves out, (tokens, vocabulary)."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    if 0 < distribution.top_k < logits.shape[-1]:
        logits = TopKLogitsWarper(distribution.top_k)(None, logits)
    if distribution.top_p < 1:
        logits = TopPLogitsWarper(distribution.top_p)(None, logits)
    return logits


def join_scores(responses: Sequence[TracedResponse], scored: Sequence[numpy.ndarray]) -> Scores:
    """Return the log-probabilities of a group as one `Scores`: the sampler's, and those that the checkpoints give.

    Args:
        responses: the group's responses, in the order in which they were scored.
        scored: an array (2, tokens) for each checkpoint and precision, as `score_with_checkpoint` returns them. The
            arrays of a checkpoint are adjacent, in the order of PRECISIONS.
    """
    lengths = numpy.array([len(response.log_probs) for response in responses])
    rows, tokens = scored[0].shape
    by_checkpoint = numpy.array(scored).reshape(-1, len(PRECISIONS), rows, tokens)
    # Both are (checkpoints, 2, tokens).
    in_float32 = by_checkpoint[:, PRECISIONS.index(FLOAT32)]
    in_bfloat16 = by_checkpoint[:, PRECISIONS.index(BFLOAT16)]
    return Scores(
        sampled=numpy.concatenate([response.log_probs for response in responses]),
        starts=numpy.cumsum(lengths) - lengths,
        exact=in_float32[:, LOG_PROB_ROW],
        rounded=in_bfloat16[:, LOG_PROB_ROW],
        slopes=in_float32[:, SLOPE_ROW],
    )


def _judge_group(
    *,
    group: Group,
    scores: Scores,
    announced: str | None,
    checkpoints: Sequence[str],
    temperature: float,
) -> GroupAnswer:
    """Judge which checkpoints the responses of a group are from.

    Args:
        group: the group.
        scores: the log-probabilities that the sampler recorded and that the checkpoints give.
        announced: the sampler's precision according to the configuration; None if unknown.
        checkpoints: the paths of the checkpoints, in the order of the scores.
        temperature: the temperature at which the checkpoints were scored.
    """
    judgement = judge(scores, announced)
    distances = [_find_distance(path, judgement, index, len(scores.starts)) for index, path in enumerate(checkpoints)]
    # False sorts before True, so that the remaining checkpoints come first.
    distances.sort(key=lambda distance: (not distance.remains, -distance.responses, distance.mean))
    rounded_of_remaining = scores.rounded[judgement.remaining]
    # Checkpoints with the same log-probabilities in bfloat16 can't be told apart there.
    same_when_rounded = len(rounded_of_remaining) > 1 and bool((rounded_of_remaining == rounded_of_remaining[0]).all())
    step, version = group
    return GroupAnswer(
        step=step,
        version=version,
        tokens=len(scores.sampled),
        precision=judgement.precision,
        announced=announced,
        distances=tuple(distances),
        same=same_when_rounded,
        responses=len(scores.starts),
        unexplained=int(judgement.unexplained.sum()),
        shift=_say_shift(judgement, scores, temperature),
    )


def _find_distance(path: str, judgement: SamplerJudgement, index: int, responses: int) -> Distance:
    """Return how far a checkpoint is from the sampler, and how many of the responses it explains.

    Args:
        path: the path of the checkpoint.
        judgement: the judgement of the group.
        index: the number of the checkpoint in the judgement.
        responses: how many responses the group has.
    """
    token_distances = judgement.distances[index]
    explained = responses if judgement.remaining[index] else 0
    if index in judgement.parts:
        explained = int(judgement.parts[index].sum())
    # Folders above the checkpoint may have such a name too. The last one is its own.
    versions = STEP_FOLDER.findall(path)
    return Distance(
        checkpoint=path,
        version=int(versions[-1]) if versions else None,
        mean=float(token_distances.mean()),
        most=float(numpy.quantile(token_distances, 0.99)),
        remains=bool(judgement.remaining[index]),
        responses=explained,
    )


def _say_shift(judgement: SamplerJudgement, scores: Scores, temperature: float) -> str | None:
    """Say how the sampler's distribution differs from the expected one; None if the two agree.

    The text is a clause that follows "sampled in float32 from A, ".

    Args:
        judgement: the judgement of `scores`.
        scores: the log-probabilities that the sampler recorded and that the checkpoints give.
        temperature: the temperature at which the checkpoints were scored. It is 1 for a sampler that records raw
            log-probabilities, whatever is configured.
    """
    if judgement.shift is None:
        return None
    if judgement.shift == LEFT_OUT:
        return (
            "with tokens left out as by top_p or top_k, unlike the configuration: the log-probabilities of the others "
            "are raised, and none is lowered"
        )
    # Another temperature is never an explanation by parts, so a checkpoint remains. If several do, the first is taken.
    first_remaining = int(numpy.flatnonzero(judgement.remaining)[0])
    change_of_log_inverse = fit_temperature_changes(scores)[first_remaining]
    # log(1 / sampled_at) = log(1 / temperature) + the change
    sampled_at = temperature * numpy.exp(-change_of_log_inverse)
    return f"with log-probabilities at a temperature of about {sampled_at:.4g} instead of {temperature:g}"


def say(answer: GroupAnswer) -> str:
    """Return the line that the command prints for an answer."""
    version = "a version that the trace doesn't name"
    if answer.version is not None:
        version = f"version {answer.version} according to the trace"
    head = f"{answer.verdict + ':':11}step {answer.step}, {answer.tokens} tokens, sampled by {version}"
    if answer.partly_explaining:
        return f"{head}: {_say_shares(answer)}."
    if not answer.remaining:
        nearest = answer.distances[0]
        return f"{head}: none of these weights sampled them, in float32 or bfloat16. The nearest are {nearest}."
    remaining = " or ".join(str(distance) for distance in answer.remaining)
    text = f"{head}: {_begin_sentence(answer)} {answer.precision} from {remaining}"
    if answer.shift is not None:
        text += f", {answer.shift}"
    if len(answer.remaining) > 1:
        text += "; the tokens can't tell these weights apart"
    if answer.same:
        text += ": in bfloat16 they are one, so that no step between them reached the sampler"
    others = [distance for distance in answer.distances if not distance.remains]
    if others:
        text += f"; the next are {others[0]}"
    if answer.is_rounded:
        text += f". {ROLLOUT_PRECISION} says {answer.announced}"
    return f"{text}."


def _begin_sentence(answer: GroupAnswer) -> str:
    """Return the beginning of a sentence that a precision must follow."""
    if answer.shift is None:
        return "sampled in"
    return "none of these weights sampled them as configured. They were sampled in"


def _say_shares(answer: GroupAnswer) -> str:
    """Say which share of the responses each checkpoint explains, and which share no checkpoint explains.

    Returns:
        A sentence without its full stop. It also says how the sampler's distribution differs from the configured one.
    """
    shares = []
    for distance in answer.partly_explaining:
        shares.append(f"{_say_share(distance.responses, answer.responses)} from {distance.checkpoint}")
    if answer.unexplained:
        shares.append(f"{_say_share(answer.unexplained, answer.responses)} from none of these weights")
    text = f"{_begin_sentence(answer)} {answer.precision}"
    if len(answer.partly_explaining) > 1:
        text += " from several weights"
    text += f": {', '.join(shares)}"
    if answer.shift is not None:
        text += f", {answer.shift}"
    return text


def _say_share(responses: int, total: int) -> str:
    """Say which share some of the responses are of all, and how many they are."""
    return f"{percent(responses / total)} of the responses ({responses} of {total})"
