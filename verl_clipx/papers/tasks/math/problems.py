r"""Problems and right answers out of the public data sets' own schemas.

A set is a local copy or on the hub, and yields problems in its order, repeats included.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_clipx.common.files import read_json
from verl_clipx.common.responses import last_boxed
from verl_clipx.papers.tasks.ground_truth import decode_ground_truth
from verl_clipx.papers.tasks.records import Record, read_records

ORZ_FILE = "orz_math_57k_collection.json"
DSR_UNIFORM_FILE = "data/deepscaler_c/deepscaler_uniform_train.parquet of github.com/zhyang2226/AR-Lopti"

# What the sources put around a problem; our own templates replace it.
_OPENING = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem."
)
_CLOSINGS = (
    'Remember to put your answer on its own line after "Answer:".',
    "Let's think step by step and output the final answer within \\boxed{}.",
)
_QUESTION_FIELDS = ("problem", "question", "Problem", "Question")
_ANSWER_FIELDS = ("answer", "final_answer", "Answer")
_MAX_BOX = 2000


@dataclass(frozen=True)
class MathProblem:
    """One problem.

    Attributes:
        text: the problem statement, without instructions.
        answers: accepted spellings of the right answer; empty if the source has none that a response could match.
        about: what the source says about it, such as a difficulty. All problems of a source have the same keys.
    """

    text: str
    answers: tuple[str, ...]
    about: dict[str, Any] = field(default_factory=dict)


def read_problems(
    source: Path | None, schema: str, hub: str | None, hub_split: str = "test", hub_config: str | None = None
) -> Iterator[MathProblem]:
    r"""Yield the problems of a set; those without an answer are left out, and a warning names their rows.

    Args:
        schema: a key of PARSERS. "benchmark" accepts what copies of evaluation sets have: verl's own schema, or a
            `problem` or `question` (put after its `context`, if any) with an `answer`, a `final_answer`, or a
            `solution` whose last `\boxed{}` is the answer.

    Raises:
        ValueError: the set is not on the hub and no copy is given, or the copy has another form; the message names it.
    """
    if source is None and hub is None:
        raise ValueError(f"dsr_uniform is not on the hub; give a local copy of {DSR_UNIFORM_FILE}")
    if schema == "orz":
        records = _conversations(source, hub)
    else:
        records = read_records(source, hub=hub or "", hub_split=hub_split, hub_config=hub_config)
    left_out = []
    for number, record in enumerate(records, 1):
        problem = PARSERS[schema](record, f"{source or hub}, row {number}")
        if problem.text and problem.answers:
            yield problem
        else:
            left_out.append(str(number))
    if left_out:
        rows = ", ".join(left_out[:10]) + (", …" if len(left_out) > 10 else "")
        message = f"{source or hub}: {len(left_out)} problems without an answer were left out (rows {rows})"
        warnings.warn(message, stacklevel=2)


def _conversations(source: Path | None, hub: str) -> list[Any]:
    if source is None:
        from huggingface_hub import hf_hub_download

        source = Path(hf_hub_download(hub, ORZ_FILE, repo_type="dataset"))
    try:
        conversations = read_json(source)
    except (OSError, ValueError) as error:
        raise ValueError(f"{error}; give the file {ORZ_FILE}") from None
    if not isinstance(conversations, list):
        raise ValueError(f"{source}: contains {type(conversations).__name__}, not an array; is it {ORZ_FILE}?")
    return conversations


def _parse_verl(record: Record, where: str) -> MathProblem:
    text, truth, _ = _verl_fields(record, where)
    return _problem(text, truth)


def _parse_skywork(record: Record, where: str) -> MathProblem:
    text, truth, extra = _verl_fields(record, where)
    about = {"source": record.get("data_source"), "model_difficulty": extra.get("model_difficulty")}
    # A right answer is the JSON of a list of spellings.
    return _problem(text, decode_ground_truth(truth), about)


def _parse_conversation(conversation: Any, where: str) -> MathProblem:
    try:
        return _problem(str(conversation[0]["value"]), conversation[1]["ground_truth"]["value"])
    except (LookupError, TypeError):
        raise ValueError(
            f"{where}: not a pair of messages with 'value' and 'ground_truth'; is it {ORZ_FILE}?"
        ) from None


def _parse_dsr(record: Record, where: str) -> MathProblem:
    text, truth, extra = _verl_fields(record, where)
    try:
        about = {"difficulty": float(extra["difficulty"]), "source_index": int(extra["index"])}
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(f"{where}: the record has extra_info={extra}; it needs numbers difficulty, index") from None
    return _problem(text, truth, about)


def _parse_benchmark(record: Record, where: str) -> MathProblem:
    if "reward_model" in record:
        return _parse_verl(record, where)
    text = next((record[name] for name in _QUESTION_FIELDS if record.get(name)), None)
    truth = next((record[name] for name in _ANSWER_FIELDS if not _is_missing(record.get(name))), None)
    if truth is None:
        truth = last_boxed(record.get("solution"), _MAX_BOX)
    if not isinstance(text, str):
        raise ValueError(
            f"{where}: a record has the fields {sorted(record)}; it needs one of {_QUESTION_FIELDS} and one of "
            f"{(*_ANSWER_FIELDS, 'solution')}"
        )
    context = record.get("context")
    return _problem(f"{context.strip()}\n{text}" if isinstance(context, str) and context.strip() else text, truth)


def _verl_fields(record: Record, where: str) -> tuple[str, Any, dict[str, Any]]:
    """Return the problem without what its source puts around it, the ground truth, and extra_info."""
    try:
        text, truth = record["prompt"][0]["content"], (record["reward_model"] or {}).get("ground_truth")
    except (LookupError, TypeError, AttributeError):
        text = truth = None
    extra = record.get("extra_info") or {}
    if not isinstance(text, str) or not isinstance(extra, dict):
        raise ValueError(
            f"{where}: a record has the fields {sorted(record)}; it needs verl's prompt, reward_model and, if there "
            "is one, extra_info"
        )
    text = text.strip().removeprefix(_OPENING)
    for closing in _CLOSINGS:
        text = text.removesuffix(closing)
    return text, truth, extra


def _problem(text: str, truth: Any, about: dict[str, Any] | None = None) -> MathProblem:
    answers = map(_spelling, truth if isinstance(truth, list) else [truth])
    return MathProblem(text.strip(), tuple(dict.fromkeys(filter(None, answers))), about or {})


def _spelling(answer: Any) -> str:
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    return "" if _is_missing(answer) else str(answer).strip()


def _is_missing(value: Any) -> bool:
    # Tables spell a missing value as NaN, which is not equal to itself.
    return value is None or value != value


PARSERS: dict[str, Callable[[Any, str], MathProblem]] = {
    "orz": _parse_conversation,
    "verl": _parse_verl,
    "dsr": _parse_dsr,
    "skywork": _parse_skywork,
    "benchmark": _parse_benchmark,
}
