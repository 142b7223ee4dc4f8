"""The doctor's findings: versions, registration, ports, resources.

Covers: each check's verdict on a fine and on a broken case. Not covered: the table's looks, GPUs, the check inside a
Ray worker (it runs the same code as the one in a fresh interpreter; `clipx doctor` shows it).
"""

import socket
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

from verl_clipx.check import doctor
from verl_clipx.cli import app


def test_a_version_outside_the_tested_range_says_what_to_do():
    fine = doctor.in_range("verl", doctor.VERL_RANGE, "error")
    assert (fine.level, fine.advice) == ("ok", "")
    wrong = doctor.in_range("verl", SpecifierSet("<0.9"), "error")
    assert wrong.level == "error" and "pip install 'verl<0.9'" in wrong.advice
    missing = doctor.in_range("no-such-distribution", SpecifierSet(">=1"), "warning")
    assert (missing.level, missing.found) == ("warning", "not installed")


def test_a_local_version_counts_as_its_public_one(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda _: "2.13.0+cpu")
    assert doctor.in_range("torch", SpecifierSet("==2.13.0"), "warning").level == "ok"


def test_it_says_who_tested_which_combination(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda _: "0.0.1")
    on_gpu, on_cpu = (
        {finding.subject: finding.advice for finding in doctor.check_versions(has_gpu)} for has_gpu in (True, False)
    )
    assert on_gpu["vllm"] == (
        "verl tests its GPU environment with this (verl-clipx has not been run on a GPU): vllm==0.24.0"
    )
    assert on_cpu["torch"] == "verl-clipx's own tests run on a CPU with: torch==2.13.0"


def test_a_missing_tool_is_a_warning_that_names_the_extra(monkeypatch):
    assert doctor.check_tools().level == "ok"
    monkeypatch.setitem(doctor.TOOLS, "no_such_module", "no-such-distribution")
    finding = doctor.check_tools()
    assert (finding.level, finding.found) == ("warning", "no no-such-distribution")
    assert "pip install 'verl-clipx[tools]'" in finding.advice


@pytest.mark.slow
def test_registration_is_found_in_a_fresh_interpreter():
    findings = doctor.check_registration("here", doctor.REGISTERED, 120)
    assert [finding.level for finding in findings] == ["ok", "ok"]
    assert "clipx_acpo" in findings[0].found


@pytest.mark.slow
def test_a_switched_off_plugin_is_an_error_that_names_the_variable(monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    (finding,) = doctor.check_registration("here", doctor.REGISTERED, 120)
    assert finding.level == "error"
    assert "VERL_USE_EXTERNAL_PLUGINS is 'none'" in finding.advice


@pytest.mark.slow
def test_a_crash_and_a_hang_are_told_apart():
    assert "ZeroDivisionError" in doctor.check_registration("here", "1 / 0", 60)[0].advice
    assert "no answer within 1 s" in doctor.check_registration("here", "import time; time.sleep(30)", 1)[0].advice


def test_options_are_listed_by_what_is_known_of_them():
    run, read = doctor.check_options()
    assert "FSDP2" in run.found and {"Megatron", "VeOmni"} <= {*read.found.split(", ")}


def test_a_port_in_use_is_a_warning(monkeypatch):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setattr(doctor, "RAY_PORTS", {server.getsockname()[1]: "a test"})
        (busy,) = doctor.check_ports()
    (free,) = doctor.check_ports()
    assert (busy.level, free.level) == ("warning", "ok")


@pytest.mark.parametrize(("needed", "level"), [(0, "ok"), (10**9, "warning")])
def test_scarce_memory_is_a_warning(monkeypatch, needed, level):
    monkeypatch.setattr(doctor, "NEEDED_MEMORY_GB", needed)
    memory = doctor.check_resources(Path("/"))[0]
    assert memory.level == level


@pytest.mark.parametrize(("level", "code"), [("warning", 0), ("error", 1)])
def test_the_command_prints_advice_as_it_is_and_fails_on_errors(monkeypatch, level, code):
    finding = doctor.Finding(level, "GPUs", "none", "pip install verl-clipx[gpu]")
    monkeypatch.setattr(doctor, "examine", lambda ray: [("a group", [finding])])
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == code
    assert result.output.splitlines() == [f"{level:8}GPUs: none; pip install verl-clipx[gpu]", doctor.GPU_CHECKS]


def test_it_is_a_dozen_lines_by_default_and_everything_if_asked(monkeypatch):
    groups = [(f"group {k}", [doctor.Finding("ok", f"what {k}.{i}", "x" * 60) for i in range(5)]) for k in range(8)]
    monkeypatch.setattr(doctor, "examine", lambda ray: groups)
    short, whole = (CliRunner().invoke(app, ["doctor", *more]).output.splitlines() for more in ([], ["--verbose"]))
    assert len(short) == 9 and short[0].startswith("ok      group 0: what 0.0 x") and max(map(len, short)) <= 120
    assert len(whole) == 42 and f"ok      what 7.4: {'x' * 60}" in whole and doctor.TESTED in whole
