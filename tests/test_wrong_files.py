"""Wrong files and words given to the command line: one message, an exit code, no traceback, never a hang.

Not covered: further contents (tests/common/test_files.py); files that verl and transformers read.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf
from typer.main import get_command
from typer.testing import CliRunner, Result

from tests.papers.evaluation.tiny import evaluation_of, save_questions
from tests.papers.tables.tables import small_table
from tests.runs.example_runs import write_log, write_run
from verl_clipx.cli import app
from verl_clipx.papers.tables import collect, definition
from verl_clipx.runs.sameness import significant_values


def clipx(*words: object) -> Result:
    """Runs a command, which may end with an exit code but not with a traceback."""
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return result


RUN = "run/metrics.jsonl"
SMALL = {
    "data": {"seed": 1, "train_files": "t", "val_files": "v"},
    "trainer": {"total_training_steps": 1},
    "actor_rollout_ref": {"model": {"path": "m"}},
}


TABLE_RUN = "runs/p-seed1"
EVALUATE = "eval run {}/saved --benchmark {}/data/test.parquet --out {}/out --max-tokens 1 +hardware=cpu"
CUT_OFF, NESTED, BYTES = b"PAR1" * 10, b"[" * 100_000, b"\xff\x00{"
# What a command reads: the command, the file, and a content that it cannot have. `{}` is the folder of all files.
DOORS = {
    "log": ("report {}/run --out {}/page", RUN, NESTED),
    "record": ("report {}/run --out {}/page", "run/metrics.run.json", NESTED),
    "configuration": ("report {}/run --out {}/page", "run/.hydra/config.yaml", BYTES),
    "validation": ("report {}/run --out {}/page", "run/validation/3.jsonl", BYTES),
    "trace": ("report {}/run --out {}/page", "run/traces/step_00000001_update_0000_rank_00000.parquet", CUT_OFF),
    "bounds": ("table bounds {}/log.jsonl", "log.jsonl", BYTES),
    "collected configuration": ("table collect small --runs {}/runs", f"{TABLE_RUN}/.hydra/config.yaml", NESTED),
    "collected evaluation": ("table collect small --runs {}/runs", f"{TABLE_RUN}/evaluation/b/results.json", BYTES),
    "results": ("table render small --results {}/found.json", "found.json", NESTED),
    "evaluation": ("eval score {}/evaluation", "evaluation/config.json", NESTED),
    "completions": ("eval score {}/evaluation", "evaluation/last/b/completions/seed-0/000000/1.jsonl", BYTES),
    "scores": ("eval compare {}/evaluation {}/evaluation", "evaluation/results.json", NESTED),
    "last checkpoint": (EVALUATE, "saved/latest_checkpointed_iteration.txt", BYTES),
    "data set": ("data show {}/rows.parquet", "rows.parquet", CUT_OFF),
    "JSON": ("data build dsr_uniform --out {}/built --from {}/source.json", "source.json", NESTED),
    "lines": ("data build skywork_or1_math --out {}/built --from {}/source.jsonl", "source.jsonl", BYTES),
    "archive": ("data build hitab --out {}/built --from {}/zipped --split dev", "zipped/tables.zip", CUT_OFF),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Every file that a command reads beside the wrong one."""
    folder = tmp_path_factory.mktemp("whole")
    write_log(folder / RUN, [{"actor/x": 1.0}])
    run = folder / TABLE_RUN
    for name in (".hydra", "checkpoints", "evaluation/b"):
        (run / name).mkdir(parents=True)
    OmegaConf.save(OmegaConf.create(SMALL), run / ".hydra" / "config.yaml")
    write_log(run / "metrics.jsonl", [{"x": 1.0}])
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    evaluation_of(folder / "evaluation", np.ones((2, 1), dtype=bool), save_questions(folder / "data", 2))
    shutil.copy(folder / "evaluation" / "results.json", run / "evaluation" / "b")
    (folder / "saved" / "global_step_1" / "actor").mkdir(parents=True)
    (folder / "zipped").mkdir()
    sample = {"id": "1", "table_id": "1", "question": "q", "answer": [1], "aggregation": ["none"]}
    (folder / "zipped" / "dev_samples.jsonl").write_text(json.dumps(sample))
    return folder


@pytest.fixture
def folder(whole, tmp_path, monkeypatch):
    table = """
        evaluation: {protocol: sampled, samples: 1, temperature: 1.0, max_tokens: 8}
        benchmarks: {b: {file: b/test.parquet, questions: 2}}
        columns: [{name: B, measure: {benchmark: b, metric: avg@1}}]
        rows: [{name: P, preset: p}]
    """
    monkeypatch.setattr(definition, "load_table", lambda name: small_table(table))
    monkeypatch.setattr(collect, "_values_of_preset", lambda name: significant_values(OmegaConf.create(SMALL)))
    # Drawing takes seconds and reads no file.
    monkeypatch.setattr("verl_clipx.report.page.log_plates", lambda settings, baseline: [])
    copy = tmp_path / "all"
    shutil.copytree(whole, copy)
    config = copy / "evaluation" / "config.json"
    config.write_text(config.read_text().replace(str(whole), str(copy)))
    return copy


def refuses(folder: Path, command: str, path: Path) -> None:
    """Runs a command, which must end with a message that names the file."""
    result = clipx(*command.replace("{}", str(folder)).split())
    assert result.exit_code == 1 and path.name in result.output, result.output


@pytest.mark.parametrize("door", DOORS)
def test_what_no_command_reads_is_refused_and_named(door, folder):
    command, name, content = DOORS[door]
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    refuses(folder, command, path)
    if door in ("log", "trace", "evaluation", "last checkpoint", "JSON"):
        # A folder or a pipe in the file's place.
        path.unlink()
        path.mkdir()
        refuses(folder, command, path)
        path.rmdir()
        os.mkfifo(path)
        refuses(folder, command, path)


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run with traces; drawing takes seconds and is another test's."""
    for plates in ("log_plates", "trace_plates"):
        monkeypatch.setattr(f"verl_clipx.report.page.{plates}", lambda *arguments: [])
    return write_run(tmp_path / "run", "acpo", steps=2)


def change_column(run: Path, name: str, change) -> Path:
    """Gives the last trace, which the page shows, another column, or none, in a column's place."""
    path = sorted((run / "traces").glob("*.parquet"))[-1]
    table = pyarrow.parquet.read_table(path)
    place, field = table.schema.get_field_index(name), table.schema.field(name)
    changed = change(table.column(name), field)
    table = table.remove_column(place) if changed is None else table.set_column(place, name, changed)
    pyarrow.parquet.write_table(table, path)
    return path


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ratio", lambda column, field: None),
        ("low", lambda column, field: pyarrow.array([[1.0, 2.0]] * len(column))),
        ("weight", lambda column, field: pyarrow.nulls(len(column), field.type)),
    ],
    ids=["missing", "of another type", "without values"],
)
def test_a_wrong_column_of_a_trace_is_one_error_with_file_and_column(run, tmp_path, name, change):
    path = change_column(run, name, change)
    result = clipx("report", run, "--out", tmp_path / "page")
    assert result.exit_code == 1
    assert path.name in result.output and name in result.output


def with_prompts(path: Path, prompts: list) -> Path:
    """A benchmark of one row with another prompt."""
    table = pyarrow.parquet.read_table(path).slice(0, 1)
    kind = None if isinstance(prompts[0], str) else table.schema.field("prompt").type
    place = table.schema.get_field_index("prompt")
    pyarrow.parquet.write_table(table.set_column(place, "prompt", pyarrow.array(prompts, kind)), path)
    return path


@pytest.mark.parametrize(
    "prompts",
    [["What is 1 + 1?"], [[{"role": "user", "content": None}]]],
    ids=["a string", "a message without content"],
)
def test_prompts_that_are_no_chat_messages_are_named(folder, prompts):
    (folder / "saved/latest_checkpointed_iteration.txt").write_text("1")
    path = with_prompts(folder / "data/test.parquet", prompts)
    shown = clipx("data", "show", path)
    assert shown.exit_code == 0 and "row 0: prompt" in shown.output
    result = clipx(*EVALUATE.replace("{}", str(folder)).split())
    assert result.exit_code != 0 and path.name in result.output and "prompt" in result.output


def test_a_number_of_samples_that_no_machine_holds_is_refused(folder):
    (folder / "saved/latest_checkpointed_iteration.txt").write_text("1")
    result = clipx(*EVALUATE.replace("{}", str(folder)).split(), "--samples", 100_000_000_000)
    assert result.exit_code != 0 and "--samples" in result.output and "16384" in result.output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.slow
@pytest.mark.parametrize("words", ["methods --markdown", "metrics", "data list"])
def test_a_full_standard_output_is_an_error(words):
    # So wide that lists are tables.
    variables = {**os.environ, "COLUMNS": "400"}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "verl_clipx.cli", *words.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=variables)
    assert done.returncode == 1
    assert "its output could not be written" in done.stderr and "Traceback" not in done.stderr


def test_a_folder_of_traces_that_cannot_be_read_is_an_error(run, tmp_path):
    # Permissions do not keep root out; a file in the folder's place does.
    (run / "traces").rename(tmp_path / "elsewhere")
    (run / "traces").write_text("")
    result = clipx("report", run, "--out", tmp_path / "page")
    assert result.exit_code == 1 and "traces" in result.output


def test_a_log_cut_in_its_last_line_is_read_with_a_warning(run, tmp_path):
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"step": 3, "data": {"half wri')
    result = clipx("report", run, "--out", tmp_path / "page")
    assert result.exit_code == 0, result.output
    assert "metrics.jsonl, line 3: cut off or damaged, and left out" in result.output
    rows = list(csv.DictReader((tmp_path / "page" / "metrics.csv").open()))
    assert {row["step"] for row in rows} == {"1", "2"}


def test_escape_sequences_from_data_and_names_do_not_reach_the_terminal(run, tmp_path):
    named = run.rename(tmp_path / "before\x1b[2J\x1b]0;title\x07\x9b31mafter")
    result = clipx("report", named, "--out", tmp_path / "page")
    assert result.exit_code == 0 and not set("\x1b\x07\x9b") & set(result.output)
    prompt = [[{"role": "user", "content": "before \x1b[2J\x1b]0;title\x07\x9b31m after"}]]
    result = clipx("data", "show", with_prompts(save_questions(tmp_path / "data", 1), prompt))
    assert "before" in result.output and "after" in result.output
    assert not set("\x1b\x07\x9b") & set(result.output)


FORMULAS = ["=1+1", "+1", "-x", "@SUM(A1)", "\tx", "\rx"]


def test_texts_that_are_formulas_are_neutralised_and_numbers_stay(run, tmp_path):
    def formulas(column, field):
        return pyarrow.array([FORMULAS[index % len(FORMULAS)] for index in range(len(column))])

    path = change_column(run, "text", formulas)
    result = clipx("report", run, "--out", tmp_path / "page")
    assert result.exit_code == 0, result.output
    with (tmp_path / "page" / "tokens.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {"'" + text for text in FORMULAS} <= {row["text"] for row in rows}
    assert not [row["text"] for row in rows if row["text"].startswith(tuple("=+-@\t\r"))]
    assert min(pyarrow.parquet.read_table(path).column("advantage").to_pylist()) < 0
    assert min(float(row["advantage"]) for row in rows) < 0


# They run something, for minutes or for ever, or write where no test may.
ACTING = {"doctor", "explain", "check-loss", "build", "run", "plan"}


def reading(command, path=()):
    """Every command below one that only reads, with its words."""
    for name, below in getattr(command, "commands", {}).items():
        if name not in ACTING:
            yield from reading(below, (*path, name))
    if not hasattr(command, "commands"):
        yield path, command


@pytest.mark.slow
@pytest.mark.parametrize("junk", ["", "nan", "9" * 40, "\0", "../..", "/dev/null"])
def test_words_without_sense_have_an_answer_each(tmp_path, monkeypatch, junk):
    monkeypatch.chdir(tmp_path)
    commands = list(reading(get_command(app)))
    assert len(commands) >= 12
    for path, command in commands:
        words = [junk for parameter in command.params if not parameter.opts[0].startswith("-")]
        for parameter in command.params:
            if parameter.opts[0].startswith("--") and not getattr(parameter, "is_flag", False):
                words += [parameter.opts[0], junk]
        result = CliRunner().invoke(app, [*path, *words])
        case = f"{path} {words}: {result.exception!r}"
        assert result.exception is None or isinstance(result.exception, SystemExit), case
        assert result.output.strip(), case
