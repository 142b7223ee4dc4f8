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
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

MODULE = "verl.trainer.main_ppo"
REAL = ("basename", "cat", "cut", "dirname", "env", "grep", "head", "realpath", "sed", "seq", "tr")
RECORDED = ("python", "python3", "ray", "torchrun", "uv")
WITHOUT_EFFECT = ("chmod", "cp", "curl", "date", "git", "hf", "hostname", "huggingface-cli", "lsof", "mkdir", "mv")
WITHOUT_EFFECT += ("nproc", "npu-smi", "nvidia-smi", "pip", "pip3", "pkill", "rm", "sleep", "sysctl", "touch", "wget")
SECONDS = 20


def put_programs(folder: Path, record: Path) -> None:
    """Creates a folder of programs to be used as PATH; those for Python append their arguments to `record`.

    A record is the number of words and then the words, separated by null bytes, which no argument can contain.
    """
    folder.mkdir()
    for name in REAL:
        if (program := shutil.which(name)) is not None:
            (folder / name).symlink_to(program)
    # A script that tries something out with python -c is told that it failed.
    writes = f"""[[ ${{1:-}} != -c ]] || exit 1
printf '%s\\0' $(($# + 1)) "${{0##*/}}" "$@" >>'{record}'"""
    bodies = (
        dict.fromkeys(WITHOUT_EFFECT, ":") | dict.fromkeys(RECORDED, writes) | {"tee": f"exec {shutil.which('cat')}"}
    )
    for name, body in bodies.items():
        (folder / name).write_text(f"#!{shutil.which('bash')} -p\n{body}\n")
        (folder / name).chmod(0o755)


def recorded(text: str) -> list[list[str]]:
    """The commands in a record, each as a list of words."""
    words, commands = iter(text.split("\0")[:-1]), []
    for number in words:
        commands.append([next(words) for _ in range(int(number))])
    return commands


def unpacked(repository: Path, revision: str, folder: Path) -> str:
    """Unpacks a revision's examples into a folder and returns its commit."""
    git = ["git", f"--git-dir={repository}"]
    archive = subprocess.run([*git, "archive", revision, "examples"], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    commit = subprocess.run([*git, "rev-parse", f"{revision}^{{commit}}"], check=True, capture_output=True, text=True)
    return commit.stdout.strip()


def commands_of(script: Path, root: Path) -> list[list[str]]:
    """The overrides of every start of verl's main that a script makes, in its order."""
    with tempfile.TemporaryDirectory() as elsewhere:
        path, record = (Path(elsewhere) / name for name in ("programs", "record"))
        record.touch()
        put_programs(path, record)
        try:
            subprocess.run(
                [shutil.which("bash"), str(script)],
                cwd=root,
                env={"PATH": str(path), "HOME": "/home/user"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            print(f"{script}: not done within {SECONDS} s", file=sys.stderr)
        found = recorded(record.read_text())
    return [words[words.index(MODULE) + 1 :] for words in found if MODULE in words]


def examples(repository: Path, revision: str) -> tuple[str, dict[str, list[list[str]]]]:
    """A revision's commit, and its scripts that start verl's main, by path."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        commit = unpacked(repository, revision, root)
        scripts = sorted(root.glob("examples/**/*.sh"))
        found = {str(script.relative_to(root)): commands_of(script, root) for script in scripts}
        # Where the folder stands in a script's own paths is no part of what it says.
        found = {
            path: [[word.replace(str(root), "/verl") for word in words] for words in commands]
            for path, commands in found.items()
        }
    return commit, {path: commands for path, commands in found.items() if commands}


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
