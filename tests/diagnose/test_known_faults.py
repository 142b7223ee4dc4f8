"""What docs/dev/diagnosis_evidence.md and base_rates.json say of the committed logs, whose faults are those that
benchmarks/known_faults.py declares. Not covered: making the runs, which takes half an hour.
"""

import json
import sys
from pathlib import Path

import pytest

from verl_clipx.diagnose.base_rates import PATH
from verl_clipx.runs.folder import RunFolder

ROOT = Path(__file__).parents[2]
# Last: a script's neighbours there must not hide the standard library's.
sys.path.append(str(ROOT / "benchmarks"))
import diagnosis as counting  # noqa: E402
import known_faults  # noqa: E402


@pytest.mark.slow
def test_the_page_and_the_base_rates_are_what_the_logs_say():
    page = (ROOT / "docs/dev/diagnosis_evidence.md").read_text()
    for name, table in counting.tables().items():
        assert f"{counting.BEGIN.format(name)}{table}{counting.END.format(name)}" in page
    assert json.loads(PATH.read_text()) == counting.base_rates(counting.healthy_runs())


def test_the_logs_have_the_faults_that_were_declared():
    records = [RunFolder(path).record for path in sorted(counting.FAULTS.glob("*.jsonl.gz"))]
    assert {record["name"] for record in records} == {*known_faults.SETTINGS}
    for record in records:
        setting = known_faults.SETTINGS[record["name"]]
        assert record["expected"] == list(setting.expected) and record["also"] == list(setting.also)
        assert record["since"] == known_faults.step_of(record["name"], record["seed"])
        assert record["overrides"] == list(setting.overrides)
