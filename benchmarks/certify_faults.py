"""Pairs of arms with a planted fault, and healthy pairs: what `clipx certify` says of each; and traced runs whose
sampler is another than it should be, with their checkpoints: what `clipx recompute` says of each step.

Run: CLIPX_DATA=DATA python benchmarks/certify_faults.py RUNS    (DATA: where `table_fill.py reversal` put the data)

Small policies on reversal, trained by verl's trainer and worker in this process, each in a process of its own. RUNS is
where the runs' folders go; what is there is not made again. Prints a table in Markdown. docs/results/faults.md says
what other tools say of these runs, which read each one's verl.log.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from pprint import pformat
from typing import Annotated, Any

import known_faults
import typer
from known_faults import make_trainer, settings_of
from one_process.only_rank import become_only_rank

from verl_clipx.analysis.certify.arms import Arms, Verdict
from verl_clipx.analysis.certify.questions import answers_of
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.run.keys import nested

DECLARED = known_faults.DECLARED["certified"]
SETTINGS, SAMPLERS = settings_of("certified"), settings_of("samplers")
SEEDS = (1, 2)


def make(folder: Path, name: str, seed: int, steps: int | None) -> None:
    """Trains a setting with a seed in this process, and writes its log as verl's console has it."""
    from one_process.kept import compose_here, shortened
    from one_process.trainer import train

    import verl_clipx.papers.tasks.reversal.reward as reward

    setting, file = (SETTINGS | SAMPLERS)[name], folder.parent / "reward" / "score.py"
    # All arms name one file; only what is in it tells them apart.
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(Path(reward.__file__).read_text() + "\n# changed\n" * (name == "another_reward"))
    own = [*setting.overrides, f"reward.custom_reward_function.path={file}", *shortened(steps)]
    trainer = make_trainer(setting, setting.since, folder / "checkpoints" if name in SAMPLERS else None)
    train(compose_here(f"reversal/{setting.preset}", seed, own), folder / "metrics.jsonl", trainer)
    write_console(folder)


def write_console(folder: Path) -> None:
    """Writes verl.log: a run's configuration and steps as verl's main module prints them."""
    from verl.utils.logger.aggregate_logger import concat_dict_to_str

    record = json.loads((folder / "metrics.run.json").read_text())
    steps = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    lines = [concat_dict_to_str(step["data"], step["step"]) for step in steps]
    (folder / "verl.log").write_text("\n".join([pformat(nested(record["configuration"])), *lines, ""]))


def write_table(runs: Path, names: Sequence[str], seeds: Sequence[int]) -> int:
    """Prints the table; returns how many faults were missed and healthy pairs failed.

    Args:
        names: the settings that were made; pairs with another one are left out.
    """

    def said(*arms_of: str) -> dict[str, Any]:
        arms = [[read_run(runs / f"{name}-seed{seed}") for seed in seeds] for name in arms_of]
        return {answer.question: answer for answer in answers_of(Arms(*arms))}

    wrong = 0
    print("| planted | question | answer | other questions that fail |\n|---|---|---|---|")
    for fault, (first, second, question) in DECLARED["pairs"].items():
        if not {first, second} <= {*names}:
            continue
        answers = said(first, second)
        others = [one for one, of in answers.items() if of.verdict is Verdict.FAILED and one != question]
        wrong += answers[question].verdict is not Verdict.FAILED
        row = (fault, question, f"{answers[question].verdict.value}: {answers[question].evidence}", ", ".join(others))
        print(f"| {' | '.join(row)} |")
    failed = {}
    for pair in itertools.combinations([name for name in DECLARED["healthy"] if name in names], 2):
        right = DECLARED["of_updates"] if "grpo_16" in pair else ()
        answers = [answer for answer in said(*pair).values() if answer.question not in right]
        failed["/".join(pair)] = [answer.question for answer in answers if answer.verdict is Verdict.FAILED]
    wrong += sum(map(bool, failed.values()))
    print(f"\n{len(failed)} healthy pairs; failed: {json.dumps({key: of for key, of in failed.items() if of})}")
    return wrong


def write_samplers(runs: Path, names: Sequence[str], seed: int) -> None:
    """Prints what `clipx recompute` says of each run with a planted sampler, a line a step."""
    from verl_clipx.analysis.recompute.recompute import recompute, say

    for name in names:
        run = runs / f"{name}-seed{seed}"
        print(f"\n{name}")
        for answer in recompute(run, sorted((run / "checkpoints").iterdir())):
            print(f"- {say(answer).replace(f'{run}/checkpoints/', '')}")


def main(
    runs: Annotated[Path, typer.Argument(help="Where the runs go.")],
    only: Annotated[str | None, typer.Option(help="Make this run in this process, as NAME-seedN.")] = None,
    name: Annotated[list[str] | None, typer.Option(help="Only this setting; may be given several times.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="By default 1 and 2; samplers have the first alone.")] = None,
    steps: Annotated[int | None, typer.Option(help="Batches of each run, for a rehearsal.")] = None,
) -> None:
    """Makes the runs that are missing, one after the other, and prints the table."""
    if only is not None:
        become_only_rank()
        setting, _, number = only.rpartition("-seed")
        make(runs / only, setting, int(number), steps)
        (runs / only / "done").touch()
        return
    os.environ.setdefault("CLIPX_DATA", "data")
    seeds = seed or [*SEEDS]
    arms = [setting for setting in SETTINGS if name is None or setting in name]
    samplers = [setting for setting in SAMPLERS if name is None or setting in name]
    for setting, number in [*itertools.product(arms, seeds), *((setting, seeds[0]) for setting in samplers)]:
        make_apart(runs / f"{setting}-seed{number}", steps)
    wrong = write_table(runs, arms, seeds)
    write_samplers(runs, samplers, seeds[0])
    raise typer.Exit(wrong > 0)


def make_apart(folder: Path, steps: int | None) -> None:
    """Makes a run in a process of its own, unless it is there."""
    if (folder / "done").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, __file__, str(folder.parent), "--only", folder.name]
    if steps is not None:
        command += ["--steps", str(steps)]
    with (folder / "console.log").open("w") as output:
        subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=True)


if __name__ == "__main__":
    typer.run(main)
