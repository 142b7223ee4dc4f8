"""The files of an evaluation, and the check that one that is resumed samples the same thing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_clipx.common.files import read_json_object, write_json
from verl_clipx.papers.evaluation.completions import is_chunk
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

    def claim(self, config: dict[str, Any]) -> None:
        """Record a configuration; results of an earlier one do not belong to it, and go.

        Raises:
            ValueError: there are completions that depend on something else; the message names each difference.
        """
        if any(map(is_chunk, self.path.glob("*/*/completions/seed-*/*"))):
            was, now = _origin(self.read_config()), _origin(config)
            different = [f"{key} was {was[key]!r} and is now {now[key]!r}" for key in now if was[key] != now[key]]
            if different:
                raise ValueError(
                    f"{self.path} contains completions of another evaluation ({'; '.join(different)}). "
                    "Set another --out"
                )
        self.results.unlink(missing_ok=True)
        write_json(self.config, config)

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


def _origin(config: dict[str, Any]) -> dict[str, Any]:
    """What completions depend on. Seeds are left out, because more can be added, and so is what scores depend on."""
    sampling, models, benchmarks = config["sampling"], config["checkpoints"], config["benchmarks"]
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
