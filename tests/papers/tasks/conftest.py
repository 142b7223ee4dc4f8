"""What the tests of several tasks' small policies share."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """One thread for torch: a second one makes tensors this small slower, and much slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
