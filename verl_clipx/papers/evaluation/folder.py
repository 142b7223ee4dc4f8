"""The files of an evaluation: configuration, results, and the responses that verl's validation wrote.

The responses are in one folder for each seed and chunk of questions, such as
`<checkpoint>/<benchmark>/completions/seed-0/000000`.
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
CONFIG_SHAPE = {
    "model": str,
    "protocol": str,
    "checkpoints": {str: {"step": int | None, "fingerprint": str}},
    "benchmarks": {str: {"path": str, "sha256": str, "questions": int}},
    "sampling": {
        "samples": int,
        "seeds": [int],
        "max_tokens": int | float,
        "temperature": int | float,
        "top_p": int | float,
    },
    "reward": str,
    "versions": dict,
}
ESTIMATE_SHAPE = {"mean": int | float, "low": int | float | None, "high": int | float | None}
RESULTS_SHAPE = {
    "config": CONFIG_SHAPE,
    "benchmarks": {str: {"result": {str: ESTIMATE_SHAPE}, "values": {str: [int | float]}}},
}

# The keys of a line in verl's file of responses. "output" is the response without special tokens. The other keys come
# from the agent loop.
RESPONSE_SHAPE = {"index": int, "sample": int, "seed": int, "output": str, "length": int, "truncated": bool}
# Some keys of verl's, and the names of their columns here.
RENAMED_COLUMNS = {"index": "question", "output": "text"}

UNFINISHED = "unfinished"
"""Name of the folder, in a seed's folder, into which verl writes a chunk's responses.

Once they are complete, the number of the chunk's first question becomes its name. What an interruption has left in it
is deleted before the next chunk.
"""


@dataclass(frozen=True)
class EvaluationFolder:
    """The files of one evaluation."""

    path: Path

    @property
    def config_path(self) -> Path:
        """The JSON file with the evaluation's settings."""
        return self.path / "config.json"

    @property
    def results_path(self) -> Path:
        """The JSON file with the estimates."""
        return self.path / "results.json"

    def completions_folder(self, checkpoint: str, benchmark: str, seed: int) -> Path:
        """Return the folder of a checkpoint's completions on a benchmark.

        It has one folder for each chunk, named by the index of the chunk's first question.
        """
        return self.path / checkpoint / benchmark / "completions" / f"seed-{seed}"

    def scores_path(self, checkpoint: str, benchmark: str) -> Path:
        """Return the Parquet file with the scores of a checkpoint's completions on a benchmark."""
        return self.path / checkpoint / benchmark / "scores.parquet"

    def write_sampling_config(self, config: dict[str, Any]) -> None:
        """Write the configuration before sampling, and delete the results of an earlier scoring.

        Args:
            config: has at least the keys of CONFIG_SHAPE.

        Raises:
            OSError: the configuration cannot be read or written.
            ValueError: the folder has completions, and their settings are not known, or differ from those of `config`.
                The message names each difference. Models, benchmarks and versions are among the settings.
        """
        # A folder with a number is a finished chunk; see UNFINISHED.
        has_completions = any(self.path.glob("*/*/completions/seed-*/[0-9]*"))
        if has_completions:
            if not self.config_path.exists():
                raise ValueError(
                    f"{self.path} contains completions, but not the settings of their sampling (config.json). "
                    "Choose another folder with --out"
                )
            recorded = _settings_of_completions(self.read_config())
            wanted = _settings_of_completions(config)
            differences = []
            for key, value in wanted.items():
                recorded_value = recorded.get(key)
                if recorded_value != value:
                    differences.append(f"{key} was {recorded_value!r} and is now {value!r}")
            if differences:
                raise ValueError(
                    f"{self.path} contains completions of another evaluation ({'; '.join(differences)}). "
                    "Choose another folder with --out"
                )
        self.write_config(config)

    def write_config(self, config: dict[str, Any]) -> None:
        """Write a configuration. Delete the results, because they belong to an earlier configuration."""
        self.results_path.unlink(missing_ok=True)
        write_json(self.config_path, config)

    def read_config(self) -> dict[str, Any]:
        """Read the configuration of the evaluation.

        Raises:
            FileNotFoundError: there is no configuration.
            ValueError: the file is damaged.
        """
        if not self.config_path.exists():
            raise FileNotFoundError(
                f"{self.path}: contains no evaluation (config.json); make one with `clipx papers eval run`"
            )
        return read_json_object(self.config_path, CONFIG_SHAPE)

    def read_results(self) -> dict[str, Any]:
        """Read the results.

        An interrupted scoring leaves no results, because the files of scores may come from different rewards then.

        Raises:
            FileNotFoundError: there are no results.
            ValueError: the file is damaged.
        """
        if not self.results_path.exists():
            raise FileNotFoundError(f"{self.path}: not scored yet; run `clipx papers eval score` on it")
        return read_json_object(self.results_path, RESULTS_SHAPE)


def _settings_of_completions(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that determine the completions of a seed.

    The seeds are left out, because a later command may add some. The settings of the scoring are left out, too.

    Args:
        config: has at least the keys of CONFIG_SHAPE.
    """
    sampling = config["sampling"]
    models = {}
    for label, checkpoint in config["checkpoints"].items():
        # A model samples otherwise if its weights are loaded otherwise.
        models[label] = [checkpoint["fingerprint"], checkpoint.get("loaded")]
    hashes = {name: benchmark["sha256"] for name, benchmark in config["benchmarks"].items()}
    # Another number of nodes or GPUs may continue an evaluation, unless it changes how a checkpoint is loaded.
    overrides = [override for override in config.get("overrides", []) if not override.startswith("trainer.")]
    return {
        **sampling,
        "seeds": None,
        "samples": sampling["samples"] // len(sampling["seeds"]),
        "model": models,
        "benchmark": hashes,
        "overrides": overrides,
        "versions": {package: config["versions"].get(package) for package in PACKAGES},
    }


def read_responses(
    folder: Path, samples: int, questions: Collection[int] | None = None, files: str = "[0-9]*/*.jsonl"
) -> pandas.DataFrame:
    """Read the responses of a seed's finished chunks, or of a single chunk.

    Args:
        folder: the folder of the seed, or of the chunk.
        samples: the number of samples of each question.
        questions: the rows of the benchmark that must have responses; None for the rows that have any.
        files: the pattern of verl's files in the folder. The default is that of a seed's folder.

    Returns:
        One row for each response, ordered by question and sample. The columns are `question`, the row in the benchmark;
        `sample`, counted from 0 for each question; `seed`; `text`, the response; `length`, its number of tokens; and
        `truncated`, whether it was cut off.

    Raises:
        ValueError: a line cannot be read, or there are not exactly `samples` responses to each question.
    """
    rows = []
    for path in sorted(folder.glob(files)):
        for number, line in enumerate(read_lines(path), 1):
            response = parse_json(line, f"{path}, line {number}")
            check_shape(path, response, RESPONSE_SHAPE)
            rows.append(response)
    table = pandas.DataFrame(rows, columns=list(RESPONSE_SHAPE)).rename(columns=RENAMED_COLUMNS)
    table = table.sort_values(["question", "sample"], ignore_index=True)
    if questions is None:
        questions = set(table["question"])
    questions = sorted(questions)
    present = list(zip(table["question"], table["sample"], strict=True))
    wanted = list(product(questions, range(samples)))
    if present != wanted:
        raise ValueError(
            f"{folder}: {len(table)} responses, not exactly {samples} to each of {len(questions)} questions. "
            "Repeat the same `clipx papers eval run` command to sample what is missing. If it refuses a chunk with too "
            "few or too many responses, remove that chunk's folder first"
        )
    return table


def pending_chunks(folder: Path, question_count: int, samples: int, size: int) -> list[list[int]]:
    """Return the questions that have no responses of a seed yet, in chunks.

    Args:
        folder: the folder of the seed.
        question_count: the number of questions of the benchmark.
        samples: the number of samples of each question.
        size: the largest number of responses of a chunk. A chunk has at least one question, however many samples it
            has.

    Returns:
        For each chunk the rows of its questions, in ascending order.

    Raises:
        ValueError: as for `read_responses`.
    """
    answered = set(read_responses(folder, samples)["question"])
    pending = [question for question in range(question_count) if question not in answered]
    questions_per_chunk = max(1, size // samples)
    return [pending[start : start + questions_per_chunk] for start in range(0, len(pending), questions_per_chunk)]


def read_completions(folders: Sequence[Path], question_count: int, samples: int) -> pandas.DataFrame:
    """Read all responses to a benchmark.

    Args:
        folders: the folder of each seed. The samples of the first seed come first.
        question_count: the number of questions of the benchmark.
        samples: the number of samples of each question and seed.

    Returns:
        ``question_count * samples * len(folders)`` rows with the columns of `read_responses`. The samples of a question
        are counted on from one seed to the next.

    Raises:
        ValueError: as for `read_responses`.
    """
    tables = []
    for place, folder in enumerate(folders):
        table = read_responses(folder, samples, range(question_count))
        tables.append(table.assign(sample=table["sample"] + place * samples))
    return pandas.concat(tables).sort_values(["question", "sample"], ignore_index=True)
