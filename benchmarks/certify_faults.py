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
from pathlib import Path
from pprint import pformat
from typing import Annotated, Any

import known_faults
import typer
from known_faults import make_trainer, settings_of
from one_process.only_rank import become_only_rank

from verl_clipx.analysis.certify.questions import Arms, Verdict, answers_of
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.run.keys import nested

DECLARED = known_faults.DECLARED["certified"]
SETTINGS, SAMPLERS = settings_of("certified"), settings_of("samplers")
SEEDS = (1, 2)


def make(folder: Path, name: str, seed: int) -> None:
    """Trains a setting with a seed in this process."""
    from one_process.kept import compose_here
    from one_process.trainer import train

    import verl_clipx.papers.tasks.reversal.reward as reward

    setting, file = (SETTINGS | SAMPLERS)[name], folder.parent / "reward" / "score.py"
    # All arms name one file; only what is in it tells them apart.
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(Path(reward.__file__).read_text() + "\n# changed\n" * (name == "another_reward"))
    own = [*setting.overrides, f"reward.custom_reward_function.path={file}"]
    trainer = make_trainer(setting, setting.since, folder / "checkpoints" if name in SAMPLERS else None)
    train(compose_here(f"reversal/{setting.preset}", seed, own), folder / "metrics.jsonl", trainer)


def write_console(folder: Path) -> None:
    """Writes verl.log: a run's configuration and steps as verl's main module prints them."""
    from verl.utils.logger.aggregate_logger import concat_dict_to_str

    record = json.loads((folder / "metrics.run.json").read_text())
    steps = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    lines = [concat_dict_to_str(step["data"], step["step"]) for step in steps]
    (folder / "verl.log").write_text("\n".join([pformat(nested(record["configuration"])), *lines, ""]))


def write_table(runs: Path) -> int:
    """Prints the table; returns how many faults were missed and healthy pairs failed."""

    def said(*names: str) -> dict[str, Any]:
        arms = [[read_run(runs / f"{name}-seed{seed}") for seed in SEEDS] for name in names]
        return {answer.question: answer for answer in answers_of(Arms(*arms))}

    wrong = 0
    print("| planted | question | answer | other questions that fail |\n|---|---|---|---|")
    for fault, (first, second, question) in DECLARED["pairs"].items():
        answers = said(first, second)
        others = [one for one, of in answers.items() if of.verdict is Verdict.FAILED and one != question]
        wrong += answers[question].verdict is not Verdict.FAILED
        row = (fault, question, f"{answers[question].verdict.value}: {answers[question].evidence}", ", ".join(others))
        print(f"| {' | '.join(row)} |")
    failed = {}
    for pair in itertools.combinations(DECLARED["healthy"], 2):
        right = DECLARED["of_updates"] if "grpo_16" in pair else ()
        answers = [answer for answer in said(*pair).values() if answer.question not in right]
        failed["/".join(pair)] = [answer.question for answer in answers if answer.verdict is Verdict.FAILED]
    wrong += sum(map(bool, failed.values()))
    print(f"\n{len(failed)} healthy pairs; failed: {json.dumps({key: of for key, of in failed.items() if of})}")
    return wrong


def write_samplers(runs: Path) -> None:
    """Prints what `clipx recompute` says of each run with a planted sampler, a line a step."""
    from verl_clipx.analysis.recompute.recompute import recompute, say

    for name in SAMPLERS:
        run = runs / f"{name}-seed{SEEDS[0]}"
        print(f"\n{name}")
        for answer in recompute(run, sorted((run / "checkpoints").iterdir())):
            print(f"- {say(answer).replace(f'{run}/checkpoints/', '')}")


def main(
    runs: Annotated[Path, typer.Argument(help="Where the runs go.")],
    only: Annotated[str | None, typer.Option(help="Make this run in this process, as NAME-seedN.")] = None,
) -> None:
    """Makes the runs that are missing, one after the other, and prints the table."""
    if only is not None:
        become_only_rank()
        name, _, seed = only.rpartition("-seed")
        make(runs / only, name, int(seed))
        return
    os.environ.setdefault("CLIPX_DATA", "data")
    for name, seed in [*itertools.product(SETTINGS, SEEDS), *((name, SEEDS[0]) for name in SAMPLERS)]:
        folder = runs / f"{name}-seed{seed}"
        if (folder / "done").exists():
            continue
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with (folder / "console.log").open("w") as output:
            command = [sys.executable, __file__, str(runs), "--only", folder.name]
            subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=True)
        write_console(folder)
        (folder / "done").touch()
    wrong = write_table(runs)
    write_samplers(runs)
    raise typer.Exit(wrong > 0)


if __name__ == "__main__":
    typer.run(main)
