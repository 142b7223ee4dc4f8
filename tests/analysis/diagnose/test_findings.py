"""The sentences of a page on collapses and rewards: each stands where it is true of a made-up log, and nowhere else.
Their numbers are computed by hand. Not covered: real runs.
"""

import pytest

from tests.analysis.diagnose.example_settings import collect_findings, make_setting, make_validated_setting
from tests.analysis.runs.example_runs import write_log
from tests.messages import assert_names
from verl_clipx.analysis.diagnose.findings import compare_collapses, compare_rewards
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.analysis.runs.settings import settings_of

INTERVAL_OF_95 = "95\u202f%"
# Training rewards, one for each of seven steps.
COLLAPSED_AT_5 = [0.4, 0.4, 0.4, 0.4, 0.0, 0.0, 0.0]
NOT_COLLAPSED = [0.4, 0.41, 0.4, 0.41, 0.4, 0.41, 0.4]


@pytest.mark.parametrize(
    ("solved_after", "head"),
    [(9, "The held-out reward rose."), (2, "The held-out reward did not clearly change.")],
)
def test_a_run_alone_is_compared_with_its_start(tmp_path, solved_after, head):
    # Of ten problems one is solved before training.
    before = [(0.0,)] * 9 + [(1.0,)]
    after = [(1.0,)] * solved_after + [(0.0,)] * (10 - solved_after)
    setting = make_validated_setting(tmp_path, "A", {0: before, 5: after})
    assert compare_rewards([setting])[0].head == head


def test_a_run_alone_without_validations_is_compared_with_nothing():
    assert compare_rewards([make_setting("M", [0.1, 0.2])]) == []


def test_equal_training_rewards_are_called_equal():
    (finding,) = compare_rewards([make_setting(label, [0.1, 0.3, 0.5]) for label in "AB"])
    assert_names(finding.head, "training rewards", "A and B", "equal")
    assert_names(finding.text, "All of them", "over 3 steps")


def test_two_runs_are_compared_by_their_common_held_out_problems(tmp_path):
    unsolved = [(0,), (0,), (0,)]
    first = make_validated_setting(tmp_path, "A", {0: unsolved, 4: [(0, 1), (0, 0), (1, 1)]})
    second = make_validated_setting(tmp_path, "B", {0: unsolved, 4: [(1, 1), (0, 1), (1, 1)], 6: unsolved})
    # The last step that both validated. The differences of its problems are 0.5, 0.5 and 0: their mean is 1/3, their
    # standard error 1/6, and t(0.975, 2) is 4.302653.
    (finding,) = compare_rewards([first, second])
    assert_names(finding.head, "held-out reward", "0.500 in A", "0.833 in B")
    assert_names(finding.text, "3 problems", "step 4", f"{INTERVAL_OF_95} interval −0.384 to 1.050 over problems")
    assert_names(finding.text, "the latter minus the former: +0.333", "only of these runs")


def test_settings_of_three_seeds_are_compared_over_seeds_and_problems(tmp_path):
    # The means of the seeds are 0.5, 0.625 and 0.375, then 0.75, 0.875 and 1.
    scores_of_a = ((1, 0, 1, 0), (1, 0, 1, 0.5), (1, 0, 0.5, 0))
    scores_of_b = ((1, 1, 1, 0), (1, 1, 1, 0.5), (1, 1, 1, 1))
    settings = []
    for label, scores_of_runs in (("A", scores_of_a), ("B", scores_of_b)):
        validations = [{4: [(score,) for score in scores]} for scores in scores_of_runs]
        settings.append(make_validated_setting(tmp_path, label, *validations))
    (finding,) = compare_rewards(settings)
    assert_names(finding.text, "0.500 with A", "0.875 with B", "B minus A: +0.375")
    assert_names(finding.text, "seeds and problems", "3 and 3 seeds")


@pytest.mark.parametrize(
    "validations_of_b",
    [{0: [(0,), (1,)]}, {4: [(0,), (1,), (1,)]}, {5: [(0,), (1,)]}, {}],
    ids=["only before training", "other problems", "another step", "none"],
)
def test_what_was_not_validated_alike_is_not_compared(tmp_path, validations_of_b):
    first = make_validated_setting(tmp_path, "A", {0: [(0,), (1,)], 4: [(0,), (1,)]})
    second = make_validated_setting(tmp_path, "B", validations_of_b)
    assert compare_rewards([first, second]) == []


def test_collapsed_seeds_are_counted_with_an_exact_interval():
    settings = [make_setting("A", *[NOT_COLLAPSED] * 4), make_setting("B", *[COLLAPSED_AT_5] * 4)]
    finding = compare_collapses(settings)
    assert finding.head == "4 of 4 seeds of B collapsed."
    assert_names(finding.text, "A: 0 of 4", f"exact {INTERVAL_OF_95} interval 0.00\u202f% to 60.2\u202f%")
    assert_names(finding.text, "B: 4 of 4", "from step 5, 5, 5, 5 on", "Go back to a checkpoint")
    # Boschloo's p is 2 / 256.
    assert_names(finding.text, "B against A: p 0.008")
    assert_names(finding.text, "3 seeds", "true difference", "about 64 %")


def test_a_collapse_that_is_counted_by_seeds_is_not_said_again_in_each_run_s_diagnosis():
    settings = [make_setting("A", *[NOT_COLLAPSED] * 4), make_setting("B", *[COLLAPSED_AT_5] * 4)]
    heads = [finding.head for finding in collect_findings(settings) if "collapse" in finding.head]
    assert heads == ["4 of 4 seeds of B collapsed."]


def test_a_seed_collapsed_if_one_of_its_runs_did():
    setting = make_setting("A", NOT_COLLAPSED, COLLAPSED_AT_5, NOT_COLLAPSED, NOT_COLLAPSED, seeds=(1, 1, 2, 3))
    assert compare_collapses([setting]).head == "1 of 3 seeds of A collapsed."


def test_that_no_seed_collapsed_is_said_where_two_settings_have_three_seeds():
    settings = [make_setting(label, *[NOT_COLLAPSED] * 3) for label in "AB"]
    finding = compare_collapses(settings)
    assert finding.head == "No seed collapsed."
    assert finding.text.count("0 of 3") == 2
    assert_names(finding.text, "B against A: p 1.000")
    on_page = [(finding.head, finding.text) for finding in collect_findings(settings)]
    assert (finding.head, finding.text) in on_page


def test_that_no_seed_collapsed_is_not_said_of_one_setting_or_fewer_seeds():
    setting = make_setting("A", *[NOT_COLLAPSED] * 3)
    assert compare_collapses([setting]) is None
    assert compare_collapses([setting, make_setting("B", NOT_COLLAPSED)]) is None


def test_below_three_seeds_only_the_diagnosis_says_that_a_run_collapsed():
    settings = [make_setting("A", COLLAPSED_AT_5, NOT_COLLAPSED), make_setting("B", NOT_COLLAPSED)]
    assert compare_collapses(settings) is None
    heads = [finding.head for finding in collect_findings(settings)]
    assert sum("collapse" in head for head in heads) == 1


def test_what_several_runs_are_diagnosed_with_is_said_once(tmp_path):
    for name, cut in (("a-seed1", 0.25), ("a-seed2", 0.5), ("b", 0.0)):
        step = {"actor/pg_loss": 0.1, "health/cut_responses": cut, "health/alike_prompts": 0.0}
        write_log(tmp_path / name / "metrics.jsonl", [step] * 8)
    runs = [read_run(tmp_path / name) for name in ("a-seed1", "a-seed2", "b")]
    findings = collect_findings(settings_of(runs))
    (finding,) = [finding for finding in findings if "responses cut at the limit" in finding.head]
    assert finding.head == "2 of 3 runs: responses cut at the limit."
    assert_names(finding.text, "a-seed1 from step 1 on: health/cut_responses 0.25")
    assert_names(finding.text, "a-seed2 from step 1 on: health/cut_responses 0.5")
    assert finding.text.count("See docs/") == 1
