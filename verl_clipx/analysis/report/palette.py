"""The page's colours, one meaning each, and how far apart they are to people who see fewer of them."""

from dataclasses import dataclass

from verl_clipx.analysis.runs.settings import GRPO_METHOD, Setting

# GRPO and its bounds, the yardstick; then the other settings that are compared, in the order in which they were named.
GRPO = "#404040"
OTHERS = ("#1f66e5", "#1d723f", "#5c2c00")
# What happened to a token: clipped at the lower bound, at the upper bound. Kept tokens are ink and differ by shape.
CLIPPED_LOW = "#d1450f"
CLIPPED_HIGH = "#a3268c"
COLOURS = (GRPO, *OTHERS, CLIPPED_LOW, CLIPPED_HIGH)
INK = "#1a1a1a"
SOFT = "#636363"
HAIR = "#9a9a9a"


@dataclass(frozen=True)
class DrawnSetting(Setting):
    """A setting with a colour of its own in every figure."""

    colour: str = INK


def with_colours(settings: list[Setting]) -> list[DrawnSetting]:
    """Gives each setting its colour: GRPO's to the first of GRPO, to the others theirs in their order.

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
