"""Extracts the command lines of verl's example scripts: what tests/claims/verl_examples keeps.

    python scripts/verl_example_overrides.py GIT_DIRECTORY REVISION… > tests/claims/verl_examples/overrides.json

GIT_DIRECTORY is a clone of https://github.com/verl-project/verl, bare or with its `.git`. Each script under examples/
runs in bash, in an environment of its own without variables, so that bash itself expands the scripts' variables, arrays
and "$@". Its PATH has some programs that only read or print, stand-ins that do nothing, and stand-ins for Python that
record their arguments.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MODULE = "verl.trainer.main_ppo"
REAL = ("basename", "cat", "cut", "dirname", "env", "grep", "head", "realpath", "sed", "seq", "tr")
RECORDED = ("python", "python3", "ray", "torchrun", "uv")
WITHOUT_EFFECT = ("chmod", "cp", "curl", "date", "git", "hf", "hostname", "huggingface-cli", "lsof", "mkdir", "mv")
WITHOUT_EFFECT += ("nproc", "npu-smi", "nvidia-smi", "pip", "pip3", "pkill", "rm", "sleep", "sysctl", "touch", "wget")
SECONDS, RECORD = 20, "record"


def put_programs(folder: Path) -> None:
    """Creates the programs of a PATH in a folder; those for Python append their arguments to its file RECORD.

    A record is the number of words and then the words, separated by null bytes, which no argument can contain.
    """
    for name in REAL:
        if (program := shutil.which(name)) is not None:
            (folder / name).symlink_to(program)
    # A script that tries something out with python -c is told that it failed.
    writes = f"""[[ ${{1:-}} != -c ]] || exit 1
printf '%s\\0' $(($# + 1)) "${{0##*/}}" "$@" >>'{folder / RECORD}'"""
    bodies = (
        dict.fromkeys(WITHOUT_EFFECT, ":") | dict.fromkeys(RECORDED, writes) | {"tee": f"exec {shutil.which('cat')}"}
    )
    for name, body in bodies.items():
        (folder / name).write_text(f"#!{shutil.which('bash')} -p\n{body}\n")
        (folder / name).chmod(0o755)


def commands_of(script: Path, root: Path, programs: Path) -> list[list[str]]:
    """The overrides of every start of verl's main that a script makes, in its order."""
    record = programs / RECORD
    record.write_text("")
    command, environment = [shutil.which("bash"), str(script)], {"PATH": str(programs), "HOME": "/home/user"}
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
