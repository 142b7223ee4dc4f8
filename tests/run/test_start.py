"""What the driver decides when a run starts, through verl's entry modules as `python -m` runs them, up to ray.init:
what is printed, what stops before Ray, the machine, the lock of the run's log. Not covered: what a worker prints
(test_description.py), what verl's keys mean (test_verl_keys.py).
"""

import fcntl
import runpy
import sys
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import ray
from hydra.core.hydra_config import HydraConfig
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

from tests.claims.configuration import actor_of, merge
from tests.composition import composition
from tests.hydra_main import NEEDED
from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.losses.configs_folder import configs_folder
from verl_clipx.run import run_lock
from verl_clipx.run import start as starts

ACTOR = "actor_rollout_ref.actor"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
MAIN = "verl.trainer.main_ppo"
ONE_STEP_OFF = "verl.experimental.one_step_off_policy.main_ppo"
FULLY_ASYNC = "verl.experimental.fully_async_policy.fully_async_main"
# By trainer: the entry module, and what it needs to compose outside verl's own checkout.
ENTRIES = {
    "v1": (MAIN,),
    "v0": (MAIN, "trainer.use_v1=False"),
    "one_step_off": (ONE_STEP_OFF, "hydra.searchpath=[pkg://verl.trainer.config]"),
    "fully_async": (FULLY_ASYNC, "algorithm.rollout_correction.bypass_mode=False"),
}
QUIET = ("hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")


class RayStarts(Exception):
    """In place of a cluster."""


@pytest.fixture(autouse=True)
def working_folder(monkeypatch, tmp_path):
    """A folder for what a start writes below verl's relative trainer.default_local_dir."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs an entry module up to where it would start Ray."""
    monkeypatch.setattr(ray, "init", mock.Mock(side_effect=RayStarts))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def main(trainer, *overrides):
        module, *needed_by_trainer = ENTRIES[trainer]
        arguments = [*QUIET, f"hydra.run.dir={tmp_path}", *NEEDED, *needed_by_trainer, *overrides]
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        with warnings.catch_warnings():
            # runpy's, on a module that another test imported.
            warnings.simplefilter("ignore")
            runpy.run_module(module, run_name="__main__")

    yield main
    # hydra.main leaves its configuration behind.
    HydraConfig.instance().cfg = None


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ENTRIES)
def test_a_run_says_once_what_it_trains_and_starts(run, trainer, capsys):
    with pytest.raises(RayStarts):
        run(trainer, "+clipx=grpo", f"{ACTOR}.clip_ratio_high=0.28", "clipx.clip_low=0.7")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("clipx:")]
    assert line.startswith("clipx: clipx_grpo (+clipx=grpo), fixed bounds, clip_low=0.7 (group: 0.8), clip_high=1.28 (")
    expected = {
        # 1024 prompts by 256; one step off, verl bypasses by default.
        "one_step_off": "rollout's own (bypass_mode); 4 updates",
        "fully_async": "weights that the rollout last received; 1 update",
    }
    updates = expected.get(trainer, "a rollout batch's first update; 4 updates")
    assert line.endswith(f"{updates} per rollout batch: clipping can act")


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ENTRIES)
def test_what_is_refused_stops_before_ray(run, trainer):
    with pytest.raises(Refusal) as raised:
        run(trainer, "+clipx=acpo", f"{LOSS_MODE}=gspo")
    assert [refusal.key for refusal in raised.value.all] == [LOSS_MODE]


def test_a_notebooks_run_is_decided_too_and_says_so_each_time(run, capsys):
    config = composition("+clipx=grpo", f"{ACTOR}.clip_ratio_high=0.28")
    for _ in range(2):
        with pytest.raises(RayStarts):
            run_ppo(config, task_runner_class=TaskRunnerV1)
        assert capsys.readouterr().out.count("clip_high=1.28 (group: 1.2; from") == 1
    config.actor_rollout_ref.actor.policy_loss.loss_mode = "gspo"
    with pytest.raises(Refusal) as raised:
        run_ppo(config, TaskRunnerV1)
    assert raised.value.key == LOSS_MODE


def test_a_main_of_the_users_own_that_runs_twice_starts_each_time(run, monkeypatch, capsys):
    monkeypatch.setattr(HydraConfig, "initialized", lambda: True)
    monkeypatch.setattr(starts, "said_by_command_line", dict)
    config = composition("+clipx=grpo", f"{ACTOR}.clip_ratio_high=0.28")
    for lines in (1, 2):
        with pytest.raises(RayStarts):
            run_ppo(config, TaskRunnerV1)
        assert capsys.readouterr().out.count("clipx: clipx_grpo") == 1, lines


@pytest.mark.parametrize("version", ["0.9.1", "0.10.0.dev0"])
def test_a_run_says_in_one_line_that_no_test_ran_on_its_verl(run, monkeypatch, capsys, version):
    monkeypatch.setattr("verl.__version__", version)
    for overrides in ((), ("+clipx=grpo",)):
        with pytest.raises(RayStarts):
            run("v1", *overrides)
        lines = [line for line in capsys.readouterr().out.splitlines() if f"verl {version}" in line]
        assert len(lines) == (version != "0.9.1" and bool(overrides))
        assert all(line.startswith("clipx: ") and "not a release" in line for line in lines)


def test_without_a_gpu_a_run_names_the_switches_unless_it_joins_a_cluster_or_is_none_of_the_plugins(monkeypatch):
    # A laptop, without a cluster to join.
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    platform = SimpleNamespace(is_available=lambda: False, device_name="cuda")
    monkeypatch.setattr("verl.plugin.platform.get_platform", lambda: platform)
    monkeypatch.setattr(starts, "RAY_CURRENT_CLUSTER", configs_folder() / "no such file")
    config = merge(["+clipx=grpo"])
    actor_of(config)
    with pytest.raises(RuntimeError, match=r"VERL_PLATFORM=cpu.*\+hardware=cpu"):
        starts.start(config)
    starts.start(merge(["+clipx=grpo"], {"ray_kwargs.ray_init.address": "auto"}))
    starts.start(merge([]))
    # The CPU's platform without its group is refused.
    platform = SimpleNamespace(is_available=lambda: True, device_name="cpu")
    with pytest.raises(RuntimeError, match=r"VERL_PLATFORM=cpu but trainer\.device=cuda: add \+hardware=cpu"):
        starts.start(merge(["+clipx=grpo"], {"trainer.device": "cuda"}))
    starts.start(merge(["+clipx=grpo"], {"trainer.device": "cpu"}))


@pytest.fixture
def log(monkeypatch, tmp_path):
    """Of a run, in a folder of its own."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "run" / "metrics.jsonl"))
    yield tmp_path / "run" / "metrics.jsonl"
    run_lock.release()


LOG_TO_FILE = "trainer.logger=[file]"


def test_a_second_run_on_the_log_stops_before_ray(run, log, monkeypatch):
    monkeypatch.setattr(run_lock, "PATIENCE", 0)
    log.parent.mkdir()
    with log.with_suffix(".lock").open("w") as file:
        # As another process: a lock belongs to an open file.
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(run_lock.FolderInUse, match=r"metrics\.lock: another run .*clipx\.log=false"):
            run("v1", "+clipx=grpo", LOG_TO_FILE)
        for overrides in (["+clipx=grpo", "clipx.log=false"], []):
            with pytest.raises(RayStarts):
                run("v1", *overrides, LOG_TO_FILE)


def test_a_run_has_its_log_until_it_ends(log, monkeypatch):
    lock = log.with_suffix(".lock")
    was_held = []

    def is_initialized():
        was_held.append(run_lock.is_held(lock))
        raise RayStarts

    monkeypatch.setattr(ray, "is_initialized", is_initialized)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.setattr(starts, "require_accelerator", lambda *_: None)
    with pytest.raises(RayStarts):
        run_ppo(composition("+clipx=grpo", LOG_TO_FILE), TaskRunnerV1)
    assert was_held == [True] and not run_lock.is_held(lock)


# A pipe or a device keeps no lines; a run without a clipx node is verl's.
@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["+clipx=grpo", LOG_TO_FILE], "/dev/null"),
        (["+clipx=grpo", "trainer.logger=[console]", "clipx.log=false"], "{}/metrics.jsonl"),
        ([LOG_TO_FILE, "trainer.save_freq=1", "trainer.resume_mode=auto", f"{LOSS_MODE}=gspo"], "{}/metrics.jsonl"),
    ],
)
def test_nothing_is_locked_or_made_where_the_plugin_keeps_no_log(run, tmp_path, monkeypatch, capsys, overrides, path):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", path.format(tmp_path))
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(RayStarts):
        run("v1", *overrides, f"trainer.default_local_dir={tmp_path}/checkpoints")
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    assert overrides[0] == "+clipx=grpo" or "clipx" not in capsys.readouterr().out


def test_without_a_file_log_a_run_has_its_own_and_a_file_system_without_locks_is_named(
    run, log, tmp_path, monkeypatch, capsys
):
    with pytest.raises(RayStarts):
        run("v1", "+clipx=observe", "trainer.logger=[console]", f"trainer.default_local_dir={tmp_path}/own")
    assert list(tmp_path.rglob("*.lock")) == [tmp_path / "own" / "metrics.lock"]
    monkeypatch.setattr(starts, "take_lock", lambda path: False)
    with pytest.raises(RayStarts):
        run("v1", "+clipx=grpo", LOG_TO_FILE)
    assert f"clipx: {log.parent}: this file system cannot lock files" in capsys.readouterr().out


def test_a_log_that_cannot_be_written_stops_before_ray_with_the_switch(run, log, tmp_path, monkeypatch):
    # As root this process may write anywhere but below a file.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "file" / "metrics.jsonl"))
    overrides = ("+clipx=grpo", LOG_TO_FILE, f"trainer.default_local_dir={tmp_path}/file/run")
    with pytest.raises(OSError, match=r"the run keeps its log there\. Choose another folder, or clipx\.log=false"):
        run("v1", *overrides)
