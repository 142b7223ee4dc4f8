"""Extracts the command lines of verl's example scripts: what tests/claims/verl_examples keeps.

    python scripts/verl_example_overrides.py GIT_DIRECTORY REVISION… > tests/claims/verl_examples/overrides.json

GIT_DIRECTORY is a clone of https://github.com/verl-project/verl, bare or with its `.git`. Each script under examples/
runs in bash, so that bash itself expands its variables, arrays and "$@". It has no variables of ours and only programs
that read or print. Of every other program bash finds none: those for Python are recorded, and the rest does nothing.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MODULE = "verl.trainer.main_ppo"
REAL = ("basename", "cat", "cut", "dirname", "env", "grep", "head", "realpath", "sed", "seq", "tr")
SECONDS, RECORD, FIRST = 20, "record", "first.sh"
# Bash calls it where it finds no program. A record is the number of words and then the words, separated by null bytes,
# which no argument can contain. A script that tries something out with python -c is told that it failed.
NOT_FOUND = """command_not_found_handle() {
    case ${1##*/} in
        tee) cat ;;
        python | python3 | ray | torchrun | uv) [[ ${2-} != -c ]] && printf '%s\\0' $# "$@" >>'RECORD' ;;
    esac
}
"""


def put_programs(folder: Path) -> None:
    """Creates the programs of a PATH in a folder, and the file that bash reads before a script."""
    for name in REAL:
        if (program := shutil.which(name)) is not None:
            (folder / name).symlink_to(program)
    (folder / FIRST).write_text(NOT_FOUND.replace("RECORD", str(folder / RECORD)))


def commands_of(script: Path, root: Path, programs: Path) -> list[list[str]]:
    """The overrides of every start of verl's main that a script makes, in its order."""
    record = programs / RECORD
    record.write_text("")
    command = [shutil.which("bash"), str(script)]
    environment = {"PATH": str(programs), "HOME": "/home/user", "BASH_ENV": str(programs / FIRST)}
    given = {"cwd": root, "env": environment, "stdin": subprocess.DEVNULL, "capture_output": True}
    try:
        subprocess.run(command, timeout=SECONDS, **given)
    except subprocess.TimeoutExpired:
        print(f"{script}: not done within {SECONDS} s", file=sys.stderr)
    # Where the folder stands in a script's own paths is no part of what it says.
    words = iter(record.read_text().replace(str(root), "/verl").split("\0")[:-1])
    commands = [[next(words) for _ in range(int(number))] for number in words]
    return [command[command.index(MODULE) + 1 :] for command in commands if MODULE in command]


def examples(repository: Path, revision: str) -> tuple[str, dict[str, list[list[str]]]]:
    """A revision's commit, and its scripts that start verl's main, by path."""
    git = ["git", f"--git-dir={repository}"]
    commit = subprocess.run([*git, "rev-parse", f"{revision}^{{commit}}"], check=True, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as programs:
        root, archive = Path(folder), f"{programs}/examples.tar"
        subprocess.run([*git, "archive", f"--output={archive}", revision, "examples"], check=True)
        shutil.unpack_archive(archive, root, filter="data")
        put_programs(Path(programs))
        scripts = sorted(root.glob("examples/**/*.sh"))
        found = {str(script.relative_to(root)): commands_of(script, root, Path(programs)) for script in scripts}
    return commit.stdout.strip(), {path: commands for path, commands in found.items() if commands}


def main(repository: str, *revisions: str) -> None:
    """Prints the command lines of all revisions, equal ones once."""
    found = {revision: examples(Path(repository), revision) for revision in revisions}
    commands: dict[tuple[str, int, tuple[str, ...]], list[str]] = {}
    for revision, (_, scripts) in found.items():
        for path, lists in scripts.items():
            for index, arguments in enumerate(lists):
                commands.setdefault((path, index, tuple(arguments)), []).append(revision)
    head = {
        "source": "https://github.com/verl-project/verl, the scripts under examples/",
        "licence": "Apache-2.0, copyright Bytedance Ltd. and/or its affiliates and verl's contributors",
        "commits": {revision: commit for revision, (commit, _) in found.items()},
    }
    lines = [
        json.dumps({"script": path, "revisions": of, "arguments": list(arguments)}, ensure_ascii=False)
        for (path, _, arguments), of in sorted(commands.items())
    ]
    # A line for each command.
    print(json.dumps(head, indent=1)[:-2] + ',\n "commands": [\n  ' + ",\n  ".join(lines) + "\n ]\n}")


if __name__ == "__main__":
    main(*sys.argv[1:])
