"""`clipx report`: what it writes, what it says, and wrong input. Covers: seeds, one run, runs without traces or with
verl's own loss, many steps, size. Not covered: the page in a browser (test_report_page.py), how it looks."""

import json
import shutil
import time

import pandas
import pytest

from tests.runs.commands import clipx, page_of
from tests.runs.example_runs import WHOLE, log_line, read_columns, write_log, write_run
from verl_clipx.common.traces import Shard, shards_in, write_shard
from verl_clipx.report.page import write_report

MOST_BYTES = 5_000_000


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for method, seed in (("grpo", 1), ("grpo", 2), ("acpo", 1), ("bapo", 1)):
        write_run(folder / f"{method}-seed{seed}", method, seed=seed)
    return folder


@pytest.fixture(scope="module")
def written(runs):
    out, paths = runs / "out", [runs / name for name in ("grpo-seed1", "grpo-seed2", "acpo-seed1")]
    said = clipx("report", *paths, "--out", out, "--title", "a < b")
    return out, page_of(out), said


@pytest.mark.slow
def test_the_page_names_what_was_compared_and_needs_no_network(written):
    _, page, said = written
    assert "<h1>a &lt; b</h1>" in page
    assert "3 runs · 2 settings" in page and "verl 0.9." in page
    assert "<td>clipx.method</td><td>grpo</td><td>acpo</td>" in page
    assert "alpha 3" in page and "the band spans them, from the lowest" in page
    assert "GRPO clipped" in said and "report.html" in said
    links = [part.split('"')[0] for part in page.split('src="')[1:] + page.split('href="')[1:]]
    assert all(link.startswith(("#", "data:,", "metrics.csv", "tokens.csv", "figures")) for link in links)
    assert "@import" not in page and "url(http" not in page


def test_long_names_are_cut_in_the_headline_only_and_a_page_that_will_change_reloads_itself(tmp_path):
    names = [f"cluster_a_grpo_qwen3_8b_math_8192_tokens_{number}_{'x' * 60}" for number in (1, 2)]
    logs = [write_log(tmp_path / name / "metrics.jsonl", [{"actor/entropy": 1.0}] * 2) for name in names]
    write_report(logs, tmp_path / "out", reload_every=10)
    page = page_of(tmp_path / "out")
    assert "<h1>run 1 against run 2: what clipping did</h1>" in page and names[0] in page
    assert "<title>run 1 against run 2: what clipping did</title>" in page
    assert '<meta http-equiv="refresh" content="10">' in page


def test_runs_of_one_name_in_two_folders_stay_two(tmp_path):
    for parent, steps in (("a", 2), ("b", 3)):
        write_log(tmp_path / parent / "run" / "metrics.jsonl", [{"actor/entropy": 1.0}] * steps)
    clipx("report", tmp_path / "a" / "run", tmp_path / "b" / "run", "--out", tmp_path / "out")
    page = page_of(tmp_path / "out")
    assert "2 runs · 2 settings" in page and "<td>1 to 2</td>" in page and "<td>1 to 3</td>" in page
    assert 'http-equiv="refresh"' not in page


@pytest.mark.slow
def test_every_figure_is_a_file_too(written):
    out, page, _ = written
    # The last panel of an odd number is on the page in the width of one column and in that of two.
    wide = page.count('class="alone"')
    files = list((out / "figures").glob("[!.]*"))
    names = {path.stem for path in files}
    assert {path.suffix for path in files} == {".svg", ".png"}
    assert len(names) == page.count('role="img"') - wide == 19 and wide == 3
    ids = [part.split('"')[0] for part in page.split(' id="')[1:]]
    assert len(ids) == len(set(ids))


@pytest.mark.slow
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
    clipx("report", run / "metrics.jsonl", "--out", tmp_path / "out")
    page = page_of(tmp_path / "out")
    assert "+clipx/trace=prompts" in page and "<script" not in page
    assert not (tmp_path / "out" / "tokens.csv").exists()


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
        clipx("report", write_log(tmp_path / folder / "metrics.jsonl", [row] * 3), "--out", tmp_path / "out" / folder)
        page = page_of(tmp_path / "out" / folder)
        drawn = (tmp_path / "out" / folder / "figures" / "bounds_0.svg").read_text()
        assert ("Dashed: those of its last update." in page) == (folder == "with")
        assert ("can lie much further out" in page) == (folder == "without")
        # Two lines a panel.
        assert drawn.count("stroke-dasharray: ") == (len(last) if "c_low" in means else 4) * (folder == "with")
        # The axis reaches the widest.
        assert (">4<" in drawn) == (folder == "with")


def test_a_loss_of_verls_own_and_a_thousand_steps(tmp_path):
    rows = [{"actor/entropy": 1.0, "critic/score/mean": 0.5 + 0.4 * (step % 2)} for step in range(1000)]
    said = clipx("report", write_log(tmp_path / "metrics.jsonl", rows), "--out", tmp_path / "out")
    assert "is not known" in said and "1 to 1000" in page_of(tmp_path / "out")


@pytest.mark.slow
def test_a_report_replaces_what_one_wrote_before_and_nothing_else(tmp_path):
    runs, out = {}, tmp_path / "out"
    for name, traced in (("plain", False), ("traced", True)):
        runs[name] = write_run(tmp_path / name, "bapo", steps=2, traced=traced)
    (out / "figures").mkdir(parents=True)
    for path in (out / "figures" / "mine.svg", out / "tokens.csv"):
        path.write_text("mine")
    write_report([runs["plain"]], out)
    assert (out / "tokens.csv").read_text() == "mine"
    (out / "tokens.csv").unlink()
    write_report([runs["plain"], runs["traced"]], out)
    assert (out / "tokens.csv").exists() and (out / "figures" / "spread_0.svg").exists()
    write_report([runs["plain"]], out, "another title")
    assert not (out / "tokens.csv").exists() and not (out / "figures" / "spread_0.svg").exists()
    assert (out / "figures" / "mine.svg").read_text() == "mine" and "<title>another title</title>" in page_of(out)
    # A file of a figure's name that no report wrote.
    (out / "figures" / "spread_0.png").write_text("mine")
    assert "no report wrote it" in clipx("report", runs["traced"], "--out", out, code=1)
    assert (out / "figures" / "spread_0.png").read_text() == "mine"


@pytest.mark.slow
def test_credentials_of_an_older_record_are_not_shown(runs, tmp_path):
    copies = []
    for name in ("grpo-seed1", "acpo-seed1"):
        copies.append(shutil.copytree(runs / name, tmp_path / name))
        record = copies[-1] / "metrics.run.json"
        content = json.loads(record.read_text())
        content["configuration"]["reward"] = {"api_key": f"xyz {name}", "url": f"http://{name}:xyz@host/{name}"}
        record.write_text(json.dumps(content))
    clipx("report", *copies, "--out", tmp_path / "out")
    written = [path.read_text() for path in (tmp_path / "out").rglob("*") if path.suffix in (".html", ".csv")]
    assert not any("xyz" in text.replace("<wbr>", "") for text in written)
    assert "http://[redacted]@host/acpo-seed1" in page_of(tmp_path / "out")


@pytest.mark.slow
def test_the_largest_page_is_small_enough_and_quick(tmp_path):
    """64 completions of more than 512 tokens."""
    run = write_run(tmp_path / "run", "acpo", steps=2)
    shard = shards_in(run / "traces")[-1]
    columns = read_columns(run / "traces", shard)
    long = {name: [value for value in values[:192:3] for _ in range(600)] for name, values in columns.items()}
    long |= {"sample": [i // 600 for i in range(64 * 600)], "position": [i % 600 for i in range(64 * 600)]}
    long |= {"advantage": [0.5] * (64 * 600), "prompt": ["p"] * (64 * 600)}
    write_shard(run / "traces", Shard(shard.step, shard.update + 1, 0), long, WHOLE)
    started = time.process_time()
    clipx("report", run, "--out", tmp_path / "out")
    assert time.process_time() - started < 30
    page = page_of(tmp_path / "out")
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
    assert message in clipx("report", tmp_path, "--out", tmp_path / "out", code=1)
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_named_twice_and_a_trace_that_is_cut_short_are_errors(tmp_path):
    run = write_run(tmp_path / "run", "acpo", steps=2)
    assert "named twice" in clipx("report", run, run, "--out", tmp_path / "out", code=1)
    path = shards_in(run / "traces")[-1].path_in(run / "traces")
    path.write_bytes(path.read_bytes()[:50])
    assert "cut off" in clipx("report", run, "--out", tmp_path / "out", code=1)
