"""The tables of `clipx replay` on the sampler, by age of its weights and by turn: numbers by hand, and where none are.
Not covered: what a worker traces (tests/training/worker/test_tracer.py).
"""

import math

import pytest
from typer.testing import CliRunner

from tests.analysis.runs.commands import answer, clipx
from tests.analysis.runs.example_runs import WHOLE_UPDATE, read_columns, write_run
from tests.messages import assert_names
from verl_clipx.cli import app
from verl_clipx.run.trace_format import shards_in, write_shard


def write_run_with(folder, **columns):
    """Write a run whose traced tokens have further columns.

    Args:
        folder: where the run's folder is made.
        columns: from a name to a function that takes the row of a token in its update, and the other columns, and
            returns the token's value.
    """
    run = write_run(folder / "run", "grpo", steps=2)
    traces = run / "traces"
    for shard in shards_in(traces):
        content = read_columns(traces, shard)
        rows = range(len(content["token_id"]))
        content |= {name: [value_of(row, content) for row in rows] for name, value_of in columns.items()}
        write_shard(traces, shard, content, WHOLE_UPDATE)
    return run


def age_0(row, content):
    return 0


def age_of_row(row, content):
    """Every other token is of weights that are one version older."""
    return row % 2


def turn_of_row(row, content):
    """Each response has 12 tokens, 4 of each of three turns."""
    return row % 12 // 4


def equal_log_prob(row, content):
    """The sampler's log-probability is the recomputed one."""
    return content["old_log_prob"][row]


def distant_log_prob(row, content):
    """The sampler's log-probability differs by what float32 leaves, but by log 2 for each third token of age 1."""
    if row % 2 == 1 and row % 3 == 0:
        return content["old_log_prob"][row] - math.log(2)
    return content["old_log_prob"][row] - 1e-7 * (-1) ** (row // 2)


@pytest.fixture
def run_of_two_ages(tmp_path):
    return write_run_with(tmp_path, age=age_of_row, rollout_log_prob=distant_log_prob)


def test_tokens_of_each_age_are_counted_with_how_far_recomputed_and_sampled_probabilities_are_apart(run_of_two_ages):
    by_age = answer("replay", run_of_two_ages, "+clipx=grpo")["sampler_by_age"]
    assert {age: numbers["tokens"] for age, numbers in by_age.items()} == {"0": 384, "1": 384}
    newest = by_age["0"]
    assert newest["ESS"] == pytest.approx(1)
    assert newest["99 %"] < 1e-6
    assert newest["above 0"] == 0.5
    # Of three ratios one is 2, so that the effective sample size is (1 + 1 + 2)^2 / (3 (1 + 1 + 4)).
    older = by_age["1"]
    assert older["ESS"] == pytest.approx(16 / 18, rel=1e-4)
    assert older["log-ratio"] == pytest.approx(math.log(2) / 3, rel=1e-4)
    assert older["99 %"] == pytest.approx(math.log(2), rel=1e-4)
    assert older["1 %"] == pytest.approx(0, abs=1e-6)


def test_what_was_clipped_at_the_ages_is_what_the_run_clipped(run_of_two_ages):
    content = answer("replay", run_of_two_ages, "+clipx=grpo")
    # Both ages have as many tokens.
    clipped = sum(numbers["clipped"] for numbers in content["sampler_by_age"].values()) / 2
    of_run = content["of_run"]["numbers"]
    clipped_low = of_run["clipx/clip_fraction_low"]["value"]
    clipped_high = of_run["clipx/clip_fraction_high"]["value"]
    assert clipped == pytest.approx(clipped_low + clipped_high)
    assert clipped > 0


def test_the_table_by_age_fits_80_columns(run_of_two_ages):
    arguments = ["replay", str(run_of_two_ages), "+clipx=grpo"]
    output = CliRunner(env={"COLUMNS": "80"}).invoke(app, arguments).output
    (row,) = [line for line in output.splitlines() if line.startswith("│ 1 ")]
    assert len(row) <= 80
    # Tokens, effective sample size in per cent, mean log-ratio.
    assert_names(row, "384", "88.9", "0.23")
    assert "by turn" not in output


def test_turns_have_a_table_where_there_are_several(tmp_path):
    run = write_run_with(tmp_path, turn=turn_of_row, age=age_0, rollout_log_prob=distant_log_prob)
    by_turn = answer("replay", run, "+clipx=grpo")["sampler_by_turn"]
    assert {turn: numbers["tokens"] for turn, numbers in by_turn.items()} == {"0": 256, "1": 256, "2": 256}
    assert "by turn of the response" in clipx("replay", run, "+clipx=grpo")


def test_in_bypass_mode_the_first_update_is_compared(tmp_path):
    run = write_run_with(tmp_path, age=age_0, rollout_log_prob=equal_log_prob)
    newest = answer("replay", run, "+clipx=grpo")["sampler_by_age"]["0"]
    assert newest["tokens"] == 192
    assert newest["ESS"] == pytest.approx(1)


def test_without_the_sampler_s_log_probabilities_nothing_is_compared(tmp_path):
    run = write_run_with(tmp_path, age=age_0)
    assert answer("replay", run, "+clipx=grpo")["sampler_by_age"] == {}
    assert "sampler against" not in clipx("replay", run, "+clipx=grpo")
