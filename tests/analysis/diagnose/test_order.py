"""The order in which findings are said: facts, trends, remarks, and first what makes the advice of others void. Not
covered: what is found (test_rules.py).
"""

import pandas

from tests.analysis.diagnose.test_findings import setting
from tests.analysis.runs.commands import answer
from tests.analysis.runs.example_runs import write_log
from verl_clipx.analysis.diagnose.diagnosis import diagnose
from verl_clipx.analysis.diagnose.findings import find_alarms
from verl_clipx.analysis.diagnose.rules import HELD_OUT_FALLS, RULES
from verl_clipx.analysis.report.title import choose_gravest
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.run import Run
from verl_clipx.analysis.runs.settings import Setting

VALIDATION = "val-core/math/acc/mean@8"
STEPS = range(1, 41)
# The reward rises from step 25 on and the held-out score falls; the entropy collapsed at step 10, and of one step the
# gradient was not finite.
LYING = {
    keys.REWARD: [0.3 if step < 25 else 0.9 for step in STEPS],
    VALIDATION: [0.6 if step < 25 else 0.3 for step in STEPS],
    keys.ENTROPY: [1.0 if step < 10 else 0.01 for step in STEPS],
    keys.SKIPPED_UPDATES: [1.0 if step == 30 else 0.0 for step in STEPS],
    keys.MISMATCH: [0.05 for step in STEPS],
}


def run_of(columns, configuration=None) -> Run:
    return Run("run", pandas.DataFrame(columns, index=STEPS), configuration or {})


def names_of(run: Run) -> list[str]:
    return [diagnosis.rule.name for diagnosis in diagnose(run)]


def test_a_reward_that_lies_stands_before_advice_on_the_entropy(tmp_path):
    order = ["skipped updates", HELD_OUT_FALLS, "entropy collapse", "mismatch of rollout and training"]
    assert names_of(run_of(LYING)) == order
    write_log(tmp_path / "run/metrics.jsonl", run_of(LYING).log.to_dict("records"))
    assert [finding["finding"] for finding in answer("diagnose", tmp_path / "run")["findings"]] == order
    # A page, where runs with one finding share it.
    two = Setting("M", [run_of(LYING), run_of(LYING)])
    heads = [finding.head for finding in find_alarms([two]) if "runs: " in finding.head]
    assert [head.partition("runs: ")[2].rstrip(".") for head in heads] == order
    assert find_alarms([setting("M", [0.1, 0.2])]) == []


def test_without_it_facts_come_before_trends_and_these_before_remarks():
    honest = {key: values for key, values in LYING.items() if key != VALIDATION}
    assert names_of(run_of(honest)) == ["skipped updates", "entropy collapse", "mismatch of rollout and training"]


def test_within_a_kind_the_earliest_comes_first_unless_another_makes_its_advice_void():
    alike = {keys.ALIKE: [0.95 if step < 20 else 1.0 for step in STEPS]}
    explodes = {keys.GRADIENT_NORM: [0.3 if step < 15 else 90.0 for step in STEPS]}
    few = "few prompts teach, because samples score alike"
    assert names_of(run_of(alike | explodes)) == ["no learning signal", few, "gradient explosion"]
    # Truncated sampling begins with the run, and is why the engines differ.
    top_p = {"actor_rollout_ref.rollout.top_p": 0.9}
    mismatch = ["truncated sampling", "mismatch of rollout and training"]
    assert names_of(run_of({keys.MISMATCH: LYING[keys.MISMATCH]}, top_p)) == mismatch


def test_collapsed_seeds_come_before_remarks_and_are_the_title():
    collapsed = {keys.REWARD: [0.4 if step < 25 else 0.0 for step in STEPS], keys.MISMATCH: LYING[keys.MISMATCH]}
    found = find_alarms([Setting("M", [run_of(collapsed) for _ in range(3)])])
    assert [alarm.rule for alarm in found] == ["reward collapse", "mismatch of rollout and training"]
    gravest = choose_gravest(found, clipping_is_known=True)
    assert gravest.head == "3 of 3 seeds of M collapsed."


def test_what_a_rule_makes_void_are_rules_and_no_two_make_each_other_void():
    voids = {rule.name: rule.voids for rule in RULES}
    for name, others in voids.items():
        for other in others:
            assert name not in voids[other]
