"""The fourth step of the page: its HTML, from the analysis and the figures alone."""

import re
from collections.abc import Mapping, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from verl_clipx.analysis.report import palette
from verl_clipx.analysis.report.analysis import Analysis
from verl_clipx.analysis.report.draw import Plate
from verl_clipx.analysis.report.drawing import MOST_STEPS, Panel, inline
from verl_clipx.analysis.report.token_view import GRPO_RULE
from verl_clipx.analysis.runs import keys
from verl_clipx.common.sentences import number
from verl_clipx.common.statistics.estimate import MIN_SEEDS


def render(
    analysis: Analysis, plates: Sequence[Plate], drawings: Mapping[str, str], *, reload_every: int | None = None
) -> str:
    """Return the page, which needs no other file and no network.

    Args:
        analysis: what it says.
        plates: its figures.
        drawings: from the name of a panel to its SVG.
        reload_every: seconds after which a browser loads the page again; None: never.
    """

    def figure(panel: Panel) -> Markup:
        """Return a panel's SVG, as a template puts it into the page."""
        return inline(drawings[panel.name], panel.name, panel.description)

    grpo_clips = any(section.clipped[GRPO_RULE] for section in analysis.sections)
    first_rule = "grpo" if grpo_clips else "own"
    return environment.get_template("report.html").render(
        analysis=analysis,
        plates=plates,
        figure=figure,
        opens=first_rule,
        data=[section.numbers for section in analysis.sections],
        reload_every=reload_every,
    )


def breakable(text: str) -> Markup:
    """Let a narrow column break a text within keys and paths, nowhere else in a word, and not in `A < 0`."""
    html = re.sub(r"([/_=](?=\w)|\.(?=[A-Za-z_]))", r"\1<wbr>", str(escape(text)))
    return Markup(re.sub(r"\bA (&[lg]t;) 0", "A\u00a0\\1\u00a00", html))


environment = Environment(
    loader=PackageLoader("verl_clipx.analysis.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
environment.filters["breakable"] = breakable
environment.globals.update(
    number=number,
    palette=palette,
    PG_CLIPPED=keys.PG_CLIPPED,
    MOST_STEPS=MOST_STEPS,
    MIN_SEEDS=MIN_SEEDS,
)
