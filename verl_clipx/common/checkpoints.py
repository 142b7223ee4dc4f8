"""verl's checkpoints of a run: which one the run continues from, and whether that one is complete."""

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_clipx.common.files import parse_json, read_lines, read_whole_number, write_text
from verl_clipx.common.run_files import STEP_FOLDER, checkpoint_step

# verl's file with the step of the last checkpoint; verl writes it once the rest of the checkpoint is there.
LATEST = "latest_checkpointed_iteration.txt"

_OF_RANK = re.compile(r"(model|optim|extra_state)_world_size_(\d+)_rank_(\d+)\.pt")


def resumed_step(trainer: Mapping[str, Any]) -> int:
    """The step of the checkpoint that a run continues from, found as verl finds it; 0 if there is none."""
    mode = trainer.get("resume_mode", "disable")
    if mode == "resume_path":
        return checkpoint_step(trainer.get("resume_from_path"))
    folder = Path(str(trainer.get("default_local_dir")))
    if mode != "auto" or not (folder / LATEST).exists():
        return 0
    step = read_whole_number(folder / LATEST)
    # Without the folder verl trains from scratch.
    return step if (folder / f"global_step_{step}").exists() else 0


def step_of_line(line: bytes) -> int | None:
    """The step of a line of verl's file log; None for any other line, such as one that was cut off."""
    try:
        step = parse_json(line, "")["step"]
    except (ValueError, TypeError, KeyError):
        return None
    return step if type(step) is int else None


def logged_steps(log: Path) -> set[int]:
    """The steps for which a file log has a whole line; none if there is no log."""
    return {step for line in (read_lines(log) if log.is_file() else ()) if (step := step_of_line(line)) is not None}


def faults_of(checkpoint: Path, *, one_node: bool) -> list[str]:
    """What of a checkpoint is missing or cut off, each as a part of a sentence.

    Args:
        checkpoint: verl's folder global_step_<N>.
        one_node: whether the run has one node, so that the files of all ranks must be here.
    """
    if not (checkpoint / "actor").is_dir():
        return ["there is no folder actor"]
    files = sorted([*checkpoint.glob("actor/*.pt"), *checkpoint.glob("critic/*.pt"), *checkpoint.glob("data.pt")])
    # torch's archives end with their table of contents, which a file that was cut off lacks.
    faults = [f"{path.relative_to(checkpoint)} is cut off" for path in files if not zipfile.is_zipfile(path)]
    if one_node:
        names = {path.name for path in (checkpoint / "actor").iterdir()}
        for kind, ranks in sorted({(found[1], int(found[2])) for name in names if (found := _OF_RANK.fullmatch(name))}):
            of_ranks = [f"{kind}_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]
            faults += [f"there is no actor/{name}" for name in of_ranks if name not in names]
    return faults


def saved_by(checkpoint: Path) -> int | None:
    """How many ranks wrote a checkpoint of FSDP; None for a checkpoint of another engine."""
    folder = checkpoint / "actor"
    found = (_OF_RANK.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ()))
    return next((int(one[2]) for one in found if one), None)


def choose_checkpoint(folder: Path, log: Path | None, *, nodes: int, ranks_a_node: int) -> list[str]:
    """Makes a run continue from its newest whole checkpoint, by the file in which verl looks up the step.

    If the log ends a step before that checkpoint, the run continues from the checkpoint of that step, if there is one.

    Args:
        folder: trainer.default_local_dir.
        log: verl's file log; None if the run has none.
        nodes: trainer.nnodes.
        ranks_a_node: trainer.n_gpus_per_node.

    Returns:
        What was changed and why, in sentences.

    Raises:
        ValueError: no checkpoint is whole, or the one to continue from was saved by another number of ranks.
    """
    if not (folder / LATEST).exists():
        return []
    said = []
    try:
        named = read_whole_number(folder / LATEST)
    except ValueError as error:
        named = None
        said.append(str(error))
    steps = [int(found[1]) for path in folder.iterdir() if (found := STEP_FOLDER.fullmatch(path.name))]
    # A checkpoint later than the one that verl names was never finished.
    steps = sorted((step for step in steps if named is None or step <= named), reverse=True)
    if named is not None and named not in steps:
        said.append(f"{folder / f'global_step_{named}'}, which {LATEST} names, is not there")
    # The one before the newest is needed in case the step of the newest is not in the log.
    whole = _newest_whole(folder, steps, 2, said, one_node=nodes == 1)
    if not whole and not steps and named is not None:
        return [f"{problem}: the run starts from scratch" for problem in said]
    if not whole:
        raise ValueError(
            f"{'; '.join(said)}; and no checkpoint before it is whole. To start from scratch: "
            "trainer.resume_mode=disable, or another folder."
        )
    chosen, *before = whole
    ranks, found = nodes * ranks_a_node, saved_by(folder / f"global_step_{chosen}")
    if found not in (None, ranks):
        raise ValueError(
            f"{folder / f'global_step_{chosen}'} was saved by {found} ranks and this run has {ranks} (trainer.nnodes="
            f"{nodes} times trainer.n_gpus_per_node={ranks_a_node}). Resume it on {found}, or start from scratch in "
            "another folder."
        )
    logged = logged_steps(log) if log is not None else set()
    if log is not None and max(logged, default=0) == chosen - 1:
        lacks = f"step {chosen} was saved, and the run ended before the step's line was in {log}"
        if before[:1] == [chosen - 1]:
            said.append(lacks)
            chosen = before[0]
        elif chosen == 1:
            # There is no checkpoint before the first step, which is made again like any other.
            (folder / LATEST).unlink()
            return [*said, f"{lacks}: the run starts from scratch"]
        else:
            said.append(f"{lacks}: its numbers are lost, its update is not")
    if chosen != named:
        write_text(folder / LATEST, str(chosen))
    return [*said, f"the run goes on from {folder / f'global_step_{chosen}'}"] if said else []


def _newest_whole(folder: Path, steps: list[int], most: int, said: list[str], *, one_node: bool) -> list[int]:
    """The newest steps whose checkpoints are whole; adds to `said` what is wrong with those newer than all of them.

    Args:
        steps: of the checkpoints in the folder, the newest first.
        most: how many to look for.
    """
    whole: list[int] = []
    for step in steps:
        checkpoint = folder / f"global_step_{step}"
        faults = faults_of(checkpoint, one_node=one_node)
        if not faults:
            whole.append(step)
        elif not whole:
            said.append(f"{checkpoint} is not whole ({'; '.join(faults)})")
        if len(whole) == most:
            break
    return whole
