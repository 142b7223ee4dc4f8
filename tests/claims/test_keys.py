"""verl's keys are spelled in verl_clipx/run/keys.py alone, and a run is read by the fields of its record.

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
# The nodes that verl's configurations have.
ROOTS = ("actor_rollout_ref", "algorithm", "async_training", "critic", "data", "distillation", "trainer")
# A key of such a node, from its beginning to its end; also of the node that holds what Ray is started with.
WHOLE_KEY = re.compile(rf"({'|'.join(ROOTS)}|ray_kwargs)(\.[a-zA-Z_0-9]+)+")
# What holds a whole configuration of verl's, by the end of its name.
CONFIGURATIONS = ("config", "configuration", "base")
# What reads runs, or watches one. Of verl's modules, run/ alone makes records of configurations.
READERS = [path for path in FILES if path.parts[1] in ("analysis", "papers", "training")]
# The readers that look at keys of a configuration themselves, each with the reason.
READ_KEYS = {
    "analysis/runs/sameness.py": "a setting is the whole configuration, recorded or composed, without some keys",
    "papers/evaluation/validation_run.py": "composes the configuration that it starts verl with",
    "papers/tables/against_preset.py": "keeps a path as it is written, and a record has it resolved",
    "papers/tables/ground_truths.py": "checks a preset that has no run yet",
    "papers/tables/presets.py": "checks a preset that has no run yet",
    "papers/tables/recipe_commands.py": "prints a preset that has no run yet",
    "training/trainer/log.py": "opens a checkpoint, whose path the record keeps without credentials",
    "training/worker/registry.py": "loads the loss that verl's worker is about to look up",
}


def texts_in(tree):
    """Each constant text but docstrings, with its line."""
    prose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            yield node.lineno, node.value


def keys_spelled_in(source):
    """The lines where a key of verl's is spelled, or an attribute is the node of its models."""
    tree = ast.parse(source)
    texts = {line: text for line, text in texts_in(tree) if keys.MODEL_ROOT in text or WHOLE_KEY.fullmatch(text)}
    nodes = {node.lineno: node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return texts | {line: name for line, name in nodes.items() if name == keys.MODEL_ROOT}


def name_of(node):
    """The last part of a name with dots; empty for any other expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def holds_configuration(node):
    return name_of(node).endswith(CONFIGURATIONS)


def nodes_read_in(source):
    """The lines where a node of verl's is taken out of a configuration by its name, as in config.trainer."""
    lines = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ROOTS and holds_configuration(node.value):
            lines.add(node.lineno)
        is_item = isinstance(node, ast.Subscript) and holds_configuration(node.value)
        if is_item and getattr(node.slice, "value", None) in ROOTS:
            lines.add(node.lineno)
        if isinstance(node, ast.Call) and name_of(node.func) == "get" and node.args:
            is_of_configuration = isinstance(node.func, ast.Attribute) and holds_configuration(node.func.value)
            is_root = getattr(node.args[0], "value", None) in ROOTS
            if is_of_configuration and is_root:
                lines.add(node.lineno)
    return lines


def keys_read_in(source):
    """The lines that read keys of a configuration: by OmegaConf, by value_at, or one by one of a recorded one."""
    lines = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("OmegaConf.select", "value_at"):
            lines.add(node.lineno)
        is_get = isinstance(node, ast.Call) and name_of(node.func) == "get" and isinstance(node.func, ast.Attribute)
        if is_get and name_of(node.func.value) == "configuration":
            lines.add(node.lineno)
        if isinstance(node, ast.Subscript) and name_of(node.value) == "configuration":
            lines.add(node.lineno)
    return lines


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
    assert keys_spelled_in(source)


@pytest.mark.parametrize(
    "source", ['"""See data.seed."""', 'say(f"raise data.max_response_length, now {x}")', 'read("data/seed")']
)
def test_a_text_that_only_names_a_key_is_none(source):
    assert not keys_spelled_in(source)


def test_verls_keys_are_spelled_in_one_file():
    for path in FILES:
        assert keys_spelled_in(path.read_text()) == {}, path


@pytest.mark.parametrize("source", ["config.trainer", "run.config.data", 'config.get("trainer")', 'base["algorithm"]'])
def test_a_node_that_is_read_by_its_name_is_seen(source):
    assert nodes_read_in(source)


@pytest.mark.parametrize("source", ["record.trainer", "record.data.paths", 'config.get("clipx")', 'reply["data"]'])
def test_a_field_is_no_node(source):
    assert not nodes_read_in(source)


def test_no_node_of_verls_is_read_by_its_name():
    for path in FILES:
        assert nodes_read_in(path.read_text()) == set(), path


@pytest.mark.parametrize(
    "source",
    ["OmegaConf.select(config, KEY)", "value_at(config, KEY)", "run.configuration.get(KEY)", "configuration[KEY]"],
)
def test_a_key_that_is_read_of_a_configuration_is_seen(source):
    assert keys_read_in(source)


def test_a_run_is_read_by_the_fields_of_its_record():
    assert not keys_read_in("run.record.seeds.data, run.record.kept(KEY), run.configuration.items()")
    read = {str(path.relative_to(PACKAGE)) for path in READERS if keys_read_in(path.read_text())}
    assert read == READ_KEYS.keys()
