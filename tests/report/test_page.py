"""`clipx report`: what it writes, what it says, and wrong input. Covers: seeds, one run, runs without traces or with
verl's own loss, many steps, size. Not covered: the page in a browser (test_report_page.py), how it looks."""

import json
import shutil
import time

import pandas
import pytest
from typer.testing import CliRunner

from tests.runs.example_runs import log_line, write_log, write_run
from verl_clipx.cli import app
from verl_clipx.common.traces import Shard, read_shards, shards_in, write_shard

MOST_BYTES = 5_000_000


def report(*words):
    return CliRunner().invoke(app, ["report", *map(str, words)])


def text_of(out):
    """The page without the places where it may break within a key."""
    return (out / "report.html").read_text().replace("<wbr>", "")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for method, seed in (("grpo", 1), ("grpo", 2), ("acpo", 1), ("bapo", 1)):
        write_run(folder / f"{method}-seed{seed}", method, seed=seed)
    return folder


@pytest.fixture(scope="module")
def written(runs):
    out = runs / "out"
    result = report(runs / "grpo-seed1", runs / "grpo-seed2", runs / "acpo-seed1", "--out", out, "--title", "a < b")
    assert result.exit_code == 0, result.output
    return out, text_of(out), result.output


@pytest.mark.slow
def test_the_page_names_what_was_compared(written):
    _, page, output = written
    assert "<h1>a &lt; b</h1>" in page
    assert "3 runs · 2 settings" in page and "verl 0.9." in page
    assert "<td>clipx.method</td><td>grpo</td><td>acpo</td>" in page
    assert "alpha 3" in page and "the band spans them, from the lowest" in page
    assert "GRPO clipped" in output.replace("\n", " ") and "report.html" in output


def test_long_names_are_cut_in_the_headline_only(tmp_path):
    names = [f"cluster_a_grpo_qwen3_8b_math_8192_tokens_{number}_{'x' * 60}" for number in (1, 2)]
    for name in names:
        write_log(tmp_path / name / "metrics.jsonl", [{"actor/entropy": 1.0}] * 2)
    assert report(*(tmp_path / name for name in names), "--out", tmp_path / "out").exit_code == 0
    page = text_of(tmp_path / "out")
    full = f"{names[0]} against {names[1]}: what clipping did to the tokens"
    cut = [f"…{name[name.index('tokens_') + 7 :][:28]}…" for name in names]
    assert f'<h1 title="{full}">{" against ".join(cut)}: what clipping did to the tokens</h1>' in page
    assert f"<title>{full}</title>" in page


def test_runs_of_one_name_in_two_folders_stay_two(tmp_path):
    for parent, steps in (("a", 2), ("b", 3)):
        write_log(tmp_path / parent / "run" / "metrics.jsonl", [{"actor/entropy": 1.0}] * steps)
    assert report(tmp_path / "a" / "run", tmp_path / "b" / "run", "--out", tmp_path / "out").exit_code == 0
    page = text_of(tmp_path / "out")
    assert "2 runs · 2 settings" in page and "<td>1 to 2</td>" in page and "<td>1 to 3</td>" in page


def test_it_needs_no_network(written):
    _, page, _ = written
    links = [part.split('"')[0] for part in page.split('src="')[1:] + page.split('href="')[1:]]
    assert all(link.startswith(("#", "data:,", "metrics.csv", "tokens.csv", "figures")) for link in links)
    assert "@import" not in page and "url(http" not in page


def test_every_figure_is_a_file_too(written):
    out, page, _ = written
    # The last panel of an odd number is on the page in the width of one column and in that of two.
    wide = page.count('class="alone"')
    files = list((out / "figures").glob("[!.]*"))
    names = {path.stem for path in files}
    assert {path.suffix for path in files} == {".svg", ".png"}
    assert len(names) == page.count('role="img"') - wide == 21 and wide == 3
    ids = [part.split('"')[0] for part in page.split(' id="')[1:]]
    assert len(ids) == len(set(ids))


def test_the_numbers_are_those_of_the_log(written, runs):
    table = pandas.read_csv(written[0] / "metrics.csv")
    assert list(table["run"].unique()) == ["grpo-seed1", "grpo-seed2", "acpo-seed1"]
    line = json.loads((runs / "acpo-seed1" / "metrics.jsonl").read_text().splitlines()[2])
    row = table[(table["run"] == "acpo-seed1") & (table["step"] == 3)].iloc[0]
    assert row["actor/clipx/epsilon/bin_0"] == pytest.approx(line["data"]["actor/clipx/epsilon/bin_0"])
    tokens = pandas.read_csv(written[0] / "tokens.csv")
    assert set(tokens["setting"]) == {"GRPO", "ACPO"} and {"ratio", "low", "high", "weight"} <= set(tokens)


def test_without_traces_it_says_how_to_get_them(tmp_path):
    run = write_run(tmp_path / "bapo-seed1", "bapo", traced=False)
    assert report(run / "metrics.jsonl", "--out", tmp_path / "out").exit_code == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "+clipx/trace=prompts" in page and "<script" not in page
    assert not (tmp_path / "out" / "tokens.csv").exists()


ESTIMATE = "actor/clipx/entropy_clip_estimate"


def test_runs_that_log_the_entropy_clip_estimate_show_it_beside_what_happened(tmp_path):
    rows = [{"actor/entropy": 1 - 0.1 * step} for step in range(7)]
    write_log(tmp_path / "without" / "metrics.jsonl", rows)
    write_log(tmp_path / "with" / "metrics.jsonl", [{**row, ESTIMATE: -3.0} for row in rows])
    for names, shown in ((("without",), False), (("without", "with"), True)):
        assert report(*(tmp_path / name for name in names), "--out", tmp_path / "out").exit_code == 0
        page = (tmp_path / "out" / "report.html").read_text()
        figures = [path.name for path in (tmp_path / "out" / "figures").glob("entropy_change_*.svg")]
        assert figures == ["entropy_change_0.svg"] * shown
        heading = "The Entropy-Clip estimate had the sign of entropy’s change in 6 of 6 steps"
        assert (heading in page) == (ESTIMATE in pandas.read_csv(tmp_path / "out" / "metrics.csv")) == shown
    drawn = (tmp_path / "out" / "figures" / "entropy_change_0.svg").read_text()
    assert "nats per unit of learning rate" in drawn and "same sign in 6 of 6 steps" in drawn


@pytest.mark.parametrize(
    ("means", "last"),
    [
        ({"c_low": 0.6, "c_high": 1.2}, {"c_low_last": 0.5, "c_high_last": 5.0}),
        ({"epsilon/bin_0": 0.3, "epsilon/bin_1": 0.2}, {"epsilon_last/bin_0": 4.0, "epsilon_last/bin_1": 0.2}),
    ],
)
def test_the_last_updates_bounds_are_dashed_and_within_the_figure(tmp_path, means, last):
    for folder, names in (("without", means), ("with", means | last)):
        row = {f"actor/clipx/{name}": value for name, value in names.items()}
        write_log(tmp_path / folder / "metrics.jsonl", [row] * 3)
        assert report(tmp_path / folder, "--out", tmp_path / "out" / folder).exit_code == 0
        page = (tmp_path / "out" / folder / "report.html").read_text()
        drawn = (tmp_path / "out" / folder / "figures" / "bounds_0.svg").read_text()
        assert ("Dashed: those of its last update." in page) == (folder == "with")
        assert ("can lie much further out" in page) == (folder == "without")
        # Two lines a panel.
        assert drawn.count("stroke-dasharray: ") == (len(last) if "c_low" in means else 4) * (folder == "with")
        # The axis reaches the widest.
        assert (">4<" in drawn) == (folder == "with")


def test_a_loss_of_verls_own_and_a_thousand_steps(tmp_path):
    rows = [{"actor/entropy": 1.0, "critic/score/mean": 0.5 + 0.4 * (step % 2)} for step in range(1000)]
    write_log(tmp_path / "metrics.jsonl", rows)
    result = report(tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 0 and "is not known" in result.output.replace("\n", " ")
    assert "1 to 1000" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.slow
def test_a_report_is_replaced(runs, tmp_path):
    for names in (("grpo-seed1", "acpo-seed1"), ("bapo-seed1",)):
        assert report(*(runs / name for name in names), "--out", tmp_path).exit_code == 0
    assert not (tmp_path / "figures" / "fractions_1.svg").exists()
    assert "<title>BAPO: what clipping did" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_what_no_report_wrote_stays(runs, tmp_path):
    figures = tmp_path / "figures"
    figures.mkdir()
    for path in (figures / "mine.svg", tmp_path / "report.html"):
        path.write_text("mine")
    for name in ("acpo-seed1", "bapo-seed1"):
        assert report(runs / name, "--out", tmp_path).exit_code == 0
    assert (figures / "mine.svg").read_text() == "mine" and len(list(figures.glob("*.svg"))) > 1


@pytest.mark.slow
def test_only_tokens_that_a_report_wrote_are_removed(tmp_path):
    plain = write_run(tmp_path / "plain", "bapo", traced=False)
    tokens = tmp_path / "out" / "tokens.csv"
    tokens.parent.mkdir()
    tokens.write_text("mine")
    assert report(plain, "--out", tokens.parent).exit_code == 0
    assert tokens.read_text() == "mine"
    tokens.unlink()
    traced = write_run(tmp_path / "traced", "bapo", steps=2)
    for run, there in ((traced, True), (traced, True), (plain, False)):
        assert report(run, "--out", tokens.parent).exit_code == 0
        assert tokens.exists() == there


@pytest.mark.slow
def test_a_foreign_file_of_a_figures_name_is_not_replaced(runs, tmp_path):
    assert report(runs / "acpo-seed1", "--out", tmp_path / "first").exit_code == 0
    names = [path.name for path in (tmp_path / "first" / "figures").glob("*.png")]
    foreign = tmp_path / "second" / "figures" / names[-1]
    foreign.parent.mkdir(parents=True)
    foreign.write_text("mine")
    result = report(runs / "acpo-seed1", "--out", tmp_path / "second")
    assert result.exit_code == 1 and "no report wrote it" in result.output.replace("\n", " ")
    assert foreign.read_text() == "mine"


@pytest.mark.slow
def test_credentials_of_an_older_record_are_not_shown(runs, tmp_path):
    copies = []
    for name in ("grpo-seed1", "acpo-seed1"):
        copies.append(shutil.copytree(runs / name, tmp_path / name))
        record = copies[-1] / "metrics.run.json"
        content = json.loads(record.read_text())
        content["configuration"]["reward"] = {"api_key": f"xyz {name}", "url": f"http://{name}:xyz@host/{name}"}
        record.chmod(0o644)
        record.write_text(json.dumps(content))
    assert report(*copies, "--out", tmp_path / "out").exit_code == 0
    written = [path.read_text() for path in (tmp_path / "out").rglob("*") if path.suffix in (".html", ".csv")]
    written = [text.replace("<wbr>", "") for text in written]
    assert not any("xyz" in text for text in written)
    assert "http://[redacted]@host/acpo-seed1" in written[0] + written[1]


@pytest.mark.slow
def test_the_largest_page_is_small_enough_and_quick(tmp_path):
    """64 completions of more than 512 tokens."""
    run = write_run(tmp_path / "run", "acpo", steps=2)
    shard = shards_in(run / "traces")[-1]
    columns = read_shards(run / "traces", [shard]).drop_columns(["step", "update", "rank"]).to_pydict()
    long = {name: [value for value in values[:192:3] for _ in range(600)] for name, values in columns.items()}
    long |= {"sample": [i // 600 for i in range(64 * 600)], "position": [i % 600 for i in range(64 * 600)]}
    long["advantage"] = [0.5] * len(long["sample"])
    write_shard(run / "traces", Shard(shard.step, shard.update + 1, 0), {**long, "prompt": ["p"] * len(long["sample"])})
    started = time.process_time()
    assert report(run, "--out", tmp_path / "out").exit_code == 0
    assert time.process_time() - started < 30
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count('class="line"') == 64 and page.count("88 more") == 64
    assert len(page.encode()) < MOST_BYTES


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.jsonl", "", "empty: the run has not logged its first step yet"),
        ("metrics.jsonl", "step,loss\n1,2\n", "not a line"),
        ("metrics.jsonl", log_line(1, **{"train/loss": 1.0}), "not the log of a policy's training by verl"),
        ("other.txt", "", "no such log"),
    ],
)
def test_what_is_no_log_is_an_error(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    result = report(tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 1 and message in result.output.replace("\n", " ")
    assert "Traceback" not in result.output and not (tmp_path / "out").exists()


def test_a_run_that_is_named_twice_is_an_error(runs, tmp_path):
    result = report(runs / "acpo-seed1", runs / "acpo-seed1", "--out", tmp_path / "out")
    assert result.exit_code == 1 and "named twice" in result.output


def test_a_trace_that_is_cut_short_is_an_error(tmp_path):
    run = write_run(tmp_path / "run", "acpo", steps=2)
    path = shards_in(run / "traces")[-1].path_in(run / "traces")
    path.write_bytes(path.read_bytes()[:50])
    result = report(run, "--out", tmp_path / "out")
    assert result.exit_code == 1 and "cut off" in result.output.replace("\n", " ")
