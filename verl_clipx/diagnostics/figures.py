"""Figures of a run."""

from pathlib import Path

import matplotlib
import pandas
from matplotlib.axes import Axes

from verl_clipx.diagnostics.held_out import HeldOutReward

matplotlib.use("Agg")
from matplotlib import pyplot  # the backend must be chosen first

REGION_COLOURS = {"LN": "tab:blue", "HP": "tab:red", "LP": "tab:cyan", "HN": "tab:orange"}


def run_figure(log: pandas.DataFrame, held_out: list[HeldOutReward], title: str, path: Path) -> Path:
    """Draws reward, entropy, clip bounds, clip fractions, and gradient mass over steps.

    Args:
        log: from `read_run_log`.
        held_out: rewards on held-out problems, with intervals; may be empty.
        title: above the figure.
        path: where the PNG goes.

    Returns:
        The path.
    """
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 8), layout="constrained")
    figure.suptitle(title)
    draw_reward(axes[0, 0], log, held_out)
    draw_columns(axes[0, 1], log, {"entropy": "actor/entropy"}, "entropy of the policy (nats a token)")
    draw_bounds(axes[0, 2], log)
    fractions = {"below the lower bound, A < 0": "actor/clipx/clip_fraction_low"}
    fractions["above the upper bound, A > 0"] = "actor/clipx/clip_fraction_high"
    draw_columns(axes[1, 0], log, fractions, "fraction of tokens outside the bounds")
    draw_gradient_mass(axes[1, 1], log)
    draw_columns(axes[1, 2], log, {"KL": "actor/ppo_kl"}, "KL from the old policy (nats a token)")
    for axis in axes.flat:
        axis.set_xlabel("training step")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def draw_columns(axis: Axes, log: pandas.DataFrame, columns: dict[str, str], title: str) -> None:
    """Draws columns of the log, by label, leaving out what the run did not log."""
    axis.set_title(title)
    for label, column in columns.items():
        if column in log:
            series = log[column].dropna()
            axis.plot(series.index, series, label=label if len(columns) > 1 else None)


def draw_reward(axis: Axes, log: pandas.DataFrame, held_out: list[HeldOutReward]) -> None:
    """Draws the reward of the rollouts and, with intervals, on held-out problems."""
    axis.set_title("reward")
    if "critic/score/mean" in log:
        series = log["critic/score/mean"].dropna()
        axis.plot(series.index, series, color="tab:gray", alpha=0.4, label="rollouts")
        axis.plot(
            series.index, series.rolling(9, center=True, min_periods=1).median(), color="black", label="median of 9"
        )
    if held_out:
        means = [point.mean for point in held_out]
        below = [point.mean - point.low for point in held_out]
        above = [point.high - point.mean for point in held_out]
        steps = [point.step for point in held_out]
        axis.errorbar(
            steps, means, (below, above), fmt="o-", capsize=4, color="tab:red", label="held out, 95 % interval"
        )
    axis.set_ylim(0, 1)


def draw_bounds(axis: Axes, log: pandas.DataFrame) -> None:
    """Draws BAPO's searched bounds or ACPO's epsilon per bin; says so if the method's bounds are constant."""
    if "actor/clipx/c_high" in log:
        draw_columns(
            axis, log, {"upper": "actor/clipx/c_high", "lower": "actor/clipx/c_low"}, "clip bounds on the ratio"
        )
        return
    epsilons = sorted(column for column in log if column.startswith("actor/clipx/epsilon/bin_"))
    if epsilons:
        labels = {f"bin {column.rsplit('_', 1)[1]} (0: improbable tokens)": column for column in epsilons}
        draw_columns(axis, log, labels, "epsilon per probability bin")
        return
    axis.set_title("clip bounds on the ratio")
    axis.text(0.5, 0.5, "constant for this method", ha="center", va="center", transform=axis.transAxes)


def draw_gradient_mass(axis: Axes, log: pandas.DataFrame) -> None:
    """Draws the share of the sum of |F*A| that lies outside the bounds, by region, as a stack."""
    axis.set_title("gradient mass |F*A| outside the bounds, share of all")
    columns = {name: f"actor/clipx/gradient_mass/{name}" for name in (*REGION_COLOURS, "M")}
    if not set(columns.values()) <= set(log):
        return
    mass = log[list(columns.values())].dropna()
    shares = mass.div(mass.sum(axis=1).where(lambda total: total > 0), axis=0).fillna(0)
    outside = [shares[columns[name]] for name in REGION_COLOURS]
    axis.stackplot(shares.index, outside, labels=list(REGION_COLOURS), colors=list(REGION_COLOURS.values()), alpha=0.8)
