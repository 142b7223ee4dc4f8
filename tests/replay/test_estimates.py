"""`clipx replay` where the trace has a part of the tokens: estimates with intervals, which are never called exact."""

import numpy
import pytest
import torch

from tests.runs.commands import answer, clipx
from tests.runs.example_runs import write_log, write_run
from verl_clipx.common.decided_from import DecidedFrom
from verl_clipx.common.traces import Shard, UpdateFacts, read_shards, shards_in, write_shard
from verl_clipx.replay import measures, of_run


def value(found: dict, name: str) -> float:
    return found["settings"][0]["numbers"][name]["value"]


def test_a_ranks_missing_file_leaves_an_estimate_that_is_called_one(tmp_path):
    run = write_run(tmp_path / "acpo-seed1", "acpo", steps=2, facts=UpdateFacts(1, 2, DecidedFrom.MINI_BATCH))
    assert not answer("replay", run, "+clipx=grpo")["exact"]
    text = clipx("replay", run, "+clipx=grpo")
    assert "The numbers are estimates" in text and "all that there were" not in text
    said = clipx("replay", run, "+clipx=acpo_reference", code=1)
    assert "which the trace has only at clipx.trace.fraction=1" in said


def prompts_run(folder, chosen, *, prompts=60, fraction=1.0):
    """A run of one update, with the tokens of some prompts, whose ratios spread differently by prompt."""
    generator = torch.Generator().manual_seed(7)
    shape = prompts, 4, 20
    old = -torch.rand(shape, generator=generator) * 3
    spread = 0.05 + 0.4 * torch.rand(prompts, 1, 1, generator=generator)
    current = (old + spread * torch.randn(shape, generator=generator)).clamp(max=0)
    advantage = torch.randn(prompts, 4, 1, generator=generator).expand(shape)
    places = [(p, s, k) for p in chosen for s in range(4) for k in range(20)]

    ratio = (current - old).exp()
    drawn = {"log_prob": current, "old_log_prob": old, "ratio": ratio, "bounded": ratio, "weight": ratio}
    drawn |= {"advantage": advantage, "unshaped_advantage": advantage}
    same = {"token_id": 0, "text": "a", "micro_batch": 0, "region": "M", "low": 0.0, "high": 9.0}
    columns = {
        "prompt": [f"{p:02d}" for p, *_ in places],
        "sample": [s for _, s, _ in places],
        "position": [k for *_, k in places],
        **{name: [float(values[place]) for place in places] for name, values in drawn.items()},
        **{name: [value] * len(places) for name, value in same.items()},
    }
    write_shard(folder / "traces", Shard(1, 0, 0), columns, UpdateFacts(fraction, 1, DecidedFrom.MINI_BATCH))
    write_log(folder / "metrics.jsonl", [{"actor/pg_clipfrac": 0.0}])
    return folder


@pytest.mark.slow
def test_an_interval_over_prompts_holds_what_all_tokens_give(tmp_path, monkeypatch):
    monkeypatch.setattr(measures, "REPLICATES", 60)
    whole = answer("replay", prompts_run(tmp_path / "whole", range(60)), "+clipx=acpo", "clipx.alpha=0.5")
    assert whole["exact"]
    generator, held = numpy.random.default_rng(0), {"clip_fraction": 0, "clipx/epsilon/bin_2": 0, "cosine": 0}
    for draw in range(12):
        chosen = sorted(generator.choice(60, 20, replace=False))
        run = prompts_run(tmp_path / f"part {draw}", chosen, fraction=1 / 3)
        found = answer("replay", run, "+clipx=acpo", "clipx.alpha=0.5")
        assert not found["exact"]
        for name in held:
            one = found["settings"][0]["numbers"][name]
            assert one["low"] <= one["value"] <= one["high"] or name == "cosine"
            held[name] += one["low"] <= value(whole, name) <= one["high"]
        # Counts stand for all prompts.
        of_all = sum(value(whole, f"clipx/count/bin_{k}") for k in range(5))
        assert sum(value(found, f"clipx/count/bin_{k}") for k in range(5)) == pytest.approx(of_all)
    # Below 10 of 12 an interval of 95 % comes once in 500 draws.
    assert all(count >= 10 for count in held.values()), held


@pytest.mark.slow
@pytest.mark.matrix
def test_the_interval_of_a_parameter_holds_what_all_tokens_give(tmp_path, monkeypatch):
    monkeypatch.setattr(measures, "REPLICATES", 40)
    words = ("+clipx=acpo", "clipx.alpha=0.0,4.0", "--match", "clip_fraction=0.1")
    (whole,) = answer("replay", prompts_run(tmp_path / "whole", range(60)), *words)["matches"]
    assert whole["low"] is None and whole["crossings"] == 1 and 0.1 < whole["value"] < 3
    generator, held, widths = numpy.random.default_rng(0), 0, []
    for draw in range(12):
        chosen = sorted(generator.choice(60, 20, replace=False))
        (found,) = answer("replay", prompts_run(tmp_path / f"part {draw}", chosen, fraction=1 / 3), *words)["matches"]
        assert found["low"] < found["value"] < found["high"]
        held += found["low"] <= whole["value"] <= found["high"]
        widths.append(found["high"] - found["low"])
    # Below 10 of 12 an interval of 95 % comes once in 500 draws; one of the whole range would hold anything.
    assert held >= 10 and max(widths) < 2


def test_the_runs_own_numbers_are_estimates_too(tmp_path):
    run = prompts_run(tmp_path / "whole", range(60))
    own = answer("replay", run, "+clipx=grpo")["of_run"]["numbers"]["positive_share"]
    assert own["low"] is None
    table = read_shards(run / "traces", shards_in(run / "traces")).to_pandas()
    generator, held = numpy.random.default_rng(0), 0
    for _ in range(40):
        chosen = generator.choice(sorted(table.prompt.unique()), 20, replace=False)
        found = of_run.numbers_of_run([table[table.prompt.isin(chosen)]], whole=False)["positive_share"]
        assert found.low < found.value < found.high
        held += found.low <= own["value"] <= found.high
    # Below 34 of 40 an interval of 95 % comes once in 300 times; one of 99.9 % would always hold.
    assert 34 <= held < 40


def test_few_prompts_have_no_interval(tmp_path):
    run = prompts_run(tmp_path / "few", range(4), fraction=0.1)
    found = answer("replay", run, "+clipx=acpo")
    assert found["settings"][0]["numbers"]["clip_fraction"]["low"] is None and not found["exact"]
    assert found["of_run"]["numbers"]["positive_share"]["low"] is None
    text = clipx("replay", run, "+clipx=acpo", "clipx.alpha=0.0,4.0", "--match", "clip_fraction=0.1")
    assert "An estimate without an interval, since too few prompts are traced." in text and "Exact" not in text
