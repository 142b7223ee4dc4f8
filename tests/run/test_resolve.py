"""A run is resolved once, by one resolver, whoever reads its configuration first: the driver's hook, a main of the
user's own, a notebook, verl's Tinker worker. Which facts there are for rollout batches and traces. Not covered: files
of the user's (test_explain.py), verl's keys (test_verl_keys.py), entry modules (test_start.py).
"""

import dataclasses
import inspect
import pickle
import sys

import hydra
import pytest
import verl.utils.device
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.engine_workers_tinker import TinkerActorRolloutRefWorker

from tests.claims.configuration import (
    ACTOR,
    actor_of,
    build_by_verl,
    compose_by_hydra,
    decide,
    find_refusals,
    merge,
    refusals_in,
)
from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.run import resolve as resolving
from verl_clipx.run.keys import FACTS
from verl_clipx.run.resolve import build_target, resolve, target_node
from verl_clipx.run.trace import Trace

WIDER_THAN_VERLS = f"{ACTOR}.clip_ratio_high=0.28"
AS_VERLS_DEFAULT = f"{ACTOR}.clip_ratio_low=0.2"
# What a record has of the first.
TAKEN_OVER = {"clip_high": {"key": "clip_ratio_high", "given": 0.28, "value": 1.28}}
NEEDED = (f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", "clipx.log=false")


def is_resolved(config) -> bool:
    return not OmegaConf.is_interpolation(config.actor_rollout_ref.actor.policy_loss, "run")


@pytest.fixture
def main(monkeypatch, tmp_path):
    """A main under Hydra, as `python main.py` runs it: what a function makes of its configuration."""
    results = []

    def run(function, *overrides):
        monkeypatch.setattr(sys, "argv", ["main.py", f"hydra.run.dir={tmp_path}", *overrides])
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
        decorated = hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
        decorated(lambda config: results.append(function(config)))()
        return results.pop()

    yield run
    HydraConfig.instance().cfg = None


def test_the_drivers_hook_forces_it_with_the_command_lines_names(main, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")

    def main_of_verl(config):
        verl.utils.device.auto_set_device(config)
        assert is_resolved(config)
        return build_by_verl(config).policy_loss

    policy_loss = main(main_of_verl, "+clipx=grpo", WIDER_THAN_VERLS, *NEEDED)
    assert (policy_loss.run.record.loss.group, policy_loss.run.record.loss.taken) == ("grpo", TAKEN_OVER)
    assert policy_loss.clipx.method.clip_high == 1.28
    # A key counts there even if it repeats verl's default.
    with pytest.raises(Refusal) as raised:
        main(main_of_verl, "+clipx=grpo", "clipx.clip_low=0.7", AS_VERLS_DEFAULT, *NEEDED)
    assert raised.value.key == f"{ACTOR}.clip_ratio_low"


def test_in_a_main_of_the_users_own_the_first_read_resolves_it_without_names(main):
    def main_of_the_user(config):
        assert not is_resolved(config)
        # As verl's task runners do first.
        OmegaConf.resolve(config)
        assert is_resolved(config)
        return build_by_verl(config).policy_loss

    policy_loss = main(
        main_of_the_user, "+clipx=grpo", WIDER_THAN_VERLS, "clipx.clip_low=0.7", AS_VERLS_DEFAULT, *NEEDED
    )
    assert (policy_loss.run.record.loss.group, policy_loss.run.record.loss.taken) == (None, TAKEN_OVER)
    assert policy_loss.clipx.method.clip_high == 1.28 and policy_loss.clipx.method.clip_low == 0.7


def test_in_a_notebook_the_first_read_resolves_it():
    policy_loss = build_by_verl(compose_by_hydra("+clipx=grpo", WIDER_THAN_VERLS)).policy_loss
    assert policy_loss.run.record.loss.taken == TAKEN_OVER and policy_loss.clipx.method.clip_high == 1.28
    with pytest.raises(Exception) as raised:
        build_by_verl(compose_by_hydra("+clipx=dapo", f"{ACTOR}.clip_ratio_high=0.3"))
    (refusal,) = refusals_in(raised.value)
    assert (refusal.key, refusal.value) == (f"{ACTOR}.clip_ratio_high", 0.3)
    # A configuration that has changed is resolved anew.
    config, decision = decide("+clipx=grpo")
    config.actor_rollout_ref.actor.ppo_epochs = 2
    assert (decision.record.schedule.updates, resolve(config).record.schedule.updates) == (4, 8)


def test_a_read_resolves_it_once(monkeypatch):
    resolved = []

    def recording_resolve(config):
        resolved.append(config)
        return resolve(config)

    monkeypatch.setattr(resolving, "resolve", recording_resolve)
    build_by_verl(compose_by_hydra("+clipx=grpo"))
    assert len(resolved) == 1


def test_verls_tinker_worker_gets_it_by_its_first_read():
    # It builds its actor as every worker of verl's does, from the part of the configuration that Ray pickles.
    assert "init_model" not in vars(TinkerActorRolloutRefWorker)
    assert "omega_conf_to_dataclass(self.config.actor)" in inspect.getsource(ActorRolloutRefWorker.init_model)
    config = pickle.loads(
        pickle.dumps(compose_by_hydra("+clipx=grpo", WIDER_THAN_VERLS, f"{ACTOR}.ppo_epochs=3").actor_rollout_ref)
    )
    policy_loss = omega_conf_to_dataclass(config.actor).policy_loss
    assert (policy_loss.run.record.loss.taken, policy_loss.run.record.schedule.updates) == (TAKEN_OVER, 12)
    assert policy_loss.clipx.method.clip_high == 1.28


@pytest.mark.parametrize("override", [f"+{FACTS}.group=dapo", f"{FACTS}=null", f"{FACTS}={{group:x}}"])
def test_facts_about_the_run_cannot_be_set(override):
    config = compose_by_hydra("+clipx=acpo", override)
    with pytest.raises(Refusal) as raised:
        resolve(config)
    assert [refusal.key for refusal in raised.value.all] == [FACTS]
    # Nor where no driver resolves.
    with pytest.raises(Exception) as raised:
        build_by_verl(config)
    assert [refusal.key for refusal in refusals_in(raised.value)] == [FACTS]


def test_rollout_batches_that_verl_logs_as_one_step():
    for overrides, batches in (
        ((), 1),
        (("trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=4"), 4),
        (("async_training.trigger_parameter_sync_step=3",), 3),
    ):
        record = decide("+clipx=grpo", *overrides, "trainer.critic_warmup=2")[1].record
        assert record.schedule.batches_a_step == batches and record.length.critic_warmup == 2


@pytest.mark.parametrize(
    ("overrides", "key", "named"),
    [
        (("+clipx=acpo", "+clipx.aplha=2"), "clipx.aplha", "clipx.alpha"),
        (("+clipx=acpo", "clipx.method=acop"), "clipx.method", "+clipx=acpo"),
        (("+clipx/trace=prompts", "+clipx/update=lopti"), "clipx", "+clipx/update, +clipx/trace"),
        (("clipex=acpo",), "+clipex", "+clipx=acpo"),
        (("clipx/shapping=x",), "+clipx/shapping", "+clipx/shaping"),
        (("clipx.alpha=2",), "clipx.alpha", "+clipx=grpo"),
    ],
)
def test_a_misspelt_key_of_ours_names_the_nearest(overrides, key, named):
    (refusal,) = find_refusals(*overrides)
    assert refusal.key == key and named in str(refusal) and str(refusal).count(",") < 4


# --- Traces ----------------------------------------------------------------------------------------------------------

WITH_TRACE = ["+clipx=grpo", "+clipx/trace=prompts"]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"VERL_FILE_LOGGER_PATH": "{0}/run/metrics.jsonl"}, "{0}/run/traces"),
        ({"VERL_FILE_LOGGER_PATH": "run/mine.jsonl"}, "{0}/run/mine.traces"),
        ({"VERL_FILE_LOGGER_ROOT": "{0}/logs"}, "{0}/logs/P/E.traces"),
        ({}, "{0}/P/E.traces"),
    ],
)
def test_traces_go_where_the_report_looks(monkeypatch, tmp_path, variables, expected):
    monkeypatch.chdir(tmp_path)
    for variable in ("VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value.format(tmp_path))
    names = {"trainer.project_name": "P", "trainer.experiment_name": "E"}
    config, _ = decide(*WITH_TRACE, *(f"{key}={value}" for key, value in names.items()))
    folders = {config.clipx.trace.folder, actor_of(config).policy_loss.clipx.trace.folder}
    # Where no driver has decided, too.
    folders.add(actor_of(merge(WITH_TRACE, names)).policy_loss.clipx.trace.folder)
    assert folders == {expected.format(tmp_path)}


def test_a_folder_that_is_named_stays_and_a_wrong_value_is_named(tmp_path):
    config, _ = decide(*WITH_TRACE, f"clipx.trace.folder={tmp_path}")
    assert actor_of(config).policy_loss.clipx.trace == Trace(folder=str(tmp_path))
    for value in ("fraction=0", "every=1.5", "seed=-1", "folder=''", "evry=3"):
        (refusal,) = find_refusals(*WITH_TRACE, f"clipx.trace.{value}")
        assert refusal.key == f"clipx.trace.{value.partition('=')[0]}"
    # The first rollout batch is traced.
    assert [step for step in range(1, 8) if Trace(every=3).includes(step)] == [1, 4, 7]


@dataclasses.dataclass(frozen=True)
class PartOfHandover:
    """What a driver hands to its workers, whose defaults are values."""

    limit: int | None = 5
    kinds: tuple[str, ...] = ("a",)
    name: str | None = None


def test_a_worker_gets_each_field_as_the_driver_has_it():
    for part in (PartOfHandover(), PartOfHandover(limit=None, kinds=()), PartOfHandover(name="b")):
        received = build_target(target_node(part))
        assert received.limit == part.limit
        assert tuple(received.kinds) == part.kinds
        assert received.name == part.name
