"""`clipx certify` on pairs of arms that nobody would compare, by kind, none of which may pass; and on pairs that only
look different, which must. Not covered: what the trainer writes (tests/training/trainer/test_log.py).
"""

import pandas
import pytest
from omegaconf import OmegaConf

from tests.analysis.certify.example_arms import (
    ACPO,
    ACTOR,
    SOUND_VERSIONS,
    both_runs,
    certify_arms,
    fingerprint_of,
    updates_of,
    vary,
    with_fingerprints,
    with_metrics,
    write_run,
)
from tests.composition import composition
from tests.messages import assert_names
from verl_clipx.analysis.certify.arms import Verdict
from verl_clipx.analysis.certify.certify import certify
from verl_clipx.analysis.certify.questions import QUESTIONS
from verl_clipx.analysis.certify.settings import compared_values
from verl_clipx.analysis.runs.run import Run
from verl_clipx.run.keys import flat
from verl_clipx.run.record import record_of

# The questions, in the words of the output.
NOTHING_ELSE_DIFFERS = "the arms differ in nothing but what should differ"
SEEDS_ONLY = "the runs of an arm differ in seeds only"
ONE_VERSION = "one version of each package"
ONE_MODEL = "one model"
ONE_SET_OF_DATA = "one set of data"
ONE_START = "one start"
FURTHER_FILES = "one content of each further file"
SAME_AMOUNTS = "the same steps, with as many updates and prompts"
DROPPED_ALIKE = "as many prompts were dropped for their age"
NOT_TOO_OLD = "no sample was older than allowed"
PAIRED = "runs of one seed are paired"
DIFFERENCE_REACHED = "what differs reached the runs"
ONE_VALIDATION = "one validation"

MODEL_PATH = "actor_rollout_ref.model.path"
ROLLOUT = "actor_rollout_ref.rollout"
DATA_CLASS = "data.custom_cls.path"
RESUME_PATH = "trainer.resume_from_path"
# verl's metric of how far the sampler's probabilities are from the trainer's.
DISTANCE = "training/rollout_probs_diff_mean"
OTHER_HASH = "b" * 64
CHECKPOINT = {"start/paths": ["sft/global_step_100"], "start/hash": OTHER_HASH}


def with_key(key, value):
    """Return an arm in which a key of the configuration is set."""
    return both_runs(overrides={key: value})


def with_record(name, value):
    """Return an arm in which a part of the record, or "part/field", is set."""
    return both_runs(record={name: value})


def with_version(package, version):
    """Return an arm with another version of a package; None if the record lacks it."""
    return with_record("versions", SOUND_VERSIONS | {package: version})


def with_metric(name, value):
    """Return an arm that logs a metric with one value in every step."""
    return both_runs(edit_line=with_metrics({name: value}))


def with_fingerprint(name, value):
    """Return an arm in which a field of each batch is set."""
    return both_runs(edit_line=with_fingerprints(**{name: value}))


def with_validations(validations):
    """Return an arm with other validations: from steps to the rewards of each problem."""
    return both_runs(validations=validations)


def naming_file(key, *, path="mine.py", digest):
    """Return an arm in which a key names a file, with the hash of what is in it."""
    return both_runs(overrides={key: path}, record={"files": {key: digest}})


def with_shifted_steps(shift):
    """Return an arm whose steps have larger numbers."""

    def edit(line):
        line["step"] += shift
        line["batch"]["versions"] = [line["step"] - 1, line["step"] - 1]
        return line

    return both_runs(edit_line=edit)


def train_one_update(line):
    """Return a line whose batch was trained in a single update; an `edit_line`."""
    line["batch"]["updates"] = [line["batch"]["rows"]]
    return line


def with_rows_of_first_arm():
    """Return an arm that trains, in every step, the rows of the first arm's run of the same seed."""
    arguments_of_runs = []
    for seed in (1, 2):
        arguments_of_runs.append({"edit_line": take_rows_of(f"grpo-seed{seed}")})
    return arguments_of_runs


def take_rows_of(run_name):
    """Return an `edit_line` with the rows and updates of another run."""

    def edit(line):
        line["batch"]["rows"] = fingerprint_of(run_name, line["step"], "rows")
        line["batch"]["updates"] = updates_of(run_name, line["step"])
        return line

    return edit


def with_fingerprints_in_step_1_only():
    """Return an arm that has fingerprints in the first step only."""

    def edit(line):
        if line["step"] == 1:
            return line
        return line | {"batch": None}

    return both_runs(edit_line=edit)


# From the kind of a pair to its second arm, and the question that must not pass.
INCOMPARABLE = {
    "precision": (with_key(f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", "bf16"), NOTHING_ELSE_DIFFERS),
    "rollout precision": (with_key(f"{ROLLOUT}.dtype", "float32"), NOTHING_ELSE_DIFFERS),
    "rollout engine": (with_key(f"{ROLLOUT}.name", "sglang"), NOTHING_ELSE_DIFFERS),
    "training engine": (with_key(f"{ACTOR}.strategy", "megatron"), NOTHING_ELSE_DIFFERS),
    "attention": (
        with_key("actor_rollout_ref.model.override_config.attn_implementation", "eager"),
        NOTHING_ELSE_DIFFERS,
    ),
    "torch.compile": (with_key(f"{ACTOR}.use_torch_compile", False), NOTHING_ELSE_DIFFERS),
    "tensor parallel": (with_key(f"{ROLLOUT}.tensor_model_parallel_size", 4), NOTHING_ELSE_DIFFERS),
    "number of nodes": (with_key("trainer.nnodes", 4), NOTHING_ELSE_DIFFERS),
    "micro-batches": (with_key(f"{ACTOR}.ppo_micro_batch_size_per_gpu", 16), NOTHING_ELSE_DIFFERS),
    "remove padding": (with_key("actor_rollout_ref.model.use_remove_padding", False), NOTHING_ELSE_DIFFERS),
    "prompts that are read": (with_key("data.max_prompt_length", 4096), NOTHING_ELSE_DIFFERS),
    "steps of a decaying rate": (
        both_runs(overrides={f"{ACTOR}.optim.lr_scheduler_type": "cosine", "trainer.total_epochs": 30}),
        NOTHING_ELSE_DIFFERS,
    ),
    "model of one folder name": (
        both_runs(overrides={MODEL_PATH: "other/base"}, record={"model/hash": OTHER_HASH}),
        ONE_MODEL,
    ),
    "model's commit on the hub": (with_record("model/hash", f"commit:{OTHER_HASH}"), ONE_MODEL),
    "model without a hash": (with_record("model/hash", None), ONE_MODEL),
    "train.parquet of two folders": (
        both_runs(overrides={"data.train_files": "other/train.parquet"}, record={"data/hash": OTHER_HASH}),
        ONE_SET_OF_DATA,
    ),
    "validation file": (with_record("validation/hash", OTHER_HASH), ONE_SET_OF_DATA),
    "data without a hash": (with_record("data/hash", None), ONE_SET_OF_DATA),
    "verl": (with_version("verl", "0.9.0"), ONE_VERSION),
    "torch": (with_version("torch", "2.8.0"), ONE_VERSION),
    "transformers": (with_version("transformers", "4.56.0"), ONE_VERSION),
    "plugin": (with_version("verl-clipx", "0.2.0"), ONE_VERSION),
    "engine's version": (with_version("vllm", "0.10.0"), ONE_VERSION),
    "engine's version lacks": (with_version("vllm", None), ONE_VERSION),
    "no versions": (with_record("versions", {}), ONE_VERSION),
    "commit": (with_record("commit", "d" * 40), ONE_VERSION),
    "accelerators": (with_record("machines/accelerators", ["H100"]), ONE_VERSION),
    "start checkpoint": (both_runs(record=CHECKPOINT), ONE_START),
    "start checkpoint without a record": (
        both_runs(overrides={"trainer.resume_mode": "resume_path", RESUME_PATH: "sft/global_step_100"}),
        ONE_START,
    ),
    "shifted steps": (with_shifted_steps(100), SAME_AMOUNTS),
    "fewer updates than the other arm": (both_runs(edit_line=train_one_update), SAME_AMOUNTS),
    "fewer prompts than the other arm": (with_fingerprint("groups", 12), SAME_AMOUNTS),
    "no tokens": (with_fingerprint("tokens", 0), SAME_AMOUNTS),
    "half of the tokens": (with_fingerprint("tokens", 2500), SAME_AMOUNTS),
    "skipped updates": (with_metric("actor/clipx/skipped_updates", 2.0), SAME_AMOUNTS),
    "updates of a verl log with a gradient that is not finite": (
        with_metric("actor/grad_norm", float("nan")),
        SAME_AMOUNTS,
    ),
    "a twentieth more responses without a finite reward": (
        with_metric("health/not_finite/rewards", 10.0),
        SAME_AMOUNTS,
    ),
    "rewards of a verl log that are not finite": (with_metric("critic/score/mean", float("nan")), SAME_AMOUNTS),
    "fewer responses than the other arm": (with_fingerprint("sequences", 100), SAME_AMOUNTS),
    "prompts dropped by a trainer that drops none": (
        with_metric("training/off_policy/evicted_samples", 4.0),
        DROPPED_ALIKE,
    ),
    "no gradient": (with_metric("actor/grad_norm", 0.0), SAME_AMOUNTS),
    "another learning rate than is configured": (with_metric("actor/lr", 2e-6), SAME_AMOUNTS),
    "later validation": (
        with_validations({1: [(1.0,), (0.0,)], 5: [(1.0,), (0.0,), (1.0,)]}),
        ONE_VALIDATION,
    ),
    "another last validation": (with_validations({5: [(1.0,), (0.0,)], 8: [(1.0,), (0.0,)]}), ONE_VALIDATION),
    "twice as many answers in validation": (with_validations({5: [(1.0, 1.0), (0.0, 0.0)]}), ONE_VALIDATION),
    "no common validation": (with_validations({3: [(1.0,), (0.0,)]}), ONE_VALIDATION),
    "older samples by one of two metrics": (
        both_runs(
            edit_line=with_metrics(
                {
                    "training/off_policy/trajectory_staleness/max": 3.0,
                    "training/off_policy/trajectory_staleness_worst/max": 0.0,
                }
            )
        ),
        NOT_TOO_OLD,
    ),
    "equal rows": (with_rows_of_first_arm(), DIFFERENCE_REACHED),
    "fingerprints of the first step": (with_fingerprints_in_step_1_only(), PAIRED),
}


@pytest.mark.parametrize("kind", INCOMPARABLE)
def test_arms_that_nobody_would_compare_do_not_pass(tmp_path, kind):
    second, question = INCOMPARABLE[kind]
    printed = certify_arms(tmp_path, second=second, code=None)
    assert printed.answers[question].verdict != "passed", printed.text


@pytest.mark.parametrize("kind", ["start checkpoint", "verl", "model of one folder name", "precision", "equal rows"])
def test_what_is_recorded_and_differs_fails(tmp_path, kind):
    second, question = INCOMPARABLE[kind]
    certify_arms(tmp_path, second=second, code=1).assert_verdict(question, "failed")


# From the kind of a pair to its second arm.
COMPARABLE = {
    "names and folders": both_runs(
        overrides={
            "trainer.project_name": "mine",
            "trainer.experiment_name": "second",
            "trainer.default_local_dir": "elsewhere",
            "trainer.validation_data_dir": "elsewhere/validation",
        }
    ),
    "ports": with_key("transfer_queue.metrics.port", 1234),
    "what a resume would read": with_key(f"{ACTOR}.checkpoint.load_contents", ["model"]),
    "checkpoints and validations": both_runs(overrides={"trainer.save_freq": 5, "trainer.test_freq": 1}),
    "epochs beyond the steps": with_key("trainer.total_epochs", 30),
    "what is recorded": both_runs(overrides={"trainer.logger": ["console"], "clipx.trace.every": 1}),
    "a copy of the model": with_key(MODEL_PATH, "elsewhere/base"),
    "a copy of the data": with_key("data.train_files", "elsewhere/train.parquet"),
    "a copy of the reward": with_key("reward.custom_reward_function.path", "elsewhere/reward.py"),
    "more validations": with_validations({3: [(1.0,), (0.0,)], 5: [(1.0,), (0.0,)]}),
}


@pytest.mark.parametrize("kind", COMPARABLE)
def test_arms_that_only_look_different_pass(tmp_path, kind):
    printed = certify_arms(tmp_path, second=COMPARABLE[kind], code=0)
    assert_names(printed.summary, f"{len(QUESTIONS)} questions", f"{len(QUESTIONS)} passed")


# In the first arm the sampler is near its trainer, in the second one far from it.
NEAR = with_metric(DISTANCE, 0.002)
FAR = with_metric(DISTANCE, 0.05)


def test_a_sampler_that_is_far_from_its_trainer_in_the_first_step_fails(tmp_path):
    printed = certify_arms(tmp_path, first=NEAR, second=FAR, code=1)
    printed.assert_verdict(ONE_START, "failed", "first step", "0.05 in acpo-seed1", "0.002 in grpo-seed1")


def test_a_sampler_that_is_not_much_farther_from_its_trainer_passes(tmp_path):
    # Less than four times as far.
    printed = certify_arms(tmp_path, first=NEAR, second=with_metric(DISTANCE, 0.005), code=0)
    printed.assert_verdict(ONE_START, "passed")


@pytest.mark.parametrize("distance", [0.05, 0.005])
def test_a_sampler_may_be_far_from_its_trainer_where_the_rollout_should_differ(tmp_path, distance):
    second = both_runs(overrides={f"{ROLLOUT}.dtype": "float32"}, edit_line=with_metrics({DISTANCE: distance}))
    words = vary("clipx.*", f"{ACTOR}.policy_loss.*", f"{ROLLOUT}.dtype")
    printed = certify_arms(tmp_path, first=NEAR, second=second, words=words, code=0)
    printed.assert_verdict(ONE_START, "passed")


def test_patterns_that_name_only_the_loss_leave_the_samplers_compared(tmp_path):
    words = vary("clipx*", f"{ACTOR}.policy_loss.loss_*")
    printed = certify_arms(tmp_path, first=NEAR, second=FAR, words=words, code=1)
    printed.assert_verdict(ONE_START, "failed", "0.05 in acpo-seed1", "0.002 in grpo-seed1")


def test_samplers_whose_distances_were_logged_from_different_steps_on_are_not_compared(tmp_path):
    def log_distance_from_step_2(line):
        if line["step"] > 1:
            line["data"][DISTANCE] = 0.05
        return line

    second = both_runs(edit_line=log_distance_from_step_2)
    certify_arms(tmp_path, first=NEAR, second=second, code=0).assert_verdict(ONE_START, "passed")


def test_a_gradient_of_0_or_nan_is_not_said_to_be_0_in_every_step(tmp_path):
    def log_nan_then_0(line):
        line["data"]["actor/grad_norm"] = 0.0 if line["step"] > 1 else float("nan")
        return line

    printed = certify_arms(tmp_path, second=both_runs(edit_line=log_nan_then_0), code=1)
    printed.assert_verdict(SAME_AMOUNTS, "failed", "no step", "finite gradient", "acpo-seed1", "acpo-seed2")


def test_runs_whose_folders_have_the_same_name_are_told_apart(tmp_path):
    first = []
    second = []
    for seed in (1, 2):
        near = with_metrics({DISTANCE: 0.002})
        first.append(write_run(tmp_path / f"grpo/x-seed{seed}", seed=seed, edit_line=near))
        second.append(
            write_run(
                tmp_path / f"acpo/x-seed{seed}",
                seed=seed,
                loss=ACPO,
                edit_line=with_metrics({DISTANCE: 0.05}),
                record={"model/hash": OTHER_HASH, "data/hash": "c" * 64},
            )
        )
    answers = certify([*map(str, first), "vs", *map(str, second)], vary=())
    answer_by_question = {answer.question: answer for answer in answers}
    for question in (ONE_MODEL, ONE_SET_OF_DATA, ONE_START):
        assert answer_by_question[question].verdict is Verdict.FAILED
    assert f"{tmp_path}/acpo/x-seed" in answer_by_question[ONE_START].evidence
    # The seed is still read.
    assert answer_by_question["every seed reached its run"].verdict is Verdict.PASSED


def test_what_is_read_of_the_checkpoint_that_both_arms_began_with_is_compared(tmp_path):
    first = both_runs(record=CHECKPOINT)
    second = both_runs(record=CHECKPOINT, overrides={f"{ACTOR}.checkpoint.load_contents": ["model"]})
    printed = certify_arms(tmp_path, first=first, second=second, code=1)
    printed.assert_verdict(ONE_START, "passed")
    printed.assert_verdict(NOTHING_ELSE_DIFFERS, "failed", f"{ACTOR}.checkpoint.load_contents")


@pytest.mark.parametrize(
    ("name", "second"),
    [
        (f"{ROLLOUT}.name", with_key(f"{ROLLOUT}.name", "hf")),
        ("versions.torch", with_version("torch", "2.8.0")),
        ("commit", with_record("commit", "d" * 40)),
        (MODEL_PATH, with_record("model/hash", OTHER_HASH)),
        ("data.train_files", with_record("data/hash", OTHER_HASH)),
        ("reward.custom_reward_function.path", with_record("reward/hash", OTHER_HASH)),
        (DATA_CLASS, naming_file(DATA_CLASS, digest=OTHER_HASH)),
        (RESUME_PATH, both_runs(record=CHECKPOINT)),
    ],
)
def test_what_should_differ_is_named(tmp_path, name, second):
    # Where --vary is given, it has to name the loss too.
    words = vary("clipx.*", f"{ACTOR}.policy_loss.*", name)
    printed = certify_arms(tmp_path / "differs", second=second, words=words, code=0)
    printed.assert_verdict(NOTHING_ELSE_DIFFERS, "passed", name)
    printed = certify_arms(tmp_path / "does not differ", words=words, code=1)
    printed.assert_verdict(NOTHING_ELSE_DIFFERS, "failed", "do not differ", name, "--vary")


@pytest.mark.parametrize(
    "key",
    [
        DATA_CLASS,
        f"{ROLLOUT}.multi_turn.tool_config_path",
        f"{ROLLOUT}.agent.agent_loop_config_path",
        "reward.reward_manager.module.path",
        "reward.reward_model.model_path",
        "distillation.teacher_models.teacher_model.model_path",
    ],
)
def test_a_further_file_is_compared_by_its_content(tmp_path, key):
    first = naming_file(key, digest="a" * 64)
    copy = naming_file(key, digest="a" * 64, path="copy/mine.py")
    printed = certify_arms(tmp_path / "copy", first=first, second=copy, code=None)
    printed.assert_verdict(FURTHER_FILES, "passed", "one hash", key)
    printed.assert_verdict(NOTHING_ELSE_DIFFERS, "passed")
    other = naming_file(key, digest="b" * 64)
    printed = certify_arms(tmp_path / "other", first=first, second=other, code=1)
    # Eight characters of a hash are shown.
    printed.assert_verdict(FURTHER_FILES, "failed", key, "aaaaaaaa", "bbbbbbbb")


def test_a_further_file_of_one_arm_alone_fails(tmp_path):
    printed = certify_arms(tmp_path, second=naming_file(DATA_CLASS, digest="a" * 64), code=1)
    printed.assert_verdict(FURTHER_FILES, "failed", DATA_CLASS, "not set", "grpo-seed1", "grpo-seed2")


def test_a_further_file_without_a_hash_is_not_recorded(tmp_path):
    arm = with_key(DATA_CLASS, "mine.py")
    printed = certify_arms(tmp_path, first=arm, second=arm, code=3)
    printed.assert_verdict(FURTHER_FILES, "not recorded", DATA_CLASS)


def test_two_commits_of_a_model_on_the_hub_fail(tmp_path):
    first = with_record("model/hash", f"commit:{'a' * 64}")
    second = with_record("model/hash", f"commit:{'b' * 64}")
    printed = certify_arms(tmp_path, first=first, second=second, code=1)
    printed.assert_verdict(ONE_MODEL, "failed", MODEL_PATH, "aaaaaaaa", "bbbbbbbb")


def test_a_commit_on_the_hub_beside_a_folder_is_not_known_to_be_one_model(tmp_path):
    second = with_record("model/hash", f"commit:{'a' * 64}")
    printed = certify_arms(tmp_path, second=second, code=3)
    printed.assert_verdict(ONE_MODEL, "not recorded", MODEL_PATH, "folder", "hub")


def test_arms_with_other_prompts_under_one_seed_are_not_paired(tmp_path):
    def change_prompts(line):
        line["batch"]["prompts"] = fingerprint_of("other", line["batch"]["prompts"])
        return line

    printed = certify_arms(tmp_path, second=both_runs(edit_line=change_prompts), code=0)
    printed.assert_verdict(PAIRED, "passed", "not paired", "other prompts", "1", "2")


def test_another_source_of_ones_own_loss_within_an_arm_fails(tmp_path):
    function = f"{ACTOR}.policy_loss.run.record.identity.function"
    second = ({"overrides": {function: "a" * 32}}, {"overrides": {function: "b" * 32}})
    printed = certify_arms(tmp_path, second=second, code=1)
    printed.assert_verdict(SEEDS_ONLY, "failed", "source", "clipx.function")


def test_evidence_of_the_first_step_alone_is_called_that(tmp_path):
    printed = certify_arms(tmp_path, second=with_fingerprints_in_step_1_only(), code=3)
    printed.assert_verdict(PAIRED, "not recorded", "step 1 alone", "acpo-seed1")


def test_two_seeds_of_a_recipe_with_seeded_rollouts_are_of_one_setting():
    runs = []
    for seed in (1, 2):
        overrides = (f"data.seed={seed}", f"trainer.experiment_name=a{seed}")
        config = composition("+clipx=acpo", "+clipx/rollout=seeded", *overrides)
        values = flat(OmegaConf.to_container(config, resolve=False))
        runs.append(Run(name=f"a-seed{seed}", log=pandas.DataFrame(), configuration=values, record=record_of(values)))
    first, second = runs
    assert compared_values(first) == compared_values(second)
