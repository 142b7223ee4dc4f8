"""The colours of the page, each with one meaning."""

from dataclasses import dataclass

from verl_clipx.analysis.runs.settings import GRPO_METHOD, Setting

# The colour of GRPO and its bounds, with which others are compared.
GRPO = "#404040"
# The colours of the other settings, in the order in which they were named.
OTHERS = ("#1f66e5", "#1d723f", "#5c2c00")
# The colours of tokens that are clipped at the lower and at the upper bound. Kept tokens are INK and differ by shape.
CLIPPED_LOW = "#d1450f"
CLIPPED_HIGH = "#a3268c"
COLOURS = (GRPO, *OTHERS, CLIPPED_LOW, CLIPPED_HIGH)
# The colours of texts, of texts that matter less, and of thin lines.
INK = "#1a1a1a"
SOFT = "#636363"
HAIR = "#9a9a9a"


@dataclass(frozen=True)
class DrawnSetting(Setting):
    """A setting with a colour of its own in every figure."""

    colour: str = INK


def with_colours(settings: list[Setting]) -> list[DrawnSetting]:
    """Give each setting its colour: GRPO's colour to the first setting of GRPO, and OTHERS to the rest in their order.

    Raises:
        ValueError: there are more settings than colours that people can keep apart.
    """
    yardstick = next((setting for setting in settings if setting.runs[0].method == GRPO_METHOD), None)
    others = [setting for setting in settings if setting is not yardstick]
    if len(others) > len(OTHERS):
        raise ValueError(
            f"{len(settings)} settings: a report tells {len(OTHERS)} besides GRPO apart. Name fewer runs. Those whose "
            "records differ only in seeds, names and places are one setting; a run without a record is its own."
        )
    unused = iter(OTHERS)
    coloured = []
    for setting in settings:
        colour = GRPO if setting is yardstick else next(unused)
        coloured.append(DrawnSetting(label=setting.label, runs=setting.runs, colour=colour))
    return coloured
