"""What every test begins with: the examples of property tests, signals that are not ignored, YAML that is parsed once,
a garbage collector that leaves modules alone; one thread for torch.

Property tests draw the same examples in every run, unless new ones are asked for:

python -m pytest tests                               the same examples everywhere, so that chance decides nothing
python -m pytest tests --hypothesis-profile=random   new ones in every run, and the smallest that fails
"""

import copy
import functools
import gc
import io
import signal

import pytest
from hypothesis import HealthCheck, Phase, settings
from omegaconf import OmegaConf

# Ignored under nohup and in a shell's background; what the tests start would inherit that, and no shell can trap what
# it came to ignore.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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
def _loaded(text):
    return load_yaml(io.StringIO(text))


OmegaConf.load = staticmethod(
    lambda file: copy.deepcopy(_loaded(file.read())) if isinstance(file, io.TextIOBase) else load_yaml(file)
)


@pytest.fixture
def one_thread():
    """One thread for torch: a second one makes small tensors slower, and much slower on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items) -> None:
    """Runs of verl come first: the short tests at the end then keep all processes busy."""
    items.sort(key=lambda item: "end_to_end" not in item.keywords)


def pytest_collection_finish() -> None:
    """What has been imported is not collected any more.

    A million objects of torch, transformers and verl live to the end. The collector would go through them again and
    again, which takes a sixth to a third of the tests' time.
    """
    gc.collect()
    gc.freeze()
