"""Figures of the site: the gradient weight F of a method over the ratio, for either sign of the advantage."""

from io import StringIO

import numpy
import torch
from matplotlib.figure import Figure

from verl_clipx.analysis.report.drawing import style
from verl_clipx.analysis.report.palette import INK, OTHERS, SOFT
from verl_clipx.losses.applying.loss import apply
from verl_clipx.losses.base.method import Method
from verl_clipx.losses.base.tokens import Inputs

HIGHEST_RATIO = 2.5
# Under the old policy; at the highest ratio, the current probability is still at most 1.
PROBABILITIES = {0.1: "-", 0.4: (0, (4, 2))}
POINTS = 1001
MOST_WEIGHT = 5.0


def weights(method: Method, advantage: float, probability: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Ratios, and the gradient weight at each of a token that is a sequence by itself, (POINTS,) each.

    Args:
        method: bounds that adapt are those before any statistics: where a search starts, or a bin without spread.
        advantage: that of each token.
        probability: that of each token under the old policy.
    """
    ratio = torch.linspace(1e-3, HIGHEST_RATIO, POINTS, dtype=torch.float64)[:, None]
    old = torch.full_like(ratio, probability).log()
    inputs = Inputs(
        log_prob=old + ratio.log(),
        old_log_prob=old,
        advantages=torch.full_like(ratio, advantage),
        mask=torch.ones_like(ratio, dtype=torch.bool),
        rollout_log_prob=old,
        entropy=torch.ones_like(old),
        group=torch.arange(POINTS),
    )
    size = method.statistics_size + method.second_statistics_size
    decision = method.decide(torch.zeros(size, dtype=torch.float64))
    return ratio[:, 0], apply(method, None, inputs, decision).weight[:, 0]


def draw_weights(method: Method) -> str:
    """Draws F over the ratio, one panel for each sign of the advantage, as SVG."""
    with style():
        drawing = Figure(figsize=(10, 4.4))
        for axes, advantage in zip(drawing.subplots(1, 2, sharey=True), (1.0, -1.0), strict=True):
            lines = [[values.numpy() for values in weights(method, advantage, one)] for one in PROBABILITIES]
            same = numpy.allclose(lines[0][1], lines[1][1])
            drawn = zip(lines[: 2 - same], PROBABILITIES.items(), OTHERS, strict=False)
            for (ratio, weight), (probability, line_style), colour in drawn:
                # No line is drawn where the weight jumps.
                jumps = numpy.abs(numpy.diff(weight, append=weight[-1])) > 0.05
                label = f"old probability {probability:g}"
                axes.plot(ratio, numpy.where(jumps, numpy.nan, weight), color=colour, ls=line_style, label=label)
            axes.plot([0, HIGHEST_RATIO], [0, HIGHEST_RATIO], color=SOFT, lw=0.7, ls=":")
            axes.set(xlim=(0, HIGHEST_RATIO), xlabel="ratio r", title=f"A {'>' if advantage > 0 else '<'} 0")
            axes.set_ylim(-0.05, min(MOST_WEIGHT, axes.get_ylim()[1]))
            if not same:
                axes.legend(frameon=False, labelspacing=0.6)
        drawing.axes[0].set_ylabel("gradient weight F")
        given = ", ".join(f"{name} {value}" for name, value in method.parameters.items() if value is not None)
        title = f"{method.name}: the gradient is F·A; dotted: F = r"
        drawing.suptitle(title, x=0.02, ha="left", weight="bold", color=INK)
        note = " Bounds that adapt are those before any statistics." if method.statistics_size else ""
        drawing.text(0.02, 0.02, f"{given}.{note}", color=SOFT, fontsize=9, wrap=True, linespacing=1.6)
        drawing.subplots_adjust(left=0.07, right=0.95, top=0.84, bottom=0.22, wspace=0.12)
        drawing.savefig(svg := StringIO(), format="svg")
        return svg.getvalue()
