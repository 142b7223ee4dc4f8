"""Draws small changes of a package's source at random and shows which of its tests notice them.

Run it in the root of a clean checkout (Python 3.11 or newer, POSIX, pytest; nothing else):
    nice python scripts/mutate.py -n 40 --seed 1 --under losses/base --under losses/methods

N lines are drawn, each code line that can be changed being equally likely, then one change on the line: a comparison
flipped, and/or, not removed, + - * / exchanged, a constant (n to n + 1, True/False), index, slice off by 1, a default,
a return value made None, a call or an assignment made pass, a condition forced, min/max or any/all exchanged.
The same seed on the same source draws the same. --list runs no test; --only 3 7 makes only these of the drawn.

The fast tests of one stage run after the other, until one fails or takes longer than --timeout: caught.
    mirror     of verl_clipx/a/b.py: tests/a/test_b.py and tests/a/test_b_*.py, where there are any
    folder     tests/a, or the nearest folder above it that exists below tests
    importers  the test folders of those folders of the package in which a file imports verl_clipx.a.b
A survivor may still be caught elsewhere. First mirror and folder must pass on the unchanged source. Files are changed
in place and restored, with their time, whatever ends the run but SIGKILL; where git sees changes in the package it
refuses to begin. Limits: not changed are texts (but defaults), annotations, decorators, class headers, imports,
f-strings, `__all__`, raise, assert, calls named as in MESSAGES, bodies under TYPE_CHECKING and `__main__`. Some changes
alter nothing that anyone can observe: look at each survivor. A deleted assignment is mostly a NameError, which any test
of the line finds. mutmut makes a class unimportable whose method has a module's name, and cosmic-ray changes half as
many lines.
"""

import argparse
import ast
import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

COMMAND = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not end_to_end and not slow"]
NOTHING_COLLECTED = 5
MESSAGES = {"print", "warn", "warning", "info", "debug", "error", "exception", "log", "echo", "secho"}
SKIPPED = ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.arg
HEADERS = ("annotation", "returns", "bases", "decorator_list")
PAIRS = [("min", "max"), ("any", "all"), ("amin", "amax"), ("minimum", "maximum"), ("argmin", "argmax")]
SWAPS = dict(PAIRS) | {second: first for first, second in PAIRS}
FLIPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}
SYMBOLS = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "/", "**": "*", "%": "//", "|": "&", "&": "|"}
OPERATORS = {  # By kind, how an operator is found between two operands, and what to put there.
    "arithmetic": (r"(\*\*|//|[-+*/%|&])=?", SYMBOLS),
    "and/or": (r"\b(and|or)\b", {"and": "or", "or": "and"}),
    "comparison": (r"(\b(?:not\s+)?in\b|\bis(?:\s+not)?\b|[=!<>]=|[<>])", FLIPS | {"in": "not in", "not in": "in"}),
}


class ChangeFinder(ast.NodeVisitor):
    """Collects the changes of a file that are thought of: a node's own before those of its parts."""

    def __init__(self, source):
        self.source = source
        self.line_starts = [0, *(match.end() for match in re.finditer(b"\n", source))]
        # Each is (kind, start, end, new text), in bytes of the source.
        self.changes = []

    def span(self, node):
        start = self.line_starts[node.lineno - 1] + node.col_offset
        end = self.line_starts[node.end_lineno - 1] + node.end_col_offset
        return start, end

    def replace(self, kind, node, *texts):
        start, end = self.span(node)
        self.changes.extend((kind, start, end, text) for text in texts)

    def exchange_operators(self, kind, *operands):
        """Exchanges the operator between each two neighbouring operands."""
        pattern, swaps = OPERATORS[kind]
        for (_, start), (end, _) in itertools.pairwise(map(self.span, operands)):
            match = re.search(pattern, self.source[start:end].decode())
            if match is None or b"#" in self.source[start:end]:
                continue
            symbol = " ".join(match[1].split())
            if symbol in swaps:
                self.changes.append((kind, start + match.start(1), start + match.end(1), swaps[symbol]))

    def change_defaults(self, values):
        for value in values:
            if isinstance(value, ast.Constant) and isinstance(value.value, str | None):
                self.replace("default", value, "0" if value.value is None else repr(value.value + "_"))

    def force_conditions(self, conditions):
        for condition in conditions:
            self.replace("condition", condition, "True", "False")

    def generic_visit(self, node):
        """Visits the parts of a node that are code a test could notice."""
        for field, value in ast.iter_fields(node):
            for part in value if isinstance(value, list) else [value]:
                skipped = field in HEADERS or isinstance(part, SKIPPED) or name_of_call(part) in MESSAGES
                if isinstance(part, ast.AST) and not skipped:
                    self.visit(part)

    def visit_ClassDef(self, node):
        node.keywords = []
        self.change_defaults(part.value for part in node.body if isinstance(part, ast.AnnAssign))
        self.generic_visit(node)

    def visit_arguments(self, node):
        self.change_defaults([*node.defaults, *node.kw_defaults])
        self.generic_visit(node)

    def visit_If(self, node):
        if re.search("TYPE_CHECKING|__main__", ast.unparse(node.test)):
            node.body = []
            node.test = ast.Constant(None)
        else:
            self.force_conditions([node.test])
        self.generic_visit(node)

    def visit_test(self, node):
        self.force_conditions([node.test])
        self.generic_visit(node)

    visit_IfExp = visit_While = visit_test

    def visit_comprehension(self, node):
        self.force_conditions(node.ifs)
        self.generic_visit(node)

    def visit_Return(self, node):
        if node.value is not None:
            self.replace("return", node.value, "None")
        self.generic_visit(node)

    def visit_Expr(self, node):
        # A docstring, or an ellipsis.
        if isinstance(node.value, ast.Constant):
            return
        if name_of_call(node.value) not in MESSAGES:
            self.replace("expression deleted", node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node):
        if [getattr(target, "id", None) for target in node.targets] == ["__all__"]:
            return
        self.replace("assignment deleted", node, "pass")
        self.generic_visit(node)

    def visit_AnnAssign(self, node):
        if node.value is not None:
            self.replace("assignment deleted", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node):
        self.replace("assignment deleted", node, "pass")
        self.exchange_operators("arithmetic", node.target, node.value)
        self.generic_visit(node)

    def visit_Compare(self, node):
        self.exchange_operators("comparison", node.left, *node.comparators)
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        self.exchange_operators("and/or", *node.values)
        self.generic_visit(node)

    def visit_BinOp(self, node):
        ends_of_texts = {ast.unparse(side)[-1] for side in (node.left, node.right)} & {*"'\""}
        if not ends_of_texts:
            self.exchange_operators("arithmetic", node.left, node.right)
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.Not):
            start, _ = self.span(node)
            self.changes.append(("not", start, start + len("not"), ""))
        self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, bool):
            self.replace("constant", node, repr(not node.value))
        elif isinstance(node.value, int | float):
            self.replace("constant", node, repr(node.value + 1))

    def visit_Slice(self, node):
        for bound in (node.lower, node.upper):
            if not isinstance(bound, ast.Constant | None):
                self.replace("index", bound, f"({ast.unparse(bound)}) + 1")
        if node.lower is None:
            start, _ = self.span(node)
            self.changes.append(("index", start, start, "1"))
        self.generic_visit(node)

    def visit_Call(self, node):
        words = [(name_of_call(node), self.span(node.func)[1])]
        words += [(word.arg, self.span(word)[0] + len(word.arg)) for word in node.keywords if word.arg]
        for word, end in words:
            if word in SWAPS:
                self.changes.append(("min/max", end - len(word), end, SWAPS[word]))
        self.generic_visit(node)


def name_of_call(node):
    """The name of the function that a node calls, without what it belongs to; empty if it calls none by name."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "id", getattr(node.func, "attr", ""))


def changes_of(source):
    """The changes of a file that are thought of: (kind, start, end, new text), in bytes of the source."""
    finder = ChangeFinder(source)
    finder.visit(ast.parse(source))
    return [change for change in finder.changes if source[change[1] : change[2]] != change[3].encode()]


def draw(package, under, number, seed):
    """`number` of (path, line, kind, before, after, changed source), and the number of lines that can be changed."""
    on_line = {}
    for path in sorted(package.rglob("*.py")):
        if not under or any(path.is_relative_to(package / folder) for folder in under):
            source = path.read_bytes()
            for change in changes_of(source):
                on_line.setdefault((path, source.count(b"\n", 0, change[1]) + 1), []).append(change)
    generator, drawn = random.Random(seed), []
    for path, line in generator.sample(sorted(on_line), len(on_line)):
        source, (kind, start, end, new) = path.read_bytes(), generator.choice(on_line[path, line])
        changed = source[:start] + new.encode() + source[end:]
        with contextlib.suppress(SyntaxError):
            compile(changed, path, "exec")
            texts = (text[source.rfind(b"\n", 0, start) + 1 :].split(b"\n")[0] for text in (source, changed))
            drawn.append((path, line, kind, *(text.decode().strip() for text in texts), changed))
        if len(drawn) == number:
            break
    return drawn, len(on_line)


def stages_of(path, package):
    """Yields (stage, folders and files of tests) in the order in which they run."""
    tests, folder = Path("tests"), "tests" / path.relative_to(package).parent
    yield "mirror", sorted([*folder.glob(f"test_{path.stem}.py"), *folder.glob(f"test_{path.stem}_*.py")])
    folder = next(existing for existing in (folder, *folder.parents) if existing.is_dir())
    yield "folder", [folder] if folder != tests else []
    parent, _, name = (dotted := ".".join(path.with_suffix("").parts).removesuffix(".__init__")).rpartition(".")
    imported = re.compile(rf"(from|import) {re.escape(dotted)}\b|from {re.escape(parent)} import [^\n]*\b{name}\b")
    others = {tests / x.relative_to(package).parent for x in package.rglob("*.py") if imported.search(x.read_text())}
    yield "importers", sorted(other for other in others if other.is_dir() and other not in (folder, *folder.parents))


def fails(tests, timeout):
    """Whether tests fail or take too long."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    child = subprocess.Popen([*COMMAND, *tests], stdout=subprocess.DEVNULL, env=environment, start_new_session=True)
    try:
        return child.wait(timeout) not in (0, NOTHING_COLLECTED)
    except subprocess.TimeoutExpired:
        return True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def stage_that_fails(path, changed, package, timeout):
    """The first stage that fails on a changed source, or None; the file is restored."""
    source, state = path.read_bytes(), path.stat()
    try:
        path.write_bytes(changed)
        return next((name for name, tests in stages_of(path, package) if tests and fails(tests, timeout)), None)
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="?", type=Path, default=Path("verl_clipx"))
    for name, default in {"-n": 20, "--seed": 0, "--timeout": 600.0}.items():
        parser.add_argument(name, type=type(default), default=default)
    parser.add_argument("--under", action="append")
    parser.add_argument("--only", type=int, nargs="+")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if subprocess.run(["git", "status", "--porcelain", given.package], capture_output=True).stdout:
        sys.exit(f"{given.package} has changes that git does not have: commit or stash them first")
    drawn, lines = draw(given.package, given.under, given.n, given.seed)
    print(f"{len(drawn)} changes drawn from {lines} lines that can be changed, seed {given.seed}", flush=True)
    chosen = [one for one in enumerate(drawn, 1) if one[0] in (given.only or one)]
    near = {test for _, (path, *_) in chosen for _, tests in [*stages_of(path, given.package)][:2] for test in tests}
    if not given.list and fails(sorted(near), 10 * given.timeout):
        sys.exit("on the unchanged source some of these fail: " + " ".join(map(str, sorted(near))))
    stages = Counter()
    for number, (path, line, kind, before, after, changed) in chosen:
        what = f"{number:3} {path}:{line} {kind}: {before[:100]}  →  {after[:100]}"
        if not given.list:
            stage = stage_that_fails(path, changed, given.package, given.timeout)
            stages[stage] += 1
            what = ("caught by " + stage if stage else "SURVIVED") + what
        print(what, flush=True)
    if stages:
        print(f"caught {len(chosen) - stages.pop(None, 0)} of {len(chosen)}: {dict(stages)}")


if __name__ == "__main__":
    main()
