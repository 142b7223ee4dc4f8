"""Draws small changes of a package's source at random and shows which of its tests notice them.

Run it in the root of a clean checkout (Python 3.11 or newer, POSIX, pytest; nothing else):
    python mutate.py verl_clipx -n 40 --seed 1 --under base --under methods --json drawn.json \\
        --command 'nice python -m pytest -q -rfE -p no:cacheprovider -m "not end_to_end and not slow" {tests}'

N lines are drawn, each code line that can be changed being equally likely, then one change on the line: a comparison
flipped, and/or, not removed, + - * / exchanged, a constant (n to n + 1, True/False), index, slice off by 1, a default,
a return value made None, a call or an assignment made pass, a condition forced, min/max or any/all exchanged.
The same seed on the same source draws the same. --list runs no test; --only 3 7 makes only these of the drawn.

{tests} stands for the tests of one stage after the other, until one fails or takes longer than --timeout: caught.
    mirror     of verl_clipx/a/b.py: tests/a/test_b.py and tests/a/test_b_*.py, where there are any
    folder     tests/a, or the nearest folder above it that exists below tests
    importers  the test folders of those folders of the package in which a file imports verl_clipx.a.b
    all        tests, with --all alone; without it a survivor may still be caught elsewhere
First mirror and folder must pass on the unchanged source (not with --no-baseline). Files are changed in place and
restored, with their time, whatever ends the run but SIGKILL; where git sees changes in the package it refuses to begin.
Limits: not changed are texts (but defaults), annotations, decorators, class headers, imports, f-strings, `__all__`,
raise, assert, calls named as in MESSAGES, bodies under TYPE_CHECKING and `__main__`. Some changes alter nothing that
anyone can observe: look at each survivor. A deleted assignment is mostly a NameError, which any test of the line finds.
"""

import argparse
import ast
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from math import comb
from pathlib import Path
from statistics import median

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


def changes_of(source):
    """The changes of a file that are thought of: (kind, start, end, new text), in bytes of the source."""
    lines, found = [0, *(match.end() for match in re.finditer(b"\n", source))], []

    def span(node):
        return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset

    def replace(kind, node, *texts):
        found.extend((kind, *span(node), text) for text in texts)

    def operators(kind, *operands):
        pattern, swaps = OPERATORS[kind]
        for (_, start), (end, _) in zip(map(span, operands), map(span, operands[1:]), strict=False):
            match = re.search(pattern, source[start:end].decode())
            if match and b"#" not in source[start:end] and (symbol := " ".join(match[1].split())) in swaps:
                found.append((kind, start + match.start(1), start + match.end(1), swaps[symbol]))

    def defaults(values):
        for value in values:
            if isinstance(value, ast.Constant) and isinstance(value.value, str | None):
                replace("default", value, "0" if value.value is None else repr(value.value + "_"))

    def name_of(call):
        return getattr(call.func, "id", getattr(call.func, "attr", "")) if isinstance(call, ast.Call) else ""

    def walk(node):
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.Expr(value=ast.Constant()):
                return
            case ast.ClassDef():
                node.keywords = []
                defaults(part.value for part in node.body if isinstance(part, ast.AnnAssign))
            case ast.arguments():
                defaults([*node.defaults, *node.kw_defaults])
            case ast.If() if re.search("TYPE_CHECKING|__main__", ast.unparse(node.test)):
                node.body, node.test = [], ast.Constant(None)
            case ast.If() | ast.IfExp() | ast.While() | ast.comprehension():
                for test in [node.test] if hasattr(node, "test") else node.ifs:
                    replace("condition", test, "True", "False")
            case ast.Return(value=ast.expr()):
                replace("return", node.value, "None")
            case ast.Expr() if name_of(node.value) not in MESSAGES:
                replace("expression deleted", node, "pass")
            case ast.Assign() | ast.AugAssign() | ast.AnnAssign(value=ast.expr()):
                replace("assignment deleted", node, "pass")
                if isinstance(node, ast.AugAssign):
                    operators("arithmetic", node.target, node.value)
            case ast.Compare():
                operators("comparison", node.left, *node.comparators)
            case ast.BoolOp():
                operators("and/or", *node.values)
            case ast.BinOp() if not {*"'\""} & {ast.unparse(side)[-1] for side in (node.left, node.right)}:
                operators("arithmetic", node.left, node.right)
            case ast.UnaryOp(op=ast.Not()):
                found.append(("not", span(node)[0], span(node)[0] + len("not"), ""))
            case ast.Constant(value=bool() | int() | float() as value):
                replace("constant", node, repr(not value if isinstance(value, bool) else value + 1))
            case ast.Slice():
                for bound in filter(lambda x: not isinstance(x, ast.Constant | None), (node.lower, node.upper)):
                    replace("index", bound, f"({ast.unparse(bound)}) + 1")
                found.extend([("index", span(node)[0], span(node)[0], "1")] if node.lower is None else [])
            case ast.Call():
                words = [(name_of(node), span(node.func)[1])]
                words += [(word.arg, span(word)[0] + len(word.arg)) for word in node.keywords if word.arg]
                found.extend(("min/max", end - len(word), end, SWAPS[word]) for word, end in words if word in SWAPS)
        for field, value in ast.iter_fields(node):
            for part in value if isinstance(value, list) else [value]:
                skipped = field in HEADERS or isinstance(part, SKIPPED) or name_of(part) in MESSAGES
                if isinstance(part, ast.AST) and not skipped:
                    walk(part)

    walk(ast.parse(source))
    return [change for change in found if source[change[1] : change[2]] != change[3].encode()]


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


def stages_of(path, package, whole):
    """Yields (stage, folders and files of tests) in the order in which they run."""
    tests, folder = Path("tests"), "tests" / path.relative_to(package).parent
    yield "mirror", sorted([*folder.glob(f"test_{path.stem}.py"), *folder.glob(f"test_{path.stem}_*.py")])
    folder = next(existing for existing in (folder, *folder.parents) if existing.is_dir())
    yield "folder", [folder] if folder != tests else []
    parent, _, name = (dotted := ".".join(path.with_suffix("").parts).removesuffix(".__init__")).rpartition(".")
    imported = re.compile(rf"(from|import) {re.escape(dotted)}\b|from {re.escape(parent)} import [^\n]*\b{name}\b")
    others = {tests / x.relative_to(package).parts[0] for x in package.rglob("*.py") if imported.search(x.read_text())}
    yield "importers", sorted(other for other in others if other.is_dir() and other not in (folder, *folder.parents))
    yield "all", [tests] if whole else []


def run(command, tests, timeout):
    """Whether the tests caught something (pytest's 5: none was collected), and the names of those that failed."""
    command = "export PYTHONDONTWRITEBYTECODE=1; " + command.replace("{tests}", " ".join(map(str, tests)))
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen(command, shell=True, stdout=out, stderr=out, start_new_session=True)
        try:
            code = child.wait(timeout)
        except subprocess.TimeoutExpired:
            return True, ["(timeout)"]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        out.seek(0)
        return code not in (0, 5), re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", out.read(), re.MULTILINE)


def least(count, of):
    """The lower end of a share's exact (Clopper-Pearson) 95 % interval, in percent, rounded up to 0.1."""
    tails = (sum(comb(of, k) * p**k * (1000 - p) ** (of - k) for k in range(count, of + 1)) for p in range(1001))
    return next(p / 10 for p, tail in enumerate(tails) if 40 * tail >= 1000**of)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="?", type=Path, default=Path("verl_clipx"))
    options = {"-n": 20, "--seed": 0, "--timeout": 600.0, "--json": Path(os.devnull), "--command": "pytest {tests}"}
    for name, default in options.items():
        parser.add_argument(name, type=type(default), default=default)
    parser.add_argument("--under", action="append")
    parser.add_argument("--only", type=int, nargs="+")
    for flag in ("--all", "--list", "--no-baseline"):
        parser.add_argument(flag, action="store_true")
    given = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if subprocess.run(["git", "status", "--porcelain", given.package], capture_output=True).stdout:
        sys.exit(f"{given.package} has changes that git does not have: commit or stash them first")
    drawn, lines = draw(given.package, given.under, given.n, given.seed)
    print(f"{len(drawn)} changes drawn from {lines} lines that can be changed, seed {given.seed}", flush=True)
    near = {one for path, *_ in drawn for _, tests in list(stages_of(path, given.package, False))[:2] for one in tests}
    if not (given.list or given.no_baseline) and (broken := run(given.command, sorted(near), 10 * given.timeout))[0]:
        sys.exit("\n".join(["on the unchanged source these fail:", *broken[1]]))
    results = []
    for number, (path, line, kind, before, after, changed) in enumerate(drawn, 1):
        what = f"{number:3} {path}:{line} {kind}: {before[:100]}  →  {after[:100]}"
        if given.list or number not in (given.only or [number]):
            print(what) if given.list else None
            continue
        source, state, begun, stage, failed = path.read_bytes(), path.stat(), time.monotonic(), None, []
        try:
            path.write_bytes(changed)
            for name, tests in stages_of(path, given.package, given.all):
                if tests and not stage:
                    caught, failed = run(given.command, tests, given.timeout)
                    stage = name if caught else None
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
        seconds = round(time.monotonic() - begun, 1)
        print("caught by " + stage if stage else "SURVIVED", what, f" ({len(failed)} failed, {seconds} s)", flush=True)
        results.append({"number": number, "file": str(path), "line": line, "kind": kind, "before": before,
                        "after": after, "stage": stage, "failed": failed, "seconds": seconds})  # fmt: skip
        given.json.write_text(json.dumps(results, indent=1))
    if results:
        caught, n = [one for one in results if one["stage"]], len(results)
        for kind, of in sorted(Counter(one["kind"] for one in results).items()):
            print(f"{kind}: caught {sum(one['kind'] == kind for one in caught)} of {of}")
        print(f"caught {(k := len(caught))} of {n}: {least(k, n):.0f} to {100 - least(n - k, n):.0f} % (95 %)")
        print("by stage", dict(Counter(one["stage"] for one in caught)))
        middle = median(one["seconds"] for one in results), median([len(one["failed"]) for one in caught] or [0])
        print(f"medians: {middle[0]} s a change, {middle[1]} failed tests where caught")


if __name__ == "__main__":
    main()
