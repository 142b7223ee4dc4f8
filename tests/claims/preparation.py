"""What a reader of a page has when its commands come, and a test has not: small copies, made by the project itself."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
from verl.utils.tracking import Tracking

from tests.analysis.certify import example_arms
from tests.analysis.runs.example_runs import write_run
from tests.claims.documents import ROOT
from tests.compiler import load_compiler
from tests.papers.evaluation.tiny import save_questions, write_evaluation, write_questions
from tests.papers.tasks.knights_and_knaves.released import OTHER, TRAIN, make_record, write_release
from verl_clipx.analysis.runs.folder import RunFolder
from verl_clipx.papers.evaluation.commands import DEFAULT_REWARD
from verl_clipx.papers.tasks.knights_and_knaves.policy import draw_training_puzzles, fit_policy
from verl_clipx.papers.tasks.records import read_jsonl
from verl_clipx.papers.tasks.tiny_policy.model import ModelConfig
from verl_clipx.papers.tasks.tiny_policy.warm_start import WarmStartConfig

TASKS = Path(__file__).parents[1] / "papers" / "tasks"
SHORT_WARM_START = WarmStartConfig(
    steps=3, batch_size=4, model=ModelConfig(hidden_size=64, intermediate_size=64, num_layers=1, max_length=64)
)


def finished_run(folder: Path) -> None:
    """The run of docs/launch.md."""
    write_run(folder / "runs/acpo/orz_7b_acpo_near-seed1", "acpo")


def compiler(folder: Path) -> None:
    """The compiler of the checks of docs/own_loss.md, of which each would import it anew."""
    load_compiler()


def two_runs(folder: Path) -> None:
    """The runs of docs/reading.md and other pages."""
    for method in ("grpo", "acpo"):
        write_run(folder / f"runs/{method}-seed1", method)


def two_arms(folder: Path) -> None:
    """The runs of docs/certify.md."""
    for method, loss in (("grpo", {}), ("acpo", example_arms.ACPO)):
        for seed in (1, 2):
            example_arms.write_run(folder / f"runs/{method}-seed{seed}", seed=seed, loss=loss)


def logs_without_the_plugin(folder: Path) -> None:
    """The logs of several pages: a kept run whose learning rate rose, as verl's loggers and W&B's export have it."""
    kept = RunFolder(ROOT / "docs/results/runs/faults/fast_learning-seed31.jsonl.gz").rows
    prefixes_of_plugin = ("actor/clipx/", "health/")
    rows = {}
    for step, row in kept.items():
        rows[step] = {key: value for key, value in row.items() if not key.startswith(prefixes_of_plugin)}
    os.environ["TENSORBOARD_DIR"] = str(folder / "tensorboard/grpo")
    with (folder / "train.log").open("w") as log, contextlib.redirect_stdout(log):
        tracking = Tracking("project", "grpo", ["console", "tensorboard"])
        for step, row in rows.items():
            tracking.log(row, step)
        tracking.finish()
    pandas.DataFrame(rows).T.to_csv(folder / "wandb.csv", index_label="_step")


def evaluations(folder: Path) -> None:
    """Evaluations of two checkpoints, scored by the default reward, and of two methods' three trainings; made up."""
    generator = np.random.default_rng(0)
    prepared = folder / "prepared"
    prepared.mkdir()
    six_questions = save_questions(prepared, 6)
    twelve_questions = write_questions(prepared, 12)
    for method in ("grpo", "acpo"):
        write_evaluation(
            folder / f"eval/{method}", generator.random((6, 4)) < 0.5, six_questions, reward=DEFAULT_REWARD
        )
        for seed in (1, 2, 3):
            out = folder / f"runs/{method}-seed{seed}/evaluation/aime24"
            write_evaluation(out, generator.random((12, 4)) < 0.5, twelve_questions)


def puzzle_policy(folder: Path) -> dict[str, str]:
    """A policy for puzzles, as its warm start leaves it after three steps, and a run's checkpoint of the same."""
    policy = fit_policy(
        draw_training_puzzles(50, seed=0), 0.0, SHORT_WARM_START, folder / "runs/policies", num_threads=1
    )
    actor = folder / "runs/knights_and_knaves/grpo/checkpoints/global_step_40/actor"
    shutil.copytree(policy, actor / "huggingface")
    return {"MODEL_PATH": str(policy)}


def hitab_release(folder: Path) -> None:
    """The release's files, invented rows in them."""
    shutil.copytree(TASKS / "hitab/fixtures/release", folder / "HiTab")


def deepscaler_file(folder: Path) -> None:
    """Rows in the schema of AR-Lopti's file."""
    rows = list(read_jsonl(TASKS / "math/fixtures/dsr_uniform.jsonl"))
    pq.write_table(pa.Table.from_pylist(rows), folder / "deepscaler_uniform_train.parquet")


def released_puzzles(folder: Path) -> None:
    """AR-Lopti's repository, invented puzzles in it."""
    write_release(folder / "AR-Lopti/data/kk/instruct/merge_34567ppl", TRAIN, [make_record(OTHER, (False, True, True))])


def run_script(folder: Path) -> None:
    """A script that ends in a command of verl's."""
    batches = "actor_rollout_ref.actor.use_dynamic_bsz=True algorithm.adv_estimator=grpo"
    (folder / "run.sh").write_text(f'nvidia-smi\npython3 -m verl.trainer.main_ppo {batches} "$@"\n')


def recipes(folder: Path) -> None:
    """The repository's recipes, from whose root their commands run."""
    (folder / "recipes").symlink_to(ROOT / "recipes")


# Each gets the page's folder, which is the working folder, and may return environment variables.
PREPARATIONS: dict[str, list[Callable[[Path], dict[str, str] | None]]] = {
    "README.md": [logs_without_the_plugin],
    "docs/collapse.md": [logs_without_the_plugin],
    "docs/launch.md": [finished_run],
    "docs/mac_windows.md": [logs_without_the_plugin],
    "docs/evaluation.md": [evaluations],
    "docs/faq.md": [two_runs],
    "docs/reading.md": [two_runs, logs_without_the_plugin],
    "docs/certify.md": [two_arms],
    "docs/dapo_32b.md": [recipes],
    "docs/two_gpus.md": [recipes],
    "docs/own_loss.md": [compiler],
    "docs/swap.md": [run_script],
    "docs/tasks/hitab.md": [hitab_release],
    "docs/tasks/knights_and_knaves.md": [puzzle_policy, released_puzzles],
    "docs/tasks/math.md": [deepscaler_file],
}
