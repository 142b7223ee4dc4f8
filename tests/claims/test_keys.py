"""verl's keys are spelled in verl_clipx/run/keys.py alone.

Not covered: prose, in docstrings and in messages, patterns with a star, and losses/, which knows nothing of a run.
"""

import ast
import re
from pathlib import Path

import pytest

from verl_clipx.run import keys

PACKAGE = Path("verl_clipx")
FILES = sorted(
    path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "run/keys.py" and PACKAGE / "losses" not in path.parents
)
# A key of a node that verl's configurations have, from its beginning to its end.
WHOLE_KEY = re.compile(r"(actor_rollout_ref|algorithm|async_training|critic|data|distillation|trainer)(\.[a-z_0-9]+)+")


def texts_in(tree):
    """Each constant text but docstrings, with its line."""
    prose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            yield node.lineno, node.value


def spelled_in(source):
    tree = ast.parse(source)
    texts = {line: text for line, text in texts_in(tree) if keys.MODEL_ROOT in text or WHOLE_KEY.fullmatch(text)}
    nodes = {node.lineno: node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return texts | {line: name for line, name in nodes.items() if name == keys.MODEL_ROOT}


@pytest.mark.parametrize(
    "source",
    [
        'get("data.train_batch_size")',
        'set_to(f"set actor_rollout_ref.{x}")',
        "config.actor_rollout_ref.actor",
        'pair = ("trainer.nnodes",)',
    ],
)
def test_a_spelled_key_is_seen(source):
    assert spelled_in(source)


@pytest.mark.parametrize(
    "source", ['"""See data.seed."""', 'say(f"raise data.max_response_length, now {x}")', 'read("data/seed")']
)
def test_other_texts_are_none(source):
    assert not spelled_in(source)


def test_verls_keys_are_spelled_in_one_file():
    spelled = {str(path): found for path in FILES if (found := spelled_in(path.read_text()))}
    assert spelled == {}
