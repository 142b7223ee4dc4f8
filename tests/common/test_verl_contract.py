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
# Files that only run without a GPU, which tests/training/cpu holds, or that only commands outside training need.
NOT_OF_TRAINING_ON_GPUS = ("training/cpu/", "training/doctor.py", "analysis/recompute/", "papers/")


def find_files(module: str) -> list[Path]:
    """Return the file of a module of the installed verl; none if it is not there."""
    path = VERL.joinpath(*module.split(".")[1:])
    return [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]


@pytest.fixture
def copy_of_verl(tmp_path) -> Path:
    """A copy of the files of the installed verl in which the names are."""
    for requirement in REQUIREMENTS:
        # A name may be that of a module.
        for module in (requirement.module, f"{requirement.module}.{requirement.name}"):
            for file in find_files(module):
                copy = tmp_path / file.relative_to(VERL)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(file.read_text())
    verl_contract.source_of.cache_clear()
    return tmp_path


def rename_in_copy(copy_of_verl: Path, module: str, old: str, new: str) -> Path:
    """Rename whatever has a name in the copy of a module, and return its file."""
    (file,) = find_files(module)
    copy = copy_of_verl / file.relative_to(VERL)
    copy.write_text(re.sub(rf"\b{old}\b", new, copy.read_text()))
    return copy


def test_the_installed_verl_has_every_name_and_so_has_a_copy_of_these_files(copy_of_verl):
    assert changes_in(VERL) == ()
    assert changes_in(copy_of_verl) == ()


@pytest.mark.parametrize(
    "requirement", REQUIREMENTS, ids=lambda requirement: f"{requirement.module}.{requirement.name}"
)
def test_the_report_names_a_name_or_module_that_is_gone(copy_of_verl, requirement):
    last_part = requirement.name.rpartition(".")[2]
    file = rename_in_copy(copy_of_verl, requirement.module, last_part, f"other_{last_part}")
    submodule = copy_of_verl.joinpath(*requirement.module.split(".")[1:], f"{requirement.name}.py")
    submodule.unlink(missing_ok=True)
    assert change_of(requirement, copy_of_verl) == f"{requirement.module}.{requirement.name} is not there"
    file.unlink()
    verl_contract.source_of.cache_clear()
    assert change_of(requirement, copy_of_verl) == f"{requirement.module} is not there"


@pytest.mark.parametrize(
    ("requirement", "parameter"),
    [(requirement, parameter) for requirement in REQUIREMENTS for parameter in requirement.parameters],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_the_report_names_a_function_whose_parameter_was_renamed_and_the_new_name(copy_of_verl, requirement, parameter):
    renamed = f"other_{parameter}"
    rename_in_copy(copy_of_verl, requirement.module, parameter, renamed)
    change = change_of(requirement, copy_of_verl)
    assert change.startswith(f"{requirement.module}.{requirement.name} takes (")
    assert_names(change, renamed)


def test_every_module_that_is_hooked_has_a_row():
    hooked = {module for module, _ in HOOKS if module.startswith("verl.")}
    assert len(hooked) >= 8
    assert hooked <= {requirement.module for requirement in REQUIREMENTS}


def test_every_name_that_the_training_imports_from_verl_has_a_row():
    required = {(requirement.module, requirement.name.partition(".")[0]) for requirement in REQUIREMENTS}
    missing = []
    for file in sorted(PACKAGE.rglob("*.py")):
        if str(file.relative_to(PACKAGE)).startswith(NOT_OF_TRAINING_ON_GPUS):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("verl."):
                for alias in node.names:
                    is_required = (node.module, alias.name) in required
                    if not (is_required or is_required_module(node.module, alias.name, required)):
                        missing.append((file.name, node.module, alias.name))
    assert missing == []


def is_required_module(package: str, name: str, required: set[tuple[str, str]]) -> bool:
    """Return whether what is imported is a module of which rows name what is read there."""
    return any(module == f"{package}.{name}" for module, _ in required)


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
    ("source", "fitting_uses"),
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
def test_what_a_signature_must_have_depends_on_who_calls_whom(tmp_path, source, fitting_uses):
    (tmp_path / "module.py").write_text(f"{source}: ...\n" if source.startswith("def") else source)
    verl_contract.source_of.cache_clear()
    for use in (Use.WRAPPED, Use.CALLED, Use.OVERRIDDEN):
        change = change_of(Requirement("verl.module", "f", use, ("data", "config")), tmp_path)
        assert (change is None) == (use in fitting_uses), use


def test_a_name_that_is_no_function_any_more_is_said_to_be_none(tmp_path):
    (tmp_path / "module.py").write_text("f = partial(g, data=1)\n")
    verl_contract.source_of.cache_clear()
    change = change_of(Requirement("verl.module", "f", Use.CALLED, ("data",)), tmp_path)
    assert_names(change, "verl.module.f", "not a function")


def test_a_missing_module_is_named_once(monkeypatch, tmp_path):
    requirements = tuple(Requirement("verl.module", name, Use.CALLED, ("data",)) for name in ("f", "g"))
    monkeypatch.setattr(verl_contract, "REQUIREMENTS", requirements)
    verl_contract.source_of.cache_clear()
    assert changes_in(tmp_path) == ("verl.module is not there",)
