"""The settings of benchmarks/known_faults.yaml are within the ranges of their methods, and what they name exists. Not
covered: the runs, whose kept logs tests/analysis/diagnose reads.
"""

import pytest
from known_faults import ACTS, DECLARED, settings_of

from tests.claims.configuration import parsed
from verl_clipx.analysis.certify.questions import QUESTIONS
from verl_clipx.analysis.diagnose.rules import RULES
from verl_clipx.papers.tables.presets import values_of
from verl_clipx.run.config import build


@pytest.mark.parametrize("group", ["faults", "validated", "certified"])
def test_no_setting_is_refused(group):
    for setting in settings_of(group).values():
        values = parsed(*setting.overrides)
        method = values_of(f"reversal/{setting.preset}").clipx.method
        build(method, **{key.removeprefix("clipx."): values[key] for key in values if key.startswith("clipx.")})


def test_rules_questions_arms_and_acts_exist():
    declared = settings_of("faults", "validated", "samplers", "certified")
    assert {setting.act for setting in declared.values() if setting.act} == {*ACTS}
    assert {name for setting in declared.values() for name in setting.expected + setting.also} <= {
        rule.name for rule in RULES
    }
    of = DECLARED["certified"]
    assert {*of["of_updates"], *(question for *_, question in of["pairs"].values())} <= {*QUESTIONS}
    assert {*of["healthy"], *(arm for *arms, _ in of["pairs"].values() for arm in arms)} == {*of["settings"]}
