"""The names that `import verl_clipx` promises: each is there, is what it is documented as, and is in the documentation.

Not covered: what the functions do (tests/loss/test_user_method.py, test_contract.py, test_loss.py).
"""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import verl_clipx

DOCUMENTATION = Path(verl_clipx.__file__).parents[1] / "docs" / "own_loss.md"
TYPES = {"Bounds", "FixedBounds", "Method", "Tokens"}
FUNCTIONS = {"register_loss", "check_loss", "evaluate", "parameter", "of_decision", "of_rollout_batch"}


def test_all_of_them_are_what_they_are_called():
    for name in verl_clipx.__all__:
        found = getattr(verl_clipx, name)
        assert getattr(found, "__name__", name) == name
    assert {name for name in verl_clipx.__all__ if isinstance(getattr(verl_clipx, name), type)} == TYPES
    assert {*verl_clipx.__all__} - TYPES - FUNCTIONS == {"__version__", "METHODS"}
    assert all(callable(getattr(verl_clipx, name)) for name in FUNCTIONS)
    assert issubclass(verl_clipx.METHODS["acpo"], verl_clipx.Method)
    assert verl_clipx.__version__ == metadata.version("verl-clipx")


def test_a_star_import_gives_them():
    names = {}
    exec("from verl_clipx import *", names)
    assert names.keys() >= {*verl_clipx.__all__}


def test_dir_lists_them_before_any_is_used():
    program = "import verl_clipx; assert {*verl_clipx.__all__} <= {*dir(verl_clipx)}, dir(verl_clipx)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_another_name_is_refused():
    with pytest.raises(AttributeError, match="'verl_clipx' has no attribute 'losss'"):
        verl_clipx.losss  # noqa: B018


@pytest.mark.parametrize("name", sorted({*verl_clipx.__all__} - {"__version__"}))
def test_the_documentation_names_it(name):
    assert re.search(rf"`(@|verl_clipx\.|){name}\b", DOCUMENTATION.read_text())


def test_evaluate_gives_a_loss_per_token_by_hand():
    result = verl_clipx.evaluate(
        verl_clipx.METHODS["grpo"](),
        old_log_prob=torch.zeros(1, 3, dtype=torch.float64),
        log_prob=torch.tensor([[0.1, 1.0, 0.0]], dtype=torch.float64, requires_grad=True),
        advantages=torch.ones(1, 3, dtype=torch.float64),
        mask=torch.ones(1, 3, dtype=torch.bool),
    )
    # PPO's clip at 1.2: the second token's ratio, e, is above it.
    torch.testing.assert_close(result.weight, torch.tensor([[0.1, -torch.inf, 0.0]], dtype=torch.float64).exp())
    assert result.bounds == verl_clipx.Bounds(0.8, 1.2)
