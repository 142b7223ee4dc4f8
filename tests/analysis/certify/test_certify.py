"""`clipx certify`: faults planted in the logs and records of two arms, each of which one question answers, and pairs of
healthy runs without a false alarm. Not covered: runs of verl (tests/end_to_end/test_quickstart.py), what the trainer
writes (tests/training/trainer/test_observing.py).
"""

import math
import shutil
from pprint import pformat

import pytest
from omegaconf import OmegaConf

from tests.analysis.certify.example_arms import ACTOR, STEPS, certified, name_of
from tests.analysis.runs.commands import answer, clipx
from tests.composition import composition
from tests.messages import assert_names
from verl_clipx.analysis.demo.files import RUNS, SHIPPED


def test_two_sound_arms_pass_every_question(tmp_path):
    answers = certified(tmp_path, code=0)
    assert answers[""].startswith("20 questions: 20 passed, 0 failed, 0 not recorded")
    assert_names(answers["runs of one seed are paired"], "seed", "1", "2")
    assert_names(answers[AMOUNTS], "5 steps", "4 updates a step", "16 prompts a step", "8 responses a prompt")


def changed(**values):
    """The lines with other values: under the key `at` of a line, or of its batch."""

    def keep(line):
        for key, value in values.items():
            where = line["batch"] if key in line["batch"] else line["data"]
            where[key.replace("__", "/")] = value(line["step"]) if callable(value) else value
        return line

    return {"keep": keep}


LOW, HIGH = "actor__clipx__clip_fraction_low", "actor__clipx__clip_fraction_high"
AGE = "training__off_policy__trajectory_staleness__max"
ONE_UPDATE = {"change": {f"{ACTOR}.ppo_mini_batch_size": 16}}
AMOUNTS = "the same steps, with as many updates and prompts"
BELOW = "the arms differ in nothing but what should differ"


@pytest.mark.parametrize(
    ("question", "given", "facts"),
    [
        (BELOW, dict(second=({"change": {f"{ACTOR}.optim.lr": 3e-6}},) * 2), (f"{ACTOR}.optim.lr", "1e-06", "3e-06")),
        (BELOW, dict(second=({"loss": {}},) * 2), ("nothing is compared",)),
        (BELOW, dict(words=["--vary", f"{ACTOR}.optim.lr"]), ("do not differ", f"{ACTOR}.optim.lr")),
        (
            "the runs of an arm differ in seeds only",
            dict(first=({}, {"change": {f"{ACTOR}.optim.lr": 3e-6}})),
            ("differ", f"{ACTOR}.optim.lr"),
        ),
        ("every seed reached its run", dict(first=({}, {"seed": 1})), ("grpo-seed1", "grpo-seed2", "seed 1")),
        (
            "every seed reached its run",
            dict(first=(changed(responses=lambda step: name_of(step)),) * 2),
            ("same responses", "5 steps"),
        ),
        (
            "every seed reached its run",
            dict(first=(changed(prompts=lambda step: name_of(step)),) * 2),
            ("same prompts", "5 steps"),
        ),
        (
            "no batch was trained twice",
            dict(second=({}, changed(rows=lambda step: name_of(min(step, 3)), updates=[]))),
            ("acpo-seed2", "step 4", "step 3", "2 of 5"),
        ),
        (
            "no batch was trained twice",
            dict(second=({}, changed(updates=lambda step: [name_of(min(step, 3)), name_of(step)]))),
            ("acpo-seed2", "step 1", "other rows"),
        ),
        (
            "no batch was trained twice",
            dict(second=({}, changed(rows="0" * 15 + "2", updates=["0" * 15 + "1"] * 2))),
            ("acpo-seed2", "update of step 2", "step 1"),
        ),
        (
            "no sample was older than allowed",
            dict(second=({}, changed(versions=lambda step: [max(step - 3, 0), step - 1]))),
            ("acpo-seed2", "2 versions", "0 allowed"),
        ),
        ("no sample was older than allowed", dict(second=({}, changed(**{AGE: 2.0}))), ("2 versions", "0 allowed")),
        # verl-omni's issue 561: 192 seeds for 768 requests.
        ("the responses of a group differ", dict(second=({}, changed(distinct=32))), ("acpo-seed2", "25.0")),
        (
            "the clip acted",
            dict(first=(ONE_UPDATE,) * 2, second=(ONE_UPDATE,) * 2),
            ("bounds have nothing else to act on",),
        ),
        (
            "the receipt agrees",
            dict(second=({}, changed(actor__clipx__receipt=lambda step: 0.8 * (step == 2)))),
            ("acpo-seed2", "0.8"),
        ),
        ("the clip acted", dict(first=({}, changed(**{LOW: 0.0, HIGH: 0.0}))), ("grpo-seed2", "no token was clipped")),
        (
            AMOUNTS,
            dict(second=(ONE_UPDATE,) * 2),
            ("1 updates a step", "grpo-seed1: 4"),
        ),
        (
            "one denominator",
            dict(second=({"change": {f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}},) * 2),
            ("seq-mean-token-mean", "token-mean"),
        ),
        ("one reward", dict(second=({}, {"record": {"reward/hash": "b" * 64}})), ("reward's file differs",)),
        (
            "one reward",
            dict(second=({"change": {"reward.custom_reward_function.name": "other"}},) * 2),
            ("another reward", "grpo-seed1", "acpo-seed1", "acpo-seed2"),
        ),
    ],
)
def test_a_planted_fault_fails_its_question(tmp_path, question, given, facts):
    answers = certified(tmp_path, code=1, **given)
    assert answers[question].startswith("failed: "), answers[""]
    assert_names(answers[question], *facts)


HALF = {f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": "bf16"}


def with_floor(share, recut=None, tokens=1000.0, precision=HALF):
    """A run whose four updates have so many tokens each, and whose first one clips a share of them; in half precision.

    `recut` is what a second measurement clips in the first step. The mean over the updates is 0.012.
    """

    def keep(line):
        found = {"floor": share} | ({"floor_recut": recut} if recut is not None and line["step"] == 1 else {})
        for name, clipped in found.items():
            line["data"] |= {f"actor/clipx/{name}/clip_fraction_{side}": clipped / 2 for side in ("low", "high")}
            line["data"] |= {f"actor/clipx/{name}/tokens/bin_{bin}": tokens / 5 for bin in range(5)}
        return line

    return {"change": precision, "keep": keep}


@pytest.mark.parametrize(
    ("given", "verdict", "evidence"),
    [
        # The later updates clip (4 * 0.012 - share) / 3 of their tokens.
        (with_floor(0.0), "passed", "in later updates, 0.00"),
        (with_floor(0.002), "passed", "in later updates"),
        (with_floor(0.012), "failed", "a difference that chance explains"),
        (with_floor(0.02), "failed", "a difference that chance explains"),
        # Equal micro-batches, whose floor is 0, and the second measurement says that later updates round.
        (with_floor(0.0, recut=0.016), "failed", "where nothing moved, a difference that chance explains"),
        (with_floor(0.0, recut=0.002), "passed", "by rounding"),
        # Three tokens of three hundred more than of a hundred say nothing.
        (with_floor(0.008, tokens=20.0), "failed", "chance explains"),
        # Neither do three of none, but in float32 rounding clips none.
        (with_floor(0.0, tokens=20.0), "failed", "chance explains"),
        (with_floor(0.0, tokens=20.0, precision={}), "passed", "in later updates, 0.00"),
        (with_floor(0.02, precision={}), "failed", "chance explains"),
        ({"change": HALF}, "not recorded", "how much of the clipping is rounding in acpo-seed1"),
    ],
)
def test_the_clip_acted_if_it_clipped_more_than_rounding_does(tmp_path, given, verdict, evidence):
    words = ("--vary", f"{ACTOR}.*", "--vary", "clipx.*")
    line = certified(tmp_path, second=(given, given), words=words, code=None)["the clip acted"]
    assert line.startswith(f"{verdict}: ") and evidence in line, line


def without(*names):
    """The lines without fingerprints or some metrics."""

    def keep(line):
        data = {key: value for key, value in line["data"].items() if not key.startswith(names)}
        return line | {"data": data, "batch": None if "batch" in names else line["batch"]}

    return {"keep": keep}


@pytest.mark.parametrize(
    ("question", "given"),
    [
        ("runs of one seed are paired", dict(first=(without("batch"),) * 2)),
        ("the receipt agrees", dict(first=({}, without("actor/clipx/receipt")))),
        ("no sample was older than allowed", dict(first=({}, without("training/off", "batch")))),
        ("the clip acted", dict(first=({}, without("actor/clipx/clip")))),
        ("one reward", dict(first=({}, {"record": {"reward/hash": None}}))),
    ],
)
def test_what_was_not_recorded_is_not_passed(tmp_path, question, given):
    answers = certified(tmp_path, code=3, **given)
    assert answers[question].startswith("not recorded: "), answers[""]


SEEDS = ("the runs of an arm differ in seeds only", "every seed reached its run")


@pytest.mark.parametrize("stripped", [{}, without("batch")], ids=["with fingerprints", "without them"])
@pytest.mark.parametrize(
    ("first", "second", "single"),
    [(1, 1, ("grpo-seed1", "acpo-seed1")), (2, 1, ("acpo-seed1",)), (1, 3, ("grpo-seed1",))],
)
def test_one_run_of_an_arm_supports_no_comparison(tmp_path, first, second, single, stripped):
    answers = certified(tmp_path, first=(stripped,) * first, second=(stripped,) * second, code=3)
    for question in SEEDS:
        assert answers[question].startswith("not recorded: "), answers[""]
        assert "one seed supports no comparison" in answers[question]
        assert all(name in answers[question] for name in single)


def test_a_fault_in_one_arm_fails_though_the_other_has_one_run(tmp_path):
    answers = certified(tmp_path, first=({}, {"seed": 1}), second=({},), code=1)
    assert answers["every seed reached its run"].startswith("failed: ")


def test_runs_without_a_common_step_show_nothing_of_their_seeds(tmp_path):
    def only(*steps):
        return {"keep": lambda line: line if line["step"] in steps else line | {"batch": None, "data": {}}}

    answers = certified(tmp_path, first=(only(1, 2), only(3, 4, 5)), second=({}, {}), code=None)
    assert answers["every seed reached its run"].startswith("not recorded: "), answers[""]
    answers = certified(tmp_path / "pairs", first=(only(1, 2),), second=(only(3, 4, 5),), code=None)
    assert answers["runs of one seed are paired"].startswith("not recorded: "), answers[""]


def by_definition(number, since=1):
    """The lines with fingerprints by a definition from a step on; those of an earlier one differ in every value."""

    def keep(line):
        if line["step"] >= since:
            line["batch"] |= {name: name_of(line["batch"][name], number) for name in ("prompts", "responses", "rows")}
            line["batch"] |= {"definition": number, "updates": []}
        return line

    return {"keep": keep}


def test_fingerprints_of_two_definitions_are_not_compared(tmp_path):
    answers = certified(tmp_path, second=(by_definition(2),) * 2, code=3)
    paired = answers["runs of one seed are paired"]
    assert paired.startswith("not recorded: ") and "grpo-seed1 and acpo-seed1" in paired
    # Within each arm they can be.
    within = answers["every seed reached its run"]
    assert within.startswith("passed: ") and "prompts and responses differ" in within
    # Within an arm of both, the logged rewards decide.
    answers = certified(tmp_path / "within", first=(by_definition(2), {}), code=3)
    assert answers["every seed reached its run"].startswith("passed: "), answers[""]
    assert "the logged rewards and lengths" in answers["every seed reached its run"]


def test_a_run_that_went_on_with_another_definition_hides_a_repeated_batch(tmp_path):
    answers = certified(tmp_path, second=({}, by_definition(2, since=3)), code=3)
    answer_of_run = answers["no batch was trained twice"]
    assert answer_of_run.startswith("not recorded: ") and "acpo-seed2" in answer_of_run


def test_steps_without_fingerprints_are_not_passed(tmp_path):
    """The part that makes them may go off while a run trains."""

    def keep(line):
        line["data"]["training/global_step"] = line["step"]
        return line if line["step"] < 4 else line | {"batch": None}

    answers = certified(tmp_path, second=({}, {"keep": keep}), code=3)
    assert_names(answers["no batch was trained twice"], "fingerprints", "2 steps", "acpo-seed2", "step 4")


def test_a_batch_in_which_no_token_counts_repeats_nothing(tmp_path):
    empty = changed(rows="0" * 16, updates=["0" * 16] * 2, sequences=0, distinct=0)
    answers = certified(tmp_path, second=({}, empty), code=1)
    assert not answers["no batch was trained twice"].startswith("failed: "), answers[""]
    # It trained nothing, which is another question.
    assert_names(answers[AMOUNTS], "acpo-seed2", "0", "grpo-seed1", "128", "responses a step")
    samples = answers["the responses of a group differ"]
    assert samples.startswith("not recorded: ") and "acpo-seed2" in samples


def test_a_failure_counts_where_another_run_lacks_the_evidence(tmp_path):
    lacks = without("actor/clipx/clip")
    answers = certified(tmp_path, first=(lacks, {}), second=({}, changed(**{LOW: 0.0, HIGH: 0.0})), code=1)
    assert answers["the clip acted"].startswith("failed: ") and "acpo-seed2" in answers["the clip acted"]


@pytest.mark.parametrize(("precision", "passes"), [("fp32", False), ("float32", False), ("bf16", True), (None, True)])
def test_a_receipt_is_judged_by_the_precision_of_its_run(tmp_path, precision, passes):
    # verl computes in bfloat16 where the precision is not set.
    engine = {f"{ACTOR}.strategy": "fsdp2", f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": precision}
    run = {"change": engine} | changed(actor__clipx__receipt=lambda step: 0.03)
    answers = certified(tmp_path, first=({"change": engine},) * 2, second=(run, {"change": engine}), code=None)
    assert answers["the receipt agrees"].startswith("passed: " if passes else "failed: ")


def test_without_fingerprints_the_logged_data_decide_what_they_can(tmp_path):
    answers = certified(tmp_path, first=(without("batch"),) * 2, second=(without("batch"),) * 2, code=3)
    assert answers["every seed reached its run"].startswith("passed: ")
    assert "logged rewards and lengths" in answers["no batch was trained twice"]
    twice = {"keep": lambda line: without("batch")["keep"](line) | ({"data": TWICE} if line["step"] > 3 else {})}
    answers = certified(tmp_path / "twice", second=({}, twice), code=1)
    assert_names(answers["no batch was trained twice"], "acpo-seed2", "step 5", "step 4")


TWICE = {"critic/score/mean": 0.5, "response_length/mean": 41.0, "critic/advantages/max": 1.7}


@pytest.mark.parametrize("words", [["a"], ["vs", "a"], ["a", "vs"], ["a", "vs", "b", "vs", "c"]])
def test_arms_without_runs_are_refused(words):
    assert "name the runs of two arms" in clipx("certify", *words, code=1)


def test_the_demos_runs_fail_nothing(tmp_path):
    runs = [shutil.copytree(SHIPPED / name, tmp_path / name) for name in RUNS]
    printed = clipx("certify", runs[0], "vs", runs[1], code=None)
    assert " 0 failed" in printed


def console_log(path, seed, step=lambda step: step, offset=0.0, **changed):
    """A console log of stock verl: the configuration that it prints, then its steps."""
    overrides = [f"data.seed={seed}", "data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=16"]
    given = [*overrides, *(f"{key.replace('__', '.')}={value}" for key, value in changed.items())]
    printed = pformat(OmegaConf.to_container(composition(*given), resolve=True))
    steps = [
        f"step:{at} - critic/score/mean:{0.3 + 0.01 * step(at) + 0.001 * seed + offset:.4f} - response_length/mean:"
        f"{40 + step(at) * seed}.5 - critic/advantages/max:{1.5 + 0.1 * step(at) * seed:.3f} - actor/pg_clipfrac:0.002"
        for at in STEPS
    ]
    path.write_text("\n".join([printed, *steps]) + "\n")
    return path


OTHER_ARM = {"actor_rollout_ref__actor__clip_ratio_high": 0.28, "offset": 0.0002}
# What two stock logs have to decide: keys, seeds, repeated data, whether the clip could act.
DECIDED = (
    BELOW,
    *("the runs of an arm differ in seeds only", "every seed reached its run", "no batch was trained twice"),
    *("the clip acted", AMOUNTS, "one denominator", "one reward"),
)


@pytest.mark.parametrize(
    ("fault", "question"),
    [
        ({}, None),
        ({"actor_rollout_ref__actor__optim__lr": 3e-6}, BELOW),
        ({"step": lambda step: min(step, 3)}, "no batch was trained twice"),
        ({"actor_rollout_ref__actor__ppo_mini_batch_size": 64}, "the clip acted"),
        ({"actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-mean"}, "one denominator"),
    ],
)
def test_console_logs_of_stock_verl_decide_what_they_can(tmp_path, fault, question):
    arms = [
        [console_log(tmp_path / f"{name}{seed}.log", seed, **given) for seed in (1, 2)]
        for name, given in (
            ("a", {}),
            ("b", {"actor_rollout_ref__actor__clip_ratio_high": 0.28, "offset": 0.0002} | fault),
        )
    ]
    answers = answer("certify", *arms[0], "vs", *arms[1], code=1 if question else 3)["answers"]
    verdicts = {row["question"]: row["verdict"] for row in answers}
    failed = {one for one in DECIDED if verdicts[one] == "failed"}
    assert {verdicts[one] for one in DECIDED} <= {"passed", "failed"}, answers
    assert failed == (set() if question is None else failed | {question}) and (not question or question in failed)


def with_receipt(**numbers):
    """The lines with other numbers of the receipt in the first step; None: without the number."""

    def keep(line):
        if line["step"] != 1:
            return line
        data = line["data"] | {f"actor/clipx/{name}": number for name, number in numbers.items()}
        return line | {"data": {key: value for key, value in data.items() if value is not None}}

    return {"keep": keep}


@pytest.mark.parametrize("failed", [1.0, 0.5, 3.0])
def test_a_receipt_that_warned_fails(tmp_path, failed):
    answers = certified(tmp_path, first=({}, with_receipt(receipt_failed=failed)), code=1)
    assert answers["the receipt agrees"].startswith("failed: ") and "receipt warned" in answers["the receipt agrees"]


def test_a_receipt_that_compared_nothing_fails(tmp_path):
    answers = certified(tmp_path, first=({}, with_receipt(receipt=math.nan, receipt_failed=1.0)), code=1)
    assert answers["the receipt agrees"].startswith("failed: ")


def test_a_log_that_has_no_number_of_failed_checks_passes_and_says_so(tmp_path):
    answers = certified(tmp_path, first=({}, with_receipt(receipt_failed=None)), code=0)
    assert answers["the receipt agrees"].startswith("passed: ")
    assert "receipt_failed" in answers["the receipt agrees"]


@pytest.mark.parametrize(
    ("receipt", "fact"),
    [
        ({"difference": 0.0, "tolerance": 1e-4, "failed": 2}, "warned of 2 checks"),
        ({"difference": 0.5, "tolerance": 1e-4, "failed": 0}, "more than 0.0001"),
        ({"difference": None, "tolerance": 1e-4, "failed": 1}, "warned of 1 checks"),
    ],
)
def test_the_receipt_in_the_record_is_read(tmp_path, receipt, fact):
    first = {"record": {"receipt": receipt}} | without("actor/clipx/receipt", "actor/clipx/receipt_failed")
    line = certified(tmp_path, first=({}, first), code=1)["the receipt agrees"]
    assert line.startswith("failed: ") and fact in line


def test_a_sound_receipt_in_the_record_does_not_hide_that_of_an_earlier_start(tmp_path):
    sound = {"record": {"receipt": {"difference": 0.0, "tolerance": 1e-4, "failed": 0}}}
    answers = certified(tmp_path, first=({}, sound | with_receipt(receipt_failed=3.0)), code=1)
    assert "warned of 3 checks" in answers["the receipt agrees"]
