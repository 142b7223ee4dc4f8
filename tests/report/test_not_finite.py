"""Runs with values that are not finite: what the page says, and that it does not break.

Covers: NaN, Infinity and null in the log, validations and traces; skipped updates, counted and by the gradient norm of
older logs. Not covered: how the worker counts them (tests/worker).
"""

import json
import re

import pandas
import pytest

from tests.runs.commands import clipx, page_of
from tests.runs.example_runs import WHOLE, read_columns, write_log, write_run
from verl_clipx.common.traces import Shard, shards_in, write_shard
from verl_clipx.diagnose.findings import findings
from verl_clipx.runs import keys
from verl_clipx.runs.folder import read_run
from verl_clipx.runs.settings import settings_of
from verl_clipx.trainer.log import write_record

NAN = float("nan")
CONFIGURATION = {
    "clipx": {"method": "acpo"},
    "data": {"seed": 1, "train_batch_size": 64},
    "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 8, "ppo_epochs": 1}},
}


def row(**more):
    """A step's metrics while no update is taken: the ratio stays 1."""
    return {
        keys.REWARD: 0.5,
        keys.ENTROPY: 1.0,
        keys.KL: 0.0,
        keys.RATIO: 1.0,
        keys.CLIPPED_LOW: 0.0,
        keys.CLIPPED_HIGH: 0.0,
        keys.GRADIENT_NORM: 0.3,
        **{key.replace("__", "/"): value for key, value in more.items()},
    }


def write(folder, rows, configuration=CONFIGURATION):
    log = write_log(folder / "metrics.jsonl", rows)
    if configuration:
        write_record(log, configuration)
    return folder


def told(*folders):
    return findings(settings_of([read_run(folder) for folder in folders]))


def report(folder, *runs):
    clipx("report", *runs, "--out", folder / "out")
    return page_of(folder / "out")


def skipping(counts):
    return [row(**{keys.SKIPPED_UPDATES: float(count)}) for count in counts]


def test_skipped_updates_come_first_and_no_smaller_mini_batch_is_advised(tmp_path):
    run = write(tmp_path / "mine", skipping([0, 6, 8, 4]))
    first, *others = told(run)
    # Of the three steps since the first that skipped any, 8 updates each.
    assert first.head == "ACPO, seed 1: skipped updates from step 2 on."
    assert "18 of 24 updates skipped since." in first.text and "The policy stayed as it was" in first.text
    assert not any("mini_batch" in one.text for one in (first, *others))
    assert any("mini_batch" in one.text for one in told(write(tmp_path / "healthy", skipping([0, 0, 0]))))


@pytest.mark.parametrize("configuration", [{}, {"clipx": {"method": "acpo"}}, {"data": {"train_batch_size": 0}}])
def test_without_a_known_number_of_updates_the_skipped_ones_are_counted(tmp_path, configuration):
    assert told(write(tmp_path / "mine", skipping([1, 0]), configuration))[0].text.startswith("1 update skipped since.")


@pytest.mark.parametrize("value", [NAN, float("inf"), None])
def test_in_older_logs_the_gradient_norm_is_the_evidence(tmp_path, value):
    rows = [row(), row(**{keys.GRADIENT_NORM: value}), row(), row(**{keys.GRADIENT_NORM: value})]
    first, *others = told(write(tmp_path / "mine", rows))
    assert first.head == "ACPO, seed 1: skipped updates from step 2 on."
    assert first.text.startswith("updates skipped in 2 of 3 steps since")
    # The skipped updates are these values.
    assert not any("not finite" in one.head or "mini_batch" in one.text for one in others)
    zero = [{**one, keys.SKIPPED_UPDATES: 0.0} for one in rows]
    assert not any("skipped" in one.head for one in told(write(tmp_path / "counted", zero)))


@pytest.mark.parametrize("value", [NAN, float("inf"), float("-inf"), None])
def test_rewards_that_are_not_finite_are_named_counted_and_left_out(tmp_path, value):
    rows = [row(**{keys.REWARD: reward, "actor/pg_loss": value}) for reward in (0.2, value, 0.4, value)]
    found = told(write(tmp_path / "mine", rows), write(tmp_path / "theirs", [row()] * 4, {"clipx": {"method": "grpo"}}))
    assert found[0].head == "ACPO, seed 1: values that are not finite from step 1 on."
    texts = "\n".join(f"{one.head} {one.text}" for one in found)
    assert texts.count(f"{keys.REWARD} in 2 steps") == texts.count("actor/pg_loss in 4 steps") == 1
    (of_rewards,) = [one for one in found if one.head.startswith("The training reward")]
    assert of_rewards.head == "The training reward was 0.500 in GRPO and 0.300 in ACPO, seed 1."
    assert "Means over 2 steps" in of_rewards.text


@pytest.mark.slow
def test_the_page_says_so_first(tmp_path):
    rows = [row(**{keys.REWARD: reward, keys.SKIPPED_UPDATES: 2.0}) for reward in (0.2, NAN, 0.4, None)]
    page = report(tmp_path, write(tmp_path / "mine", rows))
    assert "<summary><b>ACPO, seed 1: skipped updates from step 1 on.</b></summary><p>8 of 32" in page
    assert "ACPO, seed 1: values that are not finite from step 2 on." in page and ">nan<" not in page


@pytest.mark.slow
@pytest.mark.parametrize("method", ["acpo", "bapo", "dgpo"])
def test_no_series_breaks_sentences_or_figures(tmp_path, method):
    """Each series in turn, at one step and at all; in figures, which leave a series out, half of them and all."""
    run = write_run(tmp_path / method, method, traced=False, steps=3)
    rows = [json.loads(line)["data"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = sorted({name for row in rows for name in row})

    def change(chosen, steps, value):
        damaged = dict.fromkeys(chosen, value)
        write_log(run / "metrics.jsonl", [row | (damaged if at in steps else {}) for at, row in enumerate(rows, 1)])

    for steps in ({2}, {1, 2, 3}):
        for name in names:
            change([name], steps, NAN if len(name) % 2 else None)
            assert all("nan" not in f"{one.head} {one.text}".lower() for one in told(run)), (name, steps)
        for chosen in (names[::2], names[1::2], names):
            change(chosen, steps, NAN)
            report(tmp_path, run)


def test_held_out_scores_that_are_not_finite_are_left_out(tmp_path):
    run = write(tmp_path / "mine", [row(), row()])
    (run / "validation").mkdir()
    problem = '{{"input": "{}", "score": {}}}\n'
    (run / "validation" / "0.jsonl").write_text("".join(problem.format(i, i % 2) for i in range(8)))
    (run / "validation" / "2.jsonl").write_text("".join(problem.format(i, "NaN" if i else "null") for i in range(8)))
    assert f"{keys.HELD_OUT} in 1 step." in told(run)[0].text
    report(tmp_path, run)


@pytest.mark.slow
def test_traced_tokens_that_are_not_finite_do_not_break_the_page(tmp_path):
    run = write_run(tmp_path / "run", "acpo", steps=2)
    last = shards_in(run / "traces")[-1]
    columns = read_columns(run / "traces", last)
    for name in ("advantage", "score", "ratio", "weight", "high", "log_prob", "old_log_prob", "entropy"):
        columns[name][::7] = [NAN] * len(columns[name][::7])
    write_shard(run / "traces", Shard(last.step, last.update + 1, 0), columns, WHOLE)
    page = report(tmp_path, run)
    data = page.split('id="data">')[1].split("</script>")[0]
    assert not re.search(r"\bNaN\b", data) and json.loads(data)


def test_the_table_of_numbers_keeps_what_is_finite(tmp_path):
    run = write(tmp_path / "mine", [row(), row(**{keys.REWARD: NAN}), row(**{keys.REWARD: None})])
    report(tmp_path, run)
    table = pandas.read_csv(tmp_path / "out" / "metrics.csv")
    assert table[keys.REWARD].notna().tolist() == [True, False, False] and len(table) == 3
