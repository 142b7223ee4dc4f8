"""The tables of `clipx replay` on the sampler, by age of its weights and by turn: numbers by hand, and where none are.
Not covered: what a worker traces (tests/training/worker/test_tracer.py).
"""

import math

import pytest
from typer.testing import CliRunner

from tests.analysis.runs.commands import answer, clipx
from tests.analysis.runs.example_runs import WHOLE, read_columns, write_run
from verl_clipx.cli import app
from verl_clipx.run.trace_format import shards_in, write_shard


def run_with(folder, **columns):
    """A run whose traced tokens have further columns: functions of a row of an update and of its other columns."""
    run = write_run(folder / "run", "grpo", steps=2)
    traces = run / "traces"
    for shard in shards_in(traces):
        kept = read_columns(traces, shard)
        length = len(kept["token_id"])
        kept |= {name: [of(row, kept) for row in range(length)] for name, of in columns.items()}
        write_shard(traces, shard, kept, WHOLE)
    return run


def apart(row, kept):
    """Tokens of the newest weights differ by what float32 leaves, every third of older ones by log 2."""
    return kept["old_log_prob"][row] - (math.log(2) if row % 2 and row % 3 == 0 else 1e-7 * (-1) ** (row // 2))


def test_tokens_of_each_age_are_counted_with_how_far_recomputed_and_sampled_probabilities_are_apart(tmp_path):
    run = run_with(tmp_path, age=lambda row, _: row % 2, rollout_log_prob=apart)
    by_age = answer("replay", run, "+clipx=grpo")["sampler_by_age"]
    assert list(by_age) == ["0", "1"] and {one["tokens"] for one in by_age.values()} == {384}
    assert by_age["0"]["ESS"] == pytest.approx(1) and by_age["0"]["99 %"] < 1e-6 and by_age["0"]["above 0"] == 0.5
    # Of three ratios one is 2.
    assert by_age["1"]["ESS"] == pytest.approx(16 / 18, rel=1e-4)
    assert by_age["1"]["log-ratio"] == pytest.approx(math.log(2) / 3, rel=1e-4)
    assert by_age["1"]["99 %"] == pytest.approx(math.log(2), rel=1e-4) and by_age["1"]["1 %"] == pytest.approx(
        0, abs=1e-6
    )
    # What was clipped is the run's own share.
    clipped = sum(one["clipped"] for one in by_age.values()) / 2
    numbers = answer("replay", run, "+clipx=grpo")["of_run"]["numbers"]
    whole = sum(numbers[f"clipx/clip_fraction_{side}"]["value"] for side in ("low", "high"))
    assert clipped == pytest.approx(whole) and clipped > 0
    text = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["replay", str(run), "+clipx=grpo"]).output
    (line,) = [line for line in text.splitlines() if line.startswith("│ 1 ")]
    assert "384" in line and "88.9" in line and "0.23" in line and len(line) <= 80
    assert "by turn" not in text


def test_turns_have_a_table_where_there_are_several(tmp_path):
    run = run_with(tmp_path, turn=lambda row, _: row % 12 // 4, age=lambda *_: 0, rollout_log_prob=apart)
    found = answer("replay", run, "+clipx=grpo")["sampler_by_turn"]
    assert {turn: one["tokens"] for turn, one in found.items()} == {"0": 256, "1": 256, "2": 256}
    assert "by turn of the response" in clipx("replay", run, "+clipx=grpo")


def test_in_bypass_mode_the_first_update_is_compared_and_without_a_sampler_nothing(tmp_path):
    run = run_with(tmp_path, age=lambda *_: 0, rollout_log_prob=lambda row, kept: kept["old_log_prob"][row])
    by_age = answer("replay", run, "+clipx=grpo")["sampler_by_age"]
    assert by_age["0"]["tokens"] == 192 and by_age["0"]["ESS"] == pytest.approx(1)
    silent = run_with(tmp_path / "silent", age=lambda *_: 0)
    assert answer("replay", silent, "+clipx=grpo")["sampler_by_age"] == {}
    assert "sampler against" not in clipx("replay", silent, "+clipx=grpo")
