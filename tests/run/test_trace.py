"""The node clipx.trace: its values, where its files go, what it goes on top of.

Covers: values that are refused; the folder that the driver fills in, by verl's file logger; that the node alone is
refused. Not covered: what is written (test_tracer.py), that every group takes the node (tests/claims/test_groups.py).
"""

import pytest
from omegaconf import OmegaConf

from tests.claims.configuration import actor_of, merged
from verl_clipx.run.start import decide
from verl_clipx.run.trace import Trace

TRACED = ["+clipx=grpo", "+clipx/trace=prompts"]


def folder_of(**values):
    config = merged(TRACED, values)
    decide(config)
    # As verl's workers get it.
    (by_worker,) = {actor_of(config).policy_loss.clipx.trace.folder, OmegaConf.select(config, "clipx.trace.folder")}
    return by_worker


def test_the_group_has_the_defaults():
    assert actor_of(merged(TRACED)).policy_loss.clipx.trace == Trace()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"VERL_FILE_LOGGER_PATH": "{0}/run/metrics.jsonl"}, "{0}/run/traces"),
        ({"VERL_FILE_LOGGER_PATH": "run/mine.jsonl"}, "{0}/run/mine.traces"),
        ({"VERL_FILE_LOGGER_ROOT": "{0}/logs"}, "{0}/logs/P/E.traces"),
        ({}, "{0}/P/E.traces"),
    ],
)
def test_the_files_go_where_the_report_looks(monkeypatch, tmp_path, variables, expected):
    monkeypatch.chdir(tmp_path)
    for name in ("VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    found = folder_of(**{"trainer.project_name": "P", "trainer.experiment_name": "E"})
    assert found == expected.format(tmp_path)


def test_a_folder_that_is_named_stays(tmp_path):
    assert folder_of(**{"clipx.trace.folder": str(tmp_path)}) == str(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fraction": 0}, r"clipx\.trace\.fraction=0: must be a number \(above 0 and at most 1\)"),
        ({"fraction": 1.5}, r"clipx\.trace\.fraction=1\.5: must be"),
        ({"every": 0}, r"clipx\.trace\.every=0: must be a whole number"),
        ({"every": 1.5}, r"clipx\.trace\.every=1\.5: must be a whole number"),
        ({"seed": -1}, r"clipx\.trace\.seed=-1: must be a whole number"),
        ({"folder": ""}, r"clipx\.trace\.folder='': must be a path, or null"),
        ({"evry": 3}, r"clipx\.trace\.evry is not a parameter of Trace\. Did you mean clipx\.trace\.every\?"),
    ],
)
def test_a_wrong_value_is_named(values, message):
    with pytest.raises(Exception, match=message):
        actor_of(merged(TRACED, {f"clipx.trace.{key}": value for key, value in values.items()}))


def test_the_first_rollout_batch_is_among_them():
    assert [step for step in range(1, 8) if Trace(every=3).includes(step)] == [1, 4, 7]


@pytest.mark.parametrize(
    ("values", "batches"),
    [
        ({}, 1),
        ({"trainer.v1.trainer_mode": "separate_async", "trainer.v1.separate_async.parameter_sync_step": 4}, 4),
        ({"async_training.trigger_parameter_sync_step": 3}, 3),
    ],
)
def test_rollout_batches_that_verl_logs_as_one_step(values, batches):
    run = actor_of(merged(TRACED, {**values, "trainer.critic_warmup": 2})).policy_loss.run
    assert run.batches_a_step == batches and run.critic_warmup == 2
