"""Reads questions from Parquet files in verl's row schema."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_clipx.common.files import check_shape, hash_of_file, read_table
from verl_clipx.papers.messages import fault_of_prompt

ROW = {"data_source": str, "prompt": object, "reward_model": {"ground_truth": object}, "extra_info": dict}


@dataclass(frozen=True)
class Benchmark:
    """A named list of questions. A question is a row in verl's schema, and its index is its row number."""

    name: str
    path: Path
    sha256: str
    questions: list[dict[str, Any]]


def read_benchmark(path: Path, name: str, sha256: str | None = None) -> Benchmark:
    """Read a benchmark.

    Args:
        path: a Parquet file with the columns data_source, prompt (chat messages), reward_model (with ground_truth) and,
            optionally, extra_info.
        name: the benchmark's name, which becomes a folder's.
        sha256: the file's hash when the benchmark was evaluated.

    Raises:
        OSError: the file cannot be read.
        ValueError: there are no questions, a row does not follow verl's format, the name cannot be a folder's, or the
            file has changed.
    """
    if name.startswith(".") or "/" in name or "\\" in name:
        raise ValueError(
            f"benchmark name {name!r}: it becomes a folder's name, so it must not contain a slash or begin with a dot"
        )
    questions = [row | {"extra_info": row.get("extra_info") or {}} for row in read_table(path).to_pylist()]
    if not questions:
        raise ValueError(f"--benchmark {path}: contains no question")
    for number, row in enumerate(questions):
        where = f"--benchmark {path}, row {number}"
        check_shape(where, row, ROW)
        if fault := fault_of_prompt(row["prompt"]):
            raise ValueError(f"{where}: {fault}")
    found = hash_of_file(path)
    if sha256 not in (None, found):
        raise ValueError(
            f"{path}: has changed since benchmark {name} was evaluated; put the file back, or evaluate anew with "
            "another --out"
        )
    return Benchmark(name=name, path=path, sha256=found, questions=questions)


def read_benchmarks(options: Sequence[str]) -> list[Benchmark]:
    """Read what --benchmark names: a file, or NAME=FILE; by default the name is the file's, without `.parquet`.

    Raises:
        ValueError: two benchmarks have the same name.
    """
    named = [(name, Path(path)) for name, _, path in (option.rpartition("=") for option in options)]
    benchmarks = [read_benchmark(path, name or path.stem) for name, path in named]
    names = [benchmark.name for benchmark in benchmarks]
    if len(set(names)) < len(names):
        raise ValueError(f"--benchmark {', '.join(names)}: each needs a name of its own; write NAME=FILE")
    return benchmarks


def sources_of(benchmark: Benchmark, field: str) -> list[str]:
    """Return the source of each question, for clustered standard errors."""
    for row, question in enumerate(benchmark.questions):
        if question["extra_info"].get(field) is None:
            there = ", ".join(sorted(question["extra_info"]))
            raise ValueError(f"--cluster {field}: not in extra_info of {benchmark.path}, row {row}; there are {there}")
    return [str(question["extra_info"][field]) for question in benchmark.questions]
