"""The page's first table, by hand on made-up logs and traces; masked tokens in it, in the figures and in the view. Not
covered: how it looks (screenshots are for people); intervals over seeds (tests/common).
"""

import re

import pandas
import pytest

from tests.analysis.diagnose.example_settings import make_run, make_setting_of_one_run, make_validated_setting
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

Cell = tuple[str, str]


def compute_untraced(*settings: Setting) -> list[SettingNumbers]:
    """Return the numbers of settings without traces."""
    coloured = with_colours(list(settings))
    return compute_numbers(ReadRuns(settings=coloured, baseline=coloured[0]))


def cells_by_row(numbers: list[SettingNumbers]) -> dict[str, list[Cell]]:
    """Return the page's first table: from a row's name to a cell for each setting, its value and what stands below."""
    return {row.name: row.cells for row in summarise(numbers)}


def read_tokens(run) -> pandas.DataFrame:
    """Return the traced tokens of a run, a row each."""
    return read_shards(run / "traces", shards_in(run / "traces")).to_pandas()


# Of two steps.
CLIPPED = {keys.CLIPPED_LOW: [0.02, 0.04], keys.CLIPPED_HIGH: [0.0, 0.01]}
NOTHING_CLIPPED = {keys.CLIPPED_LOW: [0.0, 0.0], keys.CLIPPED_HIGH: [0.0, 0.0]}
# What lies outside the bounds has a gradient, so that it isn't clipped.
OUTSIDE_WITH_GRADIENT = CLIPPED | {key: [0.0, 0.0] for key in keys.MASS.values()}
OUTSIDE_WITH_GRADIENT |= {keys.MASS["LN"]: [0.1, 0.1], keys.MASS["M"]: [0.9, 0.9]}


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        pytest.param(
            CLIPPED,
            {"Tokens clipped low": ("3.0\u202f%", ""), "Tokens clipped high": ("0.50\u202f%", "")},
            id="clipped tokens",
        ),
        pytest.param(
            OUTSIDE_WITH_GRADIENT,
            {"Tokens clipped low": ("3.0\u202f%", "outside, with a gradient")},
            id="tokens outside the bounds",
        ),
        # It counts both sides together.
        pytest.param(
            {keys.PG_CLIPPED: [0.02]}, {"Tokens clipped": ("2.0\u202f%", "")}, id="verl's count of clipped tokens"
        ),
        pytest.param(
            {keys.KL: [0.01, 0.04, 0.01]}, {"Highest KL": ("0.04", "step 2; the median is 0.01")}, id="highest KL"
        ),
        pytest.param({keys.REWARD: [0.1, 0.3]}, {"Reward": ("0.200", "2 steps; one seed: no verdict")}, id="reward"),
        pytest.param(
            {
                keys.MASKED["A < 0"]: [0.02],
                keys.MASKED["A > 0"]: [0.01],
                keys.MASKED_SEQUENCES[0]: [3],
                keys.MASKED_SEQUENCES[1]: [0],
            },
            {"Tokens masked": ("3.0\u202f%", "2.0\u202f% A < 0, 1.0\u202f% A > 0; 3.0 whole responses an update")},
            id="masked tokens",
        ),
    ],
)
def test_cells_by_hand(columns, expected):
    table = cells_by_row(compute_untraced(make_setting_of_one_run(columns)))
    for row, cell in expected.items():
        assert table[row] == [cell]
    assert ("Tokens clipped low" in table) == (keys.CLIPPED_LOW in columns)
    # A run without validations and traces.
    assert "Held-out reward" not in table
    assert "Gradient taken by clipping" not in table


@pytest.mark.parametrize(
    ("columns_by_label", "headline"),
    [
        pytest.param({"A": CLIPPED}, "A clipped 3.5\u202f% of the tokens", id="one setting"),
        pytest.param(
            {"A": CLIPPED, "B": NOTHING_CLIPPED}, "A clipped 3.5\u202f% of the tokens; B none", id="the second none"
        ),
        pytest.param(
            {"A": NOTHING_CLIPPED, "B": CLIPPED}, "A clipped none of the tokens; B 3.5\u202f%", id="the first none"
        ),
        # What is outside and has a gradient, its own or a pull's, isn't clipped.
        pytest.param(
            {"A": CLIPPED, "B": OUTSIDE_WITH_GRADIENT, "C": CLIPPED},
            "A clipped 3.5\u202f% of the tokens; C 3.5\u202f%; B has 3.5\u202f% outside its bounds, with a gradient",
            id="tokens outside the bounds",
        ),
        pytest.param({"A": CLIPPED, "B": {keys.ENTROPY: [0.02]}}, "", id="unknown of the second"),
        pytest.param(
            {"A": {keys.PG_CLIPPED: [0.02]}, "B": {keys.PG_CLIPPED: [0.03]}},
            "verl counted 2.0\u202f% of the tokens of A as clipped; 3.0\u202f% of B",
            id="verl's count of clipped tokens",
        ),
    ],
)
def test_the_headline_is_what_each_clipped(columns_by_label, headline):
    settings = [make_setting_of_one_run(columns, label) for label, columns in columns_by_label.items()]
    assert say_what_was_clipped(compute_untraced(*settings)) == headline


def test_rewards_are_over_the_steps_that_all_have_and_three_seeds_have_an_interval():
    of_three_steps = make_setting_of_one_run({keys.REWARD: [0.1, 0.3, 0.8]}, "three steps")
    runs = [make_run({keys.REWARD: [mean, mean]}, {"data.seed": seed}) for seed, mean in ((1, 0.1), (2, 0.2), (3, 0.3))]
    table = cells_by_row(compute_untraced(of_three_steps, Setting("three seeds", runs)))
    # s = 0.1, t(0.975, 2) = 4.302653, so the half width is 0.248.
    assert table["Reward"] == [
        ("0.200", "2 steps; one seed: no verdict"),
        ("0.200 [-0.048, 0.448]", "2 steps; 95\u202f% over 3 seeds"),
    ]


def test_the_last_validation_has_its_interval_over_problems(tmp_path):
    validations = {0: [(0,)] * 4, 5: [(1,), (0,), (1,), (0,)]}
    table = cells_by_row(compute_untraced(make_validated_setting(tmp_path, "A", validations)))
    ((value, note),) = table["Held-out reward"]
    assert value.startswith("0.500 [")
    assert note == "95\u202f% over 4 problems, step 5"


def test_traces_give_what_clipping_took(tmp_path):
    run = write_run(tmp_path / "grpo-seed1", "grpo", steps=2)
    ((value, note),) = cells_by_row(compute_numbers(read_runs([run])))["Gradient taken by clipping"]
    tokens = read_tokens(run)
    mass = (tokens.ratio * tokens.advantage).abs()
    clipped = tokens.region.isin(["LN", "HP"])
    assert value == f"{100 * mass[clipped].sum() / mass.sum():.2f}\u202f%"
    assert note == "in step 2"


def test_traces_give_on_how_many_tokens_of_the_last_update_a_method_differs_from_grpo(tmp_path):
    runs = [write_run(tmp_path / f"{method}-seed1", method, steps=2) for method in ("grpo", "acpo")]
    grpo_cell, acpo_cell = cells_by_row(compute_numbers(read_runs(runs)))["Tokens unlike GRPO’s"]
    assert grpo_cell == ("", "")
    tokens = read_tokens(runs[1])
    tokens = tokens[tokens["update"] == 3]
    clipped_by_grpo = ((tokens.ratio > 1.2) & (tokens.advantage > 0)) | ((tokens.ratio < 0.8) & (tokens.advantage < 0))
    clipped_by_acpo = tokens.region.isin(["LN", "HP"])
    differing = (clipped_by_grpo != clipped_by_acpo) & (tokens.advantage != 0)
    assert differing.sum() > 0
    assert acpo_cell[0] == f"{differing.sum()} of {len(tokens)}"


@pytest.mark.slow
def test_tokens_outside_the_bounds_that_are_only_pulled_back_are_not_called_kept(tmp_path):
    # IPO drops them, and its pull alone gives them a gradient, against their advantage.
    run = write_run(tmp_path / "ipo-seed1", "ipo", steps=2, threshold=0.05, kl_tau=0.5)
    clipx("report", run, "--out", tmp_path / "out")
    page = page_of(tmp_path / "out")
    assert re.search("<h1>IPO has .* outside its bounds, with a gradient", page)
    assert "outside, with a gradient</small>" in page
    assert "token</i> below the bounds, with a gradient</li>" in page
    assert re.search("○ [1-9][0-9]* tokens outside the bounds have a gradient", page)
    assert not re.search("bounds,? (?:and )?(?:kept|keeps)|outside, kept|keeps? a gradient|only soft clipping", page)


@pytest.fixture(scope="module")
def masked_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return write_run(folder / "masked-seed1", "grpo", steps=2, mask=IcePop(low=0.8, high=1.25))


@pytest.fixture(scope="module")
def page_of_masked_run(masked_run, tmp_path_factory):
    """A report on it and on a run without a mask."""
    folder = tmp_path_factory.mktemp("report")
    clipx("report", masked_run, write_run(folder / "grpo-seed1", "grpo", steps=2), "--out", folder / "out")
    return page_of(folder / "out")


@pytest.mark.slow
def test_masked_tokens_are_seen_in_table_figures_and_view(masked_run, page_of_masked_run):
    tokens = read_tokens(masked_run)
    assert {*tokens["step"]} == {2}
    assert 0 < tokens.rejected.mean() < 1
    assert "<h1>GRPO" in page_of_masked_run
    assert "Tokens masked" in page_of_masked_run
    assert "<h3>masked tokens</h3>" in page_of_masked_run
    assert '<details class="plate" open><summary><h2>What else was logged' in page_of_masked_run
    assert "taken out</li>" in page_of_masked_run
    masked_in_view = tokens[(tokens["update"] == 3) & tokens.rejected & (tokens.advantage != 0)]
    assert page_of_masked_run.count('class="out g-') == len(masked_in_view) > 0


@pytest.mark.slow
def test_what_clipping_took_is_counted_over_the_tokens_that_no_mask_takes_out(masked_run, page_of_masked_run):
    tokens = read_tokens(masked_run)
    counted = tokens[~tokens.rejected]
    mass = (counted.ratio * counted.advantage).abs()
    clipped = counted.region.isin(["LN", "HP"])
    share = f"{100 * mass[clipped].sum() / mass.sum():.2f}\u202f%"
    assert f"<td>{share}&ensp;<small>in step 2" in page_of_masked_run
