"""Which rules a log meets, and from which step on: made-up logs that meet one rule each, made-up logs that are no
finding, and the committed logs, of which the pages say the same.

The committed logs are runs with declared faults, and the 78 runs of docs/results/cpu_small_steps.csv, of which three
GPPO runs collapsed. The rules as first written found one-sided clipping in a healthy run of Knights and Knaves, and
that rule was lengthened for it; the 63 runs of Countdown changed nothing. Not covered: making the runs with faults,
which takes half an hour; clipping that rounding explains (test_rounding.py); the advice (test_remedies.py); the command
(test_diagnose_command.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diagnosis as counting
import known_faults
import numpy
import pandas
import pytest

from tests.analysis.diagnose.example_settings import (
    ACTOR,
    FLOOR_OF_2_PERCENT,
    FOUR_UPDATES_IN_SYNC,
    ONE_UPDATE,
    ONE_UPDATE_IN_SYNC,
    RECUT_OF_2_PERCENT,
    ROLLOUT,
    collect_findings,
    find_rules,
    make_run,
)
from tests.messages import assert_names
from verl_clipx.analysis.diagnose.diagnosis import diagnose, keys_missing_by_rule
from verl_clipx.analysis.diagnose.rule import Kind
from verl_clipx.analysis.diagnose.rules import CUT_AT_LIMIT, HELD_OUT_FALLS, REWARD_COLLAPSE, RULES
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.folder import RunFolder
from verl_clipx.analysis.runs.held_out import HeldOutReward
from verl_clipx.analysis.runs.run import Run
from verl_clipx.analysis.runs.run_log import not_finite_in
from verl_clipx.analysis.runs.settings import settings_of
from verl_clipx.common.statistics.estimate import Estimate

DOCS = Path(__file__).parents[3] / "docs"

STEPS = 20
# The step from which on the changing metrics of a pathology have their later value.
ONSET = 9
NAN = float("nan")
VALIDATION = "val-core/math/acc/mean@8"
BAPO_PARAMETERS = {"clipx.target": 0.4, "clipx.upper_stop": 3.0, "clipx.upper_step": 0.05}

# A metric's value, or what gives it for a step; None where the metric is not logged.
Value = float | Callable[[int], float] | None


@dataclass(frozen=True, kw_only=True)
class Pathology:
    """A made-up log that meets one rule.

    Args:
        rule: the name of the rule.
        shown_by: what sets the log apart from others that meet the same rule.
        steady: from a metric to its value in each step.
        changing: from a metric to its value before step ONSET, and to its value from then on.
        answer_lengths: the same for the mean characters of an answer in a validation; None for a run without any.
        configuration: the run's, from a dotted key to a value.
        onset: the step that the rule finds.
        evidence: what the finding must name. It is given where no committed log meets the rule, so that
            test_sentences.py checks no such sentence.
    """

    rule: str
    shown_by: str = ""
    steady: Mapping[str, Value] = field(default_factory=dict)
    changing: Mapping[str, tuple[Value, Value]] = field(default_factory=dict)
    answer_lengths: tuple[float, float] | None = None
    configuration: Mapping[str, Any] = field(default_factory=dict)
    onset: int = ONSET
    evidence: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The rule, and what sets the log apart."""
        if self.shown_by:
            return f"{self.rule}, by {self.shown_by}"
        return self.rule

    def make_run(self) -> Run:
        """Return the run that has the log, with a validation in every fourth step if it has any."""
        rows = {step: self.row_of(step) for step in range(1, STEPS + 1)}
        held_out = []
        if self.answer_lengths is not None:
            for step in range(1, STEPS + 1, 4):
                length = value_at(step, *self.answer_lengths)
                held_out.append(HeldOutReward(step, Estimate(0.5), {"a": 0.5}, length=length))
        log = pandas.DataFrame.from_dict(rows, orient="index", dtype=float)
        return Run("made-up", log, self.configuration, held_out=held_out, not_finite=not_finite_in(rows))

    def row_of(self, step: int) -> dict[str, float]:
        """Return what the log has of a step."""
        values = {metric: value_at(step, value, value) for metric, value in self.steady.items()}
        for metric, (before, since) in self.changing.items():
            values[metric] = value_at(step, before, since)
        return {metric: value for metric, value in values.items() if value is not None}


def value_at(step: int, before: Value, since: Value) -> float | None:
    """Return the value in a step of what changes at ONSET."""
    value = since if step >= ONSET else before
    return value(step) if callable(value) else value


PATHOLOGIES = [
    Pathology(rule="entropy collapse", changing={keys.ENTROPY: (1.0, 0.01)}),
    Pathology(
        rule="entropy explosion",
        changing={keys.ENTROPY: (0.3, 13.0)},
        evidence=("actor/entropy 13", "0.3 in its first step"),
    ),
    Pathology(
        rule="no learning signal",
        changing={"critic/advantages/min": (-0.9, 0.0), "critic/advantages/max": (1.5, 0.0)},
    ),
    Pathology(
        rule="few prompts teach, because samples score alike",
        changing={keys.ALIKE: (0.3, 0.95)},
        evidence=("health/alike_prompts 0.95", "at most 0.95"),
    ),
    Pathology(
        rule="one-sided clipping",
        changing={keys.CLIPPED_LOW: (0.02, 0.04), keys.CLIPPED_HIGH: (0.02, 0.0)},
    ),
    Pathology(
        rule="bounds idle: one update a rollout batch",
        steady={keys.RATIO: 1.0, keys.KL: 0.0},
        configuration=ONE_UPDATE,
        onset=1,
    ),
    # Without a configuration a gradient shows that there is something to move.
    Pathology(
        rule="bounds idle: one update a rollout batch",
        shown_by="the gradient",
        steady={keys.RATIO: 1.0, keys.KL: 0.0},
        changing={keys.GRADIENT_NORM: (0.2, 0.3)},
        onset=1,
    ),
    # In half precision, where the log says that rounding alone moved the ratio: it clips as much as the floor.
    Pathology(
        rule="bounds idle: one update a rollout batch",
        shown_by="its floor",
        steady={keys.RATIO: 1.0002, keys.KL: 3e-5}
        | FLOOR_OF_2_PERCENT
        | {keys.CLIPPED_LOW: 0.01, keys.CLIPPED_HIGH: 0.01},
        configuration=ONE_UPDATE_IN_SYNC,
        onset=1,
    ),
    # First updates clip 2 % in every step; all four together do from the onset on.
    Pathology(
        rule="clipping can't be told from rounding",
        steady=FLOOR_OF_2_PERCENT,
        changing={keys.CLIPPED_LOW: (0.05, 0.01), keys.CLIPPED_HIGH: (0.05, 0.01)},
        configuration=FOUR_UPDATES_IN_SYNC,
    ),
    Pathology(
        rule="clipping can't be told from rounding",
        shown_by="its second measurement",
        steady=RECUT_OF_2_PERCENT,
        changing={keys.CLIPPED_LOW: (0.05, 0.0075), keys.CLIPPED_HIGH: (0.05, 0.0075)},
        configuration=FOUR_UPDATES_IN_SYNC,
    ),
    Pathology(
        rule="bounds idle: the search never started",
        steady={keys.BOUND_LOW: 0.6, keys.BOUND_HIGH: 1.2},
        changing={keys.SHARE_BEFORE: (0.5, 0.6), keys.SHARE_AFTER: (0.5, 0.6)},
        configuration=BAPO_PARAMETERS,
        onset=1,
    ),
    Pathology(
        rule="bounds idle: too few tokens a bin",
        changing={f"actor/clipx/count/bin_{index}": (100.0, 5.0) for index in range(3)},
        configuration={"clipx.alpha": 3.0},
    ),
    Pathology(
        rule="bounds saturated",
        changing={keys.BOUND_HIGH_LAST: (1.5, 3.0), keys.SHARE_AFTER: (0.41, 0.3)},
        configuration=BAPO_PARAMETERS,
    ),
    Pathology(rule="held target out of reach", changing={keys.HOLD_MISSED: (0.25, 1.0)}),
    Pathology(
        rule="ratio anchored to another policy",
        changing={keys.RATIO: (1.0, 1.05)},
        configuration=ONE_UPDATE,
    ),
    Pathology(
        rule="ratio anchored to another policy",
        shown_by="the KL",
        changing={keys.RATIO: (1.0, 1.001), keys.KL: (1e-6, -0.01)},
        configuration=ONE_UPDATE,
        evidence=("ratio_mean 1.001", "actor/ppo_kl -0.01", "one update a rollout batch"),
    ),
    Pathology(rule="mismatch of rollout and training", changing={keys.MISMATCH: (0.015, 0.05)}),
    # As of another precision: below what the rule on the mismatch alone finds.
    Pathology(rule="sampler jumps away from the trainer", changing={keys.MISMATCH: (0.002, 0.015)}),
    Pathology(
        rule="truncated sampling",
        steady={keys.REWARD: 0.5},
        configuration={f"{ROLLOUT}.top_p": 0.9},
        onset=1,
    ),
    # verl logs the number only where it is above 0.
    Pathology(
        rule="prompts dropped for their age",
        changing={
            keys.EVICTED: (None, 4.0),
            keys.LENGTH: (lambda step: step + 100.5, lambda step: step + 80.5),
        },
        configuration={"data.train_batch_size": 8},
        evidence=(
            "evicted_samples 4 a step",
            "8 trained prompts",
            "23%",
            "response_length/mean 95 in the steps that dropped prompts",
            "105 in the others",
        ),
    ),
    # As of a product over a long answer.
    Pathology(
        rule="importance weights worth few samples",
        changing={keys.WEIGHTS_MEAN: (0.98, 0.06)},
        evidence=("rollout_corr/rollout_is_mean 0.06",),
    ),
    # As of weights that a few answers share.
    Pathology(
        rule="importance weights worth few samples",
        shown_by="their sample size",
        changing={keys.WEIGHTS_MEAN: (0.98, 0.9), keys.WEIGHTS_SAMPLE_SIZE: (0.97, 0.3)},
    ),
    # The policy's answers grow by half, those it is trained on by 2 %.
    Pathology(
        rule="trained answers grow shorter than validation's",
        steady={keys.LENGTH: lambda step: step + 300.5},
        answer_lengths=(1000.0, 1500.0),
        configuration={"trainer.validation_data_dir": "validation"},
        evidence=("response_length/mean 309.5", "302.5 around step 1", "1500 characters", "1000 in step 1"),
    ),
    Pathology(rule="gradient explosion", changing={keys.GRADIENT_NORM: (1.0, 500.0)}),
    Pathology(rule="reward collapse", changing={keys.REWARD: (0.5, 0.0)}),
    Pathology(
        rule="updates taken with a gradient that is not finite",
        changing={keys.SKIPPED_UPDATES: (0.0, 2.0)},
        configuration={f"{ACTOR}.strategy": "megatron"},
        evidence=("24 updates taken since",),
    ),
    # The batch of the step before is served again.
    Pathology(
        rule="one batch trained again and again",
        changing={keys.REWARD: (lambda step: step / 16, 0.5), keys.LENGTH: (lambda step: step + 99.5, 107.5)},
    ),
    Pathology(
        rule="bounds idle while the sampler drifts away",
        steady={keys.PG_CLIPPED: 0.0},
        changing={keys.SAMPLER_KL: (0.001, 0.05)},
    ),
    Pathology(rule="skipped updates", changing={keys.SKIPPED_UPDATES: (0.0, 2.0)}),
    Pathology(rule="responses cut at the limit", changing={keys.CUT: (0.01, 0.5)}),
    Pathology(
        rule="responses cut at the limit",
        shown_by="verl's own share",
        steady={keys.AS_LONG_AS_LONGEST: 0.5},
        changing={keys.LONGEST: (300.0, 512.0)},
        configuration={"data.max_response_length": 512},
        evidence=("response_length/clip_ratio 0.5", "at most 0.5"),
    ),
    # As of a W&B export without a configuration: the longest response is the same in every step.
    Pathology(
        rule="responses cut at the limit",
        shown_by="the longest",
        steady={keys.LONGEST: 8192.0},
        changing={keys.AS_LONG_AS_LONGEST: (0.1, 0.75)},
    ),
    Pathology(rule="answers without a verdict", changing={keys.UNDECIDED: (0.01, 0.2)}),
    Pathology(rule=HELD_OUT_FALLS, changing={VALIDATION: (0.6, 0.3), keys.REWARD: (0.3, 0.6)}),
    Pathology(rule="values that are not finite", changing={"health/not_finite/rewards": (0.0, 3.0)}),
    Pathology(
        rule="values that are not finite",
        shown_by="a term of the loss",
        changing={"actor/kl_loss": (0.1, NAN)},
    ),
    Pathology(
        rule="other logged values that are not finite",
        changing={"training/rollout_probs_diff_max": (0.1, NAN)},
    ),
    Pathology(rule="reward decline", changing={keys.REWARD: (0.6, 0.36)}),
    Pathology(
        rule="reward decline",
        shown_by="its validations too",
        changing={keys.REWARD: (0.6, 0.36), VALIDATION: (0.5, 0.3)},
    ),
]


def find_pathology(rule: str) -> Pathology:
    """Return the first pathology that meets a rule."""
    return next(pathology for pathology in PATHOLOGIES if pathology.rule == rule)


@pytest.mark.parametrize("pathology", PATHOLOGIES, ids=lambda pathology: pathology.name)
def test_a_pathology_meets_its_rule_alone_from_its_onset_on_and_a_page_says_so_once(pathology):
    run = pathology.make_run()
    (diagnosis,) = diagnose(run)
    assert diagnosis.rule.name == pathology.rule
    assert diagnosis.onset.step == pathology.onset
    assert_names(diagnosis.onset.evidence, *pathology.evidence)
    findings = collect_findings(settings_of([run]))
    heads = [finding.head for finding in findings if pathology.rule in f"{finding.head} {finding.text}"]
    assert heads == [f"made-up: {pathology.rule} from step {pathology.onset} on."]


def test_each_rule_has_a_pathology():
    assert {rule.name for rule in RULES} == {pathology.rule for pathology in PATHOLOGIES}


def test_without_rules_nothing_is_found():
    assert diagnose(find_pathology(REWARD_COLLAPSE).make_run(), rules=()) == []


@pytest.mark.parametrize("rule", ["bounds idle: the search never started", "bounds saturated"])
def test_a_target_that_is_no_share_is_not_compared_with_one(rule):
    run = find_pathology(rule).make_run()
    other_contribution = {**run.configuration, "clipx.contribution": "other"}
    assert diagnose(Run("made-up", run.log, other_contribution)) == []


@pytest.mark.parametrize(
    ("training", "held_out", "rules"),
    [
        pytest.param((0.6, 0.3), (0.6, 0.3), ["reward decline"], id="both fall"),
        pytest.param((0.3, 0.6), (0.6, 0.57), [], id="held out hardly falls"),
        pytest.param((0.6, 0.3), (0.6, 0.6), [], id="training falls alone, as with harder prompts"),
        pytest.param((0.6, 0.3, 0.6), (0.6, 0.3, 0.6), [], id="both fall, but not for good"),
        pytest.param((0.6, 0.5), (0.6, 0.5), [], id="both fall a little"),
        # Negative held-out scores count from the lowest of them.
        pytest.param((0.6, 0.3), (-1.0, -1.0), [], id="held out stays negative"),
        pytest.param((0.6, 0.3), (-1.0, -0.5), [], id="held out is negative and rises"),
        pytest.param((0.6, 0.3), (-0.5, -1.0), ["reward decline"], id="held out is negative and falls"),
    ],
)
def test_falls_of_training_and_held_out_rewards_are_judged_together(training, held_out, rules):
    # Each level lasts nine steps.
    run = make_run({keys.REWARD: numpy.repeat(training, 9), VALIDATION: numpy.repeat(held_out, 9)})
    assert find_rules(run) == rules


def test_an_entropy_below_a_twentieth_of_its_first_value_has_collapsed():
    # 0.11 is more than a twentieth of the mean of the first three steps, which is 1.
    (diagnosis,) = diagnose(make_run({keys.ENTROPY: [2.8] + [0.11] * 9}))
    assert diagnosis.rule.name == "entropy collapse"
    assert diagnosis.onset.step == 2


@pytest.mark.parametrize(
    ("entropies", "onset"),
    [
        pytest.param([0.3] * 5 + [1.0, 4.0, 9.0, 13.0], 7, id="fivefold and above 1"),
        pytest.param([2.4] * 5 + [8.0] * 3, 6, id="twofold and above 5"),
        pytest.param([0.3] + [9.0] * 5, 2, id="in step 2"),
        pytest.param([0.3, 0.4] + [9.0] * 5, 3, id="in step 3"),
        # As with DAPO's higher bound.
        pytest.param([0.3] * 5 + [1.2] * 30, None, id="wider than it began"),
        pytest.param([0.02] * 5 + [0.5] * 30, None, id="from next to nothing"),
        pytest.param([3.0] * 5 + [5.5] * 30, None, id="above 5, but not twofold"),
    ],
)
def test_entropy_explodes_from_its_first_step_far_above_the_beginning(entropies, onset):
    diagnoses = diagnose(make_run({keys.ENTROPY: entropies}))
    expected = [] if onset is None else [("entropy explosion", onset)]
    assert [(diagnosis.rule.name, diagnosis.onset.step) for diagnosis in diagnoses] == expected


@pytest.mark.parametrize(
    ("parameters", "epsilon_highest", "is_met"),
    [
        pytest.param({}, 0.3, True, id="no limits"),
        pytest.param({"clipx.epsilon_max": 0.4}, 0.3, True, id="no bin at the limit"),
        # Tokens may be outside the bounds of such a bin.
        pytest.param({"clipx.epsilon_max": 0.4}, 0.4, False, id="a bin at the limit"),
        # Of five tokens each, the bins keep epsilon_base.
        pytest.param({"clipx.min_tokens": 6}, 0.3, False, id="fewer tokens than min_tokens"),
    ],
)
def test_bins_of_few_tokens_are_idle_only_where_sigma_decides_their_bounds(parameters, epsilon_highest, is_met):
    counts = {f"actor/clipx/count/bin_{index}": 5.0 for index in range(3)}
    metrics = counts | {keys.EPSILON_HIGHEST: epsilon_highest}
    run = make_run(metrics, {"clipx.alpha": 3.0} | parameters, steps=10)
    assert ("bounds idle: too few tokens a bin" in find_rules(run)) == is_met


STEPS_WITH_HELD_OUT_PEAK = range(1, 131)


def reward_that_peaks_with_held_out_score(step: int) -> float:
    """Return a reward that falls with the held-out score, but not to its mean from the start."""
    return 0.1 + 0.4 * min(1, step / 65) - 0.001 * max(0, step - 65)


def reward_that_rises_on(step: int) -> float:
    return 0.1 + 0.4 * min(1, step / 65) + 0.001 * max(0, step - 65)


def noisy_flat_reward(step: int) -> float:
    return 0.5 + 0.02 * (-1) ** step


def noisy_reward_that_jumps_at_91(step: int) -> float:
    return noisy_flat_reward(step) + 0.2 * (step > 90)


@pytest.mark.parametrize(
    ("training_reward", "is_met"),
    [
        (reward_that_peaks_with_held_out_score, False),
        (reward_that_rises_on, True),
        (noisy_flat_reward, False),
        (noisy_reward_that_jumps_at_91, True),
    ],
)
def test_a_held_out_fall_is_compared_with_the_training_reward_around_the_best_held_out_score(training_reward, is_met):
    # Every fifth step is validated; the score is best in step 65.
    rows = []
    for step in STEPS_WITH_HELD_OUT_PEAK:
        held_out = 0.6 - 0.005 * abs(step - 65) if step % 5 == 0 else NAN
        rows.append({keys.REWARD: training_reward(step), VALIDATION: held_out})
    run = Run("made-up", pandas.DataFrame(rows, index=STEPS_WITH_HELD_OUT_PEAK))
    met = [diagnosis for diagnosis in diagnose(run) if diagnosis.rule.name == HELD_OUT_FALLS]
    assert bool(met) == is_met
    if is_met:
        assert_names(met[0].text, "in step 65 0.6", keys.REWARD, "on average", "in steps 59 to 71")


# A reward of 0.6 that takes 40 steps to 0.
SLOW_FALL = [0.6] * 60 + [0.6 - 0.015 * step for step in range(1, 41)]


@pytest.mark.parametrize(
    ("metric", "values", "facts"),
    [
        pytest.param(keys.ENTROPY, [1.0] * 60 + [0.4] * 40 + [0.01] * 60, ["halved by step 61"], id="in two falls"),
        pytest.param(keys.REWARD, [0.6] * 60 + [0.0] * 60, [], id="at once"),
        pytest.param(keys.REWARD, SLOW_FALL + [-0.1] * 60, [], id="to a negative reward"),
        # It is dated near the middle of its fall, and how far it goes is said.
        pytest.param(keys.REWARD, SLOW_FALL + [0.0] * 60, ["0 at the lowest"], id="over 40 steps"),
    ],
)
def test_a_collapse_names_the_step_that_halved_the_metric_if_it_found_the_fall_later(metric, values, facts):
    (diagnosis,) = diagnose(make_run({metric: values}))
    assert_names(diagnosis.text, *facts)
    assert ("halved" in diagnosis.text) == ("halved by step 61" in facts)


@pytest.mark.parametrize(("longest", "is_cut"), [(512, True), (511, False)])
def test_responses_as_long_as_the_longest_are_cut_where_that_is_the_limit(longest, is_cut):
    metrics = {keys.AS_LONG_AS_LONGEST: 0.5, keys.LONGEST: longest}
    run = make_run(metrics, {"data.max_response_length": 512}, steps=9)
    assert bool(diagnose(run)) == is_cut


def test_without_a_configuration_the_longest_response_of_the_log_is_the_limit():
    run = make_run({keys.AS_LONG_AS_LONGEST: 0.5, keys.LONGEST: 511}, steps=9)
    assert find_rules(run) == [CUT_AT_LIMIT]
    assert keys_missing_by_rule(run)[CUT_AT_LIMIT] == []


@pytest.mark.parametrize(
    "longest",
    [pytest.param(12.0, id="short"), pytest.param([500.0 + step for step in range(9)], id="growing")],
)
def test_a_longest_response_that_is_short_or_grows_is_no_limit(longest):
    assert diagnose(make_run({keys.AS_LONG_AS_LONGEST: 0.5, keys.LONGEST: longest}, steps=9)) == []


def test_verls_share_of_the_longest_responses_is_not_enough_without_their_length():
    run = make_run({keys.AS_LONG_AS_LONGEST: 0.5}, steps=9)
    assert keys_missing_by_rule(run)[CUT_AT_LIMIT] == [keys.CUT]


@pytest.mark.slow
def test_rules_that_act_while_a_run_trains_had_no_false_alarm_on_a_beginning_of_a_healthy_log():
    counts = counting.false_alarms()
    acting = {rule.name: counts[rule.name] for rule in RULES if rule.kind is not Kind.REMARK}
    assert all(alarms == 0 and logs >= 16 for alarms, logs in acting.values()), acting


def test_of_the_stored_logs_only_the_three_collapses_of_gppo_are_found_within_two_steps():
    healthy = []
    collapsed = []
    for (preset, _), run in counting.fixed_on().items():
        if preset == counting.COLLAPSED:
            collapsed.append(run)
        else:
            healthy.append(run)
    assert sum(run.name.startswith("countdown") for run in healthy) == 63
    assert len(healthy) == 75
    assert len(collapsed) == 3
    assert [diagnosis.head for run in healthy for diagnosis in diagnose(run)] == []
    for run in collapsed:
        onsets = {diagnosis.rule.name: diagnosis.onset.step for diagnosis in diagnose(run)}
        assert abs(onsets[REWARD_COLLAPSE] - counting.fell(run)) <= 2


@pytest.mark.slow
def test_the_page_on_evidence_has_the_tables_that_the_logs_give(monkeypatch):
    find_changes = counting.find_changes
    changes_by_log = {}

    def find_changes_once(log):
        """Several tables need the changes of the same logs, which take long to find."""
        if id(log) not in changes_by_log:
            changes_by_log[id(log)] = find_changes(log)
        return changes_by_log[id(log)]

    monkeypatch.setattr(counting, "find_changes", find_changes_once)
    page = (DOCS / "dev/diagnosis_evidence.md").read_text()
    for name, table in counting.tables():
        assert f"{counting.BEGIN.format(name)}{table}{counting.END.format(name)}" in page


# Parameters with which runs were made, and which are out of range by now, with what the settings have instead.
OVERRIDES_BY_NOW = {
    "clipx.alpha=30": "clipx.alpha=20",
    "clipx.clip_high=100": "clipx.clip_high=null",
    "clipx.clip_high=1000000.0": "clipx.clip_high=null",
}


def test_the_committed_logs_have_the_faults_that_were_declared():
    records = [RunFolder(path).record_content for path in counting.known_faults()]
    assert {record["name"] for record in records} == {*known_faults.SETTINGS}
    for record in records:
        setting = known_faults.SETTINGS[record["name"]]
        overrides = [OVERRIDES_BY_NOW.get(override, override) for override in record["overrides"]]
        assert record["expected"] == setting.expected
        assert record["also"] == setting.also
        assert record["since"] == setting.begins(record["name"], record["seed"])
        assert overrides == setting.overrides


def test_the_page_on_reading_lists_the_rules_and_the_pages_that_rules_name_exist():
    page = (DOCS / "reading.md").read_text()
    for kind in Kind:
        names = [f"    - {rule.name}" for rule in RULES if rule.kind is kind]
        lines = "\n".join([f"- **{kind.value.capitalize()}s**", *names, ""])
        assert lines in page, "run python benchmarks/diagnosis.py --rules"
    for rule in RULES:
        assert (DOCS.parent / rule.link.partition("#")[0]).exists(), rule
