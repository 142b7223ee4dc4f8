"""Where the ratio comes from: how large its parts are on the traced tokens."""

import numpy
import pandas
from matplotlib.ticker import FuncFormatter, NullFormatter

from verl_clipx.report.drawing import figure
from verl_clipx.report.log_figures import Panel, Plate
from verl_clipx.report.palette import GRPO, INK, SOFT
from verl_clipx.runs.traced import GRPO_HIGH, TracedUpdate

QUANTILES = {0.5: "50\u202f%", 0.9: "90\u202f%", 0.99: "99\u202f%", 0.999: "99.9\u202f%"}
# The axis is logarithmic; a part may be 0.
SMALLEST = 1e-6
# Two engines that differ by less for 99.9 % of the tokens agree, in nats.
AGREED = 1e-3


def parts_of(tokens: pandas.DataFrame) -> pandas.DataFrame:
    """The quantiles of each part's size, in nats: of the logarithm of one probability over another.

    Args:
        tokens: fields of `traces.SCHEMA`, a row for each token.

    Returns:
        A row for each part that has tokens, a column for each of QUANTILES. In bypass mode, where the old
        probabilities are the rollout's, and without the rollout's, there is no part but current / old.
    """
    old, rollout = tokens.old_log_prob, tokens.rollout_log_prob.astype(float)
    before, fresh = (old - rollout).abs(), tokens.age.eq(0)
    sizes = {"current / old": (tokens.log_prob - old).abs()}
    if before.gt(0).any():
        rest = {"old / rollout, age 0": before[fresh], "old / rollout, older": before[~fresh]}
        sizes = rest | sizes | {"current / rollout": (tokens.log_prob - rollout).abs()}
    finite = {part: size[numpy.isfinite(size)] for part, size in sizes.items()}
    rows = {part: size.quantile(list(QUANTILES)) for part, size in finite.items() if len(size)}
    return pandas.DataFrame.from_dict(rows, orient="index")


def ratio_parts(updates: list[TracedUpdate]) -> Plate:
    """The quantiles of the parts, with a panel for each setting that has several."""
    parts = {index: found for index, one in enumerate(updates) if len(found := parts_of(one.tokens)) > 1}
    apart = max(
        (float(found.loc[found.index.str.startswith("old"), 0.999].max()) for found in parts.values()), default=0
    )
    return Plate(
        "Where the ratio comes from",
        "the line that reaches furthest to the right. What passes the grey line, log 1.2, would by itself carry tokens "
        "over GRPO’s upper bound.",
        f"Sizes of the logarithms of these probabilities’ ratios that {', '.join(QUANTILES.values())} of the traced "
        "update’s tokens don’t exceed (filled, open, filled, open). Old / rollout: two engines, and for older samples "
        "also older weights. Current / old: the updates, and how much two passes differ; the clip acts on it.",
        [_panel(f"ratio_parts_{index}", updates[index], of_update) for index, of_update in parts.items()],
        "" if apart > AGREED else f"Rollout and trainer agree to {apart:.1g} nats; the updates are all of it.",
    )


def _panel(name: str, update: TracedUpdate, parts: pandas.DataFrame) -> Panel:
    drawing, (axes,) = figure(60 + 34 * len(parts), left=138, top=10)
    places, colour = range(len(parts)), update.setting.colour
    drawn = parts.clip(lower=SMALLEST)
    axes.hlines(places, drawn[0.5], drawn[0.999], color=colour, lw=1.2)
    for quantile, face in zip(QUANTILES, (colour, "white", colour, "white"), strict=True):
        axes.scatter(drawn[quantile], places, s=24, color=face, edgecolor=colour, zorder=3)
    axes.axvline(numpy.log(GRPO_HIGH), color=GRPO, lw=1)
    low, high = float(drawn.to_numpy().min()) / 2, max(2 * float(drawn.to_numpy().max()), 0.4)
    axes.set(xscale="log", xlim=(low, high), ylim=(len(parts) - 0.4, -0.6))
    axes.set_yticks(places, parts.index, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("size of the part, nats", color=SOFT)
    numbers = "; ".join(f"{part}: {', '.join(f'{size:.2g}' for size in row)}" for part, row in parts.iterrows())
    title = f"{update.setting.label}, {len(update.tokens)} tokens"
    return Panel(name, title, f"Quantiles of the parts, in nats. {numbers}.", drawing)
