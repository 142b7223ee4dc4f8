"""Wrong files and words given to the command line: one message, an exit code, no traceback, never a hang. Not covered:
further contents (tests/common/test_files.py), runs of a table (tests/papers/tables/test_collect.py), copies of data
sets (tests/papers/tasks); files that verl and transformers read.
"""

import csv
import gzip
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

from tests.analysis.runs.commands import clipx
from tests.analysis.runs.example_runs import write_log, write_run
from tests.messages import assert_names
from tests.papers.evaluation.tiny import save_questions, write_evaluation

LOG = "run/metrics.jsonl"
EVALUATE = "papers eval run {}/saved --benchmark {}/data/test.parquet --out {}/out --max-tokens 1 +hardware=cpu"
CUT_OFF_TABLE = b"PAR1" * 10
NESTED_LISTS = b"[" * 100_000
NO_TEXT = b"\xff\x00{"
# Each kind of file that a command reads: the command, the file, and a content that it cannot have. `{}` is the folder
# of all files.
FILES_READ = {
    "log": ("report {}/run --out {}/page", LOG, NESTED_LISTS),
    "record": ("report {}/run --out {}/page", "run/metrics.run.json", NESTED_LISTS),
    "configuration": ("report {}/run --out {}/page", "run/.hydra/config.yaml", NO_TEXT),
    "validation": ("report {}/run --out {}/page", "run/validation/3.jsonl", NO_TEXT),
    "trace": ("report {}/run --out {}/page", "run/traces/step_00000001_update_0000_rank_00000.parquet", CUT_OFF_TABLE),
    "results": ("papers table render dgpo_table4 --results {}/found.json", "found.json", NESTED_LISTS),
    "evaluation": ("papers eval score {}/evaluation", "evaluation/config.json", NESTED_LISTS),
    "completions": ("papers eval score {}/evaluation", "evaluation/last/b/completions/seed-0/000000/1.jsonl", NO_TEXT),
    "scores": ("papers eval compare {}/evaluation {}/evaluation", "evaluation/results.json", NESTED_LISTS),
    "last checkpoint": (EVALUATE, "saved/latest_checkpointed_iteration.txt", NO_TEXT),
    "JSON": ("papers data build dsr_uniform --out {}/built --from {}/source.json", "source.json", NESTED_LISTS),
}


@pytest.fixture(scope="module")
def sound_files(tmp_path_factory):
    """Every file that a command reads beside the wrong one."""
    folder = tmp_path_factory.mktemp("whole")
    write_log(folder / LOG, [{"actor/x": 1.0}])
    write_evaluation(folder / "evaluation", np.ones((2, 1), dtype=bool), save_questions(folder / "data", 2))
    (folder / "saved" / "global_step_1" / "actor").mkdir(parents=True)
    return folder


@pytest.fixture
def folder(sound_files, tmp_path, monkeypatch):
    # Drawing takes seconds and reads no file.
    monkeypatch.setattr("verl_clipx.analysis.report.page.draw_plates", lambda analysis: [])
    copy = tmp_path / "all"
    shutil.copytree(sound_files, copy)
    config = copy / "evaluation" / "config.json"
    config.write_text(config.read_text().replace(str(sound_files), str(copy)))
    return copy


@pytest.mark.parametrize("name", ["memory.jsonl", "memory.log", "memory.csv"])
def test_an_error_of_the_system_names_the_file(tmp_path, name):
    (tmp_path / name).symlink_to("/proc/self/mem")
    for words in (("diagnose",), ("report", "--out", tmp_path / "out"), ("diagnose", "--json")):
        assert name in clipx(words[0], tmp_path / name, *words[1:], code=1)


def test_5000_digits_are_no_step(folder):
    path = folder / "saved" / "latest_checkpointed_iteration.txt"
    path.write_text("9" * 5000)
    check_refusal(folder, EVALUATE, path)
    for name, content in (("a.log", "step:{} - actor/x:1\n"), ("a.jsonl", '{{"step": {}, "data": {{}}}}\n')):
        (folder / name).write_text(content.format("9" * 5000))
        assert name in clipx("diagnose", folder / name, code=1)


def test_a_record_that_cannot_be_created_again_is_to_be_removed(folder):
    path = folder / "run/metrics.run.json"
    path.write_text('{"versions": 1}')
    output = clipx("report", path.parent, "--out", folder / "page", code=1)
    assert path.name in output and "remove it to read the log without it" in output and "again" not in output


def test_numbers_near_the_end_of_float64_are_left_out_by_name(tmp_path):
    write_log(
        tmp_path / "a.jsonl", [{"actor/entropy": (-1) ** step * 1e308, "critic/score/mean": 0.5} for step in range(9)]
    )
    for words in (("diagnose",), ("report", "--out", tmp_path / "out")):
        output = clipx(words[0], tmp_path / "a.jsonl", *words[1:])
        assert "a.jsonl: left out, since nothing can be computed with such numbers: actor/entropy" in output
        assert "overflow" not in output


def test_a_name_that_is_no_utf_8_is_read_and_shown(tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.jsonl"))
    write_log(path, [{"actor/entropy": 0.5}] * 3)
    clipx("report", path, "--out", tmp_path / "out")
    assert "a\ufffd" in clipx("diagnose", path)


@pytest.mark.parametrize(
    "words", [["demo", "--out", ""], ["demo", "--out="], ["diagnose", ""], ["report", "x", "--out", ""]]
)
def test_an_empty_word_is_not_the_current_folder(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    assert "followed by an empty word" in clipx(*words, code=2)
    assert list(tmp_path.iterdir()) == []


def check_refusal(folder: Path, command: str, path: Path) -> None:
    """Runs a command, which must end with a message that names the file."""
    assert path.name in clipx(*command.replace("{}", str(folder)).split(), code=1)


@pytest.mark.parametrize("kind", FILES_READ)
def test_what_no_command_reads_is_refused_and_named(kind, folder):
    command, name, content = FILES_READ[kind]
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    check_refusal(folder, command, path)
    if kind in ("log", "trace", "evaluation", "last checkpoint", "JSON"):
        # A folder or a pipe in the file's place.
        path.unlink()
        path.mkdir()
        check_refusal(folder, command, path)
        path.rmdir()
        os.mkfifo(path)
        check_refusal(folder, command, path)


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run with traces; drawing takes seconds and is another test's."""
    monkeypatch.setattr("verl_clipx.analysis.report.page.draw_plates", lambda analysis: [])
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
    output = clipx("report", run, "--out", tmp_path / "page", code=1)
    assert path.name in output and name in output


def replace_prompts(path: Path, prompts: list) -> Path:
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
    path = replace_prompts(folder / "data/test.parquet", prompts)
    assert "row 0: prompt" in clipx("papers", "data", "show", path)
    output = clipx(*EVALUATE.replace("{}", str(folder)).split(), code=1)
    assert path.name in output and "prompt" in output


def test_a_number_of_samples_that_no_machine_holds_is_refused(folder):
    (folder / "saved/latest_checkpointed_iteration.txt").write_text("1")
    output = clipx(*EVALUATE.replace("{}", str(folder)).split(), "--samples", 100_000_000_000, code=2)
    assert "--samples" in output and "16384" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("output", "words"),
    [
        ('"$@" >/dev/full', "papers table list --json"),
        ('"$@" >&-', "papers table list --json"),
        ('"$@" | true', "papers table list --json"),
        # Printed in other ways.
        ('"$@" >/dev/full', "methods --markdown"),
        ('"$@" >&-', "metrics --help"),
    ],
)
def test_a_standard_output_that_takes_nothing_is_an_error_without_a_traceback(output, words):
    command = ["bash", "-o", "pipefail", "-c", output, "bash", sys.executable, "-m", "verl_clipx.cli", *words.split()]
    # So wide that lists are tables.
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "400"})
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "| true" in output or "its output could not be written" in result.stderr


def test_a_folder_of_traces_that_cannot_be_read_is_an_error(run, tmp_path):
    # Permissions do not keep root out; a file in the folder's place does.
    (run / "traces").rename(tmp_path / "elsewhere")
    (run / "traces").write_text("")
    assert "traces" in clipx("report", run, "--out", tmp_path / "page", code=1)


def test_a_log_cut_in_its_last_line_is_read_with_a_warning(run, tmp_path):
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"step": 3, "data": {"half wri')
    output = clipx("report", run, "--out", tmp_path / "page")
    assert "metrics.jsonl, line 3: cut off or damaged" in output
    rows = list(csv.DictReader((tmp_path / "page" / "metrics.csv").open()))
    assert {row["step"] for row in rows} == {"1", "2"}


# What a line of the log says of its rollout batch under `batch`: the fingerprints, and how many rows there are.
SOUND_BATCH = {
    **{"prompts": "1a", "responses": "2b", "rows": "3c", "updates": ["3c"], "versions": [0, 0]},
    **{"groups": 1, "sequences": 2, "tokens": 3, "distinct": 2},
}
# The commands that read a run; checkpoints of recompute are those of tests/analysis/recompute.
READERS = ("diagnose {}", "report {} --out {}/page", "replay {} +clipx=grpo", "certify {} vs {}", "recompute {} {}")


def replace_batches(run: Path, batch) -> None:
    """Replace what each line of a run's log says under `batch`."""
    log = run / "metrics.jsonl"
    lines = [json.dumps(json.loads(line) | {"batch": batch}) for line in log.read_text().splitlines()]
    log.write_text("\n".join(lines) + "\n")


def read_by(command: str, run: Path) -> str:
    """Return what a command of `READERS` prints about a run that it refuses with exit code 1."""
    return clipx(*[word.replace("{}", str(run)) for word in command.split()], code=1)


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize(
    "damage",
    [{"rows": None}, {"prompts": ["1a"]}, {"sequences": "many"}, {"updates": "3c"}, {"versions": 3}, {"rows": "xyz"}],
    ids=str,
)
def test_a_wrong_value_in_a_batch_is_an_error_that_names_its_file_and_key(run, command, damage):
    replace_batches(run, SOUND_BATCH | damage)
    output = read_by(command, run)
    (key,) = damage
    assert_names(output, "metrics.jsonl", key)


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("not_an_object", [None, [], "text", 3], ids=str)
def test_a_batch_that_is_no_json_object_is_an_error_that_names_its_file_and_the_value(run, command, not_an_object):
    replace_batches(run, not_an_object)
    output = read_by(command, run)
    assert_names(output, "metrics.jsonl", "`batch`", repr(not_an_object), "object")


KEPT_RUNS = Path("docs/results/runs/reversal")
KEPT_LOG = "grpo_4-seed1.jsonl.gz"
# Each damage to a kept run: a function from the log's first line, `head`, and the other lines, `rest`, to the bytes of
# the damaged file; and what the table says of it.
DAMAGED_LOGS = {
    "no hash": (lambda head, rest: pack_run({"commit": "a", "seed": 1}, rest), "it has no config_hash"),
    "a list for a hash": (lambda head, rest: pack_run(head | {"config_hash": [1]}, rest), "config_hash is [1]"),
    "null for a hash": (lambda head, rest: pack_run(head | {"config_hash": None}, rest), "config_hash is None"),
    "no seed": (lambda head, rest: pack_run({"commit": "a", "config_hash": "b"}, rest), "it has no seed"),
    "a text for a seed": (lambda head, rest: pack_run(head | {"seed": "one"}, rest), "seed is one"),
    "a list for the first line": (lambda head, rest: pack_run([], rest), "a gzip file, but not a kept run"),
    "no steps": (lambda head, rest: pack_run(head, b""), "the run has not logged its first step yet"),
    "cut off": (lambda head, rest: pack_run(head, rest)[:200], "cannot be unpacked"),
    "empty": (lambda head, rest: b"", "config_hash"),
    "bytes": (lambda head, rest: NO_TEXT, KEPT_LOG),
}


def pack_run(head, rest):
    return gzip.compress(json.dumps(head).encode() + b"\n" + rest)


def refusals_of_table(folder, code):
    """What the table of reversal refuses of the kept runs in a folder, by run."""
    words = ("papers", "table", "collect", "reversal", "--runs", folder, "--out", folder / "found.json")
    clipx(*words, code=code)
    refused = json.loads((folder / "found.json").read_text())["refused"]
    return {Path(run["folder"]).name: " ".join(run["reasons"]) for run in refused}


@pytest.mark.parametrize("name", DAMAGED_LOGS)
def test_a_damaged_kept_run_is_refused_by_the_table_with_its_file(tmp_path, name):
    damage, expected_reason = DAMAGED_LOGS[name]
    head, _, rest = gzip.decompress((KEPT_RUNS / KEPT_LOG).read_bytes()).partition(b"\n")
    (tmp_path / "reversal").mkdir()
    shutil.copy(KEPT_RUNS / "configurations.json.gz", tmp_path / "reversal")
    (tmp_path / "reversal" / KEPT_LOG).write_bytes(damage(json.loads(head), rest))
    reasons = refusals_of_table(tmp_path, code=1)[KEPT_LOG]
    assert KEPT_LOG in reasons and expected_reason in reasons


@pytest.mark.parametrize(
    "content",
    [b"abc", gzip.compress(b"[]"), gzip.compress(b'{"a": 1}')],
    # Packed bytes have the second in which they were made: two workers would then collect unlike tests.
    ids=["no archive", "a list", "no configuration"],
)
def test_damaged_configurations_of_kept_runs_are_named(tmp_path, content):
    (tmp_path / "reversal").mkdir()
    shutil.copy(KEPT_RUNS / KEPT_LOG, tmp_path / "reversal")
    (tmp_path / "reversal/configurations.json.gz").write_bytes(content)
    assert "configurations.json.gz" in refusals_of_table(tmp_path, code=1)[KEPT_LOG]


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("text", ["${", "a ${b", "${a.${b}"])
def test_an_interpolation_that_is_never_closed_is_text(run, command, text):
    record = run / "metrics.run.json"
    content = json.loads(record.read_text())
    content["configuration"] |= {"data.prompt_template": text, "data.templates": [text]}
    record.write_text(json.dumps(content))
    assert "Usage" not in clipx(*command.replace("{}", str(run)).split(), code=None)


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("content", ["[]", '"text"', "null"])
def test_a_record_that_is_no_object_is_one_error_with_its_file(run, command, content):
    (run / "metrics.run.json").write_text(content)
    assert "metrics.run.json" in clipx(*command.replace("{}", str(run)).split(), code=1)


def test_escape_sequences_from_data_and_names_do_not_reach_the_terminal(run, tmp_path):
    renamed = run.rename(tmp_path / "before\x1b[2J\x1b]0;title\x07\x9b31mafter")
    output = clipx("report", renamed, "--out", tmp_path / "page")
    prompt = [[{"role": "user", "content": "before \x1b[2J\x1b]0;title\x07\x9b31m after"}]]
    shown = clipx("papers", "data", "show", replace_prompts(save_questions(tmp_path / "data", 1), prompt))
    assert "before" in shown and "after" in shown and not set("\x1b\x07\x9b") & {*output, *shown}
