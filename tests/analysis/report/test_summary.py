"""The page's first table, by hand on made-up logs and traces; masked tokens in it, in the figures and in the view. Not
covered: how it looks (screenshots are for people); intervals over seeds (tests/common).
"""

import re

import pytest

from tests.analysis.diagnose.test_findings import held_out, of, run
from tests.analysis.runs.commands import clipx, page_of
from tests.analysis.runs.example_runs import write_run
from verl_clipx.analysis.report.numbers import SettingNumbers, compute_numbers
from verl_clipx.analysis.report.palette import with_colours
from verl_clipx.analysis.report.reading import ReadRuns, read_runs
from verl_clipx.analysis.report.summary import summarise
from verl_clipx.analysis.report.title import say_what_was_clipped
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.settings import Setting
from verl_clipx.losses.modifiers.masks import IcePop
from verl_clipx.run.trace_format import read_shards, shards_in


def rows(*settings: Setting) -> dict[str, list[tuple[str, str]]]:
    """The table of settings without traces: its rows' cells by name."""
    return {row.name: row.cells for row in summarise(numbers_of(*settings))}


def numbers_of(*settings: Setting) -> list[SettingNumbers]:
    """The numbers of settings without traces."""
    coloured = with_colours(list(settings))
    return compute_numbers(ReadRuns(settings=coloured, baseline=coloured[0]))


CLIPPED = {keys.CLIPPED_LOW: [0.02, 0.04], keys.CLIPPED_HIGH: [0.0, 0.01]}
KEPT = dict(zip(keys.MASS.values(), ([0.1] * 2, [0.0] * 2, [0.0] * 2, [0.0] * 2, [0.9] * 2), strict=True))


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (of(CLIPPED), {"Tokens clipped low": ("3.0\u202f%", ""), "Tokens clipped high": ("0.50\u202f%", "")}),
        # What lies outside the bounds and has a gradient isn't clipped.
        (of(CLIPPED | KEPT), {"Tokens clipped low": ("3.0\u202f%", "outside, with a gradient")}),
        # verl's count of both sides stands in a row of its own.
        (of({keys.PG_CLIPPED: [0.02]}), {"Tokens clipped": ("2.0\u202f%", "")}),
        (of({keys.KL: [0.01, 0.04, 0.01]}), {"Highest KL": ("0.04", "step 2; the median is 0.01")}),
        (of({keys.REWARD: [0.1, 0.3]}), {"Reward": ("0.200", "2 steps; one seed: no verdict")}),
        (
            of(dict(zip([*keys.MASKED.values(), *keys.MASKED_SEQUENCES], ([0.02], [0.01], [3], [0]), strict=True))),
            {"Tokens masked": ("3.0\u202f%", "2.0\u202f% A < 0, 1.0\u202f% A > 0; 3.0 whole responses an update")},
        ),
    ],
)
def test_cells_by_hand(setting, expected):
    found = rows(setting)
    assert ("Tokens clipped low" in found) == (keys.CLIPPED_LOW in setting.runs[0].log)
    assert {name: found[name][0] for name in expected} == expected
    assert not {"Held-out reward", "Gradient taken by clipping"} & found.keys()


NOTHING = {keys.CLIPPED_LOW: [0.0, 0.0], keys.CLIPPED_HIGH: [0.0, 0.0]}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([of(CLIPPED, "A")], "A clipped 3.5\u202f% of the tokens"),
        ([of(CLIPPED, "A"), of(NOTHING, "B")], "A clipped 3.5\u202f% of the tokens; B none"),
        ([of(NOTHING, "A"), of(CLIPPED, "B")], "A clipped none of the tokens; B 3.5\u202f%"),
        # What is outside and has a gradient, its own or a pull's, isn't clipped.
        (
            [of(CLIPPED, "A"), of(CLIPPED | KEPT, "B"), of(CLIPPED, "C")],
            "A clipped 3.5\u202f% of the tokens; C 3.5\u202f%; B has 3.5\u202f% outside its bounds, with a gradient",
        ),
        ([of(CLIPPED, "A"), of({keys.ENTROPY: [0.02]}, "B")], ""),
        (
            [of({keys.PG_CLIPPED: [0.02]}, "A"), of({keys.PG_CLIPPED: [0.03]}, "B")],
            "verl counted 2.0\u202f% of the tokens of A as clipped; 3.0\u202f% of B",
        ),
    ],
)
def test_the_headline_is_what_each_clipped(settings, said):
    assert say_what_was_clipped(numbers_of(*settings)) == said


def test_rewards_are_over_the_steps_that_all_have_and_three_seeds_have_an_interval():
    long = of({keys.REWARD: [0.1, 0.3, 0.8]}, "long")
    seeds = [run({keys.REWARD: [mean, mean]}, {"data.seed": seed}) for seed, mean in enumerate((0.1, 0.2, 0.3))]
    # s = 0.1, t(0.975, 2) = 4.302653, so the half width is 0.248.
    assert rows(long, Setting("seeds", seeds))["Reward"] == [
        ("0.200", "2 steps; one seed: no verdict"),
        ("0.200 [-0.048, 0.448]", "2 steps; 95\u202f% over 3 seeds"),
    ]


def test_the_last_validation_has_its_interval_over_problems(tmp_path):
    cell = rows(held_out(tmp_path, "A", {0: [(0,)] * 4, 5: [(1,), (0,), (1,), (0,)]}))["Held-out reward"][0]
    assert cell[0].startswith("0.500 [") and cell[1] == "95\u202f% over 4 problems, step 5"


def test_traces_give_what_clipping_took_and_on_how_many_tokens_a_method_differs_from_grpo(tmp_path):
    paths = [write_run(tmp_path / f"{name}-seed1", name, steps=2) for name in ("grpo", "acpo")]
    found = {row.name: row.cells for row in summarise(compute_numbers(read_runs(paths)))}
    tokens = [read_shards(path / "traces", shards_in(path / "traces")).to_pandas() for path in paths]
    of_grpo, mass = tokens[0].region.isin(["LN", "HP"]), (tokens[0].ratio * tokens[0].advantage).abs()
    assert found["Gradient taken by clipping"][0] == (
        f"{100 * mass[of_grpo].sum() / mass.sum():.2f}\u202f%",
        "in step 2",
    )
    last = tokens[1][tokens[1]["update"] == 3]
    by_grpo = last.ratio.gt(1.2) & last.advantage.gt(0) | last.ratio.lt(0.8) & last.advantage.lt(0)
    differ = (by_grpo != last.region.isin(["LN", "HP"])) & last.advantage.ne(0)
    assert found["Tokens unlike GRPO’s"][0] == ("", "") and differ.sum() > 0
    assert found["Tokens unlike GRPO’s"][1][0] == f"{differ.sum()} of {len(last)}"


@pytest.mark.slow
def test_tokens_outside_the_bounds_that_are_only_pulled_back_are_not_called_kept(tmp_path):
    # IPO drops them, and its pull alone gives them a gradient, against their advantage.
    run = write_run(tmp_path / "ipo-seed1", "ipo", steps=2, threshold=0.05, kl_tau=0.5)
    clipx("report", run, "--out", tmp_path / "out")
    page = page_of(tmp_path / "out")
    assert re.search("<h1>IPO has .* outside its bounds, with a gradient", page)
    assert "outside, with a gradient</small>" in page and "token</i> below the bounds, with a gradient</li>" in page
    assert re.search("○ [1-9][0-9]* tokens outside the bounds have a gradient", page)
    assert not re.search("bounds,? (?:and )?(?:kept|keeps)|outside, kept|keeps? a gradient|only soft clipping", page)


@pytest.mark.slow
def test_masked_tokens_are_seen_on_the_page(tmp_path):
    masked = write_run(tmp_path / "masked-seed1", "grpo", steps=2, mask=IcePop(low=0.8, high=1.25))
    clipx("report", masked, write_run(tmp_path / "grpo-seed1", "grpo", steps=2), "--out", tmp_path / "out")
    page, (step,) = page_of(tmp_path / "out"), {shard.step for shard in shards_in(masked / "traces")}
    tokens = read_shards(masked / "traces", shards_in(masked / "traces")).to_pandas()
    assert step == 2 and 0 < tokens.rejected.mean() < 1 and "<h1>GRPO" in page
    assert "Tokens masked" in page and "<h3>masked tokens</h3>" in page and "taken out</li>" in page
    assert '<details class="plate" open><summary><h2>What else was logged' in page
    out = tokens[tokens["update"].eq(3) & tokens.rejected & tokens.advantage.ne(0)]
    assert page.count('class="out g-') == len(out) > 0
    # What clipping took is counted over the tokens that are left.
    left = tokens[~tokens.rejected]
    lost, mass = left.region.isin(["LN", "HP"]), (left.ratio * left.advantage).abs()
    assert f"<td>{100 * mass[lost].sum() / mass.sum():.2f}\u202f%&ensp;<small>in step 2" in page
