"""`clipx certify` on pairs of arms that nobody would compare, by kind, none of which may pass; and on pairs that only
look different, which must. Not covered: what the trainer writes (tests/training/trainer/test_log.py).
"""

import pandas
import pytest
from omegaconf import OmegaConf

from tests.analysis.certify.example_arms import ACPO, ACTOR, SOUND_VERSIONS, certified, name_of, write_run
from tests.composition import composition
from verl_clipx.analysis.certify.arms import Verdict
from verl_clipx.analysis.certify.certify import certify
from verl_clipx.analysis.certify.questions import QUESTIONS
from verl_clipx.analysis.certify.settings import compared_values
from verl_clipx.analysis.runs.run import Run
from verl_clipx.run.keys import flat
from verl_clipx.run.record import record_of

BELOW = "the arms differ in nothing but what should differ"
VERSIONS = "one version of each package"
START = "one start"
AMOUNTS = "the same steps, with as many updates and prompts"
FILES = "one content of each further file"
ROLLOUT = "actor_rollout_ref.rollout"
DATA_CLASS = "data.custom_cls.path"


def both(**given):
    """The two runs of an arm, both with these arguments of `write_run`."""
    return (given, given)


def keys(**changes):
    return both(change={key.replace("__", "."): value for key, value in changes.items()})


def record(**changes):
    """Changed parts of the record, or under PART__NAME one field of a part."""
    return both(record={key.replace("__", "/"): value for key, value in changes.items()})


def file_at(key, digest, path="mine.py"):
    """A file that a key names, with the hash of what is in it."""
    return {"change": {key: path}, "record": {"files": {key: digest}}}


def set_key(key, value):
    return both(change={key: value})


def version(package, number):
    return record(versions=SOUND_VERSIONS | {package: number})


def shifted(by):
    """The lines with other numbers of steps."""

    def keep(line):
        line["step"] += by
        line["batch"]["versions"] = [line["step"] - 1] * 2
        return line

    return both(keep=keep)


def with_batch(**changes):
    """The lines with other fingerprints; `updates`: as many as that, which have the batch's rows."""

    def keep(line):
        batch = line["batch"] | changes
        if "updates" in changes:
            batch["updates"] = [batch["rows"]] * changes["updates"]
        return line | {"batch": batch}

    return keep


def with_metrics(**values):
    return lambda line: line | {"data": line["data"] | values}


def with_metric(name, value):
    return with_metrics(**{name: value})


def of_first_arm(line):
    """The line with the rows of the first arm's run of the same seed."""
    name = f"grpo-seed{line['batch'].pop('seed')}"
    rows = name_of(name, line["step"], "rows")
    half = int(name_of(name, line["step"], "half"), 16)
    updates = [f"{part % 2**64:016x}" for part in (half, int(rows, 16) - half)]
    return line | {"batch": line["batch"] | {"rows": rows, "updates": updates}}


def same_rows(seed):
    def keep(line):
        line["batch"]["seed"] = seed
        return of_first_arm(line)

    return {"keep": keep}


def only_in(*steps):
    """The lines with fingerprints in some steps only."""
    return both(keep=lambda line: line if line["step"] in steps else line | {"batch": None})


APART = {
    "precision": (keys(actor_rollout_ref__actor__fsdp_config__mixed_precision__param_dtype="bf16"), BELOW),
    "rollout precision": (set_key(f"{ROLLOUT}.dtype", "float32"), BELOW),
    "rollout engine": (set_key(f"{ROLLOUT}.name", "sglang"), BELOW),
    "training engine": (set_key(f"{ACTOR}.strategy", "megatron"), BELOW),
    "attention": (keys(actor_rollout_ref__model__override_config__attn_implementation="eager"), BELOW),
    "torch.compile": (set_key(f"{ACTOR}.use_torch_compile", False), BELOW),
    "tensor parallel": (set_key(f"{ROLLOUT}.tensor_model_parallel_size", 4), BELOW),
    "number of nodes": (set_key("trainer.nnodes", 4), BELOW),
    "micro-batches": (set_key(f"{ACTOR}.ppo_micro_batch_size_per_gpu", 16), BELOW),
    "remove padding": (set_key("actor_rollout_ref.model.use_remove_padding", False), BELOW),
    "prompts that are read": (set_key("data.max_prompt_length", 4096), BELOW),
    "steps of a decaying rate": (
        both(change={f"{ACTOR}.optim.lr_scheduler_type": "cosine", "trainer.total_epochs": 30}),
        BELOW,
    ),
    "model of one folder name": (
        both(change={"actor_rollout_ref.model.path": "other/base"}, record={"model/hash": "b" * 64}),
        "one model",
    ),
    "model's commit on the hub": (record(model__hash="commit:" + "b" * 64), "one model"),
    "model without a hash": (record(model__hash=None), "one model"),
    "train.parquet of two folders": (
        both(change={"data.train_files": "other/train.parquet"}, record={"data/hash": "b" * 64}),
        "one set of data",
    ),
    "validation file": (record(validation__hash="b" * 64), "one set of data"),
    "data without a hash": (record(data__hash=None), "one set of data"),
    "verl": (version("verl", "0.9.0"), VERSIONS),
    "torch": (version("torch", "2.8.0"), VERSIONS),
    "transformers": (version("transformers", "4.56.0"), VERSIONS),
    "plugin": (version("verl-clipx", "0.2.0"), VERSIONS),
    "engine's version": (version("vllm", "0.10.0"), VERSIONS),
    "engine's version lacks": (version("vllm", None), VERSIONS),
    "no versions": (record(versions={}), VERSIONS),
    "commit": (record(commit="d" * 40), VERSIONS),
    "accelerators": (record(machines__accelerators=["H100"]), VERSIONS),
    "start checkpoint": (
        both(record={"start/paths": ["sft/global_step_100"], "start/hash": "b" * 64}),
        START,
    ),
    "start checkpoint without a record": (
        both(change={"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "sft/global_step_100"}),
        START,
    ),
    "shifted steps": (shifted(100), AMOUNTS),
    "fewer updates than the other arm": (both(keep=with_batch(updates=1)), AMOUNTS),
    "fewer prompts than the other arm": (both(keep=with_batch(groups=12)), AMOUNTS),
    "no tokens": (both(keep=with_batch(tokens=0)), AMOUNTS),
    "half of the tokens": (both(keep=with_batch(tokens=2500)), AMOUNTS),
    "skipped updates": (both(keep=with_metric("actor/clipx/skipped_updates", 2.0)), AMOUNTS),
    "updates of a verl log with a gradient that is not finite": (
        both(keep=with_metric("actor/grad_norm", float("nan"))),
        AMOUNTS,
    ),
    "a twentieth more responses without a finite reward": (
        both(keep=with_metric("health/not_finite/rewards", 10.0)),
        AMOUNTS,
    ),
    "rewards of a verl log that are not finite": (both(keep=with_metric("critic/score/mean", float("nan"))), AMOUNTS),
    "fewer responses than the other arm": (both(keep=with_batch(sequences=100)), AMOUNTS),
    "prompts dropped by a trainer that drops none": (
        both(keep=with_metric("training/off_policy/evicted_samples", 4.0)),
        "as many prompts were dropped for their age",
    ),
    "no gradient": (both(keep=with_metric("actor/grad_norm", 0.0)), AMOUNTS),
    "another learning rate than is configured": (both(keep=with_metric("actor/lr", 2e-6)), AMOUNTS),
    "later validation": (
        both(validations={1: [(1.0,), (0.0,)], 5: [(1.0,), (0.0,), (1.0,)]}),
        "one validation",
    ),
    "another last validation": (both(validations={5: [(1.0,), (0.0,)], 8: [(1.0,), (0.0,)]}), "one validation"),
    "twice as many answers in validation": (both(validations={5: [(1.0, 1.0), (0.0, 0.0)]}), "one validation"),
    "no common validation": (both(validations={3: [(1.0,), (0.0,)]}), "one validation"),
    "older samples by one of two metrics": (
        both(
            keep=with_metrics(
                **{
                    "training/off_policy/trajectory_staleness/max": 3.0,
                    "training/off_policy/trajectory_staleness_worst/max": 0.0,
                }
            )
        ),
        "no sample was older than allowed",
    ),
    "equal rows": ((same_rows(1), same_rows(2)), "what differs reached the runs"),
    "fingerprints of the first step": (only_in(1), "runs of one seed are paired"),
}


@pytest.mark.parametrize("kind", APART)
def test_arms_that_nobody_would_compare_do_not_pass(tmp_path, kind):
    second, question = APART[kind]
    said = certified(tmp_path, second=second, code=None)
    assert not said[question].startswith("passed: "), said[""]


@pytest.mark.parametrize("kind", ["start checkpoint", "verl", "model of one folder name", "precision", "equal rows"])
def test_what_is_recorded_and_differs_fails(tmp_path, kind):
    second, question = APART[kind]
    said = certified(tmp_path, second=second, code=1)
    assert said[question].startswith("failed: "), said[""]


ALIKE = {
    "names and folders": both(
        change={
            "trainer.project_name": "mine",
            "trainer.experiment_name": "second",
            "trainer.default_local_dir": "elsewhere",
            "trainer.validation_data_dir": "elsewhere/validation",
        }
    ),
    "ports": set_key("transfer_queue.metrics.port", 1234),
    "what a resume would read": set_key(f"{ACTOR}.checkpoint.load_contents", ["model"]),
    "checkpoints and validations": both(change={"trainer.save_freq": 5, "trainer.test_freq": 1}),
    "epochs beyond the steps": set_key("trainer.total_epochs", 30),
    "what is recorded": both(change={"trainer.logger": ["console"], "clipx.trace.every": 1}),
    "a copy of the model": set_key("actor_rollout_ref.model.path", "elsewhere/base"),
    "a copy of the data": set_key("data.train_files", "elsewhere/train.parquet"),
    "a copy of the reward": set_key("reward.custom_reward_function.path", "elsewhere/reward.py"),
    "more validations": both(validations={3: [(1.0,), (0.0,)], 5: [(1.0,), (0.0,)]}),
}


@pytest.mark.parametrize("kind", ALIKE)
def test_arms_that_only_look_different_pass(tmp_path, kind):
    said = certified(tmp_path, second=ALIKE[kind], code=0)
    assert said[""].startswith(f"{len(QUESTIONS)} questions: {len(QUESTIONS)} passed")


@pytest.mark.parametrize(("far", "passes"), [(0.05, False), (0.005, True)])
def test_a_sampler_that_is_far_from_its_trainer_in_the_first_step_fails(tmp_path, far, passes):
    near, other = (both(keep=with_metric("training/rollout_probs_diff_mean", value)) for value in (0.002, far))
    line = certified(tmp_path / "loss", first=near, second=other, code=0 if passes else 1)[START]
    assert line.startswith("passed: " if passes else "failed: ")
    # Where the rollout is to differ too, it is as it should be.
    precise = [{"change": {f"{ROLLOUT}.dtype": "float32"}} | given for given in other]
    loss = ("clipx.*", f"{ACTOR}.policy_loss.*", f"{ROLLOUT}.dtype")
    words = [word for pattern in loss for word in ("--vary", pattern)]
    assert certified(tmp_path / "both", first=near, second=precise, words=words, code=0)[START].startswith("passed: ")


def test_a_gradient_of_0_or_nan_is_not_said_to_be_0_in_every_step(tmp_path):
    def keep(line):
        line["data"]["actor/grad_norm"] = 0.0 if line["step"] > 1 else float("nan")
        return line

    line = certified(tmp_path, second=both(keep=keep), code=1)[AMOUNTS]
    assert "no step had a finite gradient other than 0 in acpo-seed1, acpo-seed2" in line


def far_samplers():
    """Two arms: in the second, the sampler is far from its trainer in the first step."""
    near = both(keep=with_metric("training/rollout_probs_diff_mean", 0.002))
    far = both(keep=with_metric("training/rollout_probs_diff_mean", 0.05))
    return near, far


def test_patterns_that_name_only_the_loss_leave_the_samplers_compared(tmp_path):
    near, far = far_samplers()
    words = ("--vary", "clipx*", "--vary", f"{ACTOR}.policy_loss.loss_*")
    line = certified(tmp_path, first=near, second=far, words=words, code=1)[START]
    assert line.startswith("failed: ") and "was 0.05 in acpo-seed1 and 0.002 in grpo-seed1" in line


def test_samplers_whose_distances_were_logged_from_different_steps_on_are_not_compared(tmp_path):
    def keep(line):
        if line["step"] > 1:
            line["data"]["training/rollout_probs_diff_mean"] = 0.05
        return line

    near, _ = far_samplers()
    line = certified(tmp_path, first=near, second=both(keep=keep), code=0)[START]
    assert line.startswith("passed: ")


def test_runs_whose_folders_have_the_same_name_are_told_apart(tmp_path):
    near, far = (keep_of_arm[0]["keep"] for keep_of_arm in far_samplers())
    first = [write_run(tmp_path / f"grpo/x-seed{seed}", seed=seed, keep=near) for seed in (1, 2)]
    changed = {"model/hash": "b" * 64, "data/hash": "c" * 64}
    second = [
        write_run(tmp_path / f"acpo/x-seed{seed}", seed=seed, keep=far, loss=ACPO, record=changed) for seed in (1, 2)
    ]
    answers = certify([*map(str, first), "vs", *map(str, second)], vary=())
    failed = {answer.question: answer.evidence for answer in answers if answer.verdict is Verdict.FAILED}
    assert {"one model", "one set of data", START} <= set(failed)
    assert f"{tmp_path}/acpo/x-seed" in failed[START]
    # The seed is still read.
    verdict_by_question = {answer.question: answer.verdict for answer in answers}
    assert verdict_by_question["every seed reached its run"] is Verdict.PASSED


def test_what_is_read_of_the_checkpoint_that_both_arms_began_with_is_compared(tmp_path):
    began = {"start/paths": ["sft/global_step_100"], "start/hash": "b" * 64}
    read = {f"{ACTOR}.checkpoint.load_contents": ["model"]}
    said = certified(tmp_path, first=both(record=began), second=both(record=began, change=read), code=1)
    assert said[START].startswith("passed: ")
    assert said[BELOW].startswith("failed: ") and "checkpoint.load_contents" in said[BELOW]


@pytest.mark.parametrize(
    ("name", "second"),
    [
        (f"{ROLLOUT}.name", set_key(f"{ROLLOUT}.name", "hf")),
        ("versions.torch", version("torch", "2.8.0")),
        ("commit", record(commit="d" * 40)),
        ("actor_rollout_ref.model.path", record(model__hash="b" * 64)),
        ("data.train_files", record(data__hash="b" * 64)),
        ("reward.custom_reward_function.path", record(reward__hash="b" * 64)),
        (DATA_CLASS, both(**file_at(DATA_CLASS, "b" * 64))),
        (
            "trainer.resume_from_path",
            both(record={"start/paths": ["sft/global_step_100"], "start/hash": "b" * 64}),
        ),
    ],
)
def test_what_should_differ_is_named(tmp_path, name, second):
    """Beside the loss, whose keys are then named too."""
    loss = ("clipx.*", f"{ACTOR}.policy_loss.*")
    words = [word for pattern in (*loss, name) for word in ("--vary", pattern)]
    said = certified(tmp_path, second=second, words=words, code=0)
    assert name in said[BELOW]
    idle = certified(tmp_path / "idle", words=words, code=1)
    assert f"the arms do not differ in {name}, which --vary names" in idle[BELOW]


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
    first, copy, other = file_at(key, "a" * 64), file_at(key, "a" * 64, "copy/mine.py"), file_at(key, "b" * 64)
    same = certified(tmp_path / "same", first=both(**first), second=both(**copy), code=None)
    assert same[FILES].startswith("passed: ") and f"one hash of what {key} names" in same[FILES]
    assert same[BELOW].startswith("passed: ")
    apart = certified(tmp_path / "apart", first=both(**first), second=both(**other), code=1)
    assert apart[FILES].startswith("failed: ") and "aaaaaaaa, bbbbbbbb" in apart[FILES]


def test_a_further_file_of_one_arm_alone_fails(tmp_path):
    said = certified(tmp_path, second=both(**file_at(DATA_CLASS, "a" * 64)), code=1)
    assert said[FILES].startswith("failed: ") and f"{DATA_CLASS} is not set in grpo-seed1, grpo-seed2" in said[FILES]


def test_a_further_file_without_a_hash_is_not_recorded(tmp_path):
    given = both(change={DATA_CLASS: "mine.py"})
    said = certified(tmp_path, first=given, second=given, code=3)
    assert said[FILES].startswith("not recorded: ") and DATA_CLASS in said[FILES]


def test_two_commits_of_a_model_on_the_hub_fail_and_one_beside_a_folder_is_not_recorded(tmp_path):
    first, second = (record(model__hash=f"commit:{letter * 64}") for letter in "ab")
    said = certified(tmp_path / "commits", first=first, second=second, code=1)
    assert said["one model"].startswith("failed: ")
    said = certified(tmp_path / "kinds", second=first, code=3)
    assert said["one model"].startswith("not recorded: ") and "the name on the hub" in said["one model"]


def test_other_prompts_under_one_seed_are_called_that(tmp_path):
    def keep(line):
        return line | {"batch": line["batch"] | {"prompts": name_of("other", line["batch"]["prompts"])}}

    said = certified(tmp_path, second=both(keep=keep), code=0)
    assert "other prompts under the seed 1, 2" in said["runs of one seed are paired"]


def test_another_source_of_ones_own_loss_within_an_arm_fails(tmp_path):
    function = f"{ACTOR}.policy_loss.run.record.identity.function"
    given = [{"change": {function: digest}} for digest in ("a" * 32, "b" * 32)]
    said = certified(tmp_path, second=given, code=1)
    line = said["the runs of an arm differ in seeds only"]
    assert line.startswith("failed: ") and "the source of clipx.function" in line


def test_evidence_of_the_first_step_alone_is_called_that(tmp_path):
    said = certified(tmp_path, second=only_in(1), code=3)
    assert "step 1 alone" in said["runs of one seed are paired"]


def test_two_seeds_of_a_recipe_with_seeded_rollouts_are_of_one_setting():
    runs = []
    for seed in (1, 2):
        named = (f"data.seed={seed}", f"trainer.experiment_name=a{seed}")
        config = composition("+clipx=acpo", "+clipx/rollout=seeded", *named)
        values = flat(OmegaConf.to_container(config, resolve=False))
        runs.append(Run(f"a-seed{seed}", pandas.DataFrame(), values, record_of(values)))
    assert compared_values(runs[0]) == compared_values(runs[1])
