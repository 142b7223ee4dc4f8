"""Figures of the runs' logs: up is above the upper bound, down is below the lower."""

from math import ceil
from typing import NamedTuple

import numpy
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from verl_clipx.common.sentences import percent
from verl_clipx.common.statistics.estimate import MIN_SEEDS
from verl_clipx.diagnose.findings import (
    clipped_share,
    has_searched_bounds,
    mass_shares,
)
from verl_clipx.report.drawing import figure, label_ends
from verl_clipx.report.palette import CLIPPED_HIGH, CLIPPED_LOW, GRPO, HAIR, INK, SOFT, DrawnSetting
from verl_clipx.report.windows import HIGH, LOW, MOST_MARKS, curve, describe_windows, marks, take_windows, window_of
from verl_clipx.runs import keys
from verl_clipx.runs.traced import GRPO_HIGH, GRPO_LOW

MOST_BINS = 9
# A mean difference of probabilities below this is rounding.
AGREED = 1e-4
# In a figure as narrow as a column, more diamonds would overlap.
MOST_DIAMONDS = 24


class Panel(NamedTuple):
    """A figure of the page's width."""

    name: str
    title: str
    description: str
    drawing: Figure


class Plate(NamedTuple):
    """What stands under one heading: what to `look` for, a note, and figures, none if no log has what they show.

    `folded` says why there is nothing to see; such a plate is closed until a reader opens it.
    """

    heading: str
    look: str
    note: str
    panels: list[Panel]
    folded: str = ""


def log_plates(settings: list[DrawnSetting]) -> list[Plate]:
    """The plates of which the logs allow a figure: outcome first, then mechanism."""
    plates = [draw(settings) for draw in (outcome, bounds, fractions, masses, samples)]
    return [plate for plate in plates if plate.panels]


OUTCOMES = (
    ("reward", "Reward", keys.REWARD),
    ("entropy", "Entropy, nats a token", keys.ENTROPY),
    ("kl", "KL from the old policy, nats a token", keys.KL),
    ("gradient_norm", "Gradient norm before clipping", keys.GRADIENT_NORM),
)
SAMPLES = (
    ("length", "Response length, tokens", keys.LENGTH),
    ("cut", "Responses cut at the limit", keys.CUT),
    ("alike", "Prompts whose samples score alike", keys.ALIKE),
    ("mismatch", "Mismatch of rollout and trainer, |Δp|", keys.MISMATCH),
)


def _panels(settings: list[DrawnSetting], measures: tuple[tuple[str, str, str], ...]) -> list[Panel]:
    return [
        Panel(name, title, f"{title}, over training steps.", _lines(settings, key))
        for name, title, key in measures
        if any(len(setting.mean(key)) for setting in settings)
    ]


def outcome(settings: list[DrawnSetting]) -> Plate:
    """Reward, entropy, KL and gradient norm over steps."""
    panels, window = _panels(settings, OUTCOMES), window_of(settings)
    runs = [run for setting in settings for run in setting.runs]
    note = describe_windows(window) + "As in BAPO’s Figure 9. "
    if len(runs) > len(settings):
        note += (
            "Where a setting has several seeds, the band spans them, from the lowest to the highest; lines are means. "
        )
    if any(run.held_out for run in runs):
        note += "Diamonds: held-out problems, with 95\u202f% intervals over problems. "
    if window == 1 and any(len(run.values(keys.REWARD_ERROR)) for run in runs):
        note += "Vertical lines: 1.96 standard errors over prompts."
    look = "a gap between settings that lasts and is wider than bands and intervals."
    if len(settings) == 1:
        look = "a rise that lasts."
    elif min(setting.seeds for setting in settings) < MIN_SEEDS:
        look = "jumps and trends of each run; gaps between them need three seeds of each setting."
    return Plate("Reward, entropy, KL and gradient norm", look, note, panels)


def samples(settings: list[DrawnSetting]) -> Plate:
    """What the policy was trained on: lengths, cut responses, prompts that teach nothing, the engines' mismatch."""
    apart = max(
        (setting.mean(keys.MISMATCH).max() for setting in settings if len(setting.mean(keys.MISMATCH))), default=1
    )
    agreed = apart < AGREED
    return Plate(
        "What the samples were like",
        "a length that runs into the limit, and a share of equal scores that grows: fewer prompts then carry the "
        "gradient.",
        f"{describe_windows(window_of(settings))}Cut: at data.max_response_length tokens. Alike: of the prompts with "
        "several samples. Mismatch: the mean absolute difference between a sampled token’s probability in the rollout "
        f"engine and in the trainer{f', {apart:.1g} at most, not drawn' if agreed else ''}.",
        _panels(settings, SAMPLES[: -1 if agreed else None]),
    )


def _lines(settings: list[DrawnSetting], key: str) -> Figure:
    drawing, (axes,) = figure(236, left=52, top=12)
    window, ends = window_of(settings), []
    for setting in settings:
        table = take_windows(setting.table(key), window)
        if table.empty:
            continue
        mean = table.mean(axis=1)
        if table.shape[1] > 1:
            axes.fill_between(table.index, table.min(axis=1), table.max(axis=1), color=setting.colour, alpha=0.15, lw=0)
            axes.plot(mean.index, mean, color=setting.colour, **marks(mean, window))
        else:
            curve(axes, setting.mean(key), window, setting.colour, **marks(mean, window))
        if key == keys.REWARD and len(setting.runs) == 1:
            error = 1.96 * setting.mean(keys.REWARD_ERROR).reindex(mean.index).dropna()
            if window == 1 and len(error):
                axes.vlines(error.index, (mean - error).dropna(), (mean + error).dropna(), setting.colour, lw=1)
            _diamonds(axes, setting)
        ends.append((mean.index[-1], mean.iloc[-1], setting.label, setting.colour))
    low, high = axes.get_ylim()
    axes.set_ylim(min(0, low), high)
    if key in keys.SHARES:
        axes.yaxis.set_major_formatter(PercentFormatter(1, symbol="\u202f%"))
    step_axis(axes)
    if len(settings) > 1:
        label_ends(drawing, axes, ends)
    return drawing


def _diamonds(axes: Axes, setting: DrawnSetting) -> None:
    """Draws the held-out rewards of a run, evenly thinned if there are many; the last one stays."""
    held_out = setting.runs[0].held_out
    for point in held_out[:: -max(1, ceil(len(held_out) / MOST_DIAMONDS))]:
        if point.reward.low is not None:
            axes.vlines(point.step, point.reward.low, point.reward.high, color=setting.colour, lw=1)
        axes.plot(point.step, point.reward.mean, "D", color="white", mec=setting.colour, ms=6, mew=1.4)


# For BAPO, whose search aims at such a share.
POSITIVE_SHARE = (
    "Positive share: P/(P+N), where P and N are what the tokens with A > 0 and those with A < 0 contribute to the "
    "loss, without sign; the search moves the bounds until it reaches the target. "
)


def bounds(settings: list[DrawnSetting]) -> Plate:
    """The bounds that each setting used, over steps."""
    window, panels = window_of(settings), []
    drawn = [setting for setting in settings if setting.bins("epsilon") or has_searched_bounds(setting)]
    for index, setting in enumerate(drawn):
        draw = _draw_bins if setting.bins("epsilon") else _draw_search
        text = f"Bounds of {setting.label} over steps, against 0.8 to 1.2."
        panels.append(Panel(f"bounds_{index}", setting.label, text, draw(setting, window)))
    of_last = any(setting.bins("epsilon_last") or len(setting.mean(keys.BOUND_HIGH_LAST)) for setting in drawn)
    last = "Dashed: those of its last update. " if of_last else "A single update’s bounds can lie much further out. "
    return Plate(
        "How the bounds moved",
        "the coloured band against the grey lines at 0.8 and 1.2, GRPO’s bounds: where it is wider, tokens keep their "
        "gradient that GRPO would clip.",
        f"{describe_windows(window)}Solid: means over a step’s updates, the first of which has ratio 1. {last}"
        f"A lower bound at 0 is none. {POSITIVE_SHARE * any(map(has_searched_bounds, settings))}As in BAPO’s Figure 8.",
        panels,
    )


def _draw_bins(setting: DrawnSetting, window: int) -> Figure:
    names = setting.bins("epsilon")
    shown = [names[i] for i in sorted(set(numpy.linspace(0, len(names) - 1, min(len(names), MOST_BINS)).astype(int)))]
    rows = ceil(len(shown) / 3)
    drawing, panels = figure(46 + 132 * rows, rows=rows, columns=3, left=30, sharex=True, sharey=True)
    highest = max(1 + setting.mean(name).max() for name in (*names, *setting.bins("epsilon_last")))
    for axes, name in zip(panels, shown, strict=False):
        bin = int(name.rpartition("_")[2])
        both = [setting.mean(key) for key in (name, name.replace("/epsilon/", "/epsilon_last/"))]
        mean, last = [[(1 - epsilon).clip(lower=0), 1 + epsilon] for epsilon in both]
        _draw_bounds(axes, mean, last, setting.colour, window)
        edges = f"{bin / len(names):.2g}–{(bin + 1) / len(names):.2g}"
        axes.set_title(f"p  {edges}" if bin == 0 else edges, pad=4)
        axes.set_ylim(0, max(2.0, 1.08 * highest))
    for axes in panels[len(shown) :]:
        axes.axis("off")
    for axes in panels[max(0, len(shown) - 3) : len(shown)]:
        axes.tick_params(labelbottom=True)
        step_axis(axes, label=False)
    return drawing


def _draw_search(setting: DrawnSetting, window: int) -> Figure:
    share = setting.mean(keys.SHARE_BEFORE)
    drawing, panels = figure(330 if len(share) else 220, rows=2 if len(share) else 1, sharex=True)
    mean = [setting.mean(key) for key in (keys.BOUND_LOW, keys.BOUND_HIGH)]
    last = [setting.mean(key) for key in (keys.BOUND_LOW_LAST, keys.BOUND_HIGH_LAST)]
    _draw_bounds(panels[0], mean, last, setting.colour, window)
    panels[0].set_title("bounds on the ratio")
    if len(share):
        axes, after = panels[1], setting.mean(keys.SHARE_AFTER)
        curve(axes, share, window, setting.colour, lw=1, ls=(0, (3, 2)))
        curve(axes, after, window, setting.colour)
        axes.axhline(setting.parameter("target", 0.4), color=INK, lw=0.7)
        axes.set_title("positive share: before (dashed), after, target")
        axes.set_ylim(0, 1)
    step_axis(panels[-1])
    return drawing


def _draw_bounds(axes: Axes, mean: list[pandas.Series], last: list[pandas.Series], colour: str, window: int) -> None:
    """Draws the band between two bounds, dashed those of a step's last update, and GRPO's."""
    lines = [curve(axes, bound, window, colour) for bound in mean[0].align(mean[1], join="inner")]
    axes.fill_between(lines[0].index, *lines, color=colour, alpha=0.14, lw=0)
    for bound in (GRPO_LOW, GRPO_HIGH):
        axes.axhline(bound, color=GRPO, lw=1)
    for bound in (take_windows(values, window) for values in last):
        axes.plot(bound.index, bound, color=colour, lw=1, ls=(0, (3, 2)))


def fractions(settings: list[DrawnSetting]) -> Plate:
    """The clipped share of tokens over steps."""
    known = [setting for setting in settings if len(clipped_share(setting))]
    panels, window = [], window_of(settings)
    highest, lowest = (
        max([take_windows(setting.mean(key), window, HIGH).max() for setting in known], default=0)
        for key in (keys.CLIPPED_HIGH, keys.CLIPPED_LOW)
    )
    for index, setting in enumerate(known):
        drawing, (axes,) = figure(220, left=52)
        high, low = setting.mean(keys.CLIPPED_HIGH), setting.mean(keys.CLIPPED_LOW)
        _bars(axes, high, 0 * high, CLIPPED_HIGH, window)
        _bars(axes, -low, 0 * low, CLIPPED_LOW, window)
        _share_axis(axes, lowest, highest)
        of_all = clipped_share(setting)
        text = f"{percent(of_all.mean())} of all tokens; most {percent(of_all.max())}, step {of_all.idxmax()}"
        axes.set_title(text if of_all.max() > 0 else "none", fontweight="normal")
        description = (
            f"Bars of the share of tokens that {setting.label} clips in each step, high upwards, low downwards."
        )
        panels.append(Panel(f"fractions_{index}", setting.label, description, drawing))
    heading, look, note = "How many tokens are outside the bounds", "", ""
    if known:
        look = (
            "the height of the bars, and which way they point: up (violet) is above the upper bound with A > 0, down "
        )
        look += "(orange) below the lower with A < 0."
        note = (
            f"{_of_bars(window)}Share of all tokens on which PPO’s clip would act at the setting’s own bounds; methods "
        )
        note += (
            "with a soft clip keep a part of their gradient. Every panel has the same axes. Dual clip is not in it. "
        )
    of_verl = [one for one in settings if one not in known and len(one.mean(keys.PG_CLIPPED))]
    for index, setting in enumerate(of_verl, len(known)):
        drawing = _lines([setting], keys.PG_CLIPPED)
        text = f"{keys.PG_CLIPPED} of {setting.label} over training steps."
        panels.append(Panel(f"fractions_{index}", setting.label, text, drawing))
    if of_verl:
        heading = heading if known else "How many tokens verl counts as clipped"
        look = look or "a share that grows or jumps."
        note += f"Of {' and '.join(setting.label for setting in of_verl)} only verl’s {keys.PG_CLIPPED} is known: "
        note += "a mean over micro-batches of what the loss itself counts, both sides together. "
        note += "+clipx=observe logs each side."
    return Plate(
        heading,
        look,
        note,
        panels,
        "No token left the bounds on the side where PPO clips." if not of_verl and highest + lowest == 0 else "",
    )


def masses(settings: list[DrawnSetting]) -> Plate:
    """The share of the gradient's mass outside the bounds, by region, over steps."""
    known = [(setting, shares) for setting in settings if len(shares := mass_shares(setting))]
    panels, window = [], window_of(settings)
    highest, lowest = (
        max([take_windows(shares[of].sum(axis=1), window, HIGH).max() for _, shares in known], default=0)
        for of in (["HP", "HN"], ["LN", "LP"])
    )
    for index, (setting, shares) in enumerate(known):
        drawing, (axes,) = figure(220, left=52)
        # Steps without any mass stay on the axis.
        shares = shares.reindex(setting.mean(keys.MASS["M"]).index)
        _bars(axes, shares.HN, 0 * shares.HN, "white", window, hatch="////")
        _bars(axes, shares.HN + shares.HP, shares.HN, CLIPPED_HIGH, window)
        _bars(axes, -shares.LP, 0 * shares.LP, "white", window, hatch="////")
        _bars(axes, -shares.LP - shares.LN, -shares.LP, CLIPPED_LOW, window)
        _share_axis(axes, lowest, highest)
        text = f"outside the bounds: {percent((1 - shares.M).mean())} of the mass"
        axes.set_title(text, fontweight="normal")
        description = f"Bars of the share of {setting.label}’s gradient mass outside its bounds, by region and step."
        panels.append(Panel(f"mass_{index}", setting.label, description, drawing))
    return Plate(
        "Gradient mass outside the bounds",
        "colour: mass that PPO’s clip would have removed (HP up, LN down), which only soft clipping shows. Hatched: "
        "mass outside the bounds that no clip removes (HN up, LP down).",
        f"{_of_bars(window)}Shares of Σ|F·A| over a step’s tokens; the rest lies within the bounds.",
        panels,
        "Tokens that are clipped keep no gradient." if all((one.LN + one.HP).max() == 0 for _, one in known) else "",
    )


def _bars(
    axes: Axes, to: pandas.Series, start: pandas.Series, colour: str, window: int, hatch: str | None = None
) -> None:
    """Draws a bar for each step, or for each window its median; a line over a filled bar spans the middle 80 %."""
    ends = [take_windows(to, window, quantile).dropna() for quantile in (LOW, HIGH)]
    to, start = (take_windows(values, window).dropna() for values in (to, start))
    edge = {"edgecolor": SOFT, "linewidth": 0.5} if hatch else {}
    if len(to) <= MOST_MARKS:
        axes.bar(to.index, to - start, bottom=start, width=0.7 * window, color=colour, hatch=hatch, **edge)
    else:
        edge = {"edgecolor": SOFT, "linewidth": 0.3} if hatch else {"linewidth": 0}
        axes.fill_between(to.index, start, to, step="mid", facecolor=colour, hatch=hatch, **edge)
    if window > 1 and not hatch and (to != start).any():
        axes.vlines(to.index, *ends, color=colour, lw=0.7, alpha=0.7)


def _of_bars(window: int) -> str:
    if window == 1:
        return ""
    return f"A bar is the median of {window} steps, its line the middle 80\u202f% of them; metrics.csv has every step. "


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
