"""ACPO's bins, standard deviations and bounds by hand; the release's and the paper's are in the golden vectors."""

import pytest
import torch
from torch.testing import assert_close

from tests.golden.settings import UNCLAMPED, Setup
from verl_clipx.losses.base.method import find_declarations
from verl_clipx.losses.methods.acpo import Acpo

from .hand_rows import row, tokens_at

PUBLISHED = {
    "acpo": dict(
        alpha=3.0,
        epsilon_base=0.2,
        epsilon_min=None,
        epsilon_max=None,
        bins=5,
        bin_on="old",
        variance_epsilon=0.0,
        dual_clip=None,
        scope="mini_batch",
    ),
    "acpo_reference": dict(
        alpha=3.0,
        epsilon_base=0.2,
        epsilon_min=0.0,
        epsilon_max=3.0,
        bins=5,
        bin_on="current",
        variance_epsilon=1e-8,
        dual_clip=3.0,
        scope="micro_batch",
    ),
}
GOLDEN = {
    "acpo": Setup(
        "acpo_reference",
        dict(
            alpha="variance_alpha",
            epsilon_base="variance_base_clip",
            epsilon_min="variance_clip_min",
            epsilon_max="variance_clip_max",
            bins="variance_num_bins",
            dual_clip="clip_ratio_c",
        ),
    ),
    "paper_acpo": Setup(
        "acpo",
        dict(alpha="alpha", epsilon_base="eps_b", bins="bins", bin_on="bin_on", dual_clip="dual_clip"),
        UNCLAMPED,
    ),
}
VALUES_BESIDE_AN_END = {("epsilon_max", 0.01): {"epsilon_base": 0}}
REFUSED_INSTEAD = {"epsilon_max": ["epsilon_base"]}


def check_training(values):
    epsilons = [values(f"actor/clipx/epsilon/bin_{index}") for index in range(5)]
    means = [sum(of_bin) / len(of_bin) for of_bin in epsilons]
    assert min(means) >= 0.2 - 1e-9 and max(means) > 0.21


def make_tokens(ratio, probability, mask=None):
    """Return one sequence with ratios to these probabilities under the old policy."""
    ratio = row(*ratio)
    mask = None if mask is None else row(*mask, dtype=torch.bool)
    return tokens_at(ratio, torch.zeros_like(ratio), mask=mask, old_log_prob=row(*probability).log())


def test_two_bins_by_hand():
    method = Acpo(alpha=3.0, epsilon_base=0.2, bins=2)
    # Low bin: 0.5 and 1.5, twice, mean 1, sigma 0.5. High bin: 1.0 and 1.2, mean 1.1, sigma 0.1. The masked 9.0 is in
    # neither.
    ratios = [0.5, 1.5, 0.5, 1.5, 1.0, 1.2, 9.0]
    probabilities = [0.1, 0.4, 0.1, 0.4, 0.6, 0.9, 0.9]
    t = make_tokens(ratios, probabilities, mask=[True] * 6 + [False])
    statistics = method.statistics(t)
    decision = method.decide(statistics)
    assert_close(statistics, torch.tensor([4, 2, 0, 0.2, 1, 0.04], dtype=torch.float64))
    assert_close(decision, torch.tensor([0.5, 0.1, 1.7, 0.5], dtype=torch.float64))
    low, high = method.bounds(t, decision)
    assert_close(low, row(*[-0.7] * 4, *[0.5] * 3))
    assert_close(high, row(*[2.7] * 4, *[1.5] * 3))
    declared = find_declarations(method, method.metrics(statistics, decision))
    metrics = {key: value.item() for _, members in declared for key, value in members.items()}
    expected = {"count/bin_0": 4.0, "count/bin_1": 2.0, "epsilon/bin_0": 1.7, "epsilon/bin_1": 0.5}
    assert metrics.keys() == expected.keys(), "a metric has no value by hand here, or is logged no more"
    assert metrics == pytest.approx(expected)


def test_an_edge_belongs_to_the_upper_bin_and_1_to_the_last_one():
    # Rounding can put a probability above 1.
    t = make_tokens([1.0] * 7, [0.0, 0.25, 0.5, 0.75, 0.999, 1.0, 1.0 + 1e-6])
    counts = Acpo(bins=4).statistics(t)[:4]
    assert counts.tolist() == [1.0, 1.0, 1.0, 4.0]


@pytest.mark.parametrize("ratio", [1e-8, 3.7, 1e8])
def test_equal_ratios_far_from_one_have_no_spread(ratio):
    method = Acpo(bins=1)
    sigma = method.decide(method.statistics(make_tokens([ratio] * 7, [0.5] * 7)))[0].item()
    assert 0 <= sigma <= 1e-7 * max(1.0, ratio)


@pytest.mark.parametrize(
    ("method", "t", "expected_decision"),
    [
        pytest.param(
            Acpo(bins=3, epsilon_min=0.5, epsilon_max=1.0),
            make_tokens([1, 1, 0.5, 2.5], [0.1, 0.1, 0.5, 0.5]),
            [0, 1, 0, 0.5, 1, 0.2],
            id="caps apply to bins with tokens alone",
        ),
        pytest.param(
            Acpo(bins=1, min_tokens=3),
            make_tokens([0.5, 1.5], [0.5, 0.5]),
            [0.0, 0.2],
            id="a bin with too few tokens keeps the base",
        ),
        pytest.param(
            Acpo(bins=1, min_tokens=2),
            make_tokens([0.5, 1.5], [0.5, 0.5]),
            [0.5, 1.7],
            id="a bin with just enough tokens does not",
        ),
        pytest.param(
            Acpo(bins=1, variance_epsilon=1e-8),
            make_tokens([1.3, 1.3], [0.5, 0.5]),
            [1e-4, 0.2003],
            id="variance_epsilon is added under the root",
        ),
    ],
)
def test_decisions_by_hand(method, t, expected_decision):
    decision = method.decide(method.statistics(t))
    assert decision.tolist() == pytest.approx(expected_decision, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, 0.8 / 3),
        (dict(alpha=2.0, epsilon_base=0.1), 0.45),
        (dict(epsilon_max=1.0), 0.8 / 3),
        (dict(epsilon_max=0.9), None),
        (dict(alpha=0.0), None),
        (dict(epsilon_min=1.0), 0.0),
        (dict(alpha=0.0, epsilon_base=1.0), 0.0),
    ],
)
def test_from_that_spread_on_the_lower_bound_is_0_and_below_it_is_not(parameters, expected):
    method = Acpo(bins=1, **parameters)
    assert method.unbounded_below_from == (expected if expected is None else pytest.approx(expected))

    def lower_bound(sigma):
        # Two tokens at 1 - sigma and 1 + sigma.
        statistics = torch.tensor([2.0, 0.0, 2 * sigma**2], dtype=torch.float64)
        return 1 - float(method.decide(statistics)[1])

    spread = 5.0 if expected is None else expected
    assert (lower_bound(spread + 1e-9) <= 0) == (expected is not None)
    assert expected in (None, 0.0) or lower_bound(expected - 1e-6) > 0
