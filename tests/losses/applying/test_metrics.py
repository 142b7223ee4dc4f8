"""Metrics by hand: of a micro-batch's tokens and of a rollout batch, and every list of them. Not covered: how a worker
adds them up (tests/training/worker/test_logged_metrics.py), ages (tests/training/worker/test_layout.py), real stale
samples.
"""

import math

import pytest
import torch
from typer.testing import CliRunner

from tests.losses.methods.hand_rows import tokens_at
from verl_clipx.cli import app
from verl_clipx.losses.applying.metric_listing import LISTS, list_metric_rows
from verl_clipx.losses.applying.metrics import (
    add_metrics_over_updates,
    merge_metrics_of_passes,
    rename_ages,
    replace_sums_with_metrics,
    token_metrics,
    token_sums,
)
from verl_clipx.losses.base.shared_metrics import REGIONS
from verl_clipx.losses.methods import Bounds
from verl_clipx.losses.methods.acpo import Acpo
from verl_clipx.losses.methods.bapo import Bapo
from verl_clipx.losses.methods.grpo import Grpo
from verl_clipx.losses.methods.m2po import M2po


def sum_metrics(ratio, advantages, bounds, *, bounded=None, weighted=None, dual_clip=None, counted=None, **keywords):
    """Return the metrics of one sequence, summed over its tokens; **keywords: of `tokens_at`."""
    t = tokens_at(torch.tensor([ratio]), torch.tensor([advantages]), **keywords)
    weighted = t.ratio * t.advantages if weighted is None else torch.tensor([weighted])
    bounded = t.ratio if bounded is None else torch.tensor([bounded])
    sums = token_sums(t, bounded, bounds, weighted, dual_clip, counted)
    assert sums.dtype == torch.float64
    metrics = token_metrics(sums, dual_clipped=dual_clip is not None)
    return {name: value.item() for name, value in metrics.items()}


RATIO = [0.5, 2.0, 0.5, 4.0, 1.0, 8.0]
ADVANTAGES = [-1.0, 1.0, 1.0, -1.0, 1.0, -1.0]
WEIGHTED = [0.0, 0.25, 0.5, -4.0, 1.0, -8.0]
BOUNDS = Bounds(0.8, 1.2)


def test_metrics_by_hand():
    metrics = sum_metrics(RATIO, ADVANTAGES, BOUNDS, weighted=WEIGHTED, dual_clip=1.5)
    assert metrics == {
        "tokens": 6,
        "clipx/ratio_mean": 16.0,
        "actor/ppo_kl": pytest.approx(-4 * math.log(2), rel=1e-6),
        "actor/pg_clipfrac": 2,
        "actor/pg_clipfrac_lower": 2,
        "clipx/clip_fraction_low": 1,
        "clipx/clip_fraction_high": 1,
        "clipx/contribution/positive": 1.75,
        "clipx/contribution/negative": 12.0,
        "clipx/gradient_mass/LN": 0.0,
        "clipx/gradient_mass/HP": 0.25,
        "clipx/gradient_mass/LP": 0.5,
        "clipx/gradient_mass/HN": 12.0,
        "clipx/gradient_mass/M": 1.0,
        "clipx_sum/ratio": 16.0,
        "clipx_sum/squared_ratio": 0.25 + 4 + 0.25 + 16 + 1 + 64,
    }


def test_the_effective_sample_size_by_hand():
    # Ratios 3, 1, 0, 0: 16 / (4 * 10).
    sums = {"clipx_sum/ratio": [1.0, 0.0], "clipx_sum/squared_ratio": [2.5, 0.0], "actor/ppo_kl": [1.0]}
    metrics = replace_sums_with_metrics(sums)
    assert metrics == {"clipx/effective_sample_size": [pytest.approx(0.4), 0.0], "actor/ppo_kl": [1.0]}
    # Another loss has no such sums.
    assert replace_sums_with_metrics({"actor/ppo_kl": [1.0]}) == {"actor/ppo_kl": [1.0]}


@pytest.mark.parametrize("argument", ["mask", "counted"])
def test_only_tokens_in_the_mask_that_count_are_added_up(argument):
    chosen = torch.tensor([[False, True, False, True, False, False]])
    metrics = sum_metrics(RATIO, ADVANTAGES, BOUNDS, dual_clip=1.5, **{argument: chosen})
    assert metrics["clipx/clip_fraction_low"] == 0
    assert metrics["clipx/clip_fraction_high"] == 1
    masses = {region: metrics[f"clipx/gradient_mass/{region}"] for region in REGIONS}
    assert masses == {"LN": 0.0, "HP": 2.0, "LP": 0.0, "HN": 4.0, "M": 0.0}
    assert metrics["tokens"] == 2
    assert metrics["clipx/ratio_mean"] == 6.0
    assert metrics["actor/pg_clipfrac_lower"] == 1


def test_a_long_sequence_is_counted_exactly():
    length = 1_000_003
    t = tokens_at(torch.full((2, length), 2.0), torch.ones(2, length))
    sums = token_sums(t, t.ratio, BOUNDS, t.advantages, None, None)
    assert token_metrics(sums)["clipx/clip_fraction_high"] == 2 * length


def metrics_over_updates(metrics, method):
    """Return what `add_metrics_over_updates` adds to metrics of each update."""
    all_metrics = add_metrics_over_updates(metrics, method)
    assert {key: all_metrics[key] for key in metrics} == metrics
    return {key: values[0] for key, values in all_metrics.items() if key not in metrics}


@pytest.mark.parametrize(
    ("method", "metrics", "expected"),
    [
        pytest.param(
            Acpo(bins=2),
            {
                "clipx/epsilon/bin_0": [0.2, 0.9],
                "clipx/epsilon/bin_1": [0.3, 5.0],
                "clipx/count/bin_0": [10.0, 30.0],
                "clipx/count/bin_1": [10.0, 0.0],
            },
            {
                # The 5.0 is of a bin without tokens.
                "clipx/epsilon_highest": 0.9,
                "clipx/epsilon_average": (0.2 * 10 + 0.3 * 10 + 0.9 * 30) / 50,
                "clipx/epsilon_last/bin_0": 0.9,
                "clipx/epsilon_last/bin_1": 5.0,
            },
            id="acpo",
        ),
        pytest.param(
            Bapo(),
            {
                "clipx/c_low": [0.6, 0.8, 0.7],
                "clipx/c_high": [1.2, 3.0, 1.5],
                "clipx/positive_share_after": [0.4, 0.4, 0.4],
            },
            {
                "clipx/c_low_highest": 0.8,
                "clipx/c_low_last": 0.7,
                "clipx/c_high_highest": 3.0,
                "clipx/c_high_last": 1.5,
            },
            id="bapo",
        ),
        pytest.param(
            M2po(),
            {"clipx/log_ratio_bound": [64.0, 0.25, 0.5]},
            {"clipx/log_ratio_bound_lowest": 0.25, "clipx/log_ratio_bound_last": 0.5},
            id="m2po",
        ),
        pytest.param(Grpo(), {"clipx/ratio_mean": [1.0, 1.1]}, {}, id="grpo, which has none"),
    ],
)
def test_metrics_over_the_updates_of_a_rollout_batch_by_hand(method, metrics, expected):
    assert metrics_over_updates(metrics, method) == pytest.approx(expected)
    # Of one update the last is the mean.
    of_first_update = {name: values[:1] for name, values in metrics.items()}
    assert not [key for key in metrics_over_updates(of_first_update, method) if "last" in key]


def test_passes_are_kept_apart_and_together():
    low_pass = {"grad_norm": [1.0], "clipx/ratio_mean": [2.0], "perf/mfu": [0.4]}
    high_pass = {"grad_norm": [3.0]}
    merged = merge_metrics_of_passes({"low": low_pass, "high": high_pass})
    assert merged["grad_norm"] == [1.0, 3.0]
    # A metric of the rollout batch as a whole belongs to no pass.
    assert merged["perf/mfu"] == [0.4] and "clipx/low/perf/mfu" not in merged
    assert merged["clipx/low/grad_norm"] == [1.0] and merged["clipx/high/grad_norm"] == [3.0]
    assert merged["clipx/low/ratio_mean"] == [2.0]
    assert not [key for key in merged if "max" in key or "min" in key]
    assert merge_metrics_of_passes({None: {"loss": [1.0]}}) == {"loss": [1.0]}


def test_the_mean_age_is_shown_once_a_sample_was_older():
    metrics = {"clipx_sum/staleness/versions": [7 / 6], "loss": [1.0]}
    assert rename_ages(metrics, shown=True) == {"clipx/staleness/versions": [7 / 6], "loss": [1.0]}
    assert rename_ages(metrics, shown=False) == rename_ages({"loss": [1.0]}, shown=True) == {"loss": [1.0]}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("options", [(), ("--markdown",)])
def test_the_command_lists_every_key(name, options):
    result = CliRunner().invoke(app, ["metrics", name, *options], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert [key for row in list_metric_rows(name) for key in row.keys if key not in result.output] == []


@pytest.mark.parametrize("options", [(), ("--markdown",)])
def test_the_command_refuses_an_unknown_list_and_names_those_that_there_are(options):
    result = CliRunner().invoke(app, ["metrics", "every", *options])
    assert result.exit_code == 2
    assert "'every': must be one of default, observe" in " ".join(result.output.split())
