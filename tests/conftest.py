"""What every test begins with: property tests draw the same examples in every run, unless --hypothesis-profile=random
asks for new ones; torch has one thread unless OMP_NUM_THREADS is set, signals are not ignored, YAML is parsed once,
configurations are copied by pickle and composed once, the garbage collector leaves modules alone.
"""

import functools
import gc
import io
import json
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra._internal.hydra import Hydra
from hypothesis import HealthCheck, Phase, settings
from omegaconf import DictConfig, OmegaConf

from tests.without_plugin import link_all_but_plugin

# Before anything imports torch, and for what the tests start. Its threads wait for each other by working: with one for
# each core, the small tensors of tests took three times the CPU time of one thread beside another test.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ignored under nohup and in a shell's background; what the tests start would inherit that, and no shell can trap what
# it came to ignore.
for number, handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# How long an example takes says more about what else runs on the machine than about the code.
# hypothesis itself draws the same examples wherever it finds the environment variable CI.
settings.register_profile(
    "random", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True, derandomize=False
)

# Shrinking, which takes minutes where a failure is rare, is for whoever looks into a failure.
settings.register_profile(
    "repeatable", settings.get_profile("random"), derandomize=True, phases=(Phase.explicit, Phase.generate)
)
settings.load_profile("repeatable")

# A composition of verl's configuration parses the same thirty files each time.
load_yaml = OmegaConf.load


@functools.cache
def _pickle_yaml(text):
    return pickle.dumps(load_yaml(io.StringIO(text)))


OmegaConf.load = staticmethod(
    lambda file: pickle.loads(_pickle_yaml(file.read())) if isinstance(file, io.TextIOBase) else load_yaml(file)
)

# Composing is copying for the most part, and OmegaConf's own copies take five times as long.
copy_node_by_node = DictConfig.__deepcopy__


def _copy_by_pickle(self, memo):
    parent, self.__dict__["_parent"] = self.__dict__["_parent"], None
    try:
        copy = pickle.loads(pickle.dumps(self, pickle.HIGHEST_PROTOCOL))
    except (pickle.PicklingError, AttributeError, TypeError):
        # It holds what pickle does not know, such as a function of a test's.
        return copy_node_by_node(self, memo)
    finally:
        self.__dict__["_parent"] = parent
    # As OmegaConf's: the copy of a part stays below the same whole.
    copy.__dict__["_parent"] = parent
    return copy


DictConfig.__deepcopy__ = _copy_by_pickle

# Hydra composes everything once more to see whether it is to make a sweep; only an override of hydra.mode says so.
mode_by_composing = Hydra.get_mode
Hydra.get_mode = lambda self, config_name, overrides: (
    mode_by_composing(self, config_name, overrides) if "hydra.mode" in str(overrides) else None
)


@pytest.fixture(scope="session")
def folder_without_plugin(tmp_path_factory) -> Path:
    """A folder with links to every package but the plugin."""
    folder = tmp_path_factory.mktemp("without_plugin")
    link_all_but_plugin(folder)
    return folder


@pytest.fixture
def limit_torch_to_one_thread():
    """Gives torch one thread also where OMP_NUM_THREADS is set to more, which small tensors make slower, not faster.

    Afterwards the number of threads is the one before, whatever the code under test has set.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def compile_by(monkeypatch):
    """Puts another back end of torch.compile's in Inductor's place, which takes seconds for each graph."""
    import torch

    compiler = torch.compile

    def compile_by_backend(backend) -> None:
        # The options are left out, since they are Inductor's.
        def compile_function(function, *, options, **others):
            return compiler(function, backend=backend, **others)

        monkeypatch.setattr(torch, "compile", compile_function)

    return compile_by_backend


# An interpreter that imports verl takes more than five seconds, of which verl and the plugin are a tenth. Therefore one
# imports the rest, and forks a child for each program.
SERVER = """
import json, os, sys, tempfile, traceback
import datasets, fastapi, pandas, ray, scipy, tensordict, transfer_queue, transformers
assert not [name for name in sys.modules if name.partition(".")[0] in ("verl", "verl_clipx")]
for line in sys.stdin:
    program, folder = json.loads(line)
    outputs = [tempfile.TemporaryFile() for _ in range(2)]
    child = os.fork()
    if not child:
        for number, file in enumerate(outputs, 1):
            os.dup2(file.fileno(), number)
        os.chdir(folder)
        try:
            exec(program, {"__name__": "__main__"})
        except SystemExit as error:
            code = int(error.code or 0)
        except BaseException:
            traceback.print_exc()
            code = 1
        else:
            code = 0
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    code, texts = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), []
    for file in outputs:
        file.seek(0)
        texts.append(file.read().decode())
    print(json.dumps([code, *texts]), flush=True)
"""


@pytest.fixture(scope="session")
def run_fresh() -> Iterator[Callable[[str, Path], subprocess.CompletedProcess[str]]]:
    """Runs a program in a folder, as `python -c` would there, where neither verl nor the plugin is imported yet."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", SERVER], **pipes) as server:

        def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
            server.stdin.write(json.dumps([program, str(folder)]) + "\n")
            server.stdin.flush()
            return subprocess.CompletedProcess(program, *json.loads(server.stdout.readline()))

        yield run
        server.stdin.close()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items) -> None:
    """Runs of verl come first, then the files with most tests: short files at the end keep all processes busy. While
    the first file that needs the policy fits it, another process runs those that need none.
    """
    tests = Counter(item.path for item in items)
    runs = [item for item in items if "end_to_end" in item.keywords]
    files_with_policy = dict.fromkeys(item.path for item in runs if "task" in item.fixturenames)
    first = next(iter(files_with_policy), None)

    def place(item):
        if "end_to_end" in item.keywords:
            return 0, item.path != first, item.path in files_with_policy
        return 1, -tests[item.path], str(item.path)

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """What has been imported is not collected any more: going through it again takes a sixth to a third of the time."""
    gc.collect()
    gc.freeze()
