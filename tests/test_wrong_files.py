"""Wrong files and words given to the command line: one message, an exit code, no traceback, never a hang.

Covers: for the files of each kind that commands read one with a content that none can be read from, a folder and a pipe
in its place; words without sense to each command that only reads. Not covered: right types with wrong values, beyond
what the modules' own tests have, further contents (tests/common/test_files.py); the files of models and checkpoints,
which verl and transformers read.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from typer.main import get_command
from typer.testing import CliRunner

from tests.papers.evaluation.tiny import evaluation_of, save_questions
from tests.papers.tables.tables import small_table
from tests.runs.example_runs import write_log
from verl_clipx.cli import app
from verl_clipx.papers.tables import collect, definition
from verl_clipx.runs.sameness import significant_values

RUN = "run/metrics.jsonl"
SMALL = {
    "data": {"seed": 1, "train_files": "t", "val_files": "v"},
    "trainer": {"total_training_steps": 1},
    "actor_rollout_ref": {"model": {"path": "m"}},
}


TABLE_RUN = "runs/p-seed1"
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
    "collected evaluation": (
        "table collect small --runs {}/runs",
        f"{TABLE_RUN}/evaluation/b/results.json",
        BYTES,
    ),
    "results": ("table render small --results {}/found.json", "found.json", NESTED),
    "evaluation": ("eval score {}/evaluation", "evaluation/config.json", NESTED),
    "completions": ("eval score {}/evaluation", "evaluation/last/b/completions/seed-0/000000/1.jsonl", BYTES),
    "scores": ("eval compare {}/evaluation {}/evaluation", "evaluation/results.json", NESTED),
    "last checkpoint": (
        "eval run {}/saved --benchmark {}/data/test.parquet --out {}/out --max-tokens 1 +hardware=cpu",
        "saved/latest_checkpointed_iteration.txt",
        BYTES,
    ),
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
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, command.replace("{}", str(folder)).split())
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 1 and path.name in result.output, result.output


@pytest.mark.parametrize("door", DOORS)
def test_what_no_command_reads_is_refused_and_named(door, folder):
    command, name, content = DOORS[door]
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    refuses(folder, command, path)


@pytest.mark.parametrize("door", ["log", "trace", "evaluation", "last checkpoint", "JSON"])
def test_a_folder_or_a_pipe_in_a_files_place_is_refused_and_named(door, folder):
    command, name, _ = DOORS[door]
    path = folder / name
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)
    refuses(folder, command, path)
    path.rmdir()
    os.mkfifo(path)
    refuses(folder, command, path)


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
