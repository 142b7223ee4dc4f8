"""Wrong files given to the command line: one message with the file's name, an exit code, no traceback, never a hang.

Covers: random bytes, deep nesting, JSON of any content, a folder and a pipe in the place of every file that a command
reads, and another type in the place of a value. Not covered: right types with wrong values, beyond what the modules'
own tests have; the files of models and checkpoints, which verl and transformers read.
"""

import json
import os
import shutil
from functools import reduce
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from typer.testing import CliRunner, Result

from tests.diagnostics.runs import write_log
from tests.evaluation.tiny import save_questions
from tests.reproduction.tables import small_table
from verl_clipx.cli import app
from verl_clipx.common.files import hash_of_file
from verl_clipx.evaluation.folder import EvaluationFolder
from verl_clipx.evaluation.results import score
from verl_clipx.evaluation.samples import Sample, write_shard
from verl_clipx.reproduction import collect, tables_definition
from verl_clipx.reproduction.config_hash import significant_values

EXAMPLES = 8
MISSING = object()
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
    "report, record of a table's run": ("report {}/run --out {}/page", "run/run.json"),
    "report, configuration": ("report {}/run --out {}/page", "run/.hydra/config.yaml"),
    "report, validation": ("report {}/run --out {}/page", "run/validation/3.jsonl"),
    "report, trace": ("report {}/run --out {}/page", "run/traces/step_00000001_update_0000_rank_00000.parquet"),
    "bounds": ("bounds {}/log.jsonl", "log.jsonl"),
    "collect, configuration": ("table collect small --runs {}/runs", f"{TABLE_RUN}/.hydra/config.yaml"),
    "collect, record": ("table collect small --runs {}/runs", f"{TABLE_RUN}/run.json"),
    "collect, last checkpoint": (
        "table collect small --runs {}/runs",
        f"{TABLE_RUN}/checkpoints/latest_checkpointed_iteration.txt",
    ),
    "collect, evaluation": ("table collect small --runs {}/runs", f"{TABLE_RUN}/evaluation/b/results.json"),
    "render": ("table render small --results {}/found.json", "found.json"),
    "score, configuration": ("eval score {}/evaluation", "evaluation/config.json"),
    "score, completions": ("eval score {}/evaluation", "evaluation/model/b/completions/000000-00000.parquet"),
    "score, benchmark": ("eval score {}/evaluation", "data/test.parquet"),
    "compare, scores": ("eval compare {}/evaluation {}/evaluation", "evaluation/model/b/scores.parquet"),
    "eval, benchmark": (
        "eval run {}/saved --benchmark {}/b.parquet --out {}/out --max-tokens 1 --backend cpu",
        "b.parquet",
    ),
    "eval, last checkpoint": (
        "eval run {}/saved --benchmark {}/data/test.parquet --out {}/out --max-tokens 1 --backend cpu",
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

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
lines = st.lists(st.fixed_dictionaries({"step": values, "data": values, "input": values, "score": values}), max_size=3)
contents = (
    st.binary(max_size=100)
    | values.map(lambda value: json.dumps(value).encode())
    | lines.map(lambda found: "\n".join(map(json.dumps, found)).encode())
    | st.sampled_from(
        [b"[" * 100_000, b'{"a":' * 100_000, b"a: &a [*a]", b"PAR1", b"PAR1" * 10, b"PK\x05\x06" + 18 * b"\0"]
    )
)


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
    sampling = {"samples": 1, "max_tokens": 4, "temperature": 1.0, "top_p": 1.0}
    config = {"protocol": "sampled", "sampling": sampling, "versions": {}, "model": "model"}
    config |= {"reward": "tests.test_wrong_files:nothing", "answer": None, "correct": None, "correct_from": 1.0}
    config["checkpoints"] = {"model": {"source": "model", "step": None, "fingerprint": "f"}}
    config["benchmarks"] = {
        "b": {"path": str(questions), "sha256": hash_of_file(questions), "questions": 2, "limit": None}
    }
    evaluation.path.mkdir()
    evaluation.config.write_text(json.dumps(config))
    samples = [Sample(question, 0, 0, "x", [1], 1, False) for question in range(2)]
    write_shard(evaluation.completions("model", "b"), samples)
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
    monkeypatch.setattr(tables_definition, "load_table", lambda name: small_table(table))
    monkeypatch.setattr(collect, "_values_of_preset", lambda name: significant_values(OmegaConf.create(SMALL)))
    # Drawing takes seconds and reads no file.
    monkeypatch.setattr("verl_clipx.diagnostics.report.log_plates", lambda settings, baseline: [])
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


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(content=contents)
def test_no_content_is_a_traceback(door, folder, content):
    put(door, folder, content)
    ends_well(door, folder)
    shutil.rmtree(folder / "built", ignore_errors=True)


CHANGES = [None, True, -1, 1.5, float("inf"), "x", "", [], ["a"], {}, {"a": 1}, 10**400]

# Files whose values commands rely on: the door, and a right content where `whole` has none.
PROBLEM = {
    "prompt": [{"content": "q"}],
    "reward_model": {"ground_truth": "5"},
    "extra_info": {"difficulty": 1.0, "index": 3},
}
RIGHT = {
    "report, record": {"versions": {"verl": "1"}, "configuration": {"clipx": {"method": "acpo"}}},
    "report, log": {"step": 1, "data": {"actor/x": 1.0}},
    "bounds": {"step": 1, "data": {"actor/clipx/epsilon/bin_0": 1.0}},
    "collect, evaluation": None,
    "render": None,
    "score, configuration": None,
    "build, JSON": [PROBLEM],
    "build, lines": PROBLEM,
    "build, ORZ": [[{"value": "q"}, {"ground_truth": {"value": "5"}}]],
}


def places(value, path=()):
    """The path of every value within a value."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*path, key)
        yield from places(part, (*path, key))


def changed(right, place, value):
    """A copy with another value in a place, or without it."""
    copy = json.loads(json.dumps(right))
    parent = reduce(lambda node, key: node[key], place[:-1], copy)
    if value is MISSING:
        del parent[place[-1]]
    else:
        parent[place[-1]] = value
    return json.dumps(copy)


@pytest.mark.slow
@pytest.mark.parametrize("door", RIGHT)
def test_no_value_of_another_type_is_a_traceback(door, folder):
    path = put(door, folder, b"") if RIGHT[door] else folder / DOORS[door][1]
    if door == "render":
        CliRunner().invoke(app, ["table", "collect", "small", "--runs", str(folder / "runs"), "--out", str(path)])
    right = RIGHT[door] or json.loads(path.read_text())
    random = Random(0)
    for _ in range(EXAMPLES):
        place, value = random.choice([*places(right)]), random.choice([MISSING, *CHANGES])
        path.write_text(changed(right, place, value))
        ends_well(door, folder)
        shutil.rmtree(folder / "built", ignore_errors=True)


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
