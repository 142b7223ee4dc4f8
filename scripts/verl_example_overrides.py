"""Extracts the command lines of verl's example scripts: what tests/claims/verl_examples keeps.

    python scripts/verl_example_overrides.py GIT_DIRECTORY REVISION… > tests/claims/verl_examples/overrides.json

GIT_DIRECTORY is a clone of https://github.com/verl-project/verl, bare or with its `.git`. Each script under examples/
runs in bash, in an environment of its own without variables: programs that would act are replaced on PATH by one that
writes down its arguments, so that bash itself expands the scripts' variables, arrays and "$@".
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
# Written down, with their arguments.
RECORDED = ("python", "python3", "ray", "torchrun", "uv")
# What scripts ask of a shell; whatever else they call does nothing.
REAL = ("basename", "cat", "cut", "dirname", "env", "grep", "head", "realpath", "sed", "seq", "tr")
NOTHING = ("curl", "date", "git", "hostname", "huggingface-cli", "mkdir", "nvidia-smi", "pip", "pip3", "pkill", "rm")
NOTHING += ("sleep", "tee", "wget", "nproc", "cp", "mv", "npu-smi", "lsof", "hf", "ulimit", "sysctl", "touch", "chmod")
ARGUMENT, COMMAND = "\x1f", "\x1e"
SECONDS = 20


def unpacked(repository: Path, revision: str, folder: Path) -> str:
    """Unpacks a revision's examples into a folder and returns its commit."""
    git = ["git", f"--git-dir={repository}"]
    archive = subprocess.run([*git, "archive", revision, "examples"], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    commit = subprocess.run([*git, "rev-parse", f"{revision}^{{commit}}"], check=True, capture_output=True, text=True)
    return commit.stdout.strip()


def programs(folder: Path) -> Path:
    """A folder for PATH with the recorder and the few real programs."""
    folder.mkdir()
    record = f"{{ printf '%s{ARGUMENT}' \"$@\"; printf '{COMMAND}'; }} >>{folder.parent / 'record'}"
    # A module that scripts ask for, torch_npu, is not there.
    bodies = {name: f"[[ $1 != -c ]] || exit 1\n{record}" for name in RECORDED} | dict.fromkeys(NOTHING, "exit 0")
    for name, body in bodies.items():
        file = folder / name
        file.write_text(f"#!{shutil.which('bash')}\n{body}\n")
        file.chmod(0o755)
    for name in REAL:
        (folder / name).symlink_to(shutil.which(name))
    return folder


def commands_of(script: Path, root: Path) -> list[list[str]]:
    """The overrides of every start of verl's main that a script makes, in its order."""
    with tempfile.TemporaryDirectory() as elsewhere:
        path, record = programs(Path(elsewhere) / "programs"), Path(elsewhere) / "record"
        record.touch()
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
        found = [command.split(ARGUMENT)[:-1] for command in record.read_text().split(COMMAND)]
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
