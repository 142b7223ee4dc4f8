"""`clipx papers data` as a user types it, on handmade local copies: list, build with resume and card, show.

Not covered: the hub, where a stand-in that cannot be reached takes its place.
"""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.analysis.runs.commands import clipx
from tests.messages import assert_names
from verl_clipx.papers.tasks import commands
from verl_clipx.papers.tasks.building import read_record
from verl_clipx.papers.tasks.templates import PLAIN_TEXT_CHAT_TEMPLATE

RELEASE = Path(__file__).parent / "hitab" / "fixtures" / "release"
PROBLEMS = Path(__file__).parent / "countdown" / "fixtures" / "countdown_3to4.jsonl"


@pytest.fixture(autouse=True)
def wide_console(monkeypatch):
    """The console has read the terminal's width when its module was imported."""
    monkeypatch.setattr(commands.console, "width", 200)


def test_the_list_names_every_data_set():
    output = clipx("papers", "data", "list")
    for name in ("countdown_3to4", "hitab", "knights_and_knaves", "orz_57k", "olympiadbench"):
        assert name in output


def test_the_list_of_one_data_set_has_its_source_and_options():
    output = clipx("papers", "data", "list", "countdown_3to4")
    assert "Jiayi-Pan/Countdown-Tasks-3to4" in output
    assert "train_size, test_size" in output


def test_build_writes_files_and_resumes(tmp_path):
    out = tmp_path / "hitab"
    words = ("papers", "data", "build", "hitab", "--out", out, "--from", RELEASE)
    output = clipx(*words)
    assert_names(output, f"{out}/train.parquet: 3 rows", "1 duplicates left out", "0 of them with another answer")
    assert [pq.read_table(out / f"{split}.parquet").num_rows for split in ("train", "dev", "test")] == [3, 1, 2]
    times_before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert sorted(times_before) == ["dev.parquet", "test.parquet", "train.parquet"]
    (out / "test.parquet").unlink()
    assert clipx(*words) == output
    times_after = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    kept = [name for name, time in sorted(times_before.items()) if times_after[name] == time]
    assert kept == ["dev.parquet", "train.parquet"]
    assert read_record(out / "train.parquet").sha256 in output


def test_options_and_a_limit_and_the_hint_for_prompts_of_plain_text(tmp_path):
    options = ("--limit", 3, "--option", "train_size=4", "--option", "test-size=2")
    output = clipx("papers", "data", "build", "countdown_3to4", "--out", tmp_path, "--from", PROBLEMS, *options)
    assert "train.parquet: 3 rows, 0 duplicates" in output
    assert "test.parquet: 2 rows" in output
    assert " ".join(PLAIN_TEXT_CHAT_TEMPLATE.split()) in output
    assert read_record(tmp_path / "train.parquet").request.options == {"train_size": 4, "test_size": 2}


def test_prompts_that_are_no_plain_text_get_no_hint(tmp_path):
    options = ("--split", "test", "--limit", 1)
    output = clipx("papers", "data", "build", "knights_and_knaves_tiny", "--out", tmp_path, *options)
    assert "test.parquet: 1 rows" in output
    assert "plain text" not in output


BROKEN_COPIES = Path(__file__).with_name("broken_copies.txt").read_text().splitlines()[1:]


@pytest.mark.parametrize("line", BROKEN_COPIES)
def test_a_broken_copy_is_named(tmp_path, line):
    name, option, file, content, message = map(str.strip, line.split(" @"))
    (tmp_path / "copy").mkdir()
    path = tmp_path / "copy" / file
    if content:
        path.write_text(content.replace(r"\n", "\n"))
    options = ("--option", option) if option else ()
    words = ("papers", "data", "build", name, "--out", tmp_path / "out", "--from", path)
    assert message in clipx(*words, *options, code=1)
    assert not list(tmp_path.glob("out/*.parquet"))


def test_only_an_unreachable_hub_points_to_local_copies(tmp_path, monkeypatch):
    import datasets

    def unreachable(*arguments, **keywords):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    output = clipx("papers", "data", "build", "countdown_3to4", "--out", tmp_path, code=1)
    assert_names(output, "Couldn't reach the hub", "Jiayi-Pan/Countdown-Tasks-3to4", "give a local")
    (tmp_path / "train.parquet").write_bytes(b"")
    output = clipx("papers", "data", "build", "countdown_3to4", "--out", tmp_path, code=1)
    assert "was made by something else" in output
    assert "cannot be reached" not in output


def test_show_has_the_record_and_the_first_rows(tmp_path):
    clipx("papers", "data", "build", "countdown", "--out", tmp_path, "--option", "size=5", "--split", "test")
    file = tmp_path / "test.parquet"
    output = clipx("papers", "data", "show", file, "--rows", 2)
    assert f"{file}: 5 rows" in output
    assert "countdown, split test, prompt countdown_compact, from generated, limit None, options {'size': 5}" in output
    assert_names(output, "0 duplicates left out", "0 of them with another answer", "sha256")
    assert "row 1: user" in output
    assert "row 2: user" not in output
    assert '"ground_truth"' in output
    assert "row 0" not in clipx("papers", "data", "show", file, "--rows", 0)


def test_show_reads_files_that_others_made(tmp_path):
    pq.write_table(pa.Table.from_pylist([{"prompt": "[bold]plain[/] text", "answer": 1}]), tmp_path / "a.parquet")
    output = clipx("papers", "data", "show", tmp_path / "a.parquet")
    assert "not built by `clipx papers data build`" in output
    assert "[bold]plain[/] text" in output


def test_show_fails_on_a_broken_or_missing_file(tmp_path):
    path = tmp_path / "broken.parquet"
    path.write_text("broken")
    clipx("papers", "data", "show", path, code=1)
    clipx("papers", "data", "show", tmp_path / "missing.parquet", code=1)
