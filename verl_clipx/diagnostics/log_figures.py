"""Figures of the runs' logs: nothing smoothed, up is above the upper bound, down is below the lower."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import numpy
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from verl_clipx.common.statistics.estimate import MIN_SEEDS
from verl_clipx.diagnostics import keys
from verl_clipx.diagnostics.drawing import end_labels, figure
from verl_clipx.diagnostics.findings import (
    HARDLY,
    clipped,
    entropy_changes,
    has_searched_bounds,
    mass_shares,
    percent,
    rewards,
    same_signs,
    went_as_estimated,
    what_bounds_did,
)
from verl_clipx.diagnostics.palette import CLIPPED_HIGH, CLIPPED_LOW, GRPO, HAIR, INK, SOFT
from verl_clipx.diagnostics.runs import Setting
from verl_clipx.diagnostics.traced import GRPO_HIGH, GRPO_LOW

MOST_BARS = 60
MOST_BINS = 9


@dataclass(frozen=True)
class Panel:
    """A figure of the page's width."""

    name: str
    title: str
    description: str
    drawing: Figure


@dataclass(frozen=True)
class Plate:
    """What stands under one heading.

    Args:
        panels: at least one.
    """

    heading: str
    look: str
    note: str
    panels: list[Panel]


def log_plates(settings: list[Setting], baseline: Setting | None = None) -> list[Plate]:
    """The figures that the logs allow: outcome first, then mechanism.

    Args:
        settings: at least one.
        baseline: what the others' rewards are compared with.
    """
    plates = (outcome(settings, baseline), bounds(settings), fractions(settings), masses(settings), entropy(settings))
    return [plate for plate in plates if plate.panels]


def outcome(settings: list[Setting], baseline: Setting | None = None) -> Plate:
    """Reward, entropy and KL over steps."""
    measures = (("reward", "Reward", keys.REWARD), ("entropy", "Entropy, nats a token", keys.ENTROPY))
    measures += (("kl", "KL from the old policy, nats a token", keys.KL),)
    panels = [
        Panel(name, title, f"{title} over training steps.", _lines(settings, key, with_rewards=key == keys.REWARD))
        for name, title, key in measures
        if any(len(setting.mean(key)) for setting in settings)
    ]
    told = rewards(settings, baseline)
    note = "Each point is a step, nothing is smoothed. As in BAPO’s Figure 9. "
    if any(len(setting.runs) > 1 for setting in settings):
        note += "Bands span the seeds of a setting, from the lowest to the highest; lines are their means. "
    if any(run.held_out for setting in settings for run in setting.runs):
        note += "Diamonds: held-out problems, with 95\u202f% intervals over problems. "
    if any(len(run.values(keys.REWARD_ERROR)) for setting in settings for run in setting.runs):
        note += "Vertical lines: 1.96 standard errors over prompts."
    elif panels:
        note += "These logs have no standard error of a step’s reward over prompts, so its points have no intervals."
    heading = told[0].head.rstrip(".") if told else "Reward, entropy and KL"
    look = "a gap between settings that lasts and is wider than bands and intervals."
    if len(settings) == 1:
        look = "a rise that lasts."
    elif min(setting.seeds for setting in settings) < MIN_SEEDS:
        look = (
            "jumps and trends of each run. A gap between settings says nothing about methods yet: with so few seeds it "
            "may be no wider than between runs of one setting."
        )
    return Plate(heading, look, note, panels)


def _lines(settings: list[Setting], key: str, *, with_rewards: bool) -> Figure:
    drawing, (axes,) = figure(236, left=48, top=12)
    ends = []
    for setting in settings:
        table = setting.table(key)
        if table.empty:
            continue
        mean = table.mean(axis=1)
        if table.shape[1] > 1:
            axes.fill_between(table.index, table.min(axis=1), table.max(axis=1), color=setting.colour, alpha=0.15, lw=0)
        elif with_rewards and len(error := setting.mean(keys.REWARD_ERROR).reindex(mean.index).dropna()):
            axes.vlines(
                error.index, (mean - 1.96 * error).dropna(), (mean + 1.96 * error).dropna(), setting.colour, lw=1
            )
        marker = "o" if len(mean) <= MOST_BARS else None
        axes.plot(mean.index, mean, color=setting.colour, marker=marker, markersize=3)
        if with_rewards and len(setting.runs) == 1:
            for point in setting.runs[0].held_out:
                if point.reward.low is not None:
                    axes.vlines(point.step, point.reward.low, point.reward.high, color=setting.colour, lw=1)
                axes.plot(point.step, point.reward.mean, "D", color="white", mec=setting.colour, ms=6, mew=1.4)
        ends.append((mean.index[-1], mean.iloc[-1], setting.label, setting.colour))
    low, high = axes.get_ylim()
    axes.set_ylim(min(0, low), high)
    step_axis(axes)
    if len(settings) > 1:
        longest = max(len(label) for _, _, label, _ in ends)
        drawing.subplots_adjust(right=1 - min(0.4, (12 + 6.6 * longest) / 348))
        end_labels(axes, ends)
    return drawing


def bounds(settings: list[Setting]) -> Plate:
    """The bounds that each setting used, over steps."""
    drawn: list[tuple[Setting, Callable[[], Figure]]] = []
    for setting in settings:
        names = setting.bins("epsilon")
        if names:
            drawn.append((setting, lambda setting=setting, names=names: _bin_bounds(setting, names)))
        elif has_searched_bounds(setting):
            drawn.append((setting, lambda setting=setting: _searched_bounds(setting)))
    panels = [
        Panel(f"bounds_{index}", setting.label, f"Bounds of {setting.label} over steps, against 0.8 to 1.2.", draw())
        for index, (setting, draw) in enumerate(drawn)
    ]
    told = [finding.head.rstrip(".") for setting, _ in drawn if (finding := what_bounds_did(setting))]
    of_last = any(setting.bins("epsilon_last") or len(setting.mean(keys.BOUND_HIGH_LAST)) for setting, _ in drawn)
    last = "Dashed: those of its last update. " if of_last else "A single update’s bounds can lie much further out. "
    return Plate(
        told[0] if len(told) == 1 else "How the bounds moved",
        "the coloured band against the grey lines at 0.8 and 1.2, GRPO’s bounds: where it is wider, tokens keep their "
        "gradient that GRPO would clip.",
        f"Solid: means over a step’s updates, the first of which has ratio 1. {last}"
        "A lower bound at 0 is none. As in BAPO’s Figure 8.",
        panels,
    )


def _bin_bounds(setting: Setting, names: list[str]) -> Figure:
    shown = [names[i] for i in sorted(set(numpy.linspace(0, len(names) - 1, min(len(names), MOST_BINS)).astype(int)))]
    rows = ceil(len(shown) / 3)
    drawing, panels = figure(46 + 132 * rows, rows=rows, columns=3, left=30, sharex=True, sharey=True)
    highest = max(1 + setting.mean(name).max() for name in (*names, *setting.bins("epsilon_last")))
    for axes, name in zip(panels, shown, strict=False):
        epsilon, bin = setting.mean(name), int(name.rpartition("_")[2])
        last = setting.mean(name.replace("/epsilon/", "/epsilon_last/"))
        _band(axes, (1 - epsilon).clip(lower=0), 1 + epsilon, setting.colour)
        _last_bounds(axes, (1 - last).clip(lower=0), 1 + last, setting.colour)
        edges = f"{bin / len(names):.2g}–{(bin + 1) / len(names):.2g}"
        axes.set_title(f"p  {edges}" if bin == 0 else edges, fontsize=11, pad=4)
        axes.set_ylim(0, max(2.0, 1.08 * highest))
    for axes in panels[len(shown) :]:
        axes.axis("off")
    for axes in panels[max(0, len(shown) - 3) : len(shown)]:
        axes.tick_params(labelbottom=True)
        step_axis(axes, label=False)
    return drawing


def _searched_bounds(setting: Setting) -> Figure:
    share = setting.mean(keys.SHARE_BEFORE)
    drawing, panels = figure(330 if len(share) else 220, rows=2 if len(share) else 1, sharex=True)
    low, high = setting.mean(keys.BOUND_LOW), setting.mean(keys.BOUND_HIGH)
    _band(panels[0], low, high, setting.colour)
    _last_bounds(panels[0], *(setting.mean(key) for key in (keys.BOUND_LOW_LAST, keys.BOUND_HIGH_LAST)), setting.colour)
    panels[0].set_title("bounds on the ratio", fontsize=11)
    if len(share):
        axes, after = panels[1], setting.mean(keys.SHARE_AFTER)
        axes.plot(share.index, share, color=setting.colour, lw=1, ls=(0, (3, 2)))
        axes.plot(after.index, after, color=setting.colour)
        axes.axhline(setting.parameter("target", 0.4), color=INK, lw=0.7)
        axes.set_title("positive share: before (dashed), after, target", fontsize=11)
        axes.set_ylim(0, 1)
    step_axis(panels[-1])
    return drawing


def _band(axes: Axes, low: pandas.Series, high: pandas.Series, colour: str) -> None:
    low, high = low.align(high, join="inner")
    axes.fill_between(low.index, low, high, color=colour, alpha=0.14, lw=0)
    axes.plot(low.index, low, color=colour)
    axes.plot(high.index, high, color=colour)
    for bound in (GRPO_LOW, GRPO_HIGH):
        axes.axhline(bound, color=GRPO, lw=1)


def _last_bounds(axes: Axes, low: pandas.Series, high: pandas.Series, colour: str) -> None:
    for bound in (low, high):
        axes.plot(bound.index, bound, color=colour, lw=1, ls=(0, (3, 2)))


def fractions(settings: list[Setting]) -> Plate:
    """The clipped share of tokens over steps."""
    known = [setting for setting in settings if len(clipped(setting))]
    highest = max([setting.mean(keys.CLIPPED_HIGH).max() for setting in known], default=0)
    lowest = max([setting.mean(keys.CLIPPED_LOW).max() for setting in known], default=0)
    panels = []
    for index, setting in enumerate(known):
        drawing, (axes,) = figure(220, left=52)
        high, low = setting.mean(keys.CLIPPED_HIGH), setting.mean(keys.CLIPPED_LOW)
        _bars(axes, high, 0 * high, CLIPPED_HIGH)
        _bars(axes, -low, 0 * low, CLIPPED_LOW)
        _share_axis(axes, lowest, highest)
        most = clipped(setting)
        text = f"most: {percent(most.max())}, step {most.idxmax()}" if most.max() > 0 else "none"
        axes.set_title(text, fontsize=11, fontweight="normal")
        description = (
            f"Bars of the share of tokens that {setting.label} clips in each step, high upwards, low downwards."
        )
        panels.append(Panel(f"fractions_{index}", setting.label, description, drawing))
    return Plate(
        _most_clipping(known),
        "the height of the bars, and which way they point: up (violet) is above the upper bound with A > 0, down "
        "(orange) below the lower with A < 0.",
        "Share of all tokens on which PPO’s clip would act at the setting’s own bounds; methods with a soft clip keep "
        "a part of their gradient. Every panel has the same axes. Dual clip is not in it.",
        panels,
    )


def _most_clipping(settings: list[Setting]) -> str:
    shares = {setting.label: clipped(setting).mean() for setting in settings}
    ranked = sorted(shares, key=shares.get, reverse=True)
    # Which of two has more is a question of seeds; that one has hardly any is in the logs.
    if len(ranked) < 2 or shares[ranked[0]] == shares[ranked[1]] or shares[ranked[1]] >= HARDLY:
        return "How many tokens are outside the bounds"
    most, others = ranked[0], ranked[1:]
    if shares[most] < HARDLY:
        return "Hardly any token is outside the bounds"
    if shares[others[0]]:
        return f"{most} has tokens outside its bounds, {' and '.join(others)} hardly any"
    return f"Only {most} has tokens outside its bounds"


def masses(settings: list[Setting]) -> Plate:
    """The share of the gradient's mass outside the bounds, by region, over steps."""
    known = {setting.label: (setting, shares) for setting in settings if len(shares := mass_shares(setting))}
    highest = max([(shares.HP + shares.HN).max() for _, shares in known.values()], default=0)
    lowest = max([(shares.LN + shares.LP).max() for _, shares in known.values()], default=0)
    panels = []
    for index, (label, (setting, shares)) in enumerate(known.items()):
        drawing, (axes,) = figure(220, left=52)
        # Steps without any mass stay on the axis.
        shares = shares.reindex(setting.mean(keys.MASS["M"]).index)
        _bars(axes, shares.HN, 0 * shares.HN, "white", hatch="////")
        _bars(axes, shares.HN + shares.HP, shares.HN, CLIPPED_HIGH)
        _bars(axes, -shares.LP, 0 * shares.LP, "white", hatch="////")
        _bars(axes, -shares.LP - shares.LN, -shares.LP, CLIPPED_LOW)
        _share_axis(axes, lowest, highest)
        outside = 1 - shares.M
        axes.set_title(f"outside the bounds: {percent(outside.mean())} on average", fontsize=11, fontweight="normal")
        description = f"Bars of the share of the gradient mass of {label} outside its bounds, by region, in each step."
        panels.append(Panel(f"mass_{index}", label, description, drawing))
    kept = {label: float((shares.HP + shares.LN).mean()) for label, (_, shares) in known.items()}
    outside = max([float((1 - shares.M).max()) for _, shares in known.values()], default=0.0)
    most = max(kept, key=kept.get, default="")
    soft = kept and kept[most] > 0
    return Plate(
        f"{most} keeps {percent(kept[most])} of the gradient’s mass where PPO’s clip would drop it"
        if soft
        else f"At most {percent(outside)} of a step’s gradient mass lies outside the bounds",
        "colour: mass that PPO’s clip would have removed (HP up, LN down), which only soft clipping shows. Hatched: "
        "mass outside the bounds that no clip removes (HN up, LP down).",
        "Shares of Σ|F·A| over a step’s tokens; the rest lies within the bounds.",
        panels,
    )


def entropy(settings: list[Setting]) -> Plate:
    """The Entropy-Clip estimate over steps, and the change of entropy that happened."""
    known = {setting.label: (setting, changes) for setting in settings if len(changes := entropy_changes(setting))}
    panels = []
    for index, (label, (setting, changes)) in enumerate(known.items()):
        drawing, (estimate, change) = figure(330, rows=2, left=58, sharex=True)
        same, steps = same_signs(setting)
        titles = "estimate, nats per unit of learning rate", f"change, nats: same sign in {same} of {steps} steps"
        for axes, name, title in zip((estimate, change), changes, titles, strict=True):
            axes.axhline(0, color=HAIR, lw=0.7)
            marker = "o" if len(changes) <= MOST_BARS else None
            axes.plot(changes.index, changes[name], color=setting.colour, marker=marker, markersize=3)
            axes.set_title(title, fontsize=11, fontweight="normal")
        step_axis(change)
        description = f"The Entropy-Clip estimate of {label} over steps, above the change of entropy that happened."
        panels.append(Panel(f"entropy_change_{index}", label, description, drawing))
    return Plate(
        went_as_estimated(settings),
        "whether both curves lie on the same side of 0, and rise and fall together. Below 0 entropy falls.",
        "The estimate is BAPO’s Eq. 6, a mean over a step’s updates. Adam has no single learning rate that would make "
        "nats of it, so its size says nothing. The change is to the next step, whose samples are others. Steps of a "
        "run depend on each other, so the heading tests what most of a seed’s steps did, which takes six seeds.",
        panels,
    )


def _bars(axes: Axes, to: pandas.Series, start: pandas.Series, colour: str, hatch: str | None = None) -> None:
    if len(to) <= MOST_BARS:
        edge = {"edgecolor": SOFT, "linewidth": 0.5} if hatch else {}
        axes.bar(to.index, to - start, bottom=start, width=0.7, color=colour, hatch=hatch, **edge)
    else:
        edge = {"edgecolor": SOFT, "linewidth": 0.3} if hatch else {"linewidth": 0}
        axes.fill_between(to.index, start, to, step="mid", facecolor=colour, hatch=hatch, **edge)


def _share_axis(axes: Axes, lowest: float, highest: float) -> None:
    # Room for a bar of nothing, so that an axis is never empty.
    room = 1.08 * max(lowest, highest, 1e-4)
    axes.set_ylim(-max(1.08 * lowest, 0.15 * room), max(1.08 * highest, 0.15 * room))
    axes.axhline(0, color=HAIR, lw=0.7)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{abs(100 * value):.3g}\u202f%" if value else "0"))
    step_axis(axes)


def step_axis(axes: Axes, *, label: bool = True) -> None:
    """Whole training steps on the horizontal axis, named where `label` is set."""
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    if label:
        axes.set_xlabel("training step")
