"""Reads questions from Parquet files in verl's row schema."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_clipx.common.files import check_shape, hash_of_file, read_table
from verl_clipx.papers.messages import fault_of_prompt

# What `check_shape` demands of a question. The column extra_info is optional in a file, but every question has it.
QUESTION_SHAPE = {
    "data_source": str,
    "prompt": object,
    "reward_model": {"ground_truth": object},
    "extra_info": dict,
}


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
        name: the benchmark's name. The evaluation uses it as the name of a folder.
        sha256: the hash that the file had when the benchmark was evaluated; the file must still have it. None skips
            this check.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not Parquet or has changed, there are no questions, a row does not follow verl's format,
            or the name cannot be used as the name of a folder.
    """
    if name.startswith(".") or "/" in name or "\\" in name:
        raise ValueError(
            f"benchmark name {name!r}: a folder gets this name, so it must not contain a slash or begin with a dot"
        )
    # A file that was replaced may be of another format, so the hash is checked before anything is parsed.
    if sha256 is not None and sha256 != hash_of_file(path):
        raise ValueError(
            f"{path}: has changed since benchmark {name} was evaluated; put the file back, or evaluate anew with "
            "another --out"
        )
    questions = read_table(path).to_pylist()
    if not questions:
        raise ValueError(f"{path}: contains no question")
    for number, question in enumerate(questions):
        # The column is optional, and a row may leave it empty.
        question["extra_info"] = question.get("extra_info") or {}
        where = f"{path}, row {number}"
        check_shape(where, question, QUESTION_SHAPE)
        fault = fault_of_prompt(question["prompt"])
        if fault is not None:
            raise ValueError(f"{where}: {fault}")
    return Benchmark(name=name, path=path, sha256=hash_of_file(path), questions=questions)


def read_benchmarks(options: Sequence[str]) -> list[Benchmark]:
    """Read the benchmarks that the options --benchmark give.

    Args:
        options: each is FILE or NAME=FILE. Without NAME, the benchmark is called like the file, without `.parquet`.

    Raises:
        OSError, ValueError: as for `read_benchmark`, or two benchmarks have the same name.
    """
    benchmarks = []
    for option in options:
        name, equals_sign, file = option.partition("=")
        # A name contains no slash: in runs/lr=1e-6/test.parquet, the equals sign is a part of the path.
        if not equals_sign or "/" in name:
            name = ""
            file = option
        path = Path(file)
        benchmarks.append(read_benchmark(path, name or path.stem))
    names = [benchmark.name for benchmark in benchmarks]
    if len(set(names)) < len(names):
        raise ValueError(f"--benchmark {', '.join(names)}: each needs a name of its own; write NAME=FILE")
    return benchmarks


def sources_of(benchmark: Benchmark, field: str) -> list[str]:
    """Return the source of each question, for clustered standard errors.

    Args:
        field: the key of extra_info that holds the source.

    Raises:
        ValueError: a question has no such key.
    """
    sources = []
    for row, question in enumerate(benchmark.questions):
        extra_info = question["extra_info"]
        if extra_info.get(field) is None:
            available = ", ".join(sorted(extra_info)) or "no keys"
            raise ValueError(
                f"--cluster {field}: not in extra_info of {benchmark.path}, row {row}; there are {available}"
            )
        sources.append(str(extra_info[field]))
    return sources
