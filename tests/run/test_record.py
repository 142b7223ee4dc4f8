"""The record of a run: its fields, from verl's composed configurations and from parts of one; its file; its page.

Not covered: the hashes of models and data (tests/run/test_content.py), what readers do with the fields.
"""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.composition import composition
from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.run.keys import ACTOR, FACTS, flat
from verl_clipx.run.record import SCHEMA, Loss, Resumption, RunRecord, as_json, read_record, record_of
from verl_clipx.run.start import resolve_into_config
from verl_clipx.run.trainer import KINDS, Trainer, trainer_of

PAGE = Path("docs/record.md")


def compose_record(*overrides):
    """The record of a run with these overrides."""
    return record_of(OmegaConf.to_container(composition(*overrides)))


def test_the_fields_of_a_run_of_verls_own():
    record = compose_record(
        "algorithm.adv_estimator=rloo", "data.train_files=[a/train.parquet,b/train.parquet]", "data.seed=7"
    )
    assert record.loss == Loss(mode="vanilla", widths=record.loss.widths) and not record.loss.is_ours
    assert record.loss.widths["clip_ratio_high"] == 0.2 and "policy_loss.dro_beta" not in record.loss.widths
    assert record.trainer == Trainer("sync", in_step=True, recomputes_old=True, oldest_allowed=0, stale=False)
    assert (record.estimator, record.aggregation, record.seeds.data) == ("rloo", "token-mean", 7)
    assert record.data.paths == ("a/train.parquet", "b/train.parquet")
    assert (record.batch.prompts, record.batch.mini_batch, record.batch.epochs) == (1024, 256, 1)
    assert record.schedule.updates == 4 and record.schedule.starts_at_ratio_one
    assert record.training.name == "fsdp" and record.training.precision == "bfloat16"
    assert record.optimizer.rate == 1e-6 and record.sampling.temperature == 1.0
    assert (record.receipt.difference, record.receipt.tolerance, record.line) == (None, 4e-2, None)


def test_the_loss_of_a_method_with_a_modifier():
    record = compose_record("+clipx=grpo", "+clipx/mask=icepop", "clipx.clip_high=1.3")
    assert (record.loss.mode, record.loss.method, record.loss.is_ours) == ("clipx_grpo", "grpo", True)
    assert record.loss.parameters["clip_high"] == 1.3 and "mask" not in record.loss.parameters
    assert record.loss.modifiers["mask"]["rule"] == "icepop"


def test_observed_runs_train_verls_loss():
    record = compose_record("+clipx=observe")
    assert (record.loss.mode, record.loss.method, record.loss.is_ours) == ("vanilla", "observe", False)


def test_what_a_worker_and_the_line_read_of_the_engines():
    record = compose_record(
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
        "actor_rollout_ref.actor.loss_scale_factor=512",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
        "trainer.critic_warmup=3",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        "actor_rollout_ref.rollout.logprobs_mode=processed_logprobs",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.logprobs_mode=raw_logprobs",
        "distillation.enabled=true",
        "distillation.distillation_loss.loss_mode=forward_kl_topk",
        "distillation.distillation_loss.distillation_loss_coef=0.5",
    )
    assert (record.aggregation, record.scale_factor) == ("seq-mean-token-sum-norm", 512)
    assert record.loss.uncompiled_by == "actor_rollout_ref.actor.fsdp_config.use_torch_compile"
    assert record.length.critic_warmup == 3
    sampling, terms = record.sampling, record.terms
    assert sampling.returns_log_probs is True
    assert (sampling.log_probs, sampling.log_probs_of_vllm) == ("processed_logprobs", "raw_logprobs")
    assert (terms.distillation, terms.distillation_coefficient) == (True, 0.5)
    assert terms.distillation_kind == "forward_kl_topk"


def test_a_run_that_compiles_names_no_switch():
    assert compose_record("actor_rollout_ref.actor.use_torch_compile=true").loss.uncompiled_by is None


NAMED_CHECKPOINT = ("trainer.resume_mode=resume_path", "trainer.resume_from_path=runs/a/global_step_4")


@pytest.mark.parametrize(
    ("overrides", "resumption"),
    [
        ((), Resumption(mode="auto")),
        (("trainer.resume_mode=disable",), Resumption(mode="disable")),
        (NAMED_CHECKPOINT, Resumption(mode="resume_path", path="runs/a/global_step_4")),
        (("trainer.resume_from_path=s3://me:key@host/global_step_4",), Resumption("auto", "s3://host/global_step_4")),
    ],
)
def test_the_checkpoint_that_a_run_goes_on_from(overrides, resumption):
    record = compose_record(*overrides)
    assert record.resumption == resumption
    assert record.resumption.is_named == (overrides == NAMED_CHECKPOINT)


# From verl's keys to the trainer that they choose, by its kind.
TRAINERS = {
    "v0": (
        {"trainer.use_v1": False, "trainer.v1.trainer_mode": "sync"},
        Trainer("v0", in_step=True, recomputes_old=True, oldest_allowed=0, stale=False),
    ),
    "sync": (
        {"trainer.use_v1": True, "trainer.v1.trainer_mode": "sync"},
        Trainer("sync", in_step=True, recomputes_old=True, oldest_allowed=0, stale=False),
    ),
    "colocate_async": (
        {"trainer.v1.trainer_mode": "colocate_async"},
        Trainer("colocate_async", in_step=True, recomputes_old=True, oldest_allowed=3, stale=True),
    ),
    "separate_async": (
        {"trainer.v1.trainer_mode": "separate_async"},
        Trainer("separate_async", in_step=False, recomputes_old=False, oldest_allowed=3, stale=True),
    ),
    "one_step_off": (
        {"rollout.nnodes": 1, "trainer.v1.trainer_mode": "sync"},
        Trainer("one_step_off", in_step=False, recomputes_old=True, oldest_allowed=1, stale=True),
    ),
    "fully_async": (
        {"async_training.require_batches": 1, "rollout.nnodes": 1, "trainer.use_v1": True},
        Trainer("fully_async", in_step=False, recomputes_old=False, oldest_allowed=None, stale=True),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_trainer_of_verl_is_told_by_its_keys(kind):
    keys, expected = TRAINERS[kind]
    configuration = keys | {"trainer.v1.sampler.max_off_policy_threshold": 3}
    assert trainer_of(configuration) == expected
    bypassed = trainer_of(configuration | {"algorithm.rollout_correction.bypass_mode": True})
    assert bypassed == dataclasses.replace(expected, recomputes_old=False)


def test_what_the_start_resolved_is_in_the_record_that_the_driver_writes():
    config = composition(
        "+clipx=grpo", f"{ACTOR}.clip_ratio_high=0.28", f"{ACTOR}.clip_ratio_c=5", f"{ACTOR}.qat.enable=true"
    )
    started = resolve_into_config(config, group="grpo").record
    written = record_of(OmegaConf.to_container(config, resolve=True))
    assert started.loss.taken["clip_high"]["value"] == 1.28 and "QAT" in started.untested
    for name in ("trainer", "batch", "schedule", "correction", "sampling", "terms", "length", "identity", "line"):
        assert getattr(written, name) == getattr(started, name), name
    for name in ("mode", "method", "group", "taken", "unused", "widths", "uncompiled_by"):
        assert getattr(written.loss, name) == getattr(started.loss, name), name
    assert set(started.identity) == {"settings", "package", "function"} and started.line.startswith("clipx: ")
    # The record beside the log keeps no other text of an option than verl's own.
    assert len(written.untested) == len(started.untested)


def test_a_start_of_an_older_version_is_read_as_today_s():
    resolved = {"group": "acpo", "line": "clipx: a line", "untested": ["QAT"], "identity": {"settings": "ab"}}
    taken = {"clip_high": {"key": "clip_ratio_high", "given": 0.3, "value": 1.3}}
    losses = {"taken": taken, "unused": {"clip_ratio_c": 5}}
    schedule = {"updates": 3, "bounds": "ratio_one"}
    older = record_of({FACTS: {**resolved, **losses, "schedule": schedule}})
    loss = {"group": resolved.pop("group"), **losses}
    assert older == record_of({FACTS: {"record": {**resolved, "loss": loss, "schedule": schedule}}})
    assert (older.loss.group, older.loss.taken, older.loss.unused) == ("acpo", taken, {"clip_ratio_c": 5})
    assert (older.line, older.untested, older.identity) == ("clipx: a line", ("QAT",), {"settings": "ab"})
    assert (older.schedule.updates, older.schedule.bounds) == (3, DecidedFrom.RATIO_ONE)


def test_a_part_of_a_configuration_leaves_the_rest_unknown():
    record = record_of({"data.train_batch_size": 8, "actor_rollout_ref.actor.ppo_mini_batch_size": 2})
    assert (record.batch.prompts, record.schedule.updates) == (8, 4)
    assert record.trainer == Trainer() and record.loss == Loss() and record.reward.paths == ()
    assert record_of({}) == RunRecord()


def test_nested_and_dotted_configurations_give_one_record():
    nested = OmegaConf.to_container(composition("+clipx=acpo"))
    assert record_of(nested) == record_of(flat(nested))


def test_a_record_is_read_as_it_was_written():
    record = compose_record("+clipx=bapo", "+clipx/hold=clip_fraction")
    assert read_record(json.loads(json.dumps(as_json(record))), "the file") == record


def test_a_record_of_an_older_version_is_read_by_its_configuration():
    # Without a number of its form, the whole configuration nested; of a trainer that it does not say.
    configuration = OmegaConf.to_container(composition("+clipx=acpo"))
    del configuration["trainer"]
    content = {"started": "2026-11-20T08:00:00", "versions": {"verl": "0.9.1"}, "configuration": configuration}
    record = read_record(content, "the file")
    assert record.loss.method == "acpo"
    assert record.versions == {"verl": "0.9.1"}
    assert record.started == "2026-11-20T08:00:00"


def test_a_record_of_form_2_has_what_form_3_adds_in_its_configuration():
    lengths = ("data.train_max_samples=40", "actor_rollout_ref.rollout.response_length=100")
    record = compose_record("+clipx=acpo", *NAMED_CHECKPOINT, *lengths)
    assert (record.length.rows, record.limits.generated) == (40, 100)
    before = as_json(record) | {"schema": 2}
    del before["resumption"], before["length"]["rows"], before["limits"]["generated"]
    assert read_record(json.loads(json.dumps(before)), "the file") == record


@pytest.mark.parametrize("schema", [SCHEMA + 1, 0, "1", None, [1], True])
def test_a_record_of_an_unknown_form_is_refused_by_name(schema):
    content = {**as_json(RunRecord()), "schema": schema}
    if schema is None:
        assert read_record(content, "x/metrics.run.json") == RunRecord()
        return
    with pytest.raises(ValueError, match=r"^x/metrics.run.json: .*form"):
        read_record(content, "x/metrics.run.json")


@pytest.mark.parametrize("damage", [{"loss": 3}, {"schedule": {"bounds": "none"}}, {"trainer": ["sync"]}])
def test_a_damaged_record_is_refused_with_its_file(damage):
    with pytest.raises(ValueError, match=r"^x/metrics.run.json"):
        read_record({**as_json(RunRecord()), **damage}, "x/metrics.run.json")


def names_of(kind, prefix=""):
    """The dotted names of a dataclass's fields, and of those of the dataclasses in it."""
    for field in dataclasses.fields(kind):
        part = field.default_factory
        if dataclasses.is_dataclass(part):
            yield from names_of(part, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def test_the_page_says_each_field():
    names_on_page = set(re.findall(r"`([a-z_.]+)`", PAGE.read_text()))
    # The page describes once what each of these consists of.
    contents = ("model", "critic", "data", "validation", "reward", "start")
    parts_of_contents = ("paths", "name", "hash", "parameters")
    other_fields = [name for name in names_of(RunRecord) if name.partition(".")[0] not in contents]
    assert {*other_fields, *contents, *parts_of_contents} <= names_on_page
