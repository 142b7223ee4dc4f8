"""Lists the configuration keys that verl's losses read, with where they read them, from verl's source.

    python scripts/verl_loss_keys.py [FOLDER] > tests/training/worker/fixtures/verl_loss_keys/VERSION.txt

FOLDER holds a version's `verl`, unpacked from a wheel or a checkout; without it the installed one is read. Only syntax
trees are looked at, nothing is imported: a parameter's annotation says which node of the configuration it is, and
attributes, .get, getattr, subscripts and assignments lead on from there.
"""

import ast
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"

# The modules on the loss's path, each with the node below which keys count; trainers read all sorts of others.
MODULES = {
    "trainer/ppo/core_algos.py": "",
    "workers/utils/losses.py": "",
    "trainer/distillation/losses.py": "",
    "trainer/distillation/fsdp/losses.py": "",
    "trainer/distillation/megatron/losses.py": "",
    "trainer/ppo/rollout_corr_helper.py": "",
    "trainer/ppo/ray_trainer.py": CORRECTION,
    "trainer/ppo/v1/trainer_base.py": CORRECTION,
    "trainer/ppo/v1/trainer_separate_async.py": CORRECTION,
}

# The node that a parameter is, by a name in its annotation or, without one of these, by its own name.
NODES = {
    "ActorConfig": ACTOR,
    "PolicyLossConfig": f"{ACTOR}.policy_loss",
    "RolloutCorrectionConfig": CORRECTION,
    "AlgoConfig": "algorithm",
    "CriticConfig": "critic",
    "DistillationConfig": "distillation",
    "DistillationLossConfig": "distillation.distillation_loss",
    "kl_ctrl": "algorithm.kl_ctrl",
}
# What is called on a node, no key of it.
OF_A_NODE = ("items", "keys", "values", "get", "pop")


class Reads(ast.NodeVisitor):
    """Collects what one function reads of the nodes that its parameters are.

    Args:
        function: the function, or a method of a class with the whole configuration as self.config.
        found: key to the lines that read it; added to.
    """

    def __init__(self, function: ast.FunctionDef, found: dict[str, set[int]]):
        self.found, self.names = found, {}
        arguments = function.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if (node := node_of(argument)) is not None:
                self.names[argument.arg] = node
        for statement in function.body:
            self.visit(statement)

    def path(self, node: ast.expr) -> str | None:
        """The key that an expression stands for; None if for none."""
        match node:
            case ast.Name(id=name):
                return self.names.get(name)
            case ast.Attribute(value=ast.Name(id="self"), attr="config"):
                return ""
            case ast.Attribute(value=value, attr=attr):
                return self.path(value) if attr in OF_A_NODE else self.below(value, attr)
            case ast.Subscript(value=value, slice=index):
                return self.below(value, literal(index))
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[value, name, *_]):
                return self.below(value, literal(name))
            case ast.Call(func=ast.Attribute(value=value, attr="get" | "pop"), args=[name, *_]):
                return self.below(value, literal(name))
            case ast.IfExp(body=body) if not isinstance(body, ast.Constant):
                return self.path(body)
        return None

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        """Has a name stand for the node that is assigned to it."""
        match target, value:
            case ast.Tuple(elts=targets), ast.Tuple(elts=values):
                for pair in zip(targets, values, strict=False):
                    self.assign(*pair)
            case ast.Name(id=name), _ if (path := self.path(value)) is not None:
                self.names[name] = path

    def below(self, node: ast.expr, name: str) -> str | None:
        """The key of a name in what an expression stands for."""
        path = self.path(node)
        return path if path is None else f"{path}.{name}".lstrip(".")

    def visit(self, node: ast.AST) -> None:
        """Notes a key, and follows names to which nodes are assigned."""
        match node:
            case ast.Assign(targets=[target], value=value):
                self.assign(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
                self.assign(target, value)
        if isinstance(node, ast.expr) and (path := self.path(node)):
            self.found.setdefault(path, set()).add(node.lineno)
        self.generic_visit(node)


def node_of(argument: ast.arg) -> str | None:
    """The node of the configuration that a parameter is; one that says it is one, but not which, keeps its name."""
    annotation = ast.unparse(argument.annotation) if argument.annotation else ""
    for name in (*re.findall(r"\w+", annotation), argument.arg):
        if name in NODES:
            return NODES[name]
    return argument.arg if "config" in argument.arg else None


def literal(node: ast.expr) -> str:
    """A name that is written down; one that is computed, in angle brackets."""
    return str(node.value) if isinstance(node, ast.Constant) else f"<{ast.unparse(node)}>"


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Every function and method, but for those inside another, which share its names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node)


def keys_of(verl: Path) -> dict[str, list[str]]:
    """Each key that verl's losses read, to the lines that read it."""
    places: dict[str, list[str]] = {}
    for module, node in MODULES.items():
        found: dict[str, set[int]] = {}
        for function in functions(ast.parse((verl / module).read_text())):
            Reads(function, found)
        for key, lines in found.items():
            if not node or key.startswith(f"{node}."):
                places.setdefault(key, []).extend(f"{module}:{line}" for line in sorted(lines))
    # A node that is handed on is none that is read.
    return {key: places[key] for key in sorted(places) if not any(other.startswith(f"{key}.") for other in places)}


def main() -> None:
    """Prints the keys."""
    verl = Path(sys.argv[1]) / "verl" if sys.argv[1:] else Path(find_spec("verl").origin).parent
    print("\n".join(keys_of(verl)))


if __name__ == "__main__":
    main()
