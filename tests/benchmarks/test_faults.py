"""The settings of benchmarks/known_faults.yaml are within the ranges of their methods, and what they name exists. Not
covered: the runs, whose kept logs tests/analysis/diagnose reads.
"""

import pytest
from known_faults import ACTS, DECLARED, settings_of

from tests.claims.configuration import parse
from verl_clipx.analysis.certify.questions import QUESTIONS
from verl_clipx.analysis.diagnose.rules import RULES
from verl_clipx.papers.tables.presets import values_of
from verl_clipx.run.config import build


@pytest.mark.parametrize("group", ["faults", "validated", "certified"])
def test_no_setting_is_refused(group):
    for setting in settings_of(group).values():
        method = values_of(f"reversal/{setting.preset}").clipx.method
        parameters = {}
        for key, value in parse(*setting.overrides).items():
            if key.startswith("clipx."):
                parameters[key.removeprefix("clipx.")] = value
        build(method, **parameters)


def test_the_acts_and_rules_that_settings_name_exist():
    settings = settings_of("faults", "validated", "samplers", "certified").values()
    assert {setting.act for setting in settings if setting.act} == {*ACTS}
    rules = {rule.name for rule in RULES}
    for setting in settings:
        assert {*setting.expected, *setting.also} <= rules


def test_the_questions_and_arms_that_certified_pairs_name_exist():
    certified = DECLARED["certified"]
    questions = {*certified["of_updates"]}
    arms = {*certified["healthy"]}
    for first_arm, second_arm, question in certified["pairs"].values():
        questions.add(question)
        arms |= {first_arm, second_arm}
    assert questions <= {*QUESTIONS}
    assert arms == {*certified["settings"]}
