"""Fixtures of the tests of what speaks to verl; among them programs in processes that have imported what verl imports,
but neither verl nor the plugin.

An interpreter that imports verl takes more than five seconds of a processor, of which verl and the plugin are a tenth.
Therefore one interpreter imports the rest, and forks a child for each program.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.composition import actor, composed, tensors
from verl_clipx.worker import receipt

__all__ = ["actor", "composed", "few_probes", "run_fresh", "tensors"]

SERVER = """
import json, os, sys, tempfile, traceback
import datasets, fastapi, pandas, ray, scipy, tensordict, transfer_queue, transformers
assert not [name for name in sys.modules if name.partition(".")[0] in ("verl", "verl_clipx")]
for line in sys.stdin:
    program, folder = json.loads(line)
    written = [tempfile.TemporaryFile() for _ in range(2)]
    child = os.fork()
    if not child:
        for number, file in enumerate(written, 1):
            os.dup2(file.fileno(), number)
        os.chdir(folder)
        try:
            exec(program, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            code = 1
        else:
            code = 0
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    code, texts = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), []
    for file in written:
        file.seek(0)
        texts.append(file.read().decode())
    print(json.dumps([code, *texts]), flush=True)
"""


@pytest.fixture(scope="session")
def run_fresh() -> Iterator[Callable[[str, Path], subprocess.CompletedProcess[str]]]:
    """Runs a program in a folder, as `python -c` would there."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", SERVER], **pipes) as server:

        def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
            server.stdin.write(json.dumps([program, str(folder)]) + "\n")
            server.stdin.flush()
            return subprocess.CompletedProcess(program, *json.loads(server.stdout.readline()))

        yield run
        server.stdin.close()


@pytest.fixture
def few_probes(monkeypatch):
    """The receipt makes a few of its probes: enough for any other loss, but not for each number moved a little."""
    monkeypatch.setattr(receipt, "PROBES", 12)
