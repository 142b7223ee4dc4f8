"""Each number that `clipx diagnose` prints with a metric stands in the log: in the committed logs, healthy and faulty
ones, read here by json. Not covered: at which step a rule is met (tests/analysis/diagnose/test_rules.py), means and
counts in a sentence, what the advice is worth.
"""

import csv
import gzip
import json
import math
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.analysis.runs.example_runs import write_log
from verl_clipx.analysis.demo.files import SHIPPED
from verl_clipx.cli import app

RESULTS = Path(__file__).parents[3] / "docs" / "results"
COLUMNS = {
    "reward": "critic/score/mean",
    "entropy": "actor/entropy",
    "kl": "actor/ppo_kl",
    "clip_fraction_low": "actor/clipx/clip_fraction_low",
    "clip_fraction_high": "actor/clipx/clip_fraction_high",
    "grad_norm": "actor/grad_norm",
    "response_length": "response_length/mean",
}
NUMBER = r"(-?\d+(?:\.\d+)?(?:e[-+]\d+)?)"
KEY = r"([\w-]+(?:/[\w@-]+)+)"
FINDING = re.compile(r"\S+: .+? from step \d+ on\. .+")
# A metric with its value, unless that is a mean over steps, and with its highest value.
VALUES = re.compile(rf"{KEY} (?:\S+ on average over \d+ steps|{NUMBER}(?!\S*\d))(?:, at most {NUMBER})?")


def print_diagnosis(path: Path) -> list[str]:
    """Return the lines that the command prints of a log."""
    runner = CliRunner(env={"COLUMNS": "10000"})
    result = runner.invoke(app, ["diagnose", "--verbose", str(path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def read_values(path: Path) -> dict[str, set[float]]:
    """Return a log's finite numbers by metric."""
    open_log = gzip.open if path.suffix == ".gz" else open
    with open_log(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    values: dict[str, set[float]] = {}
    for row in rows:
        for key, value in row.get("data", {}).items():
            if value is not None and math.isfinite(value):
                values.setdefault(key, set()).add(float(value))
    # verl has called it both.
    values.setdefault("actor/entropy", values.get("actor/entropy_loss", set()))
    return values


def list_committed_logs(folder: Path) -> list[Path]:
    """Return the logs of docs/results and of the demo; those of the table of cpu_small are written into the folder."""
    by_run: dict[str, list[dict]] = {}
    with (RESULTS / "cpu_small_steps.csv").open() as file:
        for row in csv.DictReader(file):
            numbers = {COLUMNS[key]: float(value) for key, value in row.items() if key in COLUMNS}
            by_run.setdefault(f"{row['preset']}-seed{row['seed']}", []).append(numbers)
    logs = [write_log(folder / f"{name}.jsonl", rows) for name, rows in by_run.items()]
    # With planted faults.
    logs += (RESULTS / "runs/faults").glob("*.jsonl.gz")
    logs += (RESULTS / "runs/validated").glob("*.jsonl.gz")
    # Healthy ones.
    logs += (RESULTS / "runs/reversal").glob("dppo_*.jsonl.gz")
    logs += (RESULTS / "runs/reversal").glob("grpo_*.jsonl.gz")
    logs += SHIPPED.glob("*-seed1/metrics.jsonl")
    return logs


def is_printed_as(number: str, value: float) -> bool:
    """Return whether a printed number is a value rounded to as many digits as it has, which are three at least."""
    digits = max(3, len(re.sub(r"e.*|\D", "", number).lstrip("0")))
    return math.isclose(float(number), value, rel_tol=0.6 * 10.0 ** (1 - digits), abs_tol=1e-6 * (number == "0"))


@pytest.mark.slow
def test_each_value_of_a_metric_in_a_sentence_stands_in_the_log(tmp_path):
    checked_keys = set()
    for path in list_committed_logs(tmp_path):
        values = read_values(path)
        for line in filter(FINDING.fullmatch, print_diagnosis(path)):
            for key, *numbers in VALUES.findall(line):
                checked_keys.add(key)
                for number in filter(None, numbers):
                    stands = any(is_printed_as(number, value) for value in values[key])
                    assert stands, f"{path.name}: {number} in {line}"
    # So that a form that is no longer printed does not look checked.
    assert {"actor/entropy", "actor/grad_norm", "critic/score/mean"} <= checked_keys, checked_keys
