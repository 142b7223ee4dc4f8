"""The doctor's findings: versions, registration, what is printed and how it ends. Not covered: GPUs; the check inside a
Ray worker, which runs the code of the check in a fresh interpreter.
"""

import importlib.util
import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

from verl_clipx.cli import app
from verl_clipx.common.verl_version import VERL_RANGE
from verl_clipx.training import doctor

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_a_version_outside_the_tested_range_says_what_to_do(monkeypatch):
    fine = doctor.check_distribution("verl", VERL_RANGE, "error")
    assert (fine.level, fine.advice) == ("ok", "")
    outside = doctor.check_distribution("verl", SpecifierSet("<0.9"), "error")
    assert outside.level == "error" and "pip install 'verl<0.9'" in outside.advice
    missing = doctor.check_distribution("no-such-distribution", SpecifierSet(">=1"), "warning")
    assert (missing.level, missing.result) == ("warning", "not installed")
    # A local version counts as its public one.
    monkeypatch.setattr(doctor, "installed_version", lambda _: "2.13.0+cpu")
    assert doctor.check_distribution("torch", SpecifierSet("==2.13.0"), "warning").level == "ok"
    # Who tested which combination.
    monkeypatch.setattr(doctor, "installed_version", lambda _: "0.0.1")
    for has_gpu, name, advice in (
        (True, "vllm", f"{doctor.TESTED_BY_VERL}: vllm==0.24.0"),
        (False, "torch", f"{doctor.TESTED_HERE}: torch==2.13.0"),
    ):
        assert advice in [finding.advice for finding in doctor.check_versions(has_gpu) if finding.subject == name]


def test_a_package_of_every_run_that_is_missing_is_an_error_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", lambda name: None if name in ("transformers", "vllm") else "0.0.1")
    findings = {finding.subject: finding for finding in doctor.check_versions(has_gpu=True)}
    assert findings["transformers"].level == "error"
    assert findings["transformers"].advice.startswith("pip install transformers==5.9.0; ")
    # A run may have another server than vLLM, and another version may work.
    assert findings["vllm"].level == "warning" and findings["torch"].level == "warning"


@pytest.mark.parametrize(
    ("version", "level"), [("0.7.2", "warning"), ("0.9.0", "warning"), ("0.12.0", "warning"), (None, "error")]
)
def test_a_package_of_every_run_in_a_version_that_verl_excludes_is_a_finding(monkeypatch, version, level):
    monkeypatch.setattr(doctor, "installed_version", lambda _: version)
    for has_gpu in (False, True):
        (finding,) = [finding for finding in doctor.check_versions(has_gpu) if finding.subject == "tensordict"]
        assert finding.level == level
        assert finding.advice == "pip install 'tensordict!=0.9.0,<=0.10.0,>=0.8.0'"


@pytest.mark.parametrize("version", ["0.8.0", "0.9.1", "0.10.0"])
def test_a_package_of_every_run_in_a_version_that_verl_takes_is_fine(monkeypatch, version):
    monkeypatch.setattr(doctor, "installed_version", lambda _: version)
    (finding,) = [finding for finding in doctor.check_versions(has_gpu=True) if finding.subject == "tensordict"]
    assert (finding.level, finding.result) == ("ok", version)


def test_the_required_versions_are_those_of_verl_and_of_this_package():
    declared = {}
    for line in metadata.requires("verl"):
        requirement = Requirement(line)
        declared[requirement.name] = requirement.specifier
    for name in ("ray", "tensordict"):
        assert SpecifierSet(doctor.REQUIRED_VERSIONS[name]) == declared[name]
    for name in ("TransferQueue", "hydra-core"):
        assert f'"{name}{doctor.REQUIRED_VERSIONS[name]}",' in PROJECT.read_text()


def test_the_versions_of_python_are_those_of_the_package():
    # tomllib is not in Python 3.10.
    (declared,) = re.findall(r'^requires-python = "(.+)"$', PROJECT.read_text(), re.MULTILINE)
    assert SpecifierSet(declared) == doctor.PYTHON_RANGE


@pytest.mark.parametrize(
    ("module", "level"), [("scipy", "warning"), ("pandas", "error"), ("pyarrow", "error"), ("uvicorn", "error")]
)
def test_a_missing_package_has_the_command_that_installs_it(monkeypatch, module, level):
    assert [finding.level for finding in doctor.check_extras(has_gpu=False)] == ["ok", "ok", "ok"]
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find_spec(name))
    (finding,) = [finding for finding in doctor.check_extras(has_gpu=False) if finding.level != "ok"]
    assert (finding.level, finding.result) == (level, f"no {module}")
    assert finding.advice.endswith(f"pip install {module}")


@pytest.mark.slow
def test_registration_is_found_in_a_fresh_interpreter_and_what_stops_it_is_told_apart(run_fresh, tmp_path, monkeypatch):
    code = doctor.CHECK_HERE
    output, error = doctor.run_python(code, 120)
    findings = [*doctor.check_registration("here", output, error), doctor.check_hydra(output, error)]
    assert [finding.level for finding in findings] == ["ok", "ok", "ok"] and "clipx_acpo" in findings[0].result
    failed = doctor.run_python("1 / 0", 60)
    assert "ZeroDivisionError" in doctor.check_registration("here", *failed)[0].advice
    assert "ZeroDivisionError" in doctor.check_hydra(*failed).advice
    slow = doctor.run_python("import time; time.sleep(30)", 1)
    assert "no answer within 1 s" in doctor.check_registration("here", *slow)[0].advice
    # A group that does not compose says nothing against the losses.
    not_composed = (output.replace("COMPOSED", ""), "HydraException")
    assert doctor.check_hydra(*not_composed).advice == "HydraException"
    assert [finding.level for finding in doctor.check_registration("here", *not_composed)] == ["ok", "ok"]
    # Its interpreter starts as the first one's does.
    without_plugins = "import os; os.environ['VERL_USE_EXTERNAL_PLUGINS'] = 'none'\n"
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    (finding,) = doctor.check_registration("here", run_fresh(without_plugins + code, tmp_path).stdout, "")
    assert finding.level == "error" and "VERL_USE_EXTERNAL_PLUGINS is 'none'" in finding.advice


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("import os; os.kill(os.getpid(), 11)", "signal SIGSEGV"),
        ("import os; os.kill(os.getpid(), 9)", "signal SIGKILL"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import os; os._exit(1)", "exit code 1"),
        # What it printed before is not what ended it.
        ("import os, sys; print('a warning', file=sys.stderr, flush=True); os.kill(os.getpid(), 6)", "signal SIGABRT"),
        ("import sys; sys.exit('no such plugin')", "no such plugin"),
    ],
)
def test_an_interpreter_that_ends_without_a_traceback_is_a_failure_of_its_own(code, advice):
    output, error = doctor.run_python(code, 60)
    assert output == "" and advice in error
    (finding,) = doctor.check_registration("here", output, error)
    assert finding.level == "error" and advice in finding.advice
    # Whether the plugin was loaded, nobody knows.
    assert "VERL_USE_EXTERNAL_PLUGINS" not in finding.advice
    assert advice in doctor.check_hydra(output, error).advice


def test_an_interpreter_that_succeeds_has_no_error_whatever_it_prints():
    assert doctor.run_python("import sys; print(1); print('a warning', file=sys.stderr)", 60) == ("1\n", "")


def test_the_command_prints_advice_fails_on_errors_and_says_everything_if_asked(monkeypatch):
    for level, code in (("warning", 0), ("error", 1)):
        finding = doctor.DoctorFinding(level, "GPUs", "none", "pip install verl-clipx[gpu]")
        monkeypatch.setattr(doctor, "examine_environment", lambda ray, finding=finding: [("a group", [finding])])
        result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
        assert result.exit_code == code
        assert result.output.splitlines() == [
            f"{level:8}GPUs: none; pip install verl-clipx[gpu]",
            doctor.GPU_CHECKS,
            doctor.IN_A_JOB,
        ]
    hints = (doctor.GPU_CHECKS, doctor.IN_A_JOB)
    groups = [
        (f"group {k}", [doctor.DoctorFinding("ok", f"what {k}.{i}", "x" * 60) for i in range(5)]) for k in range(8)
    ]
    monkeypatch.setattr(doctor, "examine_environment", lambda ray: groups)
    short = CliRunner().invoke(app, ["doctor"]).output.splitlines()
    assert len(short) == 8 + len(hints)
    assert short[0].startswith("ok      group 0: what 0.0 x")
    assert max(map(len, short[:8])) <= 120
    verbose = CliRunner().invoke(app, ["doctor", "--verbose"]).output.splitlines()
    assert len(verbose) == 40 + len(hints)
    assert f"ok      what 7.4: {'x' * 60}" in verbose
