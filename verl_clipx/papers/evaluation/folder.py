"""The files of an evaluation: configuration, results, and the responses that verl's validation wrote.

These are in one folder for each seed and chunk of questions: `<checkpoint>/<benchmark>/completions/seed-0/000000`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pandas

from verl_clipx.common.files import check_shape, parse_json, read_json_object, read_lines, write_json
from verl_clipx.papers.versions import PACKAGES

# The parts of a configuration and of results that are read again.
CONFIG = {
    "model": str,
    "protocol": str,
    "checkpoints": {str: {"step": int | None, "fingerprint": str}},
    "benchmarks": {str: {"path": str, "sha256": str, "questions": int}},
    "sampling": {"samples": int, "seeds": [int], **dict.fromkeys(("max_tokens", "temperature", "top_p"), int | float)},
    "reward": str,
    "versions": dict,
}
NUMBER = {"mean": int | float, "low": int | float | None, "high": int | float | None}
RESULTS = {"config": CONFIG, "benchmarks": {str: {"result": {str: NUMBER}, "values": {str: [int | float]}}}}

# What a line of verl's file must hold: the agent loop's record, and the response without special tokens.
ROW = {"index": int, "sample": int, "seed": int, "output": str, "length": int, "truncated": bool}
RENAMED = {"index": "question", "output": "text"}

UNFINISHED = "unfinished"
"""In a seed's folder, where verl writes the responses of a chunk until they are complete; the next chunk clears it."""


@dataclass(frozen=True)
class EvaluationFolder:
    """The files of one evaluation."""

    path: Path

    @property
    def config(self) -> Path:
        """Returns the evaluation's settings, as JSON."""
        return self.path / "config.json"

    @property
    def results(self) -> Path:
        """The estimates, as JSON."""
        return self.path / "results.json"

    def completions(self, checkpoint: str, benchmark: str, seed: int) -> Path:
        """A checkpoint's completions on a benchmark, a folder for each chunk that is called by its first question."""
        return self.path / checkpoint / benchmark / "completions" / f"seed-{seed}"

    def scores(self, checkpoint: str, benchmark: str) -> Path:
        """Scores of these completions."""
        return self.path / checkpoint / benchmark / "scores.parquet"

    def claim(self, config: dict[str, Any]) -> None:
        """Record the configuration of completions that will be sampled.

        Raises:
            ValueError: there are completions that depend on something else; the message names each difference.
        """
        if any(self.path.glob("*/*/completions/seed-*/[0-9]*")):
            was = _origin(self.read_config())
            now = _origin(config)
            different = [f"{key} was {was[key]!r} and is now {now[key]!r}" for key in now if was[key] != now[key]]
            if different:
                raise ValueError(
                    f"{self.path} contains completions of another evaluation ({'; '.join(different)}). "
                    "Set another --out"
                )
        self.write_config(config)

    def write_config(self, config: dict[str, Any]) -> None:
        """Record a configuration; results of an earlier one must not be mistaken for its own, and go."""
        self.results.unlink(missing_ok=True)
        write_json(self.config, config)

    def read_config(self) -> dict[str, Any]:
        """The configuration of the evaluation."""
        if not self.config.exists():
            raise FileNotFoundError(
                f"{self.path}: contains no evaluation (config.json); make one with `clipx papers eval run`"
            )
        return read_json_object(self.config, CONFIG)

    def read_results(self) -> dict[str, Any]:
        """The results. Without them, the scores may come from two rewards, because scoring was interrupted."""
        if not self.results.exists():
            raise FileNotFoundError(f"{self.path}: not scored yet; run `clipx papers eval score` on it")
        return read_json_object(self.results, RESULTS)


def _origin(config: dict[str, Any]) -> dict[str, Any]:
    """Returns all that completions depend on, but no seeds, because more can be added, nor what scores depend on."""
    sampling = config["sampling"]
    models = config["checkpoints"]
    benchmarks = config["benchmarks"]
    return {
        **sampling,
        "seeds": None,
        "samples": sampling["samples"] // len(sampling["seeds"]),
        "model": {label: [one["fingerprint"], one.get("loaded")] for label, one in models.items()},
        "benchmark": {name: one["sha256"] for name, one in benchmarks.items()},
        # Nodes, GPUs and the like may differ when an evaluation goes on.
        "overrides": [override for override in config.get("overrides", []) if not override.startswith("trainer.")],
        "versions": {package: config["versions"].get(package) for package in PACKAGES},
    }


def read_responses(
    folder: Path, samples: int, questions: Collection[int] | None = None, files: str = "[0-9]*/*.jsonl"
) -> pandas.DataFrame:
    """Read the responses of a seed's finished chunks, or of one run.

    Args:
        samples: samples of each question.
        questions: rows of the benchmark that must have responses; None for those that have some.
        files: pattern of verl's files in the folder.

    Returns:
        Columns question, sample, seed, text, length, truncated, ordered by question and sample.

    Raises:
        ValueError: a line cannot be read, or there are not exactly `samples` responses to each question.
    """
    rows = []
    for path in sorted(folder.glob(files)):
        for number, line in enumerate(read_lines(path), 1):
            rows.append(parse_json(line, f"{path}, line {number}"))
            check_shape(path, rows[-1], ROW)
    table = pandas.DataFrame(rows, columns=list(ROW)).rename(columns=RENAMED)
    table = table.sort_values(["question", "sample"], ignore_index=True)
    questions = sorted(set(table["question"]) if questions is None else questions)
    if list(zip(table["question"], table["sample"], strict=True)) != list(product(questions, range(samples))):
        raise ValueError(
            f"{folder}: {len(table)} responses, not exactly {samples} to each of {len(questions)} questions. "
            "Repeat the same `clipx papers eval run` command to finish them, without a chunk that has too few or "
            "too many"
        )
    return table


def pending_chunks(folder: Path, questions: int, samples: int, size: int) -> list[list[int]]:
    """Return the questions that a seed has not answered yet, in chunks of at most `size` responses."""
    answered = set(read_responses(folder, samples)["question"])
    left = [question for question in range(questions) if question not in answered]
    size = max(1, size // samples)
    return [left[start : start + size] for start in range(0, len(left), size)]


def read_completions(folders: Sequence[Path], questions: int, samples: int) -> pandas.DataFrame:
    """Read all responses to a benchmark.

    Args:
        folders: one for each seed. The samples of the first seed come first.
        questions: number of questions.
        samples: samples per question and seed.

    Returns:
        ``questions * samples * len(folders)`` rows; see `read_responses`, which says what is refused.
    """
    tables = [read_responses(folder, samples, range(questions)) for folder in folders]
    tables = [table.assign(sample=table["sample"] + place * samples) for place, table in enumerate(tables)]
    return pandas.concat(tables).sort_values(["question", "sample"], ignore_index=True)
