"""`clipx report`: what it writes, what it says, and wrong input, of seeds, of one run and without traces; its size; the
page that --follow writes anew while a run trains, until it ends or is interrupted. Not covered: the page in a browser
(test_report_page.py), long runs (test_figures.py), a lock that another host holds, how it looks.
"""

import json
import time
from types import SimpleNamespace
from unittest import mock

import pandas
import pytest

from tests.analysis.runs.commands import clipx, page_of
from tests.analysis.runs.example_runs import WHOLE, log_line, read_columns, write_log, write_run
from verl_clipx.analysis.report import follow
from verl_clipx.analysis.report import page as report_page
from verl_clipx.analysis.report.page import write_report
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.losses.base.metric import of_decision
from verl_clipx.losses.methods import METHODS
from verl_clipx.run.run_lock import release, take_lock
from verl_clipx.run.trace_format import Shard, shards_in, write_shard
from verl_clipx.training.trainer.log import write_record

MOST_BYTES = 5_000_000


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for method, seed in (("grpo", 1), ("grpo", 2), ("acpo", 1)):
        write_run(folder / f"{method}-seed{seed}", method, seed=seed)
    return folder


def test_the_page_names_what_was_compared_and_needs_no_network_its_figures_are_files_and_its_numbers_the_logs(runs):
    out, names = runs / "out", ["grpo-seed1", "grpo-seed2", "acpo-seed1"]
    said = clipx("report", *(runs / name for name in names), "--out", out, "--title", "a < b")
    page = page_of(out)
    assert "<h1>a &lt; b</h1>" in page
    assert "3 runs · 2 settings" in page and "verl 0.9." in page
    assert "<td>clipx.method</td><td>grpo</td><td>acpo</td>" in page
    assert "alpha 3" in page and "the band spans them, from the lowest" in page
    assert "GRPO clipped" in said and "report.html" in said
    links = [part.split('"')[0] for part in page.split('src="')[1:] + page.split('href="')[1:]]
    assert all(link.startswith(("#", "data:,", "metrics.csv", "figures")) for link in links)
    # Reward, length, entropy, … and the clipping of each setting: every figure over steps says so below its axis.
    assert page.count(">training step<") == 10
    assert "@import" not in page and "url(http" not in page
    files = list((out / "figures").glob("[!.]*"))
    assert {path.suffix for path in files} == {".svg", ".png"}
    assert len({path.stem for path in files}) == page.count('role="img"') == 13
    ids = [part.split('"')[0] for part in page.split(' id="')[1:]]
    assert len(ids) == len(set(ids))
    table = pandas.read_csv(out / "metrics.csv")
    assert list(table["run"].unique()) == names
    line = json.loads((runs / "acpo-seed1" / "metrics.jsonl").read_text().splitlines()[2])
    row = table[(table["run"] == "acpo-seed1") & (table["step"] == 3)].iloc[0]
    assert row["actor/clipx/epsilon/bin_0"] == pytest.approx(line["data"]["actor/clipx/epsilon/bin_0"])


def test_what_verl_counts_on_both_sides_is_not_called_clipped_low(tmp_path):
    log = write_log(tmp_path / "run" / "metrics.jsonl", [{keys.PG_CLIPPED: 0.02, keys.ENTROPY: 1.0}] * 3)
    clipx("report", log, "--out", tmp_path / "out")
    _, figures = page_of(tmp_path / "out").split('id="numbers"')
    assert "How many tokens verl counts as clipped" in figures and "both sides, as verl counts" in figures
    shown = figures.partition("Regions:")[0]
    assert "clipped low" not in shown and "violet" not in shown


# The reward of a run of verl's own whose entropy fell first.
COLLAPSED = [
    {keys.PG_CLIPPED: 0.005, keys.ENTROPY: 1.0 if step < 20 else 0.01, keys.REWARD: 0.5 if step < 60 else 0.02}
    for step in range(1, 100)
]


def test_the_gravest_finding_is_the_title_also_without_the_plugin_and_its_evidence_stands_below(tmp_path):
    log = write_log(tmp_path / "mine" / "metrics.jsonl", COLLAPSED)
    said = clipx("report", log, "--out", tmp_path / "out")
    page = page_of(tmp_path / "out")
    assert "<h1>mine: reward collapse from step 60 on</h1>" in page
    news, _, rest = page.partition('<p class="news">')[2].partition("</p>")
    assert news.startswith("critic/score/mean 0.02 on average") and "Go back to a checkpoint" in news
    # What comes after it: the other findings, folded, and what was clipped.
    assert '<details class="alarm"><summary><b>mine: entropy collapse from step 20 on.</b>' in rest
    assert '<p class="clipping">verl counted 0.50\u202f% of the tokens of mine as clipped.</p>' in rest
    assert said.index("reward collapse") < said.index("entropy collapse") < said.index("verl counted")


def test_under_a_title_of_the_users_own_every_finding_is_folded(tmp_path):
    log = write_log(tmp_path / "mine" / "metrics.jsonl", COLLAPSED)
    clipx("report", log, "--out", tmp_path / "out", "--title", "My run")
    page = page_of(tmp_path / "out")
    assert "<h1>My run</h1>" in page and 'class="news"' not in page
    assert page.count('<details class="alarm">') == 2


ONE_UPDATE = {"actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 8, "ppo_epochs": 1}}}


def test_a_remark_is_the_title_only_where_the_log_does_not_say_what_was_clipped_at_which_bound(tmp_path):
    # One update a rollout batch leaves bounds idle: a remark.
    row = {keys.RATIO: 1.0, keys.KL: 0.0, keys.ENTROPY: 1.0, keys.REWARD: 0.5}
    for name, clipping in (
        ("verls", {keys.PG_CLIPPED: 0.0}),
        ("ours", {keys.CLIPPED_LOW: 0.0, keys.CLIPPED_HIGH: 0.0}),
    ):
        log = write_log(tmp_path / name / "metrics.jsonl", [row | clipping] * 12)
        write_record(log, {"data": {"train_batch_size": 8}, **ONE_UPDATE})
        clipx("report", log, "--out", tmp_path / "out" / name)
    verls, ours = (page_of(tmp_path / "out" / name).partition("<h1>")[2] for name in ("verls", "ours"))
    assert "bounds idle: one update a rollout batch from step 1 on</h1>" in verls
    assert "clipped none of the tokens</h1>" in ours
    assert '<details class="alarm"><summary><b>ours: bounds idle: one update' in ours


def test_that_no_seed_collapsed_is_no_title(tmp_path):
    runs = []
    for name in ("grpo", "acpo"):
        for seed in range(3):
            log = write_log(tmp_path / f"{name}-seed{seed}" / "metrics.jsonl", [{keys.REWARD: 0.5 + 0.01 * seed}] * 5)
            write_record(log, {"clipx": {"method": name}, "data": {"seed": seed}})
            runs.append(log)
    clipx("report", *runs, "--out", tmp_path / "out")
    page = page_of(tmp_path / "out")
    assert "<h1>GRPO against ACPO: what the logs say</h1>" in page
    assert page.index('class="fine remarks"') < page.index("No seed collapsed.")


def test_a_page_that_will_change_reloads_itself(tmp_path):
    logs = [write_log(tmp_path / name / "metrics.jsonl", [{"actor/entropy": 1.0}] * 2) for name in "ab"]
    write_report(logs, tmp_path / "out", reload_every=10)
    page = page_of(tmp_path / "out")
    assert page.count("a against b: what the logs say") == 2 and '<meta http-equiv="refresh" content="10">' in page


def test_runs_of_one_name_in_two_folders_stay_two_also_without_traces(tmp_path):
    for parent, steps in (("a", 2), ("b", 3)):
        write_log(tmp_path / parent / "run" / "metrics.jsonl", [{"actor/entropy": 1.0}] * steps)
    clipx("report", tmp_path / "a" / "run", tmp_path / "b" / "run", "--out", tmp_path / "out")
    page = page_of(tmp_path / "out")
    assert "2 runs · 2 settings" in page and "<td>1 to 2</td>" in page and "<td>1 to 3</td>" in page
    assert 'http-equiv="refresh"' not in page
    # Without traces it begins with charts, and says last how to get them.
    assert page.index(">training step<") < page.index("In numbers") < page.index("+clipx/trace=prompts")
    assert "<script" not in page and "No traces" not in page


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


def test_a_new_metric_of_a_method_is_drawn_by_what_it_declares(tmp_path, monkeypatch):
    new = of_decision("newly", "what no method has logged before", "nats", chart="a new chart")
    monkeypatch.setitem(METHODS, "new", SimpleNamespace(logs=(new,)))
    log = write_log(tmp_path / "run" / "metrics.jsonl", [{"actor/clipx/newly": 0.1}] * 3)
    clipx("report", log, "--out", tmp_path / "out")
    page = page_of(tmp_path / "out")
    assert "<h3>a new chart</h3>" in page and "newly: what no method has logged before (nats)" in page


@pytest.mark.slow
def test_a_report_replaces_what_one_wrote_before_and_nothing_else(tmp_path):
    runs, out = {}, tmp_path / "out"
    for name, traced in (("plain", False), ("traced", True)):
        runs[name] = write_run(tmp_path / name, "bapo", steps=2, traced=traced)
    (out / "figures").mkdir(parents=True)
    (out / "figures" / "mine.svg").write_text("mine")
    write_report([runs["plain"], runs["traced"]], out)
    assert (out / "figures" / "spread_0.svg").exists()
    write_report([runs["plain"]], out, "another title")
    assert not (out / "figures" / "spread_0.svg").exists()
    assert (out / "figures" / "mine.svg").read_text() == "mine" and "<title>another title</title>" in page_of(out)
    # A file of a figure's name that no report wrote.
    (out / "figures" / "spread_0.png").write_text("mine")
    assert "no report wrote this file" in clipx("report", runs["traced"], "--out", out, code=1)
    assert (out / "figures" / "spread_0.png").read_text() == "mine"


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


def test_a_run_named_twice_is_an_error_and_nothing_is_written(tmp_path):
    log = write_log(tmp_path / "run" / "metrics.jsonl", [{"actor/entropy": 1.0}])
    assert "named twice" in clipx("report", log, log, "--out", tmp_path / "out", code=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("record", "happens", "pages"),
    [
        # In each wait a step is logged, nothing, or what ends it. The last page reloads no more.
        (True, ([], [1], [2], [3, release]), [(1, 10), (2, 10), (3, None)]),
        # Where nothing is new nothing is written.
        (False, ([], [2], [mock.Mock(side_effect=KeyboardInterrupt)]), [(1, 10), (2, 10)]),
    ],
    ids=["until it ends", "without a record until it is interrupted"],
)
def test_the_page_grows_with_the_run(tmp_path, monkeypatch, record, happens, pages):
    log, written, coming = tmp_path / "run" / "metrics.jsonl", [], iter(happens)
    log.parent.mkdir()

    def write(paths, out, *_, reload_every, **__):
        written.append((len(read_run(paths[0]).log), reload_every))
        return []

    def add(step):
        with log.open("a") as file:
            file.write(log_line(step, **{"actor/entropy": 1.0}))

    def sleep(_):
        for one in next(coming):
            one() if callable(one) else add(one)

    monkeypatch.setattr(report_page, "write_report", write)
    # Its own name: other threads sleep too.
    monkeypatch.setattr(follow, "time", SimpleNamespace(sleep=sleep))
    if record:
        write_record(log, {"clipx": {"method": "grpo"}})
        take_lock(log.with_suffix(".lock"))
    else:
        add(1)
    try:
        said = clipx("report", log.parent, "--out", tmp_path / "out", "--follow")
    finally:
        release()
    assert written == pages and said.count("no step yet") == record
    assert said.count("written at") == sum(reloads is not None for _, reloads in pages)
    if record:
        # A run that has ended is written once.
        clipx("report", log.parent, "--out", tmp_path / "out", "--follow")
        assert written[len(pages) :] == [(3, None)]
