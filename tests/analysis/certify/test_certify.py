"""`clipx certify`: faults planted in the logs and records of two arms, each of which one question answers, and pairs of
healthy runs without a false alarm. Not covered: runs of verl (tests/end_to_end/test_quickstart.py), what the trainer
writes (tests/training/trainer/test_observing.py).
"""

import math
import shutil
from pprint import pformat

import pytest
from omegaconf import OmegaConf

from tests.analysis.certify.example_arms import (
    ACTOR,
    STEPS,
    both_runs,
    certify_arms,
    fingerprint_of,
    second_run,
    vary,
    with_fingerprints,
    with_metrics,
    without_fingerprints,
    without_metrics,
)
from tests.analysis.runs.commands import answer, clipx
from tests.analysis.runs.example_runs import write_log
from tests.composition import composition
from tests.messages import assert_names
from verl_clipx.analysis.demo.files import RUNS, SHIPPED

# The questions, in the words of the output.
NOTHING_ELSE_DIFFERS = "the arms differ in nothing but what should differ"
SEEDS_ONLY = "the runs of an arm differ in seeds only"
SEEDS_REACHED = "every seed reached its run"
TRAINED_ONCE = "no batch was trained twice"
GROUPS_DIFFER = "the responses of a group differ"
PAIRED = "runs of one seed are paired"
NOT_TOO_OLD = "no sample was older than allowed"
SAME_AMOUNTS = "the same steps, with as many updates and prompts"
CLIP_ACTED = "the clip acted"
RECEIPT_AGREES = "the receipt agrees"
ONE_DENOMINATOR = "one denominator"
ONE_REWARD = "one reward"

LEARNING_RATE = f"{ACTOR}.optim.lr"
LOSS_AGG_MODE = f"{ACTOR}.loss_agg_mode"
PRECISION = f"{ACTOR}.fsdp_config.mixed_precision.param_dtype"
CLIPPED_LOW = "actor/clipx/clip_fraction_low"
CLIPPED_HIGH = "actor/clipx/clip_fraction_high"
OLDEST_SAMPLE = "training/off_policy/trajectory_staleness/max"
RECEIPT = "actor/clipx/receipt"
RECEIPT_FAILED = "actor/clipx/receipt_failed"
# 16 prompts in one mini-batch.
ONE_UPDATE = {f"{ACTOR}.ppo_mini_batch_size": 16}


def test_two_sound_arms_pass_every_question(tmp_path):
    printed = certify_arms(tmp_path, code=0)
    assert_names(printed.summary, "20 questions", "20 passed", "0 failed", "0 not recorded")
    printed.assert_verdict(PAIRED, "passed", "paired by seed", "1", "2")
    # 16 prompts in mini-batches of 4.
    amounts = ("5 steps", "1 to 5", "4 updates", "16 prompts", "8 responses")
    printed.assert_verdict(SAME_AMOUNTS, "passed", *amounts)


@pytest.mark.parametrize("named", ["run", "run/metrics.jsonl"])
def test_runs_of_one_name_are_told_apart_by_the_folders_that_they_are_in(tmp_path, named):
    for arm in ("a", "b"):
        write_log(tmp_path / arm / "run" / "metrics.jsonl", [{"actor/pg_clipfrac": 0.0}] * 3)
    printed = clipx("certify", tmp_path / "a" / named, "vs", tmp_path / "b" / named, code=1)
    for arm in ("a", "b"):
        assert f"{tmp_path / arm / 'run'}: no token was clipped in any step" in printed


def fingerprint_of_step(step):
    """Return a fingerprint that both runs of an arm have in a step."""
    return fingerprint_of(step)


def repeat_step_3(step):
    """Return a fingerprint that is the same in step 3 and in each later step."""
    return fingerprint_of(min(step, 3))


def updates_on_other_rows(step):
    """Return fingerprints of two updates that have other rows than any batch."""
    return [fingerprint_of(step, "first"), fingerprint_of(step, "second")]


def updates_that_repeat_rows(step):
    """Return fingerprints of two updates, of which the first one is the same in every step."""
    return [f"{1:016x}", f"{step + 1:016x}"]


def rows_of_updates_that_repeat_rows(step):
    """Return the fingerprint of the rows of both updates, which is the sum of theirs."""
    return f"{1 + step + 1:016x}"


def versions_two_behind(step):
    """Return the oldest and the newest version that sampled; a sample is of age 0 if version step - 1 sampled it."""
    return [max(step - 3, 0), step - 1]


def receipt_of_0_8_in_step_2(step):
    return 0.8 if step == 2 else 0.0


@pytest.mark.parametrize(
    ("question", "arguments", "facts"),
    [
        pytest.param(
            NOTHING_ELSE_DIFFERS,
            {"second": both_runs(overrides={LEARNING_RATE: 3e-6})},
            [LEARNING_RATE, "1e-06 and 3e-06", "--vary KEY"],
            id="another learning rate",
        ),
        pytest.param(
            NOTHING_ELSE_DIFFERS,
            {"second": both_runs(loss={})},
            ["same configuration", "nothing is compared"],
            id="the same loss",
        ),
        pytest.param(
            NOTHING_ELSE_DIFFERS,
            {"words": vary(LEARNING_RATE)},
            ["do not differ", LEARNING_RATE, "--vary"],
            id="the same learning rate, which should differ",
        ),
        pytest.param(
            SEEDS_ONLY,
            {"first": second_run(overrides={LEARNING_RATE: 3e-6})},
            ["differ", LEARNING_RATE],
            id="two learning rates in an arm",
        ),
        pytest.param(
            SEEDS_REACHED,
            {"first": second_run(seed=1)},
            ["grpo-seed1", "grpo-seed2", "seed 1"],
            id="one seed in an arm",
        ),
        pytest.param(
            SEEDS_REACHED,
            {"first": both_runs(edit_line=with_fingerprints(responses=fingerprint_of_step))},
            ["grpo-seed1", "grpo-seed2", "same responses", "5 steps"],
            id="the same responses under two seeds",
        ),
        pytest.param(
            SEEDS_REACHED,
            {"first": both_runs(edit_line=with_fingerprints(prompts=fingerprint_of_step))},
            ["grpo-seed1", "grpo-seed2", "same prompts", "5 steps"],
            id="the same prompts under two seeds",
        ),
        pytest.param(
            TRAINED_ONCE,
            {"second": second_run(edit_line=with_fingerprints(rows=repeat_step_3, updates=[]))},
            # Steps 4 and 5 repeat step 3.
            ["acpo-seed2", "step 4", "data of step 3", "2 of 5"],
            id="a batch that is repeated",
        ),
        pytest.param(
            TRAINED_ONCE,
            {"second": second_run(edit_line=with_fingerprints(updates=updates_on_other_rows))},
            ["acpo-seed2", "updates", "step 1", "other rows"],
            id="updates on other rows than the batch's",
        ),
        pytest.param(
            TRAINED_ONCE,
            {
                "second": second_run(
                    edit_line=with_fingerprints(updates=updates_that_repeat_rows, rows=rows_of_updates_that_repeat_rows)
                )
            },
            ["acpo-seed2", "update of step 2", "step 1"],
            id="an update on rows of an earlier step",
        ),
        pytest.param(
            NOT_TOO_OLD,
            {"second": second_run(edit_line=with_fingerprints(versions=versions_two_behind))},
            ["acpo-seed2", "2 versions", "0 allowed"],
            id="old samples by the fingerprints",
        ),
        pytest.param(
            NOT_TOO_OLD,
            {"second": second_run(edit_line=with_metrics({OLDEST_SAMPLE: 2.0}))},
            ["acpo-seed2", "2 versions", "0 allowed"],
            id="old samples by verl's metric",
        ),
        pytest.param(
            GROUPS_DIFFER,
            # 32 of 128 responses, as in verl-omni's issue 561: 192 seeds for 768 requests.
            {"second": second_run(edit_line=with_fingerprints(distinct=32))},
            ["acpo-seed2", "25.0"],
            id="equal responses in a group",
        ),
        pytest.param(
            CLIP_ACTED,
            {"first": both_runs(overrides=ONE_UPDATE), "second": both_runs(overrides=ONE_UPDATE)},
            ["grpo-seed1", "acpo-seed2", "one update", "ratio 1"],
            id="one update a rollout batch",
        ),
        pytest.param(
            CLIP_ACTED,
            {"first": second_run(edit_line=with_metrics({CLIPPED_LOW: 0.0, CLIPPED_HIGH: 0.0}))},
            ["grpo-seed2", "no token"],
            id="no clipped token",
        ),
        pytest.param(
            RECEIPT_AGREES,
            {"second": second_run(edit_line=with_metrics({RECEIPT: receipt_of_0_8_in_step_2}))},
            # The tolerance is that of float32, in which the arms compute.
            ["acpo-seed2", "0.8", "0.0001"],
            id="a receipt beyond its tolerance",
        ),
        pytest.param(
            SAME_AMOUNTS,
            {"second": both_runs(overrides=ONE_UPDATE)},
            ["acpo-seed1: 1", "acpo-seed2: 1", "grpo-seed1: 4", "updates"],
            id="fewer updates a step",
        ),
        pytest.param(
            ONE_DENOMINATOR,
            {"second": both_runs(overrides={LOSS_AGG_MODE: "seq-mean-token-mean"})},
            [LOSS_AGG_MODE, "seq-mean-token-mean", "token-mean"],
            id="another loss_agg_mode",
        ),
        pytest.param(
            ONE_REWARD,
            {"second": second_run(record={"reward/hash": "b" * 64})},
            ["reward's file", "differs"],
            id="another file of the reward",
        ),
        pytest.param(
            ONE_REWARD,
            {"second": both_runs(overrides={"reward.custom_reward_function.name": "other"})},
            ["another reward", "grpo-seed1", "acpo-seed1", "acpo-seed2"],
            id="another function of the reward",
        ),
    ],
)
def test_a_planted_fault_fails_its_question(tmp_path, question, arguments, facts):
    certify_arms(tmp_path, code=1, **arguments).assert_verdict(question, "failed", *facts)


BFLOAT16 = {PRECISION: "bf16"}
FLOAT32 = {PRECISION: "fp32"}


def with_floor(share, recut=None, tokens=1000.0):
    """Return an `edit_line` that logs the floor: what the first of the four updates of a step clips.

    Args:
        share: the share of its tokens that the first update clips. All four updates clip 0.012 on average.
        recut: the share that a second measurement clips in the first step; None without such a measurement.
        tokens: how many tokens each update has.
    """

    def edit(line):
        shares = {"floor": share}
        if recut is not None and line["step"] == 1:
            shares["floor_recut"] = recut
        for name, clipped in shares.items():
            for side in ("low", "high"):
                line["data"][f"actor/clipx/{name}/clip_fraction_{side}"] = clipped / 2
            for bin in range(5):
                line["data"][f"actor/clipx/{name}/tokens/bin_{bin}"] = tokens / 5
        return line

    return edit


# The later updates clip (4 * 0.012 - share) / 3 of their tokens.
@pytest.mark.parametrize(
    ("floor", "precision", "verdict", "facts"),
    [
        # (0.048 - 0) / 3 = 0.016
        pytest.param(with_floor(0.0), BFLOAT16, "passed", ["1.6 % in later", "0.00 % by rounding"], id="no floor"),
        # (0.048 - 0.002) / 3 = 0.0153
        pytest.param(with_floor(0.002), BFLOAT16, "passed", ["1.5 % in later", "0.20 % by rounding"], id="a low floor"),
        # (0.048 - 0.012) / 3 = 0.012
        pytest.param(
            with_floor(0.012), BFLOAT16, "failed", ["1.2 % of tokens", "later", "chance"], id="a floor as high"
        ),
        # (0.048 - 0.02) / 3 = 0.0093
        pytest.param(
            with_floor(0.02), BFLOAT16, "failed", ["0.93 % of tokens", "later", "2.0 %", "chance"], id="a higher floor"
        ),
        # Equal micro-batches, whose floor is 0, and the second measurement says that later updates round.
        pytest.param(
            with_floor(0.0, recut=0.016),
            BFLOAT16,
            "failed",
            ["1.6 % of tokens", "later", "0.00 % and 1.6 %", "chance"],
            id="a second measurement as high",
        ),
        pytest.param(
            with_floor(0.0, recut=0.002),
            BFLOAT16,
            "passed",
            ["1.6 % in later", "0.00 % and 0.20 % by rounding"],
            id="a low second measurement",
        ),
        # (0.048 - 0.008) / 3 = 0.0133. In 5 steps, 4 of 300 later tokens against 0.8 of 100 say nothing.
        pytest.param(
            with_floor(0.008, tokens=20.0),
            BFLOAT16,
            "failed",
            ["1.3 % of tokens", "later", "0.80 %", "chance"],
            id="few tokens",
        ),
        # Neither do 4.8 of 300 against none of 100, but in float32 rounding clips none.
        pytest.param(
            with_floor(0.0, tokens=20.0),
            BFLOAT16,
            "failed",
            ["1.6 % of tokens", "later", "0.00 %", "chance"],
            id="few tokens and no floor",
        ),
        pytest.param(
            with_floor(0.0, tokens=20.0),
            FLOAT32,
            "passed",
            ["1.6 % in later", "0.00 % by rounding"],
            id="few tokens and no floor, in float32",
        ),
        pytest.param(
            with_floor(0.02),
            FLOAT32,
            "failed",
            ["0.93 % of tokens", "later", "2.0 %", "chance"],
            id="a higher floor, in float32",
        ),
        pytest.param(None, BFLOAT16, "not recorded", ["acpo-seed1", "rounding"], id="no record of a floor"),
    ],
)
def test_the_clip_acted_if_it_clipped_more_than_rounding_does(tmp_path, floor, precision, verdict, facts):
    second = both_runs(overrides=precision, edit_line=floor)
    printed = certify_arms(tmp_path, second=second, words=vary(f"{ACTOR}.*", "clipx.*"), code=None)
    printed.assert_verdict(CLIP_ACTED, verdict, *facts)


def without_ages(line):
    """Return a line that does not say how old the samples are; an `edit_line`."""
    return without_fingerprints(without_metrics("training/off")(line))


@pytest.mark.parametrize(
    ("question", "first"),
    [
        pytest.param(PAIRED, both_runs(edit_line=without_fingerprints), id="no fingerprints"),
        pytest.param(RECEIPT_AGREES, second_run(edit_line=without_metrics(RECEIPT)), id="no receipt"),
        pytest.param(NOT_TOO_OLD, second_run(edit_line=without_ages), id="no ages"),
        pytest.param(CLIP_ACTED, second_run(edit_line=without_metrics("actor/clipx/clip")), id="no clip fractions"),
        pytest.param(ONE_REWARD, second_run(record={"reward/hash": None}), id="no hash of the reward"),
    ],
)
def test_what_was_not_recorded_is_not_passed(tmp_path, question, first):
    certify_arms(tmp_path, first=first, code=3).assert_verdict(question, "not recorded")


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="with fingerprints"),
        pytest.param({"edit_line": without_fingerprints}, id="without fingerprints"),
    ],
)
@pytest.mark.parametrize(
    ("runs_of_first", "runs_of_second", "single_runs"),
    [
        pytest.param(1, 1, ["grpo-seed1", "acpo-seed1"], id="one run in each arm"),
        pytest.param(2, 1, ["acpo-seed1"], id="one run in the second arm"),
        pytest.param(1, 3, ["grpo-seed1"], id="one run in the first arm"),
    ],
)
def test_one_run_of_an_arm_supports_no_comparison(tmp_path, runs_of_first, runs_of_second, single_runs, arguments):
    first = [arguments] * runs_of_first
    second = [arguments] * runs_of_second
    printed = certify_arms(tmp_path, first=first, second=second, code=3)
    for question in (SEEDS_ONLY, SEEDS_REACHED):
        printed.assert_verdict(question, "not recorded", "one seed", "no comparison", *single_runs)


def test_a_fault_in_one_arm_fails_though_the_other_has_one_run(tmp_path):
    printed = certify_arms(tmp_path, first=second_run(seed=1), second=[{}], code=1)
    printed.assert_verdict(SEEDS_REACHED, "failed")


def with_data_in(*steps):
    """Return the arguments of a run that has metrics and fingerprints in some steps only."""

    def edit(line):
        if line["step"] in steps:
            return line
        return line | {"batch": None, "data": {}}

    return {"edit_line": edit}


def test_two_seeds_without_a_common_step_are_not_known_to_have_reached_their_runs(tmp_path):
    printed = certify_arms(tmp_path, first=(with_data_in(1, 2), with_data_in(3, 4, 5)), code=None)
    printed.assert_verdict(SEEDS_REACHED, "not recorded")


def test_two_arms_without_a_common_step_are_not_known_to_be_paired(tmp_path):
    printed = certify_arms(tmp_path, first=[with_data_in(1, 2)], second=[with_data_in(3, 4, 5)], code=None)
    printed.assert_verdict(PAIRED, "not recorded")


def with_definition_2(since=1):
    """Return an `edit_line` with fingerprints by another definition, which differ in every value, from a step on."""

    def edit(line):
        batch = line["batch"]
        if line["step"] >= since:
            for name in ("prompts", "responses", "rows"):
                batch[name] = fingerprint_of(batch[name], 2)
            batch["definition"] = 2
            batch["updates"] = []
        return line

    return edit


def test_fingerprints_of_two_definitions_are_not_compared_between_arms(tmp_path):
    printed = certify_arms(tmp_path, second=both_runs(edit_line=with_definition_2()), code=3)
    printed.assert_verdict(PAIRED, "not recorded", "grpo-seed1", "acpo-seed1")
    # Within each arm they can be compared.
    printed.assert_verdict(SEEDS_REACHED, "passed", "prompts and responses")


def test_within_an_arm_of_two_definitions_the_logged_rewards_decide(tmp_path):
    first = ({"edit_line": with_definition_2()}, {})
    printed = certify_arms(tmp_path, first=first, code=3)
    printed.assert_verdict(SEEDS_REACHED, "passed", "logged rewards and lengths")


def test_a_run_that_went_on_with_another_definition_hides_a_repeated_batch(tmp_path):
    printed = certify_arms(tmp_path, second=second_run(edit_line=with_definition_2(since=3)), code=3)
    printed.assert_verdict(TRAINED_ONCE, "not recorded", "acpo-seed2")


def test_steps_without_fingerprints_are_not_passed(tmp_path):
    """The part that makes them may go off while a run trains."""

    def edit(line):
        line["data"]["training/global_step"] = line["step"]
        if line["step"] >= 4:
            line["batch"] = None
        return line

    printed = certify_arms(tmp_path, second=second_run(edit_line=edit), code=3)
    # Steps 4 and 5.
    printed.assert_verdict(TRAINED_ONCE, "not recorded", "fingerprints", "2 steps", "acpo-seed2", "step 4")


def test_a_batch_in_which_no_token_counts_repeats_nothing(tmp_path):
    no_rows = "0" * 16
    empty = with_fingerprints(rows=no_rows, updates=[no_rows, no_rows], sequences=0, distinct=0)
    printed = certify_arms(tmp_path, second=second_run(edit_line=empty), code=1)
    assert printed.answers[TRAINED_ONCE].verdict != "failed", printed.text
    # It trained nothing, which another question says. The others train 16 prompts with 8 responses each.
    printed.assert_verdict(SAME_AMOUNTS, "failed", "acpo-seed2", "0 and 128 responses", "grpo-seed1")
    printed.assert_verdict(GROUPS_DIFFER, "not recorded", "acpo-seed2")


def test_a_failure_counts_where_another_run_lacks_the_evidence(tmp_path):
    first = ({"edit_line": without_metrics("actor/clipx/clip")}, {})
    second = second_run(edit_line=with_metrics({CLIPPED_LOW: 0.0, CLIPPED_HIGH: 0.0}))
    certify_arms(tmp_path, first=first, second=second, code=1).assert_verdict(CLIP_ACTED, "failed", "acpo-seed2")


# A difference of 0.03 is beyond float32's tolerance of 0.0001, and within bfloat16's of 0.04.
@pytest.mark.parametrize(
    ("precision", "verdict"),
    [
        ("fp32", "failed"),
        ("float32", "failed"),
        ("bf16", "passed"),
        # verl computes in bfloat16 where the precision is not set.
        (None, "passed"),
    ],
)
def test_a_receipt_is_judged_by_the_precision_of_its_run(tmp_path, precision, verdict):
    engine = {f"{ACTOR}.strategy": "fsdp2", PRECISION: precision}
    sound = {"overrides": engine}
    differing = {"overrides": engine, "edit_line": with_metrics({RECEIPT: 0.03})}
    printed = certify_arms(tmp_path, first=(sound, sound), second=(differing, sound), code=None)
    printed.assert_verdict(RECEIPT_AGREES, verdict)


def test_without_fingerprints_the_logged_data_pass_what_they_can(tmp_path):
    arm = both_runs(edit_line=without_fingerprints)
    printed = certify_arms(tmp_path, first=arm, second=arm, code=3)
    printed.assert_verdict(SEEDS_REACHED, "passed", "logged rewards and lengths")
    printed.assert_verdict(TRAINED_ONCE, "passed", "logged rewards and lengths")


def test_without_fingerprints_equal_logged_data_of_two_steps_fail(tmp_path):
    repeated = {"critic/score/mean": 0.5, "response_length/mean": 41.0, "critic/advantages/max": 1.7}

    def edit(line):
        line = without_fingerprints(line)
        if line["step"] > 3:
            line["data"] = repeated
        return line

    printed = certify_arms(tmp_path, second=second_run(edit_line=edit), code=1)
    printed.assert_verdict(TRAINED_ONCE, "failed", "acpo-seed2", "step 5", "data of step 4")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["a"], id="no vs"),
        pytest.param(["vs", "a"], id="no first arm"),
        pytest.param(["a", "vs"], id="no second arm"),
        pytest.param(["a", "vs", "b", "vs", "c"], id="three arms"),
    ],
)
def test_anything_but_two_arms_is_refused(words):
    assert_names(clipx("certify", *words, code=1), "two arms", "clipx certify A1 A2 vs B1 B2")


def test_the_demos_runs_fail_nothing(tmp_path):
    folders = [shutil.copytree(SHIPPED / name, tmp_path / name) for name in RUNS]
    assert_names(clipx("certify", folders[0], "vs", folders[1], code=None), "0 failed")


def console_log(path, *, seed, overrides, reward_offset=0.0, repeats_step_3=False):
    """Write a console log of stock verl: the configuration that it prints, then its steps; return its path.

    Args:
        path: the file.
        seed: the value of data.seed.
        overrides: from further keys of the configuration to values.
        reward_offset: what is added to the rewards, so that two arms do not have the same ones.
        repeats_step_3: whether the later steps have the data of step 3.
    """
    configured = {"data.seed": seed, "data.train_batch_size": 64, f"{ACTOR}.ppo_mini_batch_size": 16} | overrides
    words = [f"{key}={value}" for key, value in configured.items()]
    lines = [pformat(OmegaConf.to_container(composition(*words), resolve=True))]
    for step in STEPS:
        step_of_data = min(step, 3) if repeats_step_3 else step
        reward = 0.3 + 0.01 * step_of_data + 0.001 * seed + reward_offset
        metrics = [
            f"critic/score/mean:{reward:.4f}",
            f"response_length/mean:{40 + step_of_data * seed}.5",
            f"critic/advantages/max:{1.5 + 0.1 * step_of_data * seed:.3f}",
            "actor/pg_clipfrac:0.002",
        ]
        lines.append(" - ".join([f"step:{step}", *metrics]))
    path.write_text("\n".join(lines) + "\n")
    return path


def verdicts_on_console_logs(tmp_path, *, code, overrides, repeats_step_3=False):
    """Return the verdicts on two arms of stock verl, by question.

    Args:
        tmp_path: the folder for the logs.
        code: the exit code that is asserted.
        overrides: what the second arm sets beside another clip_ratio_high.
        repeats_step_3: whether the later steps of the second arm have the data of step 3.
    """
    first = []
    second = []
    for seed in (1, 2):
        first.append(console_log(tmp_path / f"first{seed}.log", seed=seed, overrides={}))
        second.append(
            console_log(
                tmp_path / f"second{seed}.log",
                seed=seed,
                overrides={f"{ACTOR}.clip_ratio_high": 0.28} | overrides,
                reward_offset=0.0002,
                repeats_step_3=repeats_step_3,
            )
        )
    answers = answer("certify", *first, "vs", *second, code=code)["answers"]
    return {row["question"]: row["verdict"] for row in answers}


# What two stock logs have to decide: keys, seeds, repeated data, whether the clip could act.
DECIDED_BY_CONSOLE_LOGS = (
    NOTHING_ELSE_DIFFERS,
    SEEDS_ONLY,
    SEEDS_REACHED,
    TRAINED_ONCE,
    CLIP_ACTED,
    SAME_AMOUNTS,
    ONE_DENOMINATOR,
    ONE_REWARD,
)


def test_sound_console_logs_of_stock_verl_pass_what_they_can_decide(tmp_path):
    verdicts = verdicts_on_console_logs(tmp_path, code=3, overrides={})
    decided = {question: verdicts[question] for question in DECIDED_BY_CONSOLE_LOGS}
    assert decided == dict.fromkeys(DECIDED_BY_CONSOLE_LOGS, "passed")


@pytest.mark.parametrize(
    ("arguments", "question"),
    [
        pytest.param({"overrides": {LEARNING_RATE: 3e-6}}, NOTHING_ELSE_DIFFERS, id="another learning rate"),
        pytest.param({"overrides": {}, "repeats_step_3": True}, TRAINED_ONCE, id="a batch that is repeated"),
        # 64 prompts in one mini-batch.
        pytest.param({"overrides": {f"{ACTOR}.ppo_mini_batch_size": 64}}, CLIP_ACTED, id="one update a rollout batch"),
        pytest.param({"overrides": {LOSS_AGG_MODE: "seq-mean-token-mean"}}, ONE_DENOMINATOR, id="another average"),
    ],
)
def test_console_logs_of_stock_verl_show_a_fault(tmp_path, arguments, question):
    verdicts = verdicts_on_console_logs(tmp_path, code=1, **arguments)
    assert verdicts[question] == "failed"
    assert {verdicts[name] for name in DECIDED_BY_CONSOLE_LOGS} <= {"passed", "failed"}, verdicts


def with_receipt(metrics):
    """Return an `edit_line` that sets metrics of the receipt in the first step, and leaves out those set to None."""

    def edit(line):
        if line["step"] != 1:
            return line
        data = line["data"] | metrics
        return line | {"data": {key: value for key, value in data.items() if value is not None}}

    return edit


@pytest.mark.parametrize(
    ("failed_checks", "whole_checks"),
    [
        (1.0, "1 checks"),
        # Rounded up to whole checks.
        (0.5, "1 checks"),
        (3.0, "3 checks"),
    ],
)
def test_a_receipt_that_warned_fails(tmp_path, failed_checks, whole_checks):
    first = second_run(edit_line=with_receipt({RECEIPT_FAILED: failed_checks}))
    certify_arms(tmp_path, first=first, code=1).assert_verdict(
        RECEIPT_AGREES, "failed", "grpo-seed2", "warned", whole_checks
    )


def test_a_receipt_that_compared_nothing_fails(tmp_path):
    first = second_run(edit_line=with_receipt({RECEIPT: math.nan, RECEIPT_FAILED: 1.0}))
    certify_arms(tmp_path, first=first, code=1).assert_verdict(RECEIPT_AGREES, "failed")


def test_a_log_that_has_no_number_of_failed_checks_passes_and_says_so(tmp_path):
    first = second_run(edit_line=with_receipt({RECEIPT_FAILED: None}))
    printed = certify_arms(tmp_path, first=first, code=0)
    printed.assert_verdict(RECEIPT_AGREES, "passed", "grpo-seed2", RECEIPT_FAILED)


@pytest.mark.parametrize(
    ("receipt", "facts"),
    [
        pytest.param({"difference": 0.0, "tolerance": 1e-4, "failed": 2}, ["warned", "2 checks"], id="failed checks"),
        pytest.param({"difference": 0.5, "tolerance": 1e-4, "failed": 0}, ["0.5", "0.0001"], id="another gradient"),
        pytest.param({"difference": None, "tolerance": 1e-4, "failed": 1}, ["warned", "1 checks"], id="no difference"),
    ],
)
def test_the_receipt_in_the_record_is_read(tmp_path, receipt, facts):
    first = second_run(record={"receipt": receipt}, edit_line=without_metrics(RECEIPT, RECEIPT_FAILED))
    certify_arms(tmp_path, first=first, code=1).assert_verdict(RECEIPT_AGREES, "failed", "grpo-seed2", *facts)


def test_a_sound_receipt_in_the_record_does_not_hide_that_of_an_earlier_start(tmp_path):
    sound_receipt = {"difference": 0.0, "tolerance": 1e-4, "failed": 0}
    first = second_run(record={"receipt": sound_receipt}, edit_line=with_receipt({RECEIPT_FAILED: 3.0}))
    certify_arms(tmp_path, first=first, code=1).assert_verdict(RECEIPT_AGREES, "failed", "warned", "3 checks")
