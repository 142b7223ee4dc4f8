"""The metrics by hand: DGPO's five regions at and around the bounds, of any quantity; one transfer to the host.

Does not cover how a worker adds them up over micro-batches and ranks.
"""

import math

import pytest
import torch

from tests.host_syncs import counted_host_syncs
from tests.methods.at import tokens_at
from verl_clipx.base.shared_metrics import REGIONS
from verl_clipx.loss.metrics import to_host, token_metrics, token_sums
from verl_clipx.methods import Bounds

NO_BOUNDS = Bounds(0.0, math.inf)


def metrics_of(ratio, advantages, bounds, *, bounded=None, weighted=None, dual_clip=None, counted=None, **given):
    """The metrics of one sequence, summed over its tokens; `given`: detailed, and what `tokens_at` takes."""
    detailed = given.pop("detailed", True)
    t = tokens_at(torch.tensor([ratio]), torch.tensor([advantages]), **given)
    weighted = t.ratio * t.advantages if weighted is None else torch.tensor([weighted])
    bounded = t.ratio if bounded is None else torch.tensor([bounded])
    sums = token_sums(t, bounded, bounds, weighted, dual_clip, counted, detailed)
    assert sums.dtype == torch.float64
    found = token_metrics(sums, dual_clipped=dual_clip is not None, detailed=detailed)
    return {name: value.item() for name, value in found.items()}


NUMBER_OF = {"LN": "clip_fraction_low", "HP": "clip_fraction_high"}


def number_in(region, found):
    """How many tokens are in a region."""
    return found[f"clipx/{NUMBER_OF.get(region, f'region_fraction/{region}')}"]


def regions(ratio, advantages, bounds, **given):
    """Each token's region, from its own metrics, by number and by mass."""
    names = []
    for token in range(len(ratio)):
        counted = torch.tensor([[token == other for other in range(len(ratio))]])
        weighted = [-2.0 * (advantage != 0) for advantage in advantages]
        found = metrics_of(ratio, advantages, bounds, weighted=weighted, counted=counted, **given)
        (region,) = (region for region in REGIONS if number_in(region, found))
        mass = 2.0 * (advantages[token] != 0)
        masses = [mass * (name == region) for name in REGIONS]
        assert [found[f"clipx/gradient_mass/{name}"] for name in REGIONS] == masses
        names.append(region)
    return names


OF_TOKENS = Bounds(torch.tensor([[0.9, 0.5]]), torch.tensor([[1.1, 1.5]]))


@pytest.mark.parametrize(
    ("ratio", "advantages", "bounds", "given", "expected"),
    [
        ([0.5, 2.0, 0.5, 2.0, 1.0], [-1.0, 1.0, 1.0, -1.0, 1.0], Bounds(0.8, 1.2), {}, ["LN", "HP", "LP", "HN", "M"]),
        # Equality and an advantage of 0 are in the middle.
        ([0.75, 0.75, 1.25, 1.25], [-1.0, 1.0, 1.0, -1.0], Bounds(0.75, 1.25), {}, ["M"] * 4),
        ([0.1, 9.0], [0.0, 0.0], Bounds(0.75, 1.25), {}, ["M", "M"]),
        ([1e-30, 1e30], [-1.0, 1.0], NO_BOUNDS, {"clamp": None}, ["M", "M"]),
        # Bounds may differ between tokens.
        ([0.7, 0.7], [-1.0, -1.0], OF_TOKENS, {}, ["LN", "M"]),
        ([1.3, 1.3], [1.0, 1.0], OF_TOKENS, {}, ["HP", "M"]),
        # Regions are those of what is bounded.
        ([0.5, 2.0, 1.0], [-1.0, 1.0, -1.0], Bounds(0.8, 1.2), {"bounded": [1.0, 0.1, 0.1]}, ["M", "LP", "LN"]),
    ],
)
def test_regions_by_hand(ratio, advantages, bounds, given, expected):
    assert regions(ratio, advantages, bounds, **given) == expected


RATIO = [0.5, 2.0, 0.5, 4.0, 1.0, 8.0]
ADVANTAGES = [-1.0, 1.0, 1.0, -1.0, 1.0, -1.0]
WEIGHTED = [0.0, 0.25, 0.5, -4.0, 1.0, -8.0]
BOUNDS = Bounds(0.8, 1.2)


def test_metrics_by_hand():
    found = metrics_of(RATIO, ADVANTAGES, BOUNDS, weighted=WEIGHTED, dual_clip=1.5, detailed=False)
    assert found.pop("actor/ppo_kl") == pytest.approx(-4 * math.log(2), rel=1e-6)
    assert found == {
        **{"tokens": 6, "clipx/ratio_mean": 16.0, "actor/pg_clipfrac": 2, "actor/pg_clipfrac_lower": 2},
        **{"clipx/clip_fraction_low": 1, "clipx/clip_fraction_high": 1},
        **{"clipx/contribution/positive": 1.75, "clipx/contribution/negative": 12.0},
        "clipx_sum/ratio": 16.0,
        "clipx_sum/squared_ratio": 0.25 + 4 + 0.25 + 16 + 1 + 64,
        **dict(zip((f"clipx/gradient_mass/{name}" for name in REGIONS), (0.0, 0.25, 0.5, 12.0, 1.0), strict=True)),
    }


def test_what_all_adds_by_hand():
    # Old probabilities at the edges of the quartiles, and inside.
    probability = torch.tensor([[0.2, 0.25, 0.5, 0.6, 0.9, 1.0]])
    given = dict(weighted=WEIGHTED, dual_clip=1.5, old_log_prob=probability.log())
    found = metrics_of(RATIO, ADVANTAGES, BOUNDS, **given)
    default = metrics_of(RATIO, ADVANTAGES, BOUNDS, detailed=False, **given)
    assert {key: found[key] for key in default} == default
    assert [found[f"clipx/region_fraction/{name}"] for name in ("LP", "HN", "M")] == [1, 2, 1]
    masses = [found[f"clipx/gradient_mass_by_probability/quartile_{part}"] for part in (1, 2, 3, 4)]
    assert masses == [0.0, 0.25, 4.5, 9.0]
    current = [math.log(p * r) for p, r in zip(probability[0].tolist(), RATIO, strict=True)]
    assert found["clipx_sum/weighted"] == pytest.approx(sum(WEIGHTED))
    for name, values in (("weighted_log_prob", WEIGHTED), ("ratio_log_prob", RATIO)):
        expected = sum(value * log_prob for value, log_prob in zip(values, current, strict=True))
        assert found[f"clipx_sum/{name}"] == pytest.approx(expected, rel=1e-6), name
    assert not [name for name in found if "max" in name or "min" in name]


@pytest.mark.parametrize("by", ["mask", "counted"])
def test_only_tokens_in_the_mask_that_count_are_added_up(by):
    chosen = torch.tensor([[False, True, False, True, False, False]])
    found = metrics_of(RATIO, ADVANTAGES, BOUNDS, dual_clip=1.5, **{by: chosen})
    assert [number_in(name, found) for name in REGIONS] == [0, 1, 0, 1, 0]
    assert sum(found[f"clipx/gradient_mass_by_probability/quartile_{part}"] for part in (1, 2, 3, 4)) == 6.0
    assert [found[f"clipx/gradient_mass/{name}"] for name in REGIONS] == [0.0, 2.0, 0.0, 4.0, 0.0]
    assert (found["tokens"], found["clipx/ratio_mean"], found["actor/pg_clipfrac_lower"]) == (2, 6.0, 1)


def test_a_long_sequence_is_counted_exactly():
    length = 1_000_003
    t = tokens_at(torch.full((2, length), 2.0), torch.ones(2, length))
    sums = token_sums(t, t.ratio, BOUNDS, t.advantages, None, None)
    assert token_metrics(sums)["clipx/clip_fraction_high"] == 2 * length


def test_groups_reach_the_host_together():
    groups = {"a": torch.tensor(1), "b": torch.tensor(0.5)}, {}, {"a": torch.tensor(1 / 3, dtype=torch.float64)}
    with counted_host_syncs() as counter:
        assert to_host(*groups) == [{"a": 1.0, "b": 0.5}, {}, {"a": 1 / 3}]
    assert counter.count == 1
    with counted_host_syncs() as counter:
        assert to_host({}, {}) == [{}, {}]
    assert counter.count == 0
