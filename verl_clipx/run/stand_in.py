"""Runs in place of a program while a command is explained: `stand_in.py RECORD PROGRAM ARGUMENT …`.

It appends the command line to RECORD. What `ray job submit` or srun would start then runs here, because it leads to
verl's configuration. It does nothing else.
"""

import os
import re
import shlex
import sys
from collections.abc import Sequence

# Programs with which what a launcher starts begins, if no -- says where; options and their values come before.
STARTS = re.compile(r"(?:\S*/)?(?:python[\d.]*|bash|sh|env|uv|torchrun|conda|clipx)|\S+\.(?:sh|py)")


def payload_of(program: str, words: Sequence[str]) -> list[str]:
    """The command that a launcher would start; empty if it starts none that runs here."""
    if program != "srun" and [program, *words[:2]] != ["ray", "job", "submit"]:
        return []
    starts = (place + (word == "--") for place, word in enumerate(words) if word == "--" or STARTS.fullmatch(word))
    return [*words[next(starts, len(words)) :]]


def main(record: str, program: str, *words: str) -> None:
    """Records a command line, and becomes its payload if it has one."""
    with open(record, "a", errors="surrogateescape") as file:
        file.write(shlex.join([program, *words]) + "\n")
    if payload := payload_of(program, list(words)):
        os.execvp(payload[0], payload)


if __name__ == "__main__":
    main(*sys.argv[1:])
