"""Reads questions from Parquet files in verl's row schema."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_clipx.common.files import check_shape, hash_of_file, read_table
from verl_clipx.papers.messages import fault_of_prompt

ROW = {"data_source": str, "prompt": object, "reward_model": {"ground_truth": object}, "extra_info": dict | None}


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
        name: the benchmark's name, which becomes a folder's; by default the file's name without `.parquet`.
        limit: read only so many questions, the first ones.

    Raises:
        OSError: the file cannot be read.
        ValueError: there are no questions, a row does not follow verl's format, or the name cannot be a folder's.
    """
    name = path.stem if name is None else name
    if not name or name.startswith(".") or "/" in name or "\\" in name:
        raise ValueError(
            f"benchmark name {name!r}: it becomes a folder's name, so it must not contain a slash or begin with a dot"
        )
    questions = []
    for number, row in enumerate(read_table(path).to_pylist()[:limit]):
        where = f"--benchmark {path}, row {number}"
        check_shape(where, {"extra_info": None} | row, ROW)
        if fault := fault_of_prompt(row["prompt"]):
            raise ValueError(f"{where}: {fault}")
        truth, extra_info = row["reward_model"]["ground_truth"], row.get("extra_info") or {}
        questions.append(Question(row["data_source"], row["prompt"], truth, extra_info))
    if not questions:
        raise ValueError(f"--benchmark {path}: contains no question")
    return Benchmark(name, path, hash_of_file(path), questions)


def sources_of(benchmark: Benchmark, field: str) -> list[str]:
    """Return the source of each question, for clustered standard errors."""
    for row, question in enumerate(benchmark.questions):
        if question.extra_info.get(field) is None:
            there = ", ".join(sorted(question.extra_info))
            raise ValueError(f"--cluster {field}: not in extra_info of {benchmark.path}, row {row}; there are {there}")
    return [str(question.extra_info[field]) for question in benchmark.questions]
