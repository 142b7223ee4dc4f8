"""What docs/dev/diagnosis_evidence.md says of logs, and the base rates beside the shares of the page.

Covers: the page's tables and base_rates.json are what the committed logs say; the logs' faults are those that
benchmarks/known_faults.py declares; each share of health, clipping and diagnosis has its base rate beside it. Not
covered: making the runs, which takes half an hour.
"""

import json
import sys
from pathlib import Path

import pytest

from tests.diagnose.test_findings import of
from verl_clipx.diagnose.base_rates import PATH
from verl_clipx.diagnose.findings import findings
from verl_clipx.diagnose.rules import diagnose
from verl_clipx.runs import keys
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


# Of each share something, so that none is said to be absent.
SHARES = {
    keys.CLIPPED_LOW: [0.01] * 6,
    keys.CLIPPED_HIGH: [0.02] * 6,
    keys.ALIKE: [0.95] * 6,
    keys.CUT: [0.5] * 6,
    keys.UNDECIDED: [0.1] * 6,
    **{key: [0.1] * 6 for key in keys.MASS.values()},
}


def test_each_share_of_the_page_has_its_base_rate_beside_it():
    run = of(SHARES).runs[0]
    diagnosed = {one.rule.name: one.text for one in diagnose(run) if keys.HEALTH_SHARES.keys() & set(one.rule.reads)}
    assert len(diagnosed) == 3 and all("(usual: " in text for text in diagnosed.values())
    assert "usual: unknown, no healthy log here has it" in diagnosed["answers without a verdict"]
    (clipped,) = (one.text for one in findings([of(SHARES)]) if "kept a gradient" in one.head)
    rates = json.loads(PATH.read_text())
    assert clipped.count("(usual: ") == 4 and f"{rates['clipped on either side']['logs']} healthy logs" in clipped
