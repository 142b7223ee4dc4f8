"""The names and signatures of verl that a development version is held against: each row of the table, by itself missing
in a copy of the installed verl; signatures that fit and that don't. That a run beside such a verl says so, or is
refused, is in test_verl_version.py. Not covered: that the names do what they did, which tests/training/worker shows.
"""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from tests.claims.documents import ROOT
from tests.messages import assert_names
from verl_clipx.common import verl_contract
from verl_clipx.common.verl_contract import (
    REQUIREMENTS,
    Requirement,
    Signature,
    Use,
    change_of,
    changes_in,
    signature_of,
)
from verl_clipx.plugin import HOOKS

VERL = Path(importlib.util.find_spec("verl").origin).parent
PACKAGE = ROOT / "verl_clipx"
# What only runs without a GPU or a command outside training needs. tests/training/cpu holds the former.
ELSEWHERE = ("training/cpu/", "training/doctor.py", "analysis/recompute/", "papers/")


def files_of(module: str) -> list[Path]:
    path = VERL.joinpath(*module.split(".")[1:])
    return [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]


@pytest.fixture
def copied(tmp_path) -> Path:
    """A copy of the files of the installed verl in which the names are."""
    modules = {row.module for row in REQUIREMENTS} | {f"{row.module}.{row.name}" for row in REQUIREMENTS}
    for file in {file for module in modules for file in files_of(module)}:
        target = tmp_path / file.relative_to(VERL)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(file.read_text())
    verl_contract.source_of.cache_clear()
    return tmp_path


def test_the_installed_verl_has_every_name_and_so_has_a_copy_of_these_files(copied):
    assert changes_in(VERL) == changes_in(copied) == ()


@pytest.mark.parametrize("relied", REQUIREMENTS, ids=lambda row: f"{row.module}.{row.name}")
def test_a_name_that_is_gone_is_named(copied, relied):
    (file,) = files_of(relied.module)
    target, last = copied / file.relative_to(VERL), relied.name.rpartition(".")[2]
    target.write_text(re.sub(rf"\b{last}\b", f"{last}_of_before", target.read_text()))
    submodule = copied.joinpath(*relied.module.split(".")[1:], f"{relied.name}.py")
    submodule.unlink(missing_ok=True)
    assert change_of(relied, copied) == f"{relied.module}.{relied.name} is not there"
    target.unlink()
    verl_contract.source_of.cache_clear()
    assert change_of(relied, copied) == f"{relied.module} is not there"


@pytest.mark.parametrize(
    ("row", "name"),
    [(row, name) for row in REQUIREMENTS for name in row.parameters],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_parameter_with_another_name_is_named(copied, row, name):
    (file,) = files_of(row.module)
    target = copied / file.relative_to(VERL)
    target.write_text(re.sub(rf"\b{name}\b", f"{name}_of_now", target.read_text()))
    clause = change_of(row, copied)
    # Where the parameter has the name of its function's module or of the function, this is gone too.
    assert clause.startswith(f"{row.module}.{row.name} ") and f"{name}_of_now" in clause


def test_every_module_that_is_hooked_has_a_row():
    hooked = {module for module, _ in HOOKS if module.startswith("verl.")}
    assert len(hooked) >= 8 and hooked <= {row.module for row in REQUIREMENTS}


def test_every_name_that_the_training_imports_from_verl_has_a_row():
    rows = {(row.module, row.name.partition(".")[0]) for row in REQUIREMENTS}
    missing = []
    for file in sorted(PACKAGE.rglob("*.py")):
        if str(file.relative_to(PACKAGE)).startswith(ELSEWHERE):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("verl."):
                names = [(node.module, alias.name) for alias in node.names]
                missing += [(file.name, *name) for name in names if name not in rows and not is_module(*name, rows)]
    assert missing == []


def is_module(package: str, name: str, rows: set[tuple[str, str]]) -> bool:
    """Whether what is imported is a module of which rows name what is read there."""
    return any(module == f"{package}.{name}" for module, _ in rows)


SOURCE = '''
class Other:
    def step(self, wrong):
        """def step(self, data): of a docstring"""


class Worker(Base, metaclass=type("M", (type,), {})):
    """Trains."""

    size: int = 3
    kind = "worker"

    @register(dispatch=lambda data: {"a": data})
    async def step(
        self,
        data: dict[str, int],  # a comment: with a colon
        hdfs: str | None = None,
        *,
        factor: float = {"a": 1}["a"],
        wanted,
        **more,
    ) -> "dict: of metrics":
        pass


def after(self, first, /, second=lambda x: x, *rest): return first
'''


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Worker.step", Signature(("data", "hdfs", "factor", "wanted"), frozenset({"data", "wanted"}))),
        ("Other.step", Signature(("wrong",), frozenset({"wrong"}))),
        ("after", Signature(("first", "second"), frozenset({"first"}))),
        ("Worker.after", None),
        ("step", None),
        ("Worker.missing", None),
    ],
)
def test_signatures_are_read_from_source(name, expected):
    assert signature_of(SOURCE, name) == expected


@pytest.mark.parametrize(
    ("header", "fits"),
    [
        ("def f(data, config)", {Use.WRAPPED, Use.CALLED, Use.OVERRIDDEN}),
        ("def f(data, config, more=None)", {Use.WRAPPED, Use.CALLED}),
        ("def f(data, config, *, more=None, **others)", {Use.WRAPPED, Use.CALLED}),
        ("def f(data, config, more)", {Use.WRAPPED}),
        ("def f(config, data)", {Use.WRAPPED, Use.CALLED}),
        ("def f(data)", set()),
        ("def f(data, settings)", set()),
        ("f = partial(g, data=1)", set()),
        # The first colon after the name is that of another statement.
        ("f = g\nTABLE: dict = {}", set()),
    ],
)
def test_what_a_signature_must_have_depends_on_who_calls_whom(tmp_path, header, fits):
    (tmp_path / "module.py").write_text(f"{header}: ...\n" if header.startswith("def") else header)
    verl_contract.source_of.cache_clear()
    uses = (Use.WRAPPED, Use.CALLED, Use.OVERRIDDEN)
    clauses = {use: change_of(Requirement("verl.module", "f", use, ("data", "config")), tmp_path) for use in uses}
    assert {use for use, clause in clauses.items() if clause is None} == fits


def test_a_name_that_is_no_function_any_more_is_said_to_be_none(tmp_path):
    (tmp_path / "module.py").write_text("f = partial(g, data=1)\n")
    verl_contract.source_of.cache_clear()
    clause = change_of(Requirement("verl.module", "f", Use.CALLED, ("data",)), tmp_path)
    assert_names(clause, "verl.module.f", "not a function")


def test_a_missing_module_is_named_once(monkeypatch, tmp_path):
    rows = tuple(Requirement("verl.module", name, Use.CALLED, ("data",)) for name in ("f", "g"))
    monkeypatch.setattr(verl_contract, "REQUIREMENTS", rows)
    verl_contract.source_of.cache_clear()
    assert changes_in(tmp_path) == ("verl.module is not there",)
