"""A figure of the parts of log(current / rollout probability)."""

import numpy
from matplotlib.ticker import FuncFormatter, NullFormatter

from verl_clipx.diagnostics.anatomy import QUANTILES, parts_of
from verl_clipx.diagnostics.drawing import figure
from verl_clipx.diagnostics.keys import RATIO_PARTS
from verl_clipx.diagnostics.log_figures import Panel, Plate
from verl_clipx.diagnostics.palette import GRPO, INK, SOFT
from verl_clipx.diagnostics.runs import Setting
from verl_clipx.diagnostics.traced import GRPO_HIGH


def anatomy(settings: list[Setting]) -> Plate:
    """The quantiles of each part, a panel a setting."""
    known = [(setting, parts) for setting in settings if len(parts := parts_of(setting))]
    smallest = min([parts["median"].min() for _, parts in known], default=1.0)
    largest = max([parts["p99_9"].max() for _, parts in known], default=1.0)
    panels = []
    for index, (setting, parts) in enumerate(known):
        drawing, (axes,) = figure(60 + 34 * len(parts), left=138, top=10)
        places = numpy.arange(len(parts))
        axes.hlines(places, parts["median"].clip(lower=1e-6), parts["p99_9"], color=setting.colour, lw=1.2)
        for name, size in zip(QUANTILES, (34, 24, 24, 16), strict=True):
            face = setting.colour if name in ("median", "p99") else "white"
            axes.scatter(parts[name].clip(lower=1e-6), places, s=size, color=face, edgecolor=setting.colour, zorder=3)
        axes.axvline(numpy.log(GRPO_HIGH), color=GRPO, lw=1)
        axes.set(xscale="log", xlim=(max(smallest / 2, 1e-6), max(2 * largest, 0.4)), ylim=(len(parts) - 0.4, -0.6))
        axes.set_yticks(places, [RATIO_PARTS[part] for part in parts.index], color=INK)
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("size of the part, nats", color=SOFT)
        numbers = {
            RATIO_PARTS[part]: ", ".join(f"{row[name]:.2g}" for name in QUANTILES) for part, row in parts.iterrows()
        }
        text = "; ".join(f"{part}: {of_part}" for part, of_part in numbers.items())
        panels.append(Panel(f"anatomy_{index}", setting.label, f"Quantiles of the parts, in nats. {text}.", drawing))
    return Plate(
        "Where the ratio comes from",
        "the line that reaches furthest to the right. One that passes the grey line, log 1.2, would by itself carry "
        "tokens over GRPO’s upper bound.",
        "Sizes of the parts of log(current / rollout probability) that 50, 90, 99 and 99.9\u202f% of the tokens don’t "
        "exceed (filled, open, filled, open), means over steps. docs/metrics.md says what each part is.",
        panels,
    )
