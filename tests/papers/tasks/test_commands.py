"""`clipx papers data` as a user types it, on handmade local copies: list, build with resume and card, show.

Not covered: the hub, where a stand-in that cannot be reached takes its place.
"""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.analysis.runs.commands import clipx
from verl_clipx.papers.tasks import commands
from verl_clipx.papers.tasks.building import read_record
from verl_clipx.papers.tasks.templates import PLAIN_TEXT_CHAT_TEMPLATE

RELEASE = Path(__file__).parent / "hitab" / "fixtures" / "release"
PROBLEMS = Path(__file__).parent / "countdown" / "fixtures" / "countdown_3to4.jsonl"


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """The console has read the terminal's width when its module was imported."""
    monkeypatch.setattr(commands.console, "width", 200)


def test_list():
    text = clipx("papers", "data", "list")
    for name in ("countdown_3to4", "hitab", "knights_and_knaves", "orz_57k", "olympiadbench"):
        assert name in text
    text = clipx("papers", "data", "list", "countdown_3to4")
    assert "Jiayi-Pan/Countdown-Tasks-3to4" in text and "train_size, test_size" in text


def test_build_writes_files_and_resumes(tmp_path):
    out = tmp_path / "hitab"
    words = ("papers", "data", "build", "hitab", "--out", out, "--from", RELEASE)
    text = clipx(*words)
    left_out = "1 duplicates left out (0 of them with another answer than the row that was kept)"
    assert f"{out}/train.parquet: 3 rows, {left_out}, sha256 " in text
    assert [pq.read_table(out / f"{split}.parquet").num_rows for split in ("train", "dev", "test")] == [3, 1, 2]
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert sorted(before) == ["dev.parquet", "test.parquet", "train.parquet"]
    (out / "test.parquet").unlink()
    assert clipx(*words) == text
    after = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert [name for name in sorted(before) if before[name] == after[name]] == ["dev.parquet", "train.parquet"]
    assert read_record(out / "train.parquet").sha256 in text


def test_options_limit_and_the_plain_text_hint(tmp_path):
    options = ("--limit", 3, "--option", "train_size=4", "--option", "test-size=2")
    text = clipx("papers", "data", "build", "countdown_3to4", "--out", tmp_path, "--from", PROBLEMS, *options)
    assert "train.parquet: 3 rows, 0 duplicates" in text and "test.parquet: 2 rows" in text
    assert " ".join(PLAIN_TEXT_CHAT_TEMPLATE.split()) in text
    assert read_record(tmp_path / "train.parquet").request.options == {"train_size": 4, "test_size": 2}
    words = ("--out", tmp_path / "kk", "--split", "test", "--limit", 1)
    text = clipx("papers", "data", "build", "knights_and_knaves_tiny", *words)
    assert "test.parquet: 1 rows" in text and "plain text" not in text


BROKEN = Path(__file__).with_name("broken_copies.txt").read_text().splitlines()[1:]


@pytest.mark.parametrize("line", BROKEN)
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
    text = clipx("papers", "data", "build", "countdown_3to4", "--out", tmp_path, code=1)
    assert "Couldn't reach the hub If the hub (Jiayi-Pan/Countdown-Tasks-3to4) cannot be reached, give a local" in text
    (tmp_path / "train.parquet").write_bytes(b"")
    text = clipx("papers", "data", "build", "countdown_3to4", "--out", tmp_path, code=1)
    assert "was made by something else" in text and "cannot be reached" not in text


def test_show(tmp_path):
    clipx("papers", "data", "build", "countdown", "--out", tmp_path, "--option", "size=5", "--split", "test")
    file = tmp_path / "test.parquet"
    text = clipx("papers", "data", "show", file, "--rows", 2)
    assert f"{file}: 5 rows" in text
    assert "countdown, split test, prompt countdown_compact, from generated, limit None, options {'size': 5}" in text
    assert "; 0 duplicates left out (0 of them with another answer than the row that was kept), sha256 " in text
    assert "row 1: user" in text and "row 2: user" not in text
    assert '"ground_truth"' in text
    assert "row 0" not in clipx("papers", "data", "show", file, "--rows", 0)


def test_show_of_foreign_and_broken_files(tmp_path):
    pq.write_table(pa.Table.from_pylist([{"prompt": "[bold]plain[/] text", "answer": 1}]), tmp_path / "a.parquet")
    text = clipx("papers", "data", "show", tmp_path / "a.parquet")
    assert "not built by `clipx papers data build`" in text and "[bold]plain[/] text" in text
    (tmp_path / "b.parquet").write_text("broken")
    for name in ("b", "c"):
        clipx("papers", "data", "show", tmp_path / f"{name}.parquet", code=1)
