r"""Problems and right answers out of the public data sets' own schemas.

Each reader takes a local copy or None for the hub and yields problems in the source's order, repeats included.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_clipx.common.files import read_json
from verl_clipx.common.responses import last_boxed
from verl_clipx.papers.tasks.ground_truth import decode_ground_truth
from verl_clipx.papers.tasks.records import Record, read_records

ORZ_HUB, ORZ_FILE = "Open-Reasoner-Zero/orz_math_57k_collection", "orz_math_57k_collection.json"
DAPO_HUB = "BytedTsinghua-SIA/DAPO-Math-17k"
SKYWORK_HUB = "Skywork/Skywork-OR1-RL-Data"
DSR_UNIFORM_FILE = "data/deepscaler_c/deepscaler_uniform_train.parquet of github.com/zhyang2226/AR-Lopti"

# What the sources put around a problem; our own templates replace it.
_DAPO_OPENING = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem."
)
_DAPO_CLOSING = 'Remember to put your answer on its own line after "Answer:".'
_STEP_BY_STEP = "Let's think step by step and output the final answer within \\boxed{}."

_QUESTION_FIELDS = ("problem", "question", "Problem", "Question")
_ANSWER_FIELDS = ("answer", "final_answer", "Answer")
_MAX_BOX = 2000


@dataclass(frozen=True)
class MathProblem:
    """One problem.

    Attributes:
        text: the problem statement, without instructions.
        answers: accepted spellings of the right answer, at least one.
        about: what the source says about it, such as a difficulty. All problems of a source have the same keys.
    """

    text: str
    answers: tuple[str, ...]
    about: dict[str, Any] = field(default_factory=dict)


ProblemReader = Callable[[Path | None], Iterator[MathProblem]]


def read_orz_57k(source: Path | None) -> Iterator[MathProblem]:
    """Yield Open-Reasoner-Zero's problems, from a JSON array of conversations with the answer in the second message.

    Raises:
        ValueError: the file cannot be read, or has another form.
    """
    if source is None:
        from huggingface_hub import hf_hub_download

        source = Path(hf_hub_download(ORZ_HUB, ORZ_FILE, repo_type="dataset"))
    try:
        conversations = read_json(source)
    except (OSError, ValueError) as error:
        raise ValueError(f"{error}; give the file {ORZ_FILE}") from None
    if not isinstance(conversations, list):
        raise ValueError(f"{source}: contains {type(conversations).__name__}, not an array; is it {ORZ_FILE}?")
    for number, conversation in enumerate(conversations, 1):
        try:
            text, answer = str(conversation[0]["value"]), conversation[1]["ground_truth"]["value"]
        except (LookupError, TypeError):
            raise ValueError(
                f"{source}, entry {number}: not a pair of messages with 'value' and 'ground_truth'; is it {ORZ_FILE}?"
            ) from None
        yield from _problem(text, [answer])


def read_dapo_17k(source: Path | None) -> Iterator[MathProblem]:
    """Yield DAPO's problems, which are in verl's schema. The public set contains each about a hundred times."""

    def parse(record: Record, where: str) -> Iterator[MathProblem]:
        text, truth, _ = _verl_fields(record, where)
        yield from _problem(_unwrap(text, _DAPO_OPENING, _DAPO_CLOSING), [truth])

    yield from _parse_all(read_records(source, hub=DAPO_HUB, hub_split="train"), source or DAPO_HUB, parse)


def read_dsr_uniform(source: Path | None) -> Iterator[MathProblem]:
    """Yield AR-Lopti's 10,000 problems of DeepScaleR, drawn so that their difficulty is uniform; some appear twice.

    Raises:
        ValueError: no local copy is given, or a record has another form.
    """
    if source is None:
        raise ValueError(f"dsr_uniform is not on the hub; give a local copy of {DSR_UNIFORM_FILE}")

    def parse(record: Record, where: str) -> Iterator[MathProblem]:
        text, truth, extra = _verl_fields(record, where)
        try:
            about = {"difficulty": float(extra["difficulty"]), "source_index": int(extra["index"])}
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ValueError(
                f"{where}: the record has extra_info={extra}; it needs numbers difficulty, index"
            ) from None
        yield from _problem(_unwrap(text, "", _STEP_BY_STEP), [truth], about)

    yield from _parse_all(read_records(source, hub="", hub_split=""), source, parse)


def read_skywork_or1_math(source: Path | None) -> Iterator[MathProblem]:
    """Yield the mathematics of Skywork-OR1. A right answer is a JSON array of spellings; empty ones are skipped."""

    def parse(record: Record, where: str) -> Iterator[MathProblem]:
        text, truth, extra = _verl_fields(record, where)
        answers = decode_ground_truth(truth)
        about = {"source": record.get("data_source"), "model_difficulty": extra.get("model_difficulty")}
        answers = answers if isinstance(answers, list) else [answers]
        yield from _problem(_unwrap(text, "", _STEP_BY_STEP), answers, about)

    yield from _parse_all(read_records(source, hub=SKYWORK_HUB, hub_split="math"), source or SKYWORK_HUB, parse)


def reader_of_benchmark(hub: str, hub_split: str, hub_config: str | None = None) -> ProblemReader:
    r"""Return a reader for an evaluation set.

    Copies of these sets differ in their fields. The reader accepts verl's own schema, and a `problem` or `question`
    (put after its `context`, if any) with an `answer`, a `final_answer`, or a `solution` whose last `\boxed{}` is the
    answer.
    """

    def read(source: Path | None) -> Iterator[MathProblem]:
        records = read_records(source, hub=hub, hub_split=hub_split, hub_config=hub_config)
        yield from _parse_all(records, source or hub, _benchmark_problem)

    return read


def _parse_all(
    records: Iterable[Record], origin: Path | str, parse: Callable[[Record, str], Iterator[MathProblem]]
) -> Iterator[MathProblem]:
    """Yield the problems of all records, and warn of those that are left out because they have no answer."""
    left_out = []
    for number, record in enumerate(records, 1):
        problems = list(parse(record, f"{origin}, row {number}"))
        if not problems:
            left_out.append(number)
        yield from problems
    if left_out:
        rows = ", ".join(map(str, left_out[:10])) + (", …" if len(left_out) > 10 else "")
        warnings.warn(f"{origin}: {len(left_out)} problems without an answer were left out (rows {rows})", stacklevel=2)


def _benchmark_problem(record: Record, origin: str) -> Iterator[MathProblem]:
    if "reward_model" in record:
        text, truth, _ = _verl_fields(record, origin)
        text = _unwrap(text, "", _STEP_BY_STEP)
    else:
        text = next((record[name] for name in _QUESTION_FIELDS if record.get(name)), None)
        truth = next((record[name] for name in _ANSWER_FIELDS if not _is_missing(record.get(name))), None)
        if truth is None and isinstance(record.get("solution"), str):
            truth = last_boxed(record["solution"], _MAX_BOX)
        if not isinstance(text, str):
            raise ValueError(
                f"{origin}: a record has the fields {sorted(record)}; it needs one of {_QUESTION_FIELDS} and one of "
                f"{(*_ANSWER_FIELDS, 'solution')}"
            )
        context = record.get("context")
        text = f"{context.strip()}\n{text}" if isinstance(context, str) and context.strip() else text
    yield from _problem(text, truth if isinstance(truth, list) else [truth])


def _verl_fields(record: Record, origin: str) -> tuple[str, Any, dict[str, Any]]:
    try:
        text, truth = record["prompt"][0]["content"], (record["reward_model"] or {}).get("ground_truth")
    except (LookupError, TypeError, AttributeError):
        text = truth = None
    extra = record.get("extra_info") or {}
    if not isinstance(text, str) or not isinstance(extra, dict):
        raise ValueError(
            f"{origin}: a record has the fields {sorted(record)}; it needs verl's prompt, reward_model and, if there "
            "is one, extra_info"
        )
    return text, truth, extra


def _unwrap(text: str, opening: str, closing: str) -> str:
    return text.strip().removeprefix(opening).removesuffix(closing).strip()


def _problem(text: str, answers: list[Any], about: dict[str, Any] | None = None) -> Iterator[MathProblem]:
    """Yield the problem, unless it has no text or no answer that a response could match."""
    spellings = tuple(dict.fromkeys(filter(None, map(_spelling, answers))))
    if text.strip() and spellings:
        yield MathProblem(text.strip(), spellings, about or {})


def _spelling(answer: Any) -> str:
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    return "" if _is_missing(answer) else str(answer).strip()


def _is_missing(value: Any) -> bool:
    # Tables spell a missing value as NaN, which is not equal to itself.
    return value is None or (isinstance(value, float) and value != value)
