"""Numbers in the sentences that `clipx diagnose` prints of the committed logs, healthy and faulty ones, against the
logs, read here by json. Not covered: at which step a rule is met (tests/analysis/diagnose/test_rules.py), means and
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


def said_of(path: Path) -> list[str]:
    done = CliRunner(env={"COLUMNS": "10000"}).invoke(app, ["diagnose", "--verbose", str(path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


def values_in(path: Path) -> dict[str, set[float]]:
    """A log's finite numbers by metric."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    values: dict[str, set[float]] = {}
    for row in rows:
        for key, value in row.get("data", {}).items():
            if value is not None and math.isfinite(value):
                values.setdefault(key, set()).add(float(value))
    # verl has called it both.
    values.setdefault("actor/entropy", values.get("actor/entropy_loss", set()))
    return values


def committed_logs(folder: Path) -> list[Path]:
    """The logs of docs/results and of the demo; the table of cpu_small is written into logs in the folder."""
    by_run: dict[str, list[dict]] = {}
    with (RESULTS / "cpu_small_steps.csv").open() as file:
        for row in csv.DictReader(file):
            numbers = {COLUMNS[key]: float(value) for key, value in row.items() if key in COLUMNS}
            by_run.setdefault(f"{row['preset']}-seed{row['seed']}", []).append(numbers)
    of_table = [write_log(folder / f"{name}.jsonl", rows) for name, rows in by_run.items()]
    faulty = [path for name in ("faults", "validated") for path in (RESULTS / "runs" / name).glob("*.jsonl.gz")]
    healthy = [path for name in ("dppo", "grpo") for path in (RESULTS / "runs/reversal").glob(f"{name}_*.jsonl.gz")]
    return [*of_table, *faulty, *healthy, *SHIPPED.glob("*-seed1/metrics.jsonl")]


def is_printed_as(number: str, value: float) -> bool:
    """Whether a number is what was printed of a value, in as many digits as it has, which are three at least."""
    digits = max(3, len(re.sub(r"e.*|\D", "", number).lstrip("0")))
    return math.isclose(float(number), value, rel_tol=0.6 * 10.0 ** (1 - digits), abs_tol=1e-6 * (number == "0"))


@pytest.mark.slow
def test_each_value_of_a_metric_in_a_sentence_stands_in_the_log(tmp_path):
    named = set()
    for path in committed_logs(tmp_path):
        values = values_in(path)
        for line in filter(FINDING.fullmatch, said_of(path)):
            for key, *numbers in VALUES.findall(line):
                named.add(key)
                for number in filter(None, numbers):
                    stands = any(is_printed_as(number, value) for value in values[key])
                    assert stands, f"{path.name}: {number} in {line}"
    # So that a form that is no longer printed does not look checked.
    assert {"actor/entropy", "actor/grad_norm", "critic/score/mean"} <= named, named
