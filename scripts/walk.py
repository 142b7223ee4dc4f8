"""Counts the files that a value visits on its way through the package, and how often it comes back to one.

python scripts/walk.py verl_clipx/run/start.py:start:config

The way is read from the source: a call that gets the value, or a part of it, enters the function's file, in the order
in which the code stands and each function once. What a function of the package returns is another value. A call that is
chosen as the program runs is not followed, unless only one method of the package has its name. Refusals are left out.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = "verl_clipx/base/refusal.py"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def house() -> tuple[dict[tuple[str, str], Function], dict[str, list[tuple[str, str]]], dict[str, dict[str, str]]]:
    """Returns the functions by file and name, the places of methods by name, and each file's imported names."""
    functions, methods, imported = {}, defaultdict(list), defaultdict(dict)
    for path in sorted((ROOT / "verl_clipx").rglob("*.py")):
        file, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("verl_clipx"):
                source = f"{node.module.replace('.', '/')}.py"
                imported[file] |= {alias.asname or alias.name: source for alias in node.names}
        for top in tree.body:
            for node in top.body if isinstance(top, ast.ClassDef) else [top]:
                if isinstance(node, Function):
                    name = f"{top.name}.{node.name}" if isinstance(top, ast.ClassDef) else node.name
                    functions[file, name] = node
                    if name != node.name and not node.name.startswith("__"):
                        methods[node.name].append((file, name))
    return functions, methods, imported


def called(call: ast.Call, file: str, inside: str) -> tuple[str, str] | None:
    """Returns the file and the name of the package's function that a call enters, or None."""
    functions, methods, imported = house()
    if isinstance(call.func, ast.Name):
        name = call.func.id
        for place in ((file, f"{inside}.{name}"), (imported[file].get(name, file), name)):
            if place in functions:
                return place
    elif isinstance(call.func, ast.Attribute):
        name, of = call.func.attr, call.func.value
        own = (file, f"{inside.partition('.')[0]}.{name}")
        if isinstance(of, ast.Name) and of.id == "self" and own in functions:
            return own
        return methods[name][0] if len(methods[name]) == 1 else None
    return None


def entered(place: tuple[str, str], names: set[str], seen: set[tuple[str, str]]) -> Iterator[str]:
    """Yields the file of each function that a value enters from a function on, in which it has some names."""
    seen.add(place)
    file, inside = place
    yield file

    def holds(node: ast.AST) -> bool:
        return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))

    def visit(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            yield from visit(child)
        if isinstance(node, ast.Call):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            target = called(node, file, inside)
            if target and target not in seen and target[0] != LEFT_OUT and any(map(holds, given)):
                yield from entered(target, parameters_of(node, target), seen)
        sources = {ast.For: "iter", ast.comprehension: "iter", ast.NamedExpr: "value", ast.withitem: "context_expr"}
        source = getattr(node, sources.get(type(node), "value"), None) if not isinstance(node, ast.Call) else None
        enters = isinstance(source, ast.Call) and called(source, file, inside)
        if isinstance(source, ast.AST) and holds(source) and not enters:
            for target in getattr(node, "targets", [getattr(node, "target", getattr(node, "optional_vars", None))]):
                names.update(part.id for part in ast.walk(target or ast.Pass()) if isinstance(part, ast.Name))

    def parameters_of(call: ast.Call, target: tuple[str, str]) -> set[str]:
        arguments = house()[0][target].args
        positional = [one.arg for one in (*arguments.posonlyargs, *arguments.args) if one.arg not in ("self", "cls")]
        pairs = [
            *zip(positional, call.args, strict=False),
            *((keyword.arg, keyword.value) for keyword in call.keywords),
        ]
        return {name for name, value in pairs if name and holds(value)} or {*positional}

    for statement in house()[0][place].body:
        yield from visit(statement)


def walk(file: str, name: str, parameter: str) -> list[str]:
    """Returns the files of a parameter's stays in their order; one in a file that was left before is a return."""
    stays: list[str] = []
    for at in entered((file, name), {parameter}, set()):
        if not stays or stays[-1] != at:
            stays.append(at)
    return stays


if __name__ == "__main__":
    for start in sys.argv[1:]:
        stays = walk(*start.split(":"))
        print(f"{start}: {len({*stays})} files, {len(stays) - len({*stays})} returns", *stays, sep="\n  ")
