"""Reads questions from Parquet files in verl's row schema."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_clipx.common.files import hash_of_file, read_table
from verl_clipx.common.messages import fault_of_prompt

COLUMNS = ("data_source", "prompt", "reward_model")


@dataclass(frozen=True)
class Question:
    """One row of a benchmark: what to ask, and what the reward needs to judge a response."""

    data_source: str
    prompt: list[dict[str, str]]
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """A named list of questions. A question's index is its row number."""

    name: str
    path: Path
    sha256: str
    questions: list[Question]


def read_benchmark(path: Path, name: str | None = None, *, limit: int | None = None) -> Benchmark:
    """Read a benchmark.

    Args:
        path: a Parquet file with the columns data_source, prompt (chat messages), reward_model (with ground_truth) and,
            optionally, extra_info.
        name: the benchmark's name; by default the file's name without `.parquet`.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a column is missing, there are no questions, a row does not follow verl's format, the name is not
            a valid folder name, or `limit` is below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"--limit {limit}: must be at least 1")
    name = path.stem if name is None else name
    if not name or name.startswith(".") or "/" in name or "\\" in name:
        raise ValueError(
            f"benchmark name {name!r}: it becomes a folder's name, so it must not contain a slash or begin with a dot"
        )
    if not path.exists():
        raise FileNotFoundError(f"--benchmark {path}: no such file; give a Parquet file in verl's format")
    table = read_table(path)
    missing = [column for column in COLUMNS if column not in table.column_names]
    if missing:
        raise ValueError(f"--benchmark {path}: lacks the column {', '.join(missing)} of verl's format")
    rows = table.slice(0, None if limit is None else min(limit, len(table))).to_pylist()
    for number, row in enumerate(rows):
        fault = _fault(row)
        if fault:
            raise ValueError(f"--benchmark {path}, row {number}: {fault}")
    if not rows:
        raise ValueError(f"--benchmark {path}: contains no question")
    questions = [
        Question(row["data_source"], row["prompt"], row["reward_model"]["ground_truth"], row.get("extra_info") or {})
        for row in rows
    ]
    return Benchmark(name, path, hash_of_file(path), questions)


def _fault(row: dict[str, Any]) -> str | None:
    """Describe how a row deviates from verl's format."""
    if not isinstance(row["data_source"], str):
        return f"data_source is {row['data_source']!r:.60}, not text"
    if fault := fault_of_prompt(row["prompt"]):
        return fault
    if "ground_truth" not in (row["reward_model"] if isinstance(row["reward_model"], dict) else {}):
        return "reward_model has no ground_truth, which the reward needs"
    if not isinstance(row.get("extra_info"), dict | None):
        return f"extra_info is {row['extra_info']!r:.60}, not keys and values"
    return None


def sources_of(benchmark: Benchmark, field: str) -> list[str]:
    """Return the source of each question, for clustered standard errors."""
    lacking = [row for row, question in enumerate(benchmark.questions) if question.extra_info.get(field) is None]
    if lacking:
        there = sorted(set.intersection(*(set(question.extra_info) for question in benchmark.questions)))
        raise ValueError(
            f"--cluster {field}: not in extra_info of {benchmark.path}, row {lacking[0]}; there are {', '.join(there)}"
        )
    return [str(question.extra_info[field]) for question in benchmark.questions]
