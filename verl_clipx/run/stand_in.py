"""What runs in place of a program while a command is explained: `stand_in.py RECORD PROGRAM ARGUMENT …`.

It appends the command line to RECORD. A launcher's payload then runs here, because it leads to verl's configuration:
what follows `ray job submit`, srun and `ray symmetric-run`, and the script of sbatch. It does nothing else.
"""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

# Options of Slurm and Ray that take no value; every other one without = is followed by its value.
FLAGS = re.compile(
    "--(contiguous|exact|exclusive|hold|kill-on-bad-exit|label|no-kill|no-requeue|no-wait|overcommit|overlap|"
    "oversubscribe|parsable|preserve-env|pty|quiet|requeue|spread-job|test-only|unbuffered|verbose|wait)|-[HKlkOsEQuvWX]"
)
NODES = re.compile(r"(?:^|\s)(?:--nodes[= ]|-N ?)(\d+)")


def after_options(words: Sequence[str]) -> list[str]:
    """A command line from its first word on that is neither an option nor an option's value."""
    left = list(words)
    while left and left[0].startswith("-"):
        option = left.pop(0)
        if option == "--":
            break
        # -N4 contains its value.
        takes_next = not FLAGS.fullmatch(option) and "=" not in option and (option.startswith("--") or len(option) == 2)
        if takes_next and left:
            del left[0]
    return left


def payload_of(program: str, words: Sequence[str]) -> list[str]:
    """The command that a launcher would start; empty if it starts none that runs here."""
    if program == "ray" and (words[:2] == ["job", "submit"] or words[:1] == ["symmetric-run"]):
        return after_options(words[2:] if words[0] == "job" else words[1:])
    if program == "srun":
        return after_options(words)
    if program == "sbatch":
        wrapped = [word.partition("=")[2] for word in words if word.startswith("--wrap=")]
        wrapped += [words[place + 1] for place, word in enumerate(words[:-1]) if word == "--wrap"]
        return ["bash", "-c", *wrapped] if wrapped else ["bash", *after_options(words)]
    return []


def slurm_variables(words: Sequence[str], script: str) -> dict[str, str]:
    """The variables of a Slurm job that scripts read, with made-up names of nodes.

    Args:
        words: the arguments of sbatch.
        script: the text of the job's script, whose #SBATCH lines count where sbatch's arguments say nothing.
    """
    directives = " ".join(line[7:] for line in script.splitlines() if line.startswith("#SBATCH"))
    match = NODES.search(" ".join(words)) or NODES.search(directives)
    number = int(match[1]) if match else 1
    return {
        "SLURM_JOB_ID": "0",
        "SLURM_SUBMIT_DIR": os.getcwd(),
        "SLURM_JOB_NODELIST": ",".join(f"node{index}" for index in range(1, number + 1)),
        "SLURM_JOB_NUM_NODES": str(number),
        "SLURM_NNODES": str(number),
    }


def main(record: str, program: str, *words: str) -> None:
    """Records a command line, and becomes its payload if it has one."""
    with open(record, "a") as file:
        file.write(shlex.join([program, *words]) + "\n")
    payload = payload_of(program, list(words))
    if program == "sbatch" and len(payload) > 1:
        script = Path(payload[1]).read_text(errors="replace") if Path(payload[1]).is_file() else ""
        os.environ.update(slurm_variables(words, script))
    if program == "scontrol" and words[:2] == ("show", "hostnames"):
        print("\n".join((words[2] if len(words) > 2 else os.environ.get("SLURM_JOB_NODELIST", "")).split(",")))
    if payload and payload != ["bash"]:
        os.execvp(payload[0], payload)


if __name__ == "__main__":
    main(*sys.argv[1:])
