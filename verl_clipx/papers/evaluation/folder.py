"""The layout of an evaluation's folder, and the check that a resumed evaluation samples the same thing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_clipx.common.files import read_json_object, write_json

# The parts of a configuration and of results that are read again.
CONFIG = {
    "model": str,
    "protocol": str,
    "checkpoints": {str: {"step": int | None, "fingerprint": str}},
    "benchmarks": {str: {"path": str, "sha256": str, "questions": int}},
    "sampling": {"samples": int, "seeds": [int], **dict.fromkeys(("max_tokens", "temperature", "top_p"), int | float)},
    "reward": str,
    "correct": str | None,
    "correct_from": int | float,
    "versions": dict,
}
NUMBER = {"mean": int | float, "low": int | float | None, "high": int | float | None}
RESULTS = {"config": CONFIG, "benchmarks": {str: {"result": {str: NUMBER}, "values": {str: [int | float]}}}}


@dataclass(frozen=True)
class EvaluationFolder:
    """The files of one evaluation."""

    path: Path

    @property
    def config(self) -> Path:
        """What was evaluated and how, as JSON."""
        return self.path / "config.json"

    @property
    def results(self) -> Path:
        """The estimates, as JSON."""
        return self.path / "results.json"

    def completions(self, checkpoint: str, benchmark: str) -> Path:
        """What verl wrote of a checkpoint's completions on a benchmark: `seed-<N>/<first question>` below it."""
        return self.path / checkpoint / benchmark / "completions"

    def scores(self, checkpoint: str, benchmark: str) -> Path:
        """Scores of these completions."""
        return self.path / checkpoint / benchmark / "scores.parquet"

    def origin(self, checkpoint: str, benchmark: str) -> Path:
        """What the completions depend on, as JSON."""
        return self.path / checkpoint / benchmark / "origin.json"

    def read_config(self) -> dict[str, Any]:
        """The configuration of the evaluation."""
        if not self.config.exists():
            raise FileNotFoundError(
                f"{self.path}: contains no evaluation (config.json); make one with `clipx eval run`"
            )
        return read_json_object(self.config, CONFIG)

    def read_results(self) -> dict[str, Any]:
        """The results. Without them, the scores may come from two rewards, because scoring was interrupted."""
        if not self.results.exists():
            raise FileNotFoundError(f"{self.path}: not scored yet; run `clipx eval score` on it")
        return read_json_object(self.results, RESULTS)


def claim(path: Path, origin: dict[str, Any]) -> None:
    """Record what completions depend on, or check that it has not changed.

    Raises:
        ValueError: existing completions depend on something else (the message names each difference), or the file
            cannot be read.
    """
    if not path.exists():
        write_json(path, origin)
        return
    found = read_json_object(path)
    different = [
        f"{key} was {found.get(key)!r} and is now {origin.get(key)!r}"
        for key in sorted(found.keys() | origin.keys())
        if found.get(key) != origin.get(key)
    ]
    if different:
        raise ValueError(
            f"{path.parent} contains completions of another evaluation ({'; '.join(different)}). Set another --out"
        )
