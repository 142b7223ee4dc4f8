"""A run without a clipx node is verl's: with the plugin it does what it does with nothing but the CPU's port.

Covers, in one process without Ray: the v1 trainer in sync mode, which goes on from a checkpoint beside a stranger's
locks, validates and saves; with `-m matrix`, through Ray, the same, a run from the start, the older trainer, and
separate_async, of which no two runs are equal. Compared are files, but for times in them, the model to the digit, the
log, what was printed. verl's tables and its warning about platforms are compared with a process in which the plugin
can't be imported. Not covered: GPUs, nodes.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .runs import MAIN, SECONDS, environment_loading, environment_with, launch, metrics_of, output_of
from .training_ranks import build_worker, on_ranks

pytestmark = pytest.mark.end_to_end

# Nothing of the plugin but the CPU's port; and all of it.
PORT_ALONE = {"VERL_USE_EXTERNAL_PLUGINS": "none", **environment_loading("cpu_port")}
PLUGIN = environment_with()
LATEST = Path("checkpoints/latest_checkpointed_iteration.txt")
# Another run's, in the places in which the plugin once kept locks: of a host that cannot be asked.
LOCK = '{"host": "elsewhere", "pid": 1, "started": "boot/1", "at": "2026-11-25 12:00:00 UTC", "job": ""}\n'
LOCKS = (Path("checkpoints/run.lock"), Path("metrics.lock"))
# Validated and saved in each step; rollouts that depend on the seed alone.
SEEDED = (
    "+clipx/rollout=seeded",
    "data.seed=1",
    "trainer.save_freq=1",
    "trainer.test_freq=1",
    "trainer.validation_data_dir=validation",
    "trainer.resume_mode=auto",
    "actor_rollout_ref.rollout.val_kwargs.temperature=0",
)
# Of the two that cannot be seeded: every answer is the most probable one, so that it does not depend on the order.
GREEDY = (
    "+clipx_rollout.cpu_dtype=float64",
    "actor_rollout_ref.rollout.top_k=1",
    "algorithm.adv_estimator=reinforce_plus_plus",
    "trainer.save_freq=2",
)
# For a process in which the plugin can't be imported.
WITHOUT_PLUGIN = "import sys\nsys.modules.update(verl_clipx=None, hydra_plugins=None)\n"
# verl's modules that hold a table which others may add to, then every table of every module of verl's that they import:
# each dictionary of a module or class, with its keys and the names of its functions and classes.
TABLES = """
import importlib, json, sys, types
from verl.plugin.platform import get_platform
for name in ("trainer.main_ppo", "trainer.main_ppo_v0", "workers.engine_workers", "workers.reward_manager",
             "workers.rollout.base", "workers.rollout.replica", "workers.engine.fsdp.transformer_impl",
             "checkpoint_engine.base", "experimental.agent_loop", "experimental.reward_loop.reward_manager",
             "trainer.ppo.v1", "trainer.distillation.losses", "utils.skip.base_skip", "utils.tracking"):
    importlib.import_module("verl." + name)
get_platform()

def written(value):
    if isinstance(value, dict):
        return {str(key): written(part) for key, part in value.items()}
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, (type, types.FunctionType)) else ""

tables = {}
for name, module in sorted(sys.modules.items()):
    if name.split(".")[0] == "verl" and module is not None:
        holders = {name: module} | {f"{name}.{key}": kind for key, kind in vars(module).items()
                                    if isinstance(kind, type) and kind.__module__ == name}
        for place, holder in holders.items():
            tables |= {f"{place}.{key}": written(table) for key, table in vars(holder).items()
                       if isinstance(table, dict) and not key.startswith("__")}
print(json.dumps(tables))
"""
OF_TIME = re.compile(r"timing|perf/|/mfu|throughput|time")


# A rollout apart from the trainer.
ROLLOUT_APART = (
    "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo",
    "ray_kwargs.ray_init.num_gpus=2",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
)


def run_both(task, folders: tuple[Path, Path], *overrides: str, steps: int, entry: str = MAIN) -> None:
    """Runs verl in two folders at a time, in the second with the plugin."""
    processes = [
        launch(task, folder, *overrides, steps=steps, environment=environment, entry=entry)
        for folder, environment in zip(folders, (PORT_ALONE, PLUGIN), strict=True)
    ]
    codes = [process.wait(SECONDS) for process in processes]
    assert codes == [0, 0], "\n".join(output_of(folder)[-3000:] for folder in folders)
    for folder, process in zip(folders, processes, strict=True):
        printed_beside(folder).write_text(printed_by(folder, process.pid) if entry == MAIN else output_of(folder))


def printed_beside(folder: Path) -> Path:
    """Where `run_both` keeps what a run printed: beside its folder, whose files are compared."""
    return folder.with_suffix(".printed")


def printed_by(folder: Path, driver: int) -> str:
    """What a run's driver, by whose process id Ray names the session, and its workers printed.

    The workers' is taken from Ray's own files: what Ray passes on to the driver may be late, shortened, or lost at the
    run's end. Of several sessions the run's is the latest: an earlier process may have had the same id.
    """
    lines_of_driver = [line for line in output_of(folder).splitlines() if not re.match(r"(\x1b\[\d*m)*\(\w", line)]
    # Names of sessions begin with the time of their start.
    logs = max(Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray").glob(f"session_*_{driver}/logs"))

    def lines_of_workers(pattern):
        lines = []
        for path in sorted(logs.glob(pattern)):
            lines += path.read_text(errors="replace").replace(str(folder), "FOLDER").splitlines()
        return lines

    printed = lines_of_workers("worker-*.out")
    # How a worker's event loop ends depends on the moment. What the plugin would say has its name in it.
    errors_of_plugin = [line for line in lines_of_workers("worker-*.err") if "clipx" in line]
    return "\n".join([*lines_of_driver, *printed, *errors_of_plugin])


def check_same(folders: tuple[Path, Path], *, repeats: bool = True) -> None:
    """Checks that two runs left and said the same; contents and values where such a run repeats to the digit."""
    alone, with_plugin = folders
    files_alone = files_of(alone)
    files_with_plugin = files_of(with_plugin)
    if repeats:
        assert files_with_plugin == files_alone
    else:
        assert files_with_plugin.keys() == files_alone.keys()
    assert words_of(with_plugin) == words_of(alone)
    log_alone = read_log(alone)
    log_with_plugin = read_log(with_plugin)
    keys_alone = [(step, sorted(data)) for step, data in log_alone]
    assert [(step, sorted(data)) for step, data in log_with_plugin] == keys_alone
    assert not any("clipx" in key or "health" in key for _, data in log_alone for key in data)
    if not repeats:
        return
    for (step, data_alone), (_, data) in zip(log_alone, log_with_plugin, strict=True):
        for key, value in data_alone.items():
            if not OF_TIME.search(key):
                assert data[key] == value, (step, key)


def files_of(folder: Path) -> dict[str, object]:
    """Every file of a run by its name, and its content: both without times and random parts."""
    times = re.compile(r"\d{4}(-\d\d){2}|\d\d(-\d\d){2}|_[0-9a-f]{8}\b")
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return dict(sorted((times.sub("TIME", str(path.relative_to(folder))), content_of(path, folder)) for path in paths))


def content_of(path: Path, folder: Path) -> object:
    if path.suffix == ".jsonl":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        # The log is compared by itself; the rows of a validation are in the order of their random names.
        return None if path == metrics_of(folder) else sorted(json.dumps({**line, "uid": None}) for line in lines)
    if path.name.startswith("model_"):
        # Each tensor's sum.
        tensors = torch.load(path, weights_only=False)
        return {name: float(value.to_local().double().sum()) for name, value in tensors.items()}
    if path.suffix in {".pt", ".log"} or path.name == "hydra.yaml":
        return None
    return path.read_bytes().replace(str(folder).encode(), b"FOLDER")


def read_log(folder: Path) -> list[tuple[int, dict]]:
    """Steps and metrics of the log, in the order of its lines."""
    return [(line["step"], line["data"]) for line in map(json.loads, metrics_of(folder).read_text().splitlines())]


def words_of(folder: Path) -> set[str]:
    """The words that a run printed, without what differs between any two: numbers, its folder, progress, slow ends.

    Words and not lines, because a line of verl's configuration is broken by its width.
    """
    text = printed_beside(folder).read_text().replace(str(folder), "FOLDER")
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).replace("\r", "\n")
    lines = [line for line in text.splitlines() if not re.search(r"it/s|s/it|examples/s|gracefully shut down", line)]
    return set(re.sub(r"0x[0-9a-f]+|[0-9a-f]{8,}|[-+.0-9e]*\d+", "N", "\n".join(lines)).split())


def two_folders(folder: Path) -> tuple[Path, Path]:
    # Names of one length: verl prints its configuration in lines of a width.
    return folder / "verl_alone", folder / "with_clipx"


def save_untrained(rank: int, world: int, policy: str, folder: str) -> None:
    """A checkpoint by verl's own worker, of weights that no step has changed."""
    build_worker(Path(policy), precision=torch.float32).save_checkpoint(folder, global_step=1)


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(f"{__package__}.in_one_process", id="in one process"),
        pytest.param(MAIN, id="through Ray", marks=pytest.mark.matrix),
    ],
)
def test_a_run_does_what_it_does_without_the_plugin_and_leaves_strangers_files_as_they_are(task, tmp_path, entry):
    folders = two_folders(tmp_path)
    first, second = folders
    on_ranks(1, save_untrained, str(task.policy), str(first / "checkpoints/global_step_1/actor"))
    # As verl itself would resume it: from step 1, although a later checkpoint is there.
    shutil.copytree(first / "checkpoints/global_step_1", first / "checkpoints/global_step_9")
    (first / LATEST).write_text("1\n")
    for lock in LOCKS:
        (first / lock).write_text(LOCK)
    shutil.copytree(first, second)
    run_both(task, folders, *SEEDED, steps=3, entry=entry)
    check_same(folders)
    for folder in folders:
        assert "Resuming from" in output_of(folder) and (folder / LATEST).read_text() == "3"
        assert [(folder / lock).read_text() for lock in LOCKS] == [LOCK, LOCK]
    # Otherwise equality would mean little.
    (step_2, data_2), (step_3, data_3) = read_log(first)
    assert (step_2, step_3) == (2, 3)
    assert data_2["actor/grad_norm"] != data_3["actor/grad_norm"] != 0


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("overrides", "repeats"),
    [
        pytest.param(SEEDED, True, id="from the start"),
        pytest.param((*GREEDY, "trainer.use_v1=False"), True, id="the older trainer"),
        # Which responses make a batch depends on when they arrive.
        pytest.param((*GREEDY, *ROLLOUT_APART), False, id="a rollout apart"),
    ],
)
def test_other_runs_do_what_they_do_without_the_plugin_too(task, tmp_path, overrides, repeats):
    folders = two_folders(tmp_path)
    run_both(task, folders, *overrides, steps=2)
    check_same(folders, repeats=repeats)


def tables_and_warnings(code: str) -> tuple[dict[str, dict], str]:
    """verl's tables in a fresh process on a machine without an accelerator, and what verl said on its error stream."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1]), re.sub(r"\d[\d:,.]*", "N", result.stderr)


def test_verl_holds_nothing_of_the_plugins_but_names_of_losses():
    tables_of_verl, warnings_of_verl = tables_and_warnings(WITHOUT_PLUGIN + TABLES)
    tables, warnings = tables_and_warnings(TABLES)
    registry = "verl.trainer.ppo.core_algos.POLICY_LOSS_REGISTRY"
    added = {name for name in tables[registry] if name not in tables_of_verl[registry]}
    assert added and all(name.startswith("clipx_") for name in added)
    for name in added:
        del tables[registry][name]
    assert tables == tables_of_verl
    assert warnings == warnings_of_verl and "Registered: ('nvidia'" in warnings
    # Otherwise equality would mean little.
    registries = {name for table in tables_of_verl for name in re.findall(r"(\w+)Registry\._", table)}
    assert {"Platform", "Engine", "RolloutReplica", "CheckpointEngine"} <= registries
