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
    """A named list of questions.

    Args:
        path: the Parquet file of the questions.
        sha256: the hash of this file.
        questions: the rows of the file, in verl's schema. The index of a question is the number of its row.
    """

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
    for row, question in enumerate(questions):
        # The column is optional, and a row may leave it empty.
        question["extra_info"] = question.get("extra_info") or {}
        where = f"{path}, row {row}"
        check_shape(where, question, QUESTION_SHAPE)
        fault = fault_of_prompt(question["prompt"])
        if fault is not None:
            raise ValueError(f"{where}: {fault}")
    return Benchmark(name=name, path=path, sha256=hash_of_file(path), questions=questions)


def read_benchmarks(options: Sequence[str]) -> list[Benchmark]:
    """Read the benchmarks that the options --benchmark name.

    Args:
        options: the values of the options, each FILE or NAME=FILE. Without NAME, the benchmark has the file's name
            without `.parquet`.

    Raises:
        OSError: a file cannot be read.
        ValueError: two benchmarks have the same name, or `read_benchmark` refuses one.
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


def read_clusters(benchmark: Benchmark, key: str) -> list[str]:
    """Return the label of each question's cluster: its value under a key of extra_info, as text.

    Questions with the same label come from one source, such as an exam or a table, so they are not independent.

    Args:
        key: the key of extra_info.

    Returns:
        One label a question, in the benchmark's order.

    Raises:
        ValueError: a question has no value under the key. The message lists the keys under which it has one.
    """
    labels = []
    for row, question in enumerate(benchmark.questions):
        # A column of Parquet has the same keys in each row. Keys that a row does not have are None there.
        values = {name: value for name, value in question["extra_info"].items() if value is not None}
        if key not in values:
            available = ", ".join(sorted(values)) or "no keys"
            raise ValueError(
                f"--cluster {key}: not in extra_info of {benchmark.path}, row {row}; there are {available}"
            )
        labels.append(str(values[key]))
    return labels
