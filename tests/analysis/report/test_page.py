"""`clipx report`: what it writes and says of several runs, of one and without traces; what it refuses; its size; the
page that --follow writes anew while a run trains, until it ends or is interrupted. Not covered: the page in a browser
(test_report_page.py), long runs (test_figures.py), a lock that another host holds, how it looks.
"""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pandas
import pytest

from tests.analysis.runs.commands import clipx, page_of
from tests.analysis.runs.example_runs import WHOLE_UPDATE, log_line, read_columns, write_log, write_run
from tests.messages import assert_names
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
    """Two runs of grpo and one of acpo."""
    folder = tmp_path_factory.mktemp("runs")
    return [
        write_run(folder / "grpo-seed1", "grpo", seed=1),
        write_run(folder / "grpo-seed2", "grpo", seed=2),
        write_run(folder / "acpo-seed1", "acpo", seed=1),
    ]


class Report(NamedTuple):
    """A report that was written: what the command printed, the folder, and the page in it."""

    output: str
    folder: Path
    page: str


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory) -> Report:
    """A report on the runs, whose title needs escaping."""
    folder = tmp_path_factory.mktemp("report") / "out"
    output = clipx("report", *runs, "--out", folder, "--title", "a < b")
    return Report(output=output, folder=folder, page=page_of(folder))


def find_attributes(page: str, name: str) -> list[str]:
    """Return the values of an attribute in a page."""
    return re.findall(rf'(?<![\w-]){name}="([^"]*)"', page)


def test_the_page_names_what_was_compared(report):
    assert "<h1>a &lt; b</h1>" in report.page
    assert "3 runs · 2 settings" in report.page
    assert "verl 0.9." in report.page
    assert "<td>clipx.method</td><td>grpo</td><td>acpo</td>" in report.page
    assert "alpha 3" in report.page
    assert "the band spans them, from the lowest" in report.page
    assert_names(report.output, "GRPO clipped")
    assert "report.html" in report.output


def test_the_page_needs_no_network(report):
    links = find_attributes(report.page, "src") + find_attributes(report.page, "href")
    assert links
    assert all(link.startswith(("#", "data:,", "metrics.csv", "figures")) for link in links)
    assert "@import" not in report.page
    assert "url(http" not in report.page


def test_the_figures_of_the_page_are_files_too(report):
    # Reward, length, entropy, … and the clipping of each setting: every figure over steps says so below its axis.
    assert report.page.count(">training step<") == 10
    assert report.page.count('role="img"') == 13
    files = list((report.folder / "figures").glob("[!.]*"))
    assert {path.suffix for path in files} == {".svg", ".png"}
    assert len({path.stem for path in files}) == 13
    ids = find_attributes(report.page, "id")
    assert len(ids) == len(set(ids))


def test_the_table_has_the_numbers_of_the_logs(report, runs):
    table = pandas.read_csv(report.folder / "metrics.csv")
    assert list(table["run"].unique()) == [run.name for run in runs]
    line = json.loads((runs[2] / "metrics.jsonl").read_text().splitlines()[2])
    row = table[(table["run"] == "acpo-seed1") & (table["step"] == 3)].iloc[0]
    assert row["actor/clipx/epsilon/bin_0"] == pytest.approx(line["data"]["actor/clipx/epsilon/bin_0"])


def test_what_verl_counts_on_both_sides_is_not_called_clipped_low(tmp_path):
    log = write_log(tmp_path / "run" / "metrics.jsonl", [{keys.PG_CLIPPED: 0.02, keys.ENTROPY: 1.0}] * 3)
    clipx("report", log, "--out", tmp_path / "out")
    _, after_first_figure = page_of(tmp_path / "out").split('id="numbers"')
    assert "How many tokens verl counts as clipped" in after_first_figure
    assert "both sides, as verl counts" in after_first_figure
    # The glossary at the end explains what other runs have.
    figures = after_first_figure.partition("Regions:")[0]
    assert "clipped low" not in figures
    assert "violet" not in figures


# As verl logs it without the plugin: the entropy collapses at step 20, and the reward at step 60.
COLLAPSE_OF_VERLS_OWN_RUN = [
    {
        keys.PG_CLIPPED: 0.005,
        keys.ENTROPY: 1.0 if step < 20 else 0.01,
        keys.REWARD: 0.5 if step < 60 else 0.02,
    }
    for step in range(1, 100)
]


def test_the_gravest_finding_is_the_title_also_without_the_plugin_and_its_evidence_stands_below(tmp_path):
    log = write_log(tmp_path / "mine" / "metrics.jsonl", COLLAPSE_OF_VERLS_OWN_RUN)
    output = clipx("report", log, "--out", tmp_path / "out")
    page = page_of(tmp_path / "out")
    assert "<h1>mine: reward collapse from step 60 on</h1>" in page
    evidence, _, rest = page.partition('<p class="news">')[2].partition("</p>")
    assert evidence.startswith("critic/score/mean 0.02 on average")
    assert_names(evidence, "Go back to a checkpoint")
    # What comes after it: the other findings, folded, and what was clipped.
    assert '<details class="alarm"><summary><b>mine: entropy collapse from step 20 on.</b>' in rest
    assert '<p class="clipping">verl counted 0.50\u202f% of the tokens of mine as clipped.</p>' in rest
    assert output.index("reward collapse") < output.index("entropy collapse") < output.index("verl counted")


def test_under_a_title_of_the_users_own_every_finding_is_folded(tmp_path):
    log = write_log(tmp_path / "mine" / "metrics.jsonl", COLLAPSE_OF_VERLS_OWN_RUN)
    clipx("report", log, "--out", tmp_path / "out", "--title", "My run")
    page = page_of(tmp_path / "out")
    assert "<h1>My run</h1>" in page
    assert 'class="news"' not in page
    assert page.count('<details class="alarm">') == 2


def report_on_one_update_a_rollout_batch(folder, clipping):
    """Write a report on a run whose bounds are idle, which is a remark, and return the page from its title on."""
    row = {keys.RATIO: 1.0, keys.KL: 0.0, keys.ENTROPY: 1.0, keys.REWARD: 0.5}
    log = write_log(folder / "mine" / "metrics.jsonl", [row | clipping] * 12)
    configuration = {
        "data": {"train_batch_size": 8},
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 8, "ppo_epochs": 1}},
    }
    write_record(log, configuration)
    clipx("report", log, "--out", folder / "out")
    return page_of(folder / "out").partition("<h1>")[2]


def test_a_remark_is_the_title_where_the_log_does_not_say_what_was_clipped_at_which_bound(tmp_path):
    page = report_on_one_update_a_rollout_batch(tmp_path, {keys.PG_CLIPPED: 0.0})
    assert page.startswith("mine: bounds idle: one update a rollout batch from step 1 on</h1>")


def test_a_remark_is_folded_where_the_log_says_what_was_clipped(tmp_path):
    page = report_on_one_update_a_rollout_batch(tmp_path, {keys.CLIPPED_LOW: 0.0, keys.CLIPPED_HIGH: 0.0})
    assert "clipped none of the tokens</h1>" in page
    assert '<details class="alarm"><summary><b>mine: bounds idle: one update' in page


def test_that_no_seed_collapsed_is_no_title(tmp_path):
    runs = []
    for method in ("grpo", "acpo"):
        for seed in range(3):
            steps = [{keys.REWARD: 0.5 + 0.01 * seed}] * 5
            log = write_log(tmp_path / f"{method}-seed{seed}" / "metrics.jsonl", steps)
            write_record(log, {"clipx": {"method": method}, "data": {"seed": seed}})
            runs.append(log)
    clipx("report", *runs, "--out", tmp_path / "out")
    page = page_of(tmp_path / "out")
    assert "<h1>GRPO against ACPO: what the logs say</h1>" in page
    assert page.index('class="fine remarks"') < page.index("No seed collapsed.")


def test_a_page_that_will_change_reloads_itself(tmp_path):
    logs = [write_log(tmp_path / name / "metrics.jsonl", [{"actor/entropy": 1.0}] * 2) for name in "ab"]
    write_report(logs, tmp_path / "out", reload_every=10)
    page = page_of(tmp_path / "out")
    assert page.count("a against b: what the logs say") == 2
    assert '<meta http-equiv="refresh" content="10">' in page


@pytest.fixture
def page_of_runs_of_one_name(tmp_path):
    """A page on two runs without traces, of 2 and 3 steps."""
    for folder, steps in (("a", 2), ("b", 3)):
        write_log(tmp_path / folder / "run" / "metrics.jsonl", [{"actor/entropy": 1.0}] * steps)
    clipx("report", tmp_path / "a" / "run", tmp_path / "b" / "run", "--out", tmp_path / "out")
    return page_of(tmp_path / "out")


def test_runs_of_one_name_in_two_folders_stay_two(page_of_runs_of_one_name):
    assert "2 runs · 2 settings" in page_of_runs_of_one_name
    assert "<td>1 to 2</td>" in page_of_runs_of_one_name
    assert "<td>1 to 3</td>" in page_of_runs_of_one_name
    assert 'http-equiv="refresh"' not in page_of_runs_of_one_name


def test_without_traces_the_page_begins_with_charts_and_says_last_how_to_get_traces(page_of_runs_of_one_name):
    page = page_of_runs_of_one_name
    assert page.index(">training step<") < page.index("In numbers") < page.index("+clipx/trace=prompts")
    assert "<script" not in page
    assert "No traces" not in page


BAPO_MEANS = {"actor/clipx/c_low": 0.6, "actor/clipx/c_high": 1.2}
BAPO_LAST = {"actor/clipx/c_low_last": 0.5, "actor/clipx/c_high_last": 5.0}
ACPO_MEANS = {"actor/clipx/epsilon/bin_0": 0.3, "actor/clipx/epsilon/bin_1": 0.2}
ACPO_LAST = {"actor/clipx/epsilon_last/bin_0": 4.0, "actor/clipx/epsilon_last/bin_1": 0.2}


@pytest.mark.parametrize(
    ("means", "last", "dashed_lines"),
    [
        pytest.param(BAPO_MEANS, BAPO_LAST, 2, id="bapo"),
        # Two bounds of each of two bins.
        pytest.param(ACPO_MEANS, ACPO_LAST, 4, id="acpo"),
    ],
)
def test_the_last_updates_bounds_are_dashed_and_within_the_figure(tmp_path, means, last, dashed_lines):
    clipx("report", write_log(tmp_path / "run/metrics.jsonl", [means | last] * 3), "--out", tmp_path / "out")
    page = page_of(tmp_path / "out")
    assert "Dashed: those of its last update." in page
    assert "can lie much further out" not in page
    figure = (tmp_path / "out/figures/bounds_0.svg").read_text()
    assert figure.count("stroke-dasharray: ") == dashed_lines
    # The axis reaches the widest.
    assert ">4<" in figure


@pytest.mark.parametrize("means", [BAPO_MEANS, ACPO_MEANS], ids=["bapo", "acpo"])
def test_without_the_last_updates_bounds_the_page_says_that_they_can_lie_further_out(tmp_path, means):
    clipx("report", write_log(tmp_path / "run/metrics.jsonl", [means] * 3), "--out", tmp_path / "out")
    page = page_of(tmp_path / "out")
    assert "Dashed: those of its last update." not in page
    assert "can lie much further out" in page
    figure = (tmp_path / "out/figures/bounds_0.svg").read_text()
    assert "stroke-dasharray: " not in figure
    assert ">4<" not in figure


def test_a_new_metric_of_a_method_is_drawn_by_what_it_declares(tmp_path, monkeypatch):
    metric = of_decision("newly", "what no method has logged before", "nats", chart="a new chart")
    monkeypatch.setitem(METHODS, "new", SimpleNamespace(logs=(metric,)))
    log = write_log(tmp_path / "run" / "metrics.jsonl", [{"actor/clipx/newly": 0.1}] * 3)
    clipx("report", log, "--out", tmp_path / "out")
    page = page_of(tmp_path / "out")
    assert "<h3>a new chart</h3>" in page
    assert "newly: what no method has logged before (nats)" in page


@pytest.mark.slow
def test_a_report_replaces_what_one_wrote_before_and_nothing_else(tmp_path):
    plain = write_run(tmp_path / "plain", "bapo", steps=2, traced=False)
    traced = write_run(tmp_path / "traced", "bapo", steps=2)
    out = tmp_path / "out"
    figures = out / "figures"
    figures.mkdir(parents=True)
    (figures / "mine.svg").write_text("mine")
    write_report([plain, traced], out)
    assert (figures / "spread_0.svg").exists()
    write_report([plain], out, "another title")
    assert not (figures / "spread_0.svg").exists()
    assert (figures / "mine.svg").read_text() == "mine"
    assert "<title>another title</title>" in page_of(out)
    # A file of a figure's name that no report wrote.
    (figures / "spread_0.png").write_text("mine")
    assert_names(clipx("report", traced, "--out", out, code=1), "spread_0.png", "no report wrote this file")
    assert (figures / "spread_0.png").read_text() == "mine"


@pytest.mark.slow
def test_the_largest_page_is_small_enough_and_quick(tmp_path):
    completions = 64
    # The page shows 512 of them.
    tokens_of_completion = 600
    run = write_run(tmp_path / "run", "acpo", steps=2)
    shard = shards_in(run / "traces")[-1]
    traced = read_columns(run / "traces", shard)
    columns = {
        name: [value for value in values[: 3 * completions : 3] for _ in range(tokens_of_completion)]
        for name, values in traced.items()
    }
    places = range(completions * tokens_of_completion)
    columns |= {
        "prompt": ["p" for _ in places],
        "sample": [place // tokens_of_completion for place in places],
        "position": [place % tokens_of_completion for place in places],
        "advantage": [0.5 for _ in places],
    }
    write_shard(run / "traces", Shard(shard.step, shard.update + 1, 0), columns, WHOLE_UPDATE)
    started = time.process_time()
    clipx("report", run, "--out", tmp_path / "out")
    assert time.process_time() - started < 30
    page = page_of(tmp_path / "out")
    assert page.count('class="line"') == completions
    assert page.count("88 more") == completions
    assert len(page.encode()) < MOST_BYTES


def test_a_run_named_twice_is_an_error_and_nothing_is_written(tmp_path):
    log = write_log(tmp_path / "run" / "metrics.jsonl", [{"actor/entropy": 1.0}])
    assert "named twice" in clipx("report", log, log, "--out", tmp_path / "out", code=1)
    assert not (tmp_path / "out").exists()


class FollowedRun:
    """A run that logs steps while the command waits, and a stand-in for what writes the page.

    Args:
        folder: the run's.
        waits: for each wait of the command, a function that is called in it.

    Attributes:
        pages: of each page that was written, how many steps it had, and after how many seconds it reloads itself.
    """

    def __init__(self, folder: Path, waits: list[Callable[[], None]]):
        folder.mkdir()
        self.folder = folder
        self.log = folder / "metrics.jsonl"
        self.waits = iter(waits)
        self.pages: list[tuple[int, int | None]] = []

    def log_step(self, step: int) -> None:
        with self.log.open("a") as file:
            file.write(log_line(step, **{"actor/entropy": 1.0}))

    def write_report(self, paths, out, *_, reload_every=None, **__) -> list:
        self.pages.append((len(read_run(paths[0]).log), reload_every))
        return []

    def sleep(self, _) -> None:
        next(self.waits)()


@pytest.fixture
def follow_run(tmp_path, monkeypatch):
    """A function that makes a FollowedRun and puts it in place of the page's writer and of the clock."""

    def make(waits) -> FollowedRun:
        run = FollowedRun(tmp_path / "run", waits)
        monkeypatch.setattr(report_page, "write_report", run.write_report)
        # Its own name: other threads sleep too.
        monkeypatch.setattr(follow, "time", SimpleNamespace(sleep=run.sleep))
        return run

    yield make
    release()


def test_the_page_grows_until_the_run_ends_and_then_reloads_no_more(tmp_path, follow_run):
    def log_last_step_and_end():
        run.log_step(3)
        release()

    run = follow_run([lambda: None, lambda: run.log_step(1), lambda: run.log_step(2), log_last_step_and_end])
    write_record(run.log, {"clipx": {"method": "grpo"}})
    take_lock(run.log.with_suffix(".lock"))
    output = clipx("report", run.folder, "--out", tmp_path / "out", "--follow")
    assert run.pages == [(1, 10), (2, 10), (3, None)]
    assert output.count("no step yet") == 1
    assert output.count("written at") == 2


def test_the_page_of_a_run_that_has_ended_is_written_once(tmp_path, follow_run):
    run = follow_run([])
    run.log_step(1)
    write_record(run.log, {"clipx": {"method": "grpo"}})
    take_lock(run.log.with_suffix(".lock"))
    release()
    clipx("report", run.folder, "--out", tmp_path / "out", "--follow")
    assert run.pages == [(1, None)]


def test_without_a_record_the_page_grows_until_the_command_is_interrupted(tmp_path, follow_run):
    def interrupt():
        raise KeyboardInterrupt

    # Where nothing is new, nothing is written.
    run = follow_run([lambda: None, lambda: run.log_step(2), interrupt])
    run.log_step(1)
    output = clipx("report", run.folder, "--out", tmp_path / "out", "--follow")
    assert run.pages == [(1, 10), (2, 10)]
    assert "no step yet" not in output
    assert output.count("written at") == 2
