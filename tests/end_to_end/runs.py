"""Launches the real verl on the CPU, as a user would, and reads what it logged."""

import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pandas
import psutil

from verl_clipx.analysis.runs.run_log import Rows, parse_rows, read_run_log, table_of

SECONDS = 600
MAIN = "verl.trainer.main_ppo"
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Run:
    """A finished run: its metrics, a row a step; everything that it printed; where it wrote."""

    log: pandas.DataFrame
    output: str
    folder: Path

    def values(self, metric: str) -> list[float]:
        """A metric under the name that verl logs it by, a value a step."""
        return self.log[metric].tolist()

    def state(self, step: int) -> dict:
        """The state of the bounds in the checkpoint of a step."""
        return json.loads((self.folder / f"checkpoints/global_step_{step}/actor/clipx_state.json").read_text())


def check_receipt(run: Run, *first_steps: int, rounding: float = 1e-4) -> pandas.DataFrame:
    """Checks that the first step of each process, and no later one, has a receipt that agrees, to what rounding does;
    by default the process is one, with the log's first step. Returns the other metrics.
    """
    receipt = run.log["actor/clipx/receipt"]
    logged = receipt.dropna()
    assert list(logged.index) == list(first_steps or run.log.index[:1]) and (logged < rounding).all()
    failed = run.log["actor/clipx/receipt_failed"]
    assert failed.dropna().to_dict() == dict.fromkeys(logged.index, 0)
    assert "receipt: on copies with made-up ratios" in run.output
    assert "in the backward pass" in run.output
    return run.log.drop(columns=[receipt.name, failed.name])


def train(task, folder: Path, *overrides: str, steps: int = 2, seconds: float = SECONDS, **options) -> Run:
    """Trains for a few steps, within some seconds, and returns what happened; arguments as for `launch`.

    An AssertionError, which holds the end of its output: the run failed or did not end in time.
    """
    process = launch(task, folder, *overrides, steps=steps, **options)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        code = f"none within {seconds} s"
    assert code == 0, f"exit code {code} of {' '.join(process.args)}\n{output_of(folder)[-6000:]}"
    return Run(read_run_log(metrics_of(folder)), output_of(folder), folder)


def growing_run(folder: Path) -> Run:
    """What a run that was killed has left."""
    return Run(table_of(growing_rows(metrics_of(folder))), output_of(folder), folder)


def growing_rows(log: Path) -> Rows:
    """The steps of a log that a run goes on with or was killed in; the line that it was writing is left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return parse_rows(log.read_bytes(), log) if log.exists() else {}


def common_overrides(task, folder: Path, steps: int) -> list[str]:
    """The Hydra overrides of every run; arguments as for `launch`."""
    actor = "actor_rollout_ref.actor"
    rollout = "actor_rollout_ref.rollout"
    return [
        "+hardware=cpu",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={task.policy}",
        f"data.train_files={task.train}",
        f"data.val_files={task.test}",
        "data.train_batch_size=16",
        "data.max_prompt_length=64",
        "data.max_response_length=24",
        "reward.custom_reward_function.path=pkg://verl_clipx.papers.tasks.countdown.reward",
        # At higher rates the policy forgets within three steps how to be right, and nothing has a gradient.
        f"{actor}.optim.lr=5e-4",
        f"{actor}.ppo_mini_batch_size=8",
        f"{actor}.ppo_micro_batch_size_per_gpu=8",
        f"{rollout}.n=4",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.total_epochs=100",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        "trainer.resume_mode=disable",
    ]


def launch(
    task,
    folder: Path,
    *overrides: str,
    steps: int,
    environment: dict[str, str] | None = None,
    before: Sequence[str] = (),
    entry: str = MAIN,
    python: str = sys.executable,
) -> subprocess.Popen:
    """Starts a run of a module of verl's in an environment, with overrides after the common ones, further variables and
    words before the command.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [*before, python, "-m", entry, *common_overrides(task, folder, steps), *overrides]
    variables = {"VERL_PLATFORM": "cpu", "VERL_FILE_LOGGER_PATH": str(metrics_of(folder)), **(environment or {})}
    with (folder / "run.log").open("wb") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=os.environ | variables
        )


def environment_with(*folders: Path) -> dict[str, str]:
    """The environment in which all of verl's processes find the tests and modules of folders."""
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": ":".join(map(str, [REPOSITORY, *folders, *([inherited] if inherited else [])]))}


def environment_loading(*modules: str) -> dict[str, str]:
    """The environment in which all of verl's processes import modules of this folder."""
    return environment_with() | {"VERL_USE_EXTERNAL_MODULES": ",".join(f"{__package__}.{module}" for module in modules)}


def metrics_of(folder: Path) -> Path:
    """The log of metrics of the run in a folder. A run that resumes none starts it anew."""
    return folder / "metrics.jsonl"


def output_of(folder: Path) -> str:
    """What the run in a folder has printed."""
    return (folder / "run.log").read_text(errors="replace")


def write_documented_method(folder: Path) -> Path:
    """Writes the method that docs/own_loss.md shows into a module `spread_clip` of a folder, as a user would."""
    page = (REPOSITORY / "docs/own_loss.md").read_text()
    (block,) = re.findall(r"```python\n(# spread_clip\.py\n.*?)```", page, re.S)
    assert len(block.splitlines()) < 40, "a controller of under 40 lines"
    (folder / "spread_clip.py").write_text(block)
    return folder


def kill_tree(pid: int, seconds: float = 60) -> None:
    """Kills a process and all its descendants with SIGKILL, and waits until they are gone.

    They are stopped before the first is killed: a process that still runs could start others meanwhile, as Ray's node
    manager does with workers, and a killed one's children could no longer be found. A TimeoutError names what is left.
    """
    stopped: list[psutil.Process] = []
    while running := [process for process in _tree(pid) if process not in stopped]:
        for process in running:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        stopped += running
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + seconds
    while left := [process for process in stopped if _alive(process)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"still there {seconds} s after SIGKILL: {left}")
        time.sleep(0.05)


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _alive(process: psutil.Process) -> bool:
    try:
        # A zombie has ended; only its parent has not asked for its exit code.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
