"""Wrong files and words given to the command line: one message, an exit code, no traceback, never a hang.

Covers: for every file that a command reads random bytes, deeply nested content and a table that is cut off, a folder
and a pipe in its place; words that make no sense to the commands that only read. Not covered: right types with wrong
values, beyond what the modules' own tests have; the files of models and checkpoints, which verl and transformers read.
"""

import json
import os
import shutil
import signal
from pathlib import Path
from random import Random

import pytest
from omegaconf import OmegaConf
from typer.main import get_command
from typer.testing import CliRunner, Result

from tests.papers.evaluation.tiny import save_questions, validated_rows, write_rows
from tests.papers.tables.tables import small_table
from tests.runs.example_runs import write_log
from verl_clipx.cli import app
from verl_clipx.common.files import hash_of_file
from verl_clipx.papers.evaluation.folder import EvaluationFolder
from verl_clipx.papers.evaluation.results import score
from verl_clipx.papers.tables import collect, definition
from verl_clipx.runs.sameness import significant_values

RUN = "run/metrics.jsonl"
TABLE_RUN = "runs/p-seed1"
SMALL = {
    "data": {"seed": 1, "train_files": "t", "val_files": "v"},
    "trainer": {"total_training_steps": 1},
    "actor_rollout_ref": {"model": {"path": "m"}},
}

# What a command reads: the command, and the file. `{}` is the folder of all files.
DOORS = {
    "report, log": ("report {}/run --out {}/page", RUN),
    "report, record": ("report {}/run --out {}/page", "run/metrics.run.json"),
    "report, configuration": ("report {}/run --out {}/page", "run/.hydra/config.yaml"),
    "report, validation": ("report {}/run --out {}/page", "run/validation/3.jsonl"),
    "report, trace": ("report {}/run --out {}/page", "run/traces/step_00000001_update_0000_rank_00000.parquet"),
    "bounds": ("table bounds {}/log.jsonl", "log.jsonl"),
    "collect, configuration": ("table collect small --runs {}/runs", f"{TABLE_RUN}/.hydra/config.yaml"),
    "collect, record": ("table collect small --runs {}/runs", f"{TABLE_RUN}/metrics.run.json"),
    "collect, last checkpoint": (
        "table collect small --runs {}/runs",
        f"{TABLE_RUN}/checkpoints/latest_checkpointed_iteration.txt",
    ),
    "collect, evaluation": ("table collect small --runs {}/runs", f"{TABLE_RUN}/evaluation/b/results.json"),
    "render": ("table render small --results {}/found.json", "found.json"),
    "score, configuration": ("eval score {}/evaluation", "evaluation/config.json"),
    "score, completions": ("eval score {}/evaluation", "evaluation/model/b/completions/seed-0/000000/0.jsonl"),
    "score, benchmark": ("eval score {}/evaluation", "data/test.parquet"),
    "compare, results": ("eval compare {}/evaluation {}/evaluation", "evaluation/results.json"),
    "eval, benchmark": (
        "eval run {}/saved --benchmark {}/b.parquet --out {}/out --max-tokens 1 +hardware=cpu",
        "b.parquet",
    ),
    "eval, last checkpoint": (
        "eval run {}/saved --benchmark {}/data/test.parquet --out {}/out --max-tokens 1 +hardware=cpu",
        "saved/latest_checkpointed_iteration.txt",
    ),
    "show": ("data show {}/rows.parquet", "rows.parquet"),
    "build, JSON": ("data build dsr_uniform --out {}/built --from {}/source.json", "source.json"),
    "build, lines": ("data build skywork_or1_math --out {}/built --from {}/source.jsonl", "source.jsonl"),
    "build, table": ("data build countdown_3to4 --out {}/built --from {}/source.parquet", "source.parquet"),
    "build, ORZ": ("data build orz_57k --out {}/built --from {}/orz.json", "orz.json"),
    "build, HiTab": ("data build hitab --out {}/built --from {}/hitab --split dev", "hitab/dev_samples.jsonl"),
    "build, HiTab's tables": ("data build hitab --out {}/built --from {}/zipped --split dev", "zipped/tables.zip"),
    "build, knights": ("data build knights_and_knaves --out {}/built --from {}/knights.jsonl", "knights.jsonl"),
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
    evaluation = EvaluationFolder(folder / "evaluation")
    questions = save_questions(folder / "data", 2)
    sampling = {"samples": 1, "seeds": [0], "max_tokens": 4, "temperature": 1.0, "top_p": 1.0}
    config = {"protocol": "sampled", "sampling": sampling, "versions": {}, "model": "model"}
    config |= {"reward": "tests.test_wrong_files:nothing"}
    config["checkpoints"] = {"model": {"source": "model", "step": None, "fingerprint": "f"}}
    config["benchmarks"] = {"b": {"path": str(questions), "sha256": hash_of_file(questions), "questions": 2}}
    evaluation.path.mkdir()
    evaluation.config.write_text(json.dumps(config))
    write_rows(evaluation.completions("model", "b") / "seed-0" / "000000" / "0.jsonl", validated_rows(range(2), 1))
    score(evaluation)
    results = json.loads(evaluation.results.read_text())
    results["config"]["checkpoints"]["model"]["step"] = 1
    (run / "evaluation" / "b" / "results.json").write_text(json.dumps(results))
    (folder / "saved" / "global_step_1" / "actor").mkdir(parents=True)
    (folder / "hitab" / "tables" / "raw").mkdir(parents=True)
    (folder / "zipped").mkdir()
    sample = {"id": "1", "table_id": "1", "question": "q", "answer": [1], "aggregation": ["none"]}
    (folder / "zipped" / "dev_samples.jsonl").write_text(json.dumps(sample))
    return folder


def nothing(data_source, solution_str, ground_truth, extra_info=None):
    """A reward that is always 0."""
    return 0.0


@pytest.fixture
def folder(whole, tmp_path, monkeypatch):
    table = """
        evaluation: {protocol: sampled, samples: 1, temperature: 1.0, max_tokens: 4}
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


def ends_well(door: str, folder: Path) -> Result:
    """Runs a command on its wrong file; returns what it said."""
    command = DOORS[door][0].replace("{}", str(folder)).split()
    found = CliRunner(env={"COLUMNS": "400"}).invoke(app, command)
    assert found.exception is None or isinstance(found.exception, SystemExit), repr(found.exception)
    return found


def put(door: str, folder: Path, content: bytes) -> Path:
    path = folder / DOORS[door][1]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


class Hangs(Exception):
    """A command took too long."""


def stop(*_):
    raise Hangs


# Values that make no sense, or not much of it.
JUNK = (
    "",
    "x",
    "-1",
    "0",
    "nan",
    "inf",
    "1e400",
    "9" * 40,
    "\0",
    "ä\n",
    "[a",
    "{}",
    "a:b",
    "../..",
    "/dev/null",
    "--x",
)
# They run something, for minutes or for ever, or write where no test may.
ACTING = {"doctor", "explain", "check-loss", "build", "run", "plan"}


def leaves(command, path=()):
    """Every command below one that only reads, with its words."""
    for name, below in getattr(command, "commands", {}).items():
        if name not in ACTING:
            yield from leaves(below, (*path, name))
    if not hasattr(command, "commands"):
        yield path, command


@pytest.mark.slow
def test_words_without_sense_have_an_answer_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chance, commands = Random(0), [*leaves(get_command(app))]
    assert len(commands) >= 12
    before = signal.signal(signal.SIGALRM, stop)
    try:
        for number in range(3 * len(commands)):
            path, command = commands[number % len(commands)]
            options = [one for one in command.params if one.opts[0].startswith("--") and not getattr(one, "is_flag", 0)]
            words = [chance.choice(JUNK) for one in command.params if not one.opts[0].startswith("-")]
            for option in chance.sample(options, min(len(options), chance.randint(0, 2))):
                words += [option.opts[0], chance.choice(JUNK)]
            signal.alarm(20)
            found = CliRunner().invoke(app, [*path, *words])
            signal.alarm(0)
            case = f"{path} {words}: {found.exception!r}"
            assert found.exception is None or isinstance(found.exception, SystemExit), case
            assert found.output.strip(), case
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refused(door: str, folder: Path) -> None:
    found = ends_well(door, folder)
    assert found.exit_code == 1 and Path(DOORS[door][1]).name in found.output, found.output


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("content", [b"\xff\x00{", b"[" * 100_000, b"PAR1" * 10], ids=["bytes", "nested", "cut off"])
def test_what_no_command_reads_is_refused_and_named(door, folder, content):
    put(door, folder, content)
    refused(door, folder)


@pytest.mark.parametrize("door", DOORS)
def test_a_folder_or_a_pipe_in_a_files_place_is_refused_and_named(door, folder):
    path = put(door, folder, b"")
    path.unlink()
    path.mkdir()
    refused(door, folder)
    path.rmdir()
    os.mkfifo(path)
    refused(door, folder)
