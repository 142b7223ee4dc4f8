"""Metrics of a rollout batch: its updates' bounds, the passes of Lopti, the log-ratio's spread by the samples' age.

Covers: what ACPO, BAPO and M2PO say of their updates' bounds; the passes kept apart; sums against means and deviations
by hand; updates since the rollout; that an age that cannot move is not logged. Not covered: ages
(tests/worker/test_step.py), real stale samples (tests/end_to_end/test_training.py).
"""

import pytest
import torch

from verl_clipx.loss.rollout_metrics import AGES, merged_passes, staleness_sums, with_staleness, with_updates
from verl_clipx.methods.acpo import Acpo
from verl_clipx.methods.bapo import Bapo
from verl_clipx.methods.grpo import Grpo
from verl_clipx.methods.m2po import M2po

ACPO = {
    "clipx/epsilon/bin_0": [0.2, 0.9],
    "clipx/epsilon/bin_1": [0.3, 5.0],
    "clipx/count/bin_0": [10.0, 30.0],
    "clipx/count/bin_1": [10.0, 0.0],
}


def added(metrics, method, each=False):
    """What `with_updates` adds."""
    found = with_updates(metrics, method, each=each)
    assert {key: found[key] for key in metrics} == metrics
    return {key: values[0] for key, values in found.items() if key not in metrics}


BAPO = {"clipx/c_low": [0.6, 0.8, 0.7], "clipx/c_high": [1.2, 3.0, 1.5], "clipx/positive_share_after": [0.4] * 3}
ADDED = [
    (
        *(Acpo(bins=2), ACPO),
        {
            **{"epsilon_highest": 0.9, "epsilon_average": (0.2 * 10 + 0.3 * 10 + 0.9 * 30) / 50},
            **{"epsilon_last/bin_0": 0.9, "epsilon_last/bin_1": 5.0},
        },
    ),
    (Bapo(), BAPO, {"c_low_highest": 0.8, "c_low_last": 0.7, "c_high_highest": 3.0, "c_high_last": 1.5}),
    (
        *(M2po(), {"clipx/log_ratio_bound": [64.0, 0.25, 0.5]}),
        {"log_ratio_bound_lowest": 0.25, "log_ratio_bound_last": 0.5},
    ),
    (Grpo(), {"clipx/ratio_mean": [1.0, 1.1]}, {}),
]


@pytest.mark.parametrize(("method", "metrics", "expected"), ADDED)
def test_what_is_said_of_all_updates(method, metrics, expected):
    assert added(metrics, method) == pytest.approx({f"clipx/{name}": value for name, value in expected.items()})
    # Of one update the last is the mean.
    assert not [key for key in added({name: values[:1] for name, values in metrics.items()}, method) if "last" in key]


def test_each_update_where_wanted():
    found = added({**ACPO, "actor/ppo_kl": [0.1, 0.2]}, Acpo(bins=2), each=True)
    assert found["clipx/update_0/epsilon/bin_1"] == 0.3 and found["clipx/update_1/epsilon/bin_1"] == 5.0
    assert len(found) == 4 + 2 * 4


def test_passes_are_kept_apart_and_together():
    merged = merged_passes({"low": {"grad_norm": [1.0], "clipx/ratio_mean": [2.0]}, "high": {"grad_norm": [3.0]}})
    assert merged["grad_norm"] == [1.0, 3.0]
    assert merged["clipx/low/grad_norm"] == [1.0] and merged["clipx/high/grad_norm"] == [3.0]
    assert merged["clipx/low/ratio_mean"] == [2.0]
    assert not [key for key in merged if "max" in key or "min" in key]
    assert merged_passes({None: {"loss": [1.0]}}) == {"loss": [1.0]}


def test_sums_become_spread_and_updates():
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    log_ratio = torch.tensor([[0.0, 0.3, 0.6], [1.0, -1.0, float("nan")], [0.5, 7.0, 7.0]])
    sums = staleness_sums(torch.tensor([0, 1, 5]), log_ratio=log_ratio, mask=mask)
    tokens = 6
    metrics = {name: [float(value) / tokens] for name, value in sums.items()}
    found = with_staleness({**metrics, "loss": [1.0]}, updates_before=2, updates=4, moves=True, detailed=True)
    assert found["clipx/staleness/versions"] == [pytest.approx((0 * 3 + 1 * 2 + 5 * 1) / 6)]
    assert found["clipx/staleness/updates"] == [pytest.approx(7 / 6 * 4 + 2)]
    fractions = [found[f"clipx/staleness/fraction/{age}"][0] for age in AGES]
    assert fractions == pytest.approx([3 / 6, 2 / 6, 0, 1 / 6])
    spreads = [found[f"clipx/staleness/spread/{age}"][0] for age in AGES]
    assert spreads == pytest.approx([(0.06) ** 0.5, 1.0, 0.0, 0.0], abs=1e-6)
    assert found["loss"] == [1.0] and len(found) == 1 + 2 + 2 * len(AGES)
    shown = with_staleness({**metrics, "loss": [1.0]}, updates_before=2, updates=4, moves=True, detailed=False)
    assert shown == {key: found[key] for key in ("loss", "clipx/staleness/versions")}


def test_without_ages_rollout_log_probs_or_older_weights_there_is_less():
    given = dict(updates_before=0, updates=2, detailed=True)
    sums = staleness_sums(torch.tensor([1]), log_ratio=None, mask=torch.ones(1, 2, dtype=torch.bool))
    assert float(sums["clipx_sum/staleness/tokens/age_1"]) == 2
    metrics = {name: [float(value) / 2] for name, value in sums.items()}
    found = with_staleness(metrics, moves=True, **given)
    assert found["clipx/staleness/fraction/age_1"] == [1.0]
    assert not [key for key in found if "spread" in key]
    assert with_staleness({**metrics, "loss": [1.0]}, moves=False, **given) == {"loss": [1.0]}
    assert with_staleness({"loss": [1.0]}, moves=True, **given) == {"loss": [1.0]}
