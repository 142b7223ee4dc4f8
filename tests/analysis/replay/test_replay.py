"""`clipx replay` on runs whose every token is traced: what methods do to them, what the output says, what is refused.
Where the trace has a part of the tokens: estimates with intervals, which are never called exact. Not covered: traces of
the worker (test_workers_traces.py), tables on the sampler (test_sampler.py).
"""

import json
import re
from typing import NamedTuple

import numpy
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import torch
from typer.testing import CliRunner

from tests.analysis.runs.commands import answer, clipx
from tests.analysis.runs.example_runs import write_log, write_run
from tests.messages import assert_names
from verl_clipx.analysis.replay import traced_numbers
from verl_clipx.analysis.runs.run_log import read_run_log
from verl_clipx.cli import app
from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.run.trace_format import Shard, UpdateFacts, read_shards, shards_in, write_shard


@pytest.fixture(scope="module")
def grpo_run(tmp_path_factory):
    """A run of grpo that traced the steps 2, 4 and 6."""
    return write_run(tmp_path_factory.mktemp("runs") / "grpo-seed1", "grpo")


def number_of_first_setting(content: dict, name: str) -> float:
    return content["settings"][0]["numbers"][name]["value"]


def read_tokens(run, step: int | None = None) -> pandas.DataFrame:
    """Return the traced tokens of a step, or of all steps, a row each."""
    shards = [shard for shard in shards_in(run / "traces") if step in (None, shard.step)]
    return read_shards(run / "traces", shards).to_pandas()


@pytest.mark.parametrize("method", ["acpo", "bapo", "grpo"])
def test_the_runs_own_setting_has_its_bounds_and_its_logged_metrics(tmp_path, method):
    run = write_run(tmp_path / f"{method}-seed1", method)
    content = answer("replay", run)
    (setting,) = content["settings"]
    assert content["exact"]
    assert setting["exact"]
    assert setting["bounds_against_run"] <= 1e-6
    assert setting["regained"] == 0
    assert setting["lost"] == 0
    assert setting["numbers"]["cosine"]["value"] == pytest.approx(1)
    assert setting["numbers"]["norm_ratio"]["value"] == pytest.approx(1)
    logged = read_run_log(run / "metrics.jsonl").loc[6]
    for name in ("clip_fraction_low", "clip_fraction_high", "gradient_mass/M", "effective_sample_size"):
        expected = pytest.approx(logged[f"actor/clipx/{name}"], rel=1e-5)
        assert setting["numbers"][f"clipx/{name}"]["value"] == expected
        if "clip" in name:
            assert content["of_run"]["numbers"][f"clipx/{name}"]["value"] == expected


def test_a_record_whose_bounds_are_not_those_that_acted_is_seen(tmp_path):
    run = write_run(tmp_path / "grpo-seed1", "grpo", steps=2)
    record = json.loads((run / "metrics.run.json").read_text())
    record["configuration"]["clipx.clip_high"] = 1.5
    record["loss"]["parameters"]["clip_high"] = 1.5
    (run / "metrics.run.json").write_text(json.dumps(record))
    (setting,) = answer("replay", run)["settings"]
    # 1.5 against 1.2.
    assert setting["bounds_against_run"] == pytest.approx(0.3 / 1.2, rel=1e-5)


class ReplayByHand(NamedTuple):
    """What another method does to a step's tokens; see the output of the command for the meaning."""

    clip_fraction_low: float
    clip_fraction_high: float
    regained: int
    lost: int
    cosine: float
    norm_ratio: float


def replay_acpo_by_hand(tokens: pandas.DataFrame, alpha: float) -> ReplayByHand:
    """Apply ACPO's formula to the tokens of a step, with statistics over each update."""
    fractions_low = []
    fractions_high = []
    regained = 0
    lost = 0
    product = 0.0
    square_of_acpo = 0.0
    square_of_run = 0.0
    for _, update in tokens.groupby("update"):
        ratio = update.ratio.to_numpy(float)
        advantage = update.advantage.to_numpy(float)
        probability = numpy.exp(update.old_log_prob.to_numpy(float))
        bins = numpy.clip((probability * 5).astype(int), 0, 4)
        sigmas = numpy.zeros(5)
        for index in range(5):
            in_bin = bins == index
            if in_bin.any():
                sigmas[index] = ratio[in_bin].std()
        epsilon = (alpha * sigmas + 0.2)[bins]
        clipped_high = (ratio > 1 + epsilon) & (advantage > 0)
        clipped_low = (ratio < 1 - epsilon) & (advantage < 0)
        fractions_low.append(clipped_low.mean())
        fractions_high.append(clipped_high.mean())
        gradient_of_run = (update.weight * update.advantage).to_numpy()
        gradient_of_acpo = numpy.where(clipped_high | clipped_low, 0, ratio) * advantage
        regained += ((gradient_of_run == 0) & (gradient_of_acpo != 0)).sum()
        lost += ((gradient_of_run != 0) & (gradient_of_acpo == 0)).sum()
        product += gradient_of_run @ gradient_of_acpo
        square_of_acpo += gradient_of_acpo @ gradient_of_acpo
        square_of_run += gradient_of_run @ gradient_of_run
    return ReplayByHand(
        clip_fraction_low=numpy.mean(fractions_low),
        clip_fraction_high=numpy.mean(fractions_high),
        regained=regained,
        lost=lost,
        cosine=product / (square_of_acpo * square_of_run) ** 0.5,
        norm_ratio=(square_of_acpo / square_of_run) ** 0.5,
    )


def test_another_method_does_what_its_formula_says(grpo_run):
    content = answer("replay", grpo_run, "--step", 4, "+clipx=acpo", "clipx.alpha=1,2", "--tokens", 1000)
    assert [setting["setting"] for setting in content["settings"]] == ["acpo alpha=1", "acpo alpha=2"]
    tokens = read_tokens(grpo_run, step=4)
    for alpha, setting in zip((1, 2), content["settings"], strict=True):
        expected = replay_acpo_by_hand(tokens, alpha)
        numbers = {name: number["value"] for name, number in setting["numbers"].items()}
        assert numbers["clipx/clip_fraction_low"] == pytest.approx(expected.clip_fraction_low, abs=1e-7)
        assert numbers["clipx/clip_fraction_high"] == pytest.approx(expected.clip_fraction_high, abs=1e-7)
        assert numbers["cosine"] == pytest.approx(expected.cosine, rel=1e-5)
        assert numbers["norm_ratio"] == pytest.approx(expected.norm_ratio, rel=1e-5)
        assert setting["regained"] == expected.regained > 0
        assert setting["lost"] == expected.lost
        assert len(setting["tokens"]) == expected.regained + expected.lost
        listed = setting["tokens"][0]
        (traced_text,) = tokens.query(
            "prompt == @listed['prompt'] and sample == @listed['sample'] and position == @listed['position']"
        ).text
        assert listed["text"] == traced_text
        assert listed["change"] == "regained"


def test_the_output_counts_the_tokens_quotes_words_and_names_the_limits(grpo_run):
    output = clipx("replay", grpo_run, "+clipx=acpo", "clipx.alpha=2")
    assert_names(output, "768 tokens", "8 prompts", "all that there were", "as traced")
    assert re.search(r"`<answer>` \((once|\d+ times)\)", output)
    assert_names(output, "What the policy would have become is not known")
    assert "estimate" not in output


def test_the_tables_fit_80_columns_and_say_what_is_only_outside_the_bounds(grpo_run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["replay", str(grpo_run), "+clipx=acpo", "clipx.alpha=1,2", "+clipx=dgpo"]
    output = CliRunner().invoke(app, arguments).output
    table_lines = [line for line in output.splitlines() if line.startswith(("│", "┃"))]
    assert max(len(line) for line in table_lines) <= 80
    # DGPO clips nothing, so that both its sides are only outside.
    outside_by_line = [line.count("outside") for line in table_lines]
    assert max(outside_by_line) == 2
    assert sum(outside_by_line) == 2
    # A ratio has no negative bounds.
    assert "-" not in "".join(table_lines)
    assert_names(" ".join(output.split()), "norm ratio: its length over the run’s")


def test_a_loss_of_ones_own(grpo_run, tmp_path, monkeypatch):
    (tmp_path / "half_clip.py").write_text(
        "import torch\nfrom verl_clipx import register_loss\n\n"
        "@register_loss('half_clip')\ndef half_clip(ratio, advantages, bounds):\n"
        "    return torch.where(ratio > 1, 0.5, 1.0) * ratio\n"
    )
    monkeypatch.chdir(tmp_path)
    content = answer("replay", grpo_run, "+clipx=custom", "clipx.function=half_clip:half_clip")
    assert 0.5 < number_of_first_setting(content, "norm_ratio") < 1
    assert number_of_first_setting(content, "cosine") > 0.8


@pytest.mark.parametrize(
    ("overrides", "facts"),
    [
        pytest.param(["+clipx=acpo", "clipx.aplha=2"], ["Did you mean clipx.alpha"], id="mistyped key"),
        pytest.param(["+clipx=apco"], ["+clipx=apco", "no such group"], id="mistyped method"),
        pytest.param(["clipx.alpha=2"], ["clipx.alpha=2", "Name a method first"], id="no method"),
        pytest.param(["+clipx=observe"], ["verl's own loss"], id="verl's own loss"),
        pytest.param(["+clipx=grpo", "+clipx/update=lopti"], ["Lopti's second update pass"], id="a second pass"),
        pytest.param(
            ["+clipx=grpo", "data.seed=1"],
            ["data.seed=1", "not a setting of the plugin", "+clipx=GROUP"],
            id="a key of verl's",
        ),
        pytest.param(["+clipx=acpo", "clipx.alpha=-1"], ["clipx.alpha=-1", "must be a number"], id="out of range"),
        pytest.param(["+clipx=bapo", "clipx.weight=rollout"], ["bapo", "rollout_log_prob"], id="no sampler traced"),
        pytest.param(
            ["+clipx=grpo", "--step", 5],
            ["step 5 was not traced", "traced steps are 2, 4, 6"],
            id="a step that was not traced",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_its_key_or_step(grpo_run, overrides, facts):
    assert_names(clipx("replay", grpo_run, *overrides, code=1), *facts)


def test_without_traces_it_says_how_to_get_them(tmp_path):
    run = write_run(tmp_path / "grpo-seed1", "grpo", traced=False, steps=1)
    assert_names(clipx("replay", run, "+clipx=acpo", code=1), "+clipx/trace=prompts")


def rewrite_traces(run, edit):
    """Write each file of a run's traces anew, with what `edit` makes of its step and its columns."""
    for shard in shards_in(run / "traces"):
        file = shard.path_in(run / "traces")
        table = pyarrow.parquet.read_table(file)
        columns = table.to_pandas()
        edit(shard.step, columns)
        edited = pyarrow.Table.from_pandas(columns, schema=table.schema, preserve_index=False)
        pyarrow.parquet.write_table(edited.replace_schema_metadata(table.schema.metadata), file)


def test_without_an_advantage_the_last_step_with_finite_numbers_is_taken(tmp_path):
    def remove_advantages(step, columns):
        columns["advantage"] = 0.0
        columns["unshaped_advantage"] = 0.0
        if step == 6:
            columns["log_prob"] = numpy.inf

    run = write_run(tmp_path / "grpo-seed1", "grpo")
    rewrite_traces(run, remove_advantages)
    assert answer("replay", run, "+clipx=acpo")["step"] == 4
    output = clipx("replay", run, "+clipx=acpo", "--step", 6, code=1)
    assert_names(output, "no update of step 6", "only finite numbers")


def test_without_finite_numbers_in_any_step_no_other_step_is_advised(tmp_path):
    def make_infinite(_, columns):
        columns["log_prob"] = numpy.inf

    run = write_run(tmp_path / "grpo-seed1", "grpo", steps=2)
    rewrite_traces(run, make_infinite)
    output = clipx("replay", run, "+clipx=acpo", code=1)
    assert_names(output, "no traced update", "only finite numbers")
    assert "--step" not in output


def test_a_ranks_missing_file_leaves_an_estimate_that_is_called_one(tmp_path):
    # The traces say that there were two ranks.
    run = write_run(tmp_path / "acpo-seed1", "acpo", steps=2, facts=UpdateFacts(1, 2, DecidedFrom.MINI_BATCH))
    assert not answer("replay", run, "+clipx=grpo")["exact"]
    output = clipx("replay", run, "+clipx=grpo")
    assert_names(output, "estimates")
    assert "all that there were" not in output
    # What needs every token is refused.
    refusal = clipx("replay", run, "+clipx=acpo_reference", code=1)
    assert_names(refusal, "clipx.trace.fraction=1")


@pytest.mark.parametrize("says_count", [True, False])
def test_a_file_that_lost_rows_inside_is_known_if_it_says_how_many_there_were(tmp_path, says_count):
    run = write_run(tmp_path / "grpo-seed1", "grpo", steps=2)
    assert_names(clipx("replay", run, "+clipx=acpo"), "all that there were")
    file = shards_in(run / "traces")[0].path_in(run / "traces")
    table = pyarrow.parquet.read_table(file)
    if not says_count:
        metadata = {name: value for name, value in table.schema.metadata.items() if b"rows" not in name}
        table = table.replace_schema_metadata(metadata)
    without_four_rows = pyarrow.concat_tables([table.slice(0, 3), table.slice(7)])
    pyarrow.parquet.write_table(without_four_rows, file)
    output = clipx("replay", run, "+clipx=acpo")
    assert "all that there were" not in output
    assert_names(output, "a part of all" if says_count else "don't say how many there were")
    assert answer("replay", run, "+clipx=acpo")["exact"] != says_count


def write_run_of_prompts(folder, traced_prompts, *, prompts=60, fraction=1.0):
    """Write a run of one update, in which the spread of the ratios differs by prompt.

    Args:
        folder: the run's.
        traced_prompts: the numbers of the prompts whose tokens are traced: 20 of each of 4 samples.
        prompts: how many there were.
        fraction: clipx.trace.fraction, as the trace says it.
    """
    generator = torch.Generator().manual_seed(7)
    shape = (prompts, 4, 20)
    old_log_prob = -torch.rand(shape, generator=generator) * 3
    spread = 0.05 + 0.4 * torch.rand(prompts, 1, 1, generator=generator)
    log_prob = (old_log_prob + spread * torch.randn(shape, generator=generator)).clamp(max=0)
    advantage = torch.randn(prompts, 4, 1, generator=generator).expand(shape)
    ratio = (log_prob - old_log_prob).exp()
    values = {
        "log_prob": log_prob,
        "old_log_prob": old_log_prob,
        "ratio": ratio,
        "bounded": ratio,
        "weight": ratio,
        "advantage": advantage,
        "unshaped_advantage": advantage,
    }
    values_of_all_tokens = {"token_id": 0, "text": "a", "micro_batch": 0, "region": "M", "low": 0.0, "high": 9.0}
    places = [(prompt, sample, position) for prompt in traced_prompts for sample in range(4) for position in range(20)]
    columns = {
        "prompt": [f"{prompt:02d}" for prompt, _, _ in places],
        "sample": [sample for _, sample, _ in places],
        "position": [position for _, _, position in places],
    }
    columns |= {name: [float(tensor[place]) for place in places] for name, tensor in values.items()}
    columns |= {name: [value] * len(places) for name, value in values_of_all_tokens.items()}
    write_shard(folder / "traces", Shard(1, 0, 0), columns, UpdateFacts(fraction, 1, DecidedFrom.MINI_BATCH))
    write_log(folder / "metrics.jsonl", [{"actor/pg_clipfrac": 0.0}])
    return folder


def test_an_interval_over_prompts_holds_what_all_tokens_give(tmp_path, monkeypatch):
    monkeypatch.setattr(traced_numbers, "REPLICATES", 40)
    every_third = range(0, 60, 3)
    overrides = ("+clipx=acpo", "clipx.alpha=0.5")
    of_all = answer("replay", write_run_of_prompts(tmp_path / "all", range(60)), *overrides)
    of_third = answer("replay", write_run_of_prompts(tmp_path / "third", every_third, fraction=1 / 3), *overrides)
    assert of_all["exact"]
    assert not of_third["exact"]
    for name in ("clip_fraction", "clipx/epsilon/bin_2", "cosine"):
        estimate = of_third["settings"][0]["numbers"][name]
        assert estimate["low"] <= number_of_first_setting(of_all, name) <= estimate["high"]
        assert estimate["high"] < estimate["low"] + 0.2
    # Counts stand for all prompts.
    count = number_of_first_setting(of_third, "clipx/count/bin_2")
    assert count == pytest.approx(number_of_first_setting(of_all, "clipx/count/bin_2"), rel=0.2)


def test_the_runs_own_numbers_are_estimates_too(tmp_path):
    run = write_run_of_prompts(tmp_path / "all", range(60))
    share_of_all = answer("replay", run, "+clipx=grpo")["of_run"]["numbers"]["positive_share"]
    assert share_of_all["low"] is None
    tokens = read_tokens(run)
    generator = numpy.random.default_rng(0)
    intervals_that_hold = 0
    for _ in range(40):
        twenty_prompts = generator.choice(sorted(tokens.prompt.unique()), 20, replace=False)
        part = tokens[tokens.prompt.isin(twenty_prompts)]
        share = traced_numbers.numbers_of_run([part], whole=False)["positive_share"]
        assert share.low < share.value < share.high
        if share.low <= share_of_all["value"] <= share.high:
            intervals_that_hold += 1
    # Below 34 of 40 an interval of 95 % comes once in 300 times; one of 99.9 % would always hold.
    assert 34 <= intervals_that_hold < 40


def test_few_prompts_have_no_interval(tmp_path):
    content = answer("replay", write_run_of_prompts(tmp_path / "four", range(4), fraction=0.1), "+clipx=acpo")
    assert not content["exact"]
    assert content["settings"][0]["numbers"]["clip_fraction"]["low"] is None
    assert content["of_run"]["numbers"]["positive_share"]["low"] is None
