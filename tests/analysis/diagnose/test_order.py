"""The order in which findings are said: facts, trends, remarks, and first what makes the advice of others void. Not
covered: what is found (test_rules.py).
"""

from tests.analysis.diagnose.example_settings import find_rules, make_run, make_setting
from tests.analysis.runs.commands import answer
from tests.analysis.runs.example_runs import write_log
from verl_clipx.analysis.diagnose.findings import find_alarms
from verl_clipx.analysis.diagnose.rules import HELD_OUT_FALLS, RULES
from verl_clipx.analysis.report.title import choose_gravest
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.settings import Setting

VALIDATION = "val-core/math/acc/mean@8"
STEPS = range(1, 41)
# From step 25 on the training reward rises while the held-out score falls. The entropy collapsed at step 10, one update
# was skipped, and the sampler differs from the trainer in all steps.
REWARD_THAT_LIES = {
    keys.REWARD: [0.3 if step < 25 else 0.9 for step in STEPS],
    VALIDATION: [0.6 if step < 25 else 0.3 for step in STEPS],
    keys.ENTROPY: [1.0 if step < 10 else 0.01 for step in STEPS],
    keys.SKIPPED_UPDATES: [1.0 if step == 30 else 0.0 for step in STEPS],
    keys.MISMATCH: [0.05 for _ in STEPS],
}


def test_a_reward_that_lies_stands_before_advice_on_the_entropy(tmp_path):
    order = ["skipped updates", HELD_OUT_FALLS, "entropy collapse", "mismatch of rollout and training"]
    run = make_run(REWARD_THAT_LIES)
    assert find_rules(run) == order
    write_log(tmp_path / "run/metrics.jsonl", run.log.to_dict("records"))
    assert [finding["finding"] for finding in answer("diagnose", tmp_path / "run")["findings"]] == order
    # On a page, runs with the same finding share it.
    setting_of_two = Setting("M", [run, make_run(REWARD_THAT_LIES)])
    heads = [finding.head for finding in find_alarms([setting_of_two])]
    assert [head.partition("2 of 2 runs: ")[2].rstrip(".") for head in heads] == order


def test_a_page_of_sound_runs_has_no_diagnosis():
    assert find_alarms([make_setting("M", [0.1, 0.2])]) == []


def test_facts_come_before_trends_and_these_before_remarks():
    metrics = {metric: values for metric, values in REWARD_THAT_LIES.items() if metric != VALIDATION}
    assert find_rules(make_run(metrics)) == ["skipped updates", "entropy collapse", "mismatch of rollout and training"]


def test_within_a_kind_the_earliest_comes_first_unless_another_makes_its_advice_void():
    prompts_alike_from_step_1 = {keys.ALIKE: [0.95 if step < 20 else 1.0 for step in STEPS]}
    gradient_explodes_at_15 = {keys.GRADIENT_NORM: [0.3 if step < 15 else 90.0 for step in STEPS]}
    rules = find_rules(make_run(prompts_alike_from_step_1 | gradient_explodes_at_15))
    assert rules == ["no learning signal", "few prompts teach, because samples score alike", "gradient explosion"]


def test_truncated_sampling_comes_before_the_mismatch_that_it_explains():
    top_p = {"actor_rollout_ref.rollout.top_p": 0.9}
    run = make_run({keys.MISMATCH: REWARD_THAT_LIES[keys.MISMATCH]}, top_p)
    assert find_rules(run) == ["truncated sampling", "mismatch of rollout and training"]


def test_collapsed_seeds_come_before_remarks_and_are_the_title():
    collapse = [0.4 if step < 25 else 0.0 for step in STEPS]
    metrics = {keys.REWARD: collapse, keys.MISMATCH: REWARD_THAT_LIES[keys.MISMATCH]}
    alarms = find_alarms([Setting("M", [make_run(metrics) for _ in range(3)])])
    assert [alarm.rule for alarm in alarms] == ["reward collapse", "mismatch of rollout and training"]
    gravest = choose_gravest(alarms, clipping_is_known=True)
    assert gravest.head == "3 of 3 seeds of M collapsed."


def test_what_a_rule_makes_void_are_rules_and_no_two_make_each_other_void():
    voids_of_rules = {rule.name: rule.voids for rule in RULES}
    for name, voids in voids_of_rules.items():
        for other in voids:
            assert name not in voids_of_rules[other]
