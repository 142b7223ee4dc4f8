"""Every file that the package writes goes through verl_clipx/common/files.py, or has a reason not to; by names of
calls.

Not covered: what libraries write, such as a model's save_pretrained, Hydra's own files, and verl.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "verl_clipx"

# Calls that write a file, but for `open`: as functions of a module or methods of a path, a table or a figure.
WRITES = {"write_text", "write_bytes", "to_csv", "to_json", "to_parquet", "savefig", "dump", "save", "write_table"}
WRITES |= {"ParquetWriter", "to_pickle", "to_excel", "savez"}

GROWS = "a log that grows while a process runs"
OWN = "in a temporary folder of the command's own"
LOCK = "a lock, of which nothing is read"
IN_MEMORY = "a text in memory"
EXCEPTIONS = {
    "trainer/log.py:__init__:open": GROWS,
    "common/terminal.py:with_whole_output:open": "the null device",
    "common/run_lock.py:hold:open": LOCK,
    "common/run_lock.py:is_held:open": LOCK,
    "report/drawing.py:svg_of:savefig": IN_MEMORY,
    "papers/evaluation/validation_run.py:_launch:open": GROWS,
    "run/answer.py:end_with:open": OWN,
    "run/explain.py:put_stand_ins:write_text": OWN,
    "run/explain.py:run_session:open": OWN,
    "run/stand_in.py:main:open": OWN,
    "papers/evaluation/checkpoints.py:fingerprint_of_folder:open": "read in parts of a fixed size",
}


def accesses(tree: ast.AST) -> list[str]:
    """`function:call` of every call that opens or writes a file past files.py."""
    result = []

    def visit(node: ast.AST, function: str, partials: frozenset[str]) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.With):
            partials |= {
                item.optional_vars.id
                for item in node.items
                if isinstance(item.context_expr, ast.Call)
                and getattr(item.context_expr.func, "id", "") == "replacing"
                and isinstance(item.optional_vars, ast.Name)
            }
        if isinstance(node, ast.Call):
            # Bare names are those of files.py, but for Python's own `open`.
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = "open" if getattr(node.func, "id", "") == "open" else name
            named = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            into_a_text = name == "to_csv" and not node.args
            if name in WRITES | {"open"} and not into_a_text and not named & partials:
                result.append(f"{function}:{name}")
        for child in ast.iter_child_nodes(node):
            visit(child, function, partials)

    visit(tree, "", frozenset())
    return result


@pytest.mark.slow
def test_files_are_written_whole():
    result = {
        f"{path.relative_to(PACKAGE).as_posix()}:{access}"
        for path in PACKAGE.rglob("*.py")
        if path != PACKAGE / "common" / "files.py"
        for access in accesses(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert sorted(result) == sorted(EXCEPTIONS), "use verl_clipx/common/files.py, or say why not"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(p): p.write_text(json.load(p.open()))", ["f:write_text", "f:open"]),
        ("def f(p):\n with replacing(p) as partial: table.to_csv(partial)", []),
        ("def f(p):\n with replacing(p) as partial: table.to_csv(p)", ["f:to_csv"]),
        ("def f(p): write_text(p, table.to_csv(index=False))", []),
    ],
)
def test_the_check_sees_what_it_should(source, expected):
    assert accesses(ast.parse(source)) == expected
