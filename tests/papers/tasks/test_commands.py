"""`clipx data` as a user types it, on handmade local copies: list, build with resume and card, show.

Not covered: the hub, where a stand-in that cannot be reached takes its place.
"""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from verl_clipx.cli import app
from verl_clipx.papers.tasks import commands
from verl_clipx.papers.tasks.building import read_record
from verl_clipx.papers.tasks.templates import PLAIN_TEXT_CHAT_TEMPLATE

RELEASE = Path(__file__).parent / "hitab" / "fixtures" / "release"
PROBLEMS = Path(__file__).parent / "countdown" / "fixtures" / "countdown_3to4.jsonl"


@pytest.fixture
def clipx(monkeypatch):
    # The console has read the terminal's width when its module was imported.
    monkeypatch.setattr(commands.console, "width", 200)

    def run(*arguments):
        result = CliRunner().invoke(app, ["data", *map(str, arguments)], catch_exceptions=False)
        return result.exit_code, result.stdout

    return run


def test_list(clipx):
    code, text = clipx("list")
    assert code == 0
    for name in ("countdown_3to4", "hitab", "knights_and_knaves", "orz_57k", "olympiadbench"):
        assert name in text
    code, text = clipx("list", "countdown_3to4")
    assert code == 0 and "Jiayi-Pan/Countdown-Tasks-3to4" in text and "train_size, test_size" in text


def test_build_writes_files_and_resumes(clipx, tmp_path):
    out = tmp_path / "hitab"
    arguments = ("build", "hitab", "--out", out, "--from", RELEASE)
    code, text = clipx(*arguments)
    assert code == 0
    assert f"{out}/train.parquet: 3 rows, 1 duplicates left out (0 with another answer), sha256 " in text
    assert [pq.read_table(out / f"{split}.parquet").num_rows for split in ("train", "dev", "test")] == [3, 1, 2]
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.parquet")}
    (out / "test.parquet").unlink()
    again = clipx(*arguments)
    assert again == (0, text)
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.parquet")}
    assert [name for name in before if before[name] == after[name]] == sorted(set(before) - {"test.parquet"})
    assert read_record(out / "train.parquet").sha256 in text
    assert sorted(path.name for path in out.iterdir()) == ["dev.parquet", "test.parquet", "train.parquet"]


def test_options_limit_and_the_plain_text_hint(clipx, tmp_path):
    code, text = clipx(
        "build", "countdown_3to4", "--out", tmp_path, "--from", PROBLEMS, "--limit", 3,
        "--option", "train_size=4", "--option", "test-size=2",
    )  # fmt: skip
    assert code == 0
    assert "train.parquet: 3 rows, 0 duplicates" in text and "test.parquet: 2 rows" in text
    assert PLAIN_TEXT_CHAT_TEMPLATE in text
    assert read_record(tmp_path / "train.parquet").request.options == {"train_size": 4, "test_size": 2}
    code, text = clipx("build", "knights_and_knaves_tiny", "--out", tmp_path / "kk", "--split", "test", "--limit", 1)
    assert code == 0 and "test.parquet: 1 rows" in text and "plain text" not in text


BROKEN = Path(__file__).with_name("broken_copies.txt").read_text().splitlines()[1:]


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_copy_is_named(clipx, tmp_path, line):
    name, option, file, content, message = map(str.strip, line.split(" @"))
    (tmp_path / "copy").mkdir()
    path = tmp_path / "copy" / file
    if content:
        path.write_text(content.replace(r"\n", "\n"))
    options = ("--option", option) if option else ()
    code, text = clipx("build", name, "--out", tmp_path / "out", "--from", path, *options)
    assert code == 1 and message in text
    assert not list(tmp_path.glob("out/*.parquet"))


def test_an_unreachable_hub_points_to_local_copies(clipx, tmp_path, monkeypatch):
    import datasets

    def unreachable(*arguments, **keywords):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    code, text = clipx("build", "countdown_3to4", "--out", tmp_path)
    assert code == 1
    assert "Couldn't reach the hub\nIf the hub (Jiayi-Pan/Countdown-Tasks-3to4) cannot be reached, give a local" in text


def test_other_mistakes_do_not_blame_the_hub(clipx, tmp_path):
    (tmp_path / "train.parquet").write_bytes(b"")
    code, text = clipx("build", "countdown_3to4", "--out", tmp_path)
    assert code == 1
    assert "was made by something else" in text and "cannot be reached" not in text


def test_show(clipx, tmp_path):
    clipx("build", "countdown", "--out", tmp_path, "--option", "size=5", "--split", "test")
    code, text = clipx("show", tmp_path / "test.parquet", "--rows", 2)
    assert code == 0
    assert f"{tmp_path / 'test.parquet'}: 5 rows" in text
    assert "countdown, split test, prompt countdown_compact, from generated, limit None, options {'size': 5}" in text
    assert "; 0 duplicates left out (0 with another answer), sha256 " in text
    assert "row 1: user" in text and "row 2: user" not in text
    assert '"ground_truth"' in text
    assert clipx("show", tmp_path / "test.parquet", "--rows", 0)[0] == 0


def test_show_of_foreign_and_broken_files(clipx, tmp_path):
    import pyarrow as pa

    pq.write_table(pa.Table.from_pylist([{"prompt": "[bold]plain[/] text", "answer": 1}]), tmp_path / "a.parquet")
    code, text = clipx("show", tmp_path / "a.parquet")
    assert code == 0 and "not built by `clipx data build`" in text and "[bold]plain[/] text" in text
    (tmp_path / "b.parquet").write_text("broken")
    assert clipx("show", tmp_path / "b.parquet")[0] == 1
    assert clipx("show", tmp_path / "c.parquet")[0] == 1
