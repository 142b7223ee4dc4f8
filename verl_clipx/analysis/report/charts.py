"""What the figures of the logs show, as numbers: curves, bounds, clipped shares and gradient mass by step."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pandas

from verl_clipx.analysis.diagnose.findings import has_searched_bounds
from verl_clipx.analysis.report.numbers import SettingNumbers
from verl_clipx.analysis.report.palette import DrawnSetting
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.held_out import HeldOutReward
from verl_clipx.analysis.runs.settings import remove_shared_parts
from verl_clipx.losses.applying.metric_listing import every_metric
from verl_clipx.losses.base.metric import Metric
from verl_clipx.losses.methods import METHODS

# The share that BAPO's search aims at, where a run's record doesn't say it.
DEFAULT_TARGET = 0.4
# How many standard errors half of a normal distribution's 95 % interval is wide.
ERRORS_IN_HALF_INTERVAL = 1.96
# Stands for a metric that is not known.
NO_SERIES = pandas.Series(dtype=float)


# --- Curves ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChartLine:
    """A metric of one setting by step.

    Args:
        name: its name in the legend.
        colour: the setting's colour.
        line_style: the number of the line's style, from 0. The metrics of a chart differ in their styles.
        by_run: the metric's values, with a row for each step and a column for each run.
        errors: half the width of the 95 % interval over prompts, by step; empty if it is not known.
        held_out: the held-out rewards that are drawn on the line.
    """

    name: str
    colour: str
    line_style: int
    by_run: pandas.DataFrame
    errors: pandas.Series
    held_out: Sequence[HeldOutReward]


@dataclass(frozen=True)
class Chart:
    """Metrics of all settings by step.

    Args:
        name: the name of its files.
        title: what stands above it.
        description: a text for those who cannot see it.
        lines: what it shows, at least one line.
        from_zero: whether the axis begins at 0 or below.
        in_percent: whether the values are shares.
    """

    name: str
    title: str
    description: str
    lines: Sequence[ChartLine]
    from_zero: bool = True
    in_percent: bool = False


# Measures: a name for the chart's files, its title, and the key of the metric.
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


def collect_charts(settings: Sequence[DrawnSetting], measures: Sequence[tuple[str, str, str]]) -> list[Chart]:
    """Return a chart of each measure that all runs of some setting log.

    Args:
        settings: the settings that are drawn.
        measures: a name for the chart's files, its title, and the key of the metric.
    """
    charts = []
    for name, title, key in measures:
        lines = collect_lines(settings, {key: ""})
        if lines:
            charts.append(
                Chart(
                    name=name,
                    title=title,
                    description=f"{title}, over training steps.",
                    lines=lines,
                    in_percent=key in keys.SHARES,
                )
            )
    return charts


def collect_lines(settings: Sequence[DrawnSetting], names: dict[str, str]) -> list[ChartLine]:
    """Return a line for each setting and each metric that all runs of the setting log.

    Args:
        settings: the settings that are drawn.
        names: from the key of each metric to its name in the legend. The name is "" where the chart has a single
            metric: the legend then names the settings.
    """
    lines = []
    for setting in settings:
        for line_style, (key, name) in enumerate(names.items()):
            by_run = setting.table(key)
            if by_run.empty:
                continue
            # Only the reward of a single run needs its errors. Where there are several runs, the band between them
            # shows how far the mean may be trusted.
            is_reward_of_one_run = key == keys.REWARD and len(setting.runs) == 1
            errors = NO_SERIES
            held_out: Sequence[HeldOutReward] = ()
            if is_reward_of_one_run:
                errors = ERRORS_IN_HALF_INTERVAL * setting.mean(keys.REWARD_ERROR)
                held_out = setting.runs[0].held_out
            lines.append(
                ChartLine(
                    name=name or setting.label,
                    colour=setting.colour,
                    line_style=line_style,
                    by_run=by_run,
                    errors=errors,
                    held_out=held_out,
                )
            )
    return lines


# --- Other metrics, by what declares them ----------------------------------------------------------------------------


@dataclass(frozen=True)
class DeclaredCharts:
    """The charts of metrics that no other figure draws, and whose declarations name a chart.

    Args:
        charts: a chart for each name.
        meanings: a text for each of their metrics, with its name, meaning and unit.
    """

    charts: Sequence[Chart]
    meanings: Sequence[str]


def collect_declared(settings: Sequence[DrawnSetting]) -> DeclaredCharts:
    """Return the charts that the declarations of the logged metrics name.

    A metric is declared with its meaning and its unit. If the page is to draw it, it is also declared with the title of
    a chart. Metrics with the same title share a chart.
    """
    logged_keys: set[str] = set()
    for setting in settings:
        for run in setting.runs:
            logged_keys.update(run.log)
    charts = []
    meanings: list[str] = []
    for index, (title, metrics) in enumerate(_metrics_by_chart(logged_keys).items()):
        # A metric that is logged for each bin has several keys and one meaning.
        meanings_of_chart = list(
            dict.fromkeys(f"{metric.name}: {metric.meaning} ({metric.unit})" for metric in metrics.values())
        )
        meanings += meanings_of_chart
        charts.append(
            Chart(
                name=f"declared_{index}",
                title=title,
                description=f"{'; '.join(meanings_of_chart)}, over training steps.",
                lines=collect_lines(settings, _names_in_legend(list(metrics))),
                from_zero=False,
            )
        )
    return DeclaredCharts(charts=charts, meanings=list(dict.fromkeys(meanings)))


def _metrics_by_chart(logged_keys: set[str]) -> dict[str, dict[str, Metric]]:
    """Return the metrics of the charts that metrics' declarations name, without metrics that another figure draws.

    Args:
        logged_keys: the keys of the metrics in the logs of all runs.

    Returns:
        From the title of a chart to its metrics: from the key of a metric to its declaration.
    """
    charts: dict[str, dict[str, Metric]] = {}
    for _, metric in every_metric(METHODS):
        pattern = re.compile(rf"(actor/)?{metric.pattern}")
        keys_of_metric = [key for key in sorted(logged_keys) if pattern.fullmatch(key)]
        if not metric.chart or not keys_of_metric or keys.is_drawn(keys_of_metric[0]):
            continue
        for key in keys_of_metric:
            charts.setdefault(metric.chart, {})[key] = metric
    return charts


def _names_in_legend(metric_keys: Sequence[str]) -> dict[str, str]:
    """Return the name of each metric in a legend.

    The name is the metric's key without the beginning and the end that all keys share. A single metric has the name "".
    """
    if len(metric_keys) == 1:
        return {metric_keys[0]: ""}
    parts_of_keys = remove_shared_parts([key.split("/") for key in metric_keys])
    names: dict[str, str] = {}
    for key, parts in zip(metric_keys, parts_of_keys, strict=True):
        names[key] = "/".join(parts).replace("_", " ")
    return names


# --- Bounds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BoundsByStep:
    """Two bounds on the ratio by step.

    Args:
        low, high: the means over a step's updates.
        low_last, high_last: the bounds of a step's last update; empty if not logged.
    """

    low: pandas.Series
    high: pandas.Series
    low_last: pandas.Series
    high_last: pandas.Series


@dataclass(frozen=True)
class BinBounds:
    """The bounds of the tokens whose probability lies between two ends.

    Args:
        probability_from, probability_to: the ends of the bin, in [0, 1].
        bounds: the bounds on the ratio.
    """

    probability_from: float
    probability_to: float
    bounds: BoundsByStep


@dataclass(frozen=True)
class BinnedBounds:
    """The bounds of a setting by probability bin, as ACPO has them.

    Args:
        label, colour: of the setting.
        bins: from the lowest probabilities to the highest.
        highest: the highest bound of any step and bin.
    """

    label: str
    colour: str
    bins: Sequence[BinBounds]
    highest: float

    @property
    def has_last(self) -> bool:
        """Whether the bounds of the last updates are logged."""
        return any(len(of_bin.bounds.low_last) for of_bin in self.bins)


@dataclass(frozen=True)
class SearchedBounds:
    """The bounds of a setting that searches them for all tokens, as BAPO does.

    Args:
        label, colour: of the setting.
        bounds: on the ratio.
        share_before, share_after: the positive tokens' share of the loss before the search and after it; empty if not
            logged.
        target: the share that the search aims at.
    """

    label: str
    colour: str
    bounds: BoundsByStep
    share_before: pandas.Series
    share_after: pandas.Series
    target: float

    @property
    def has_last(self) -> bool:
        """Whether the bounds of the last updates are logged."""
        return len(self.bounds.high_last) > 0


def collect_bounds(settings: Sequence[DrawnSetting]) -> list[BinnedBounds | SearchedBounds]:
    """Return the bounds of each setting that logs moving bounds."""
    bounds: list[BinnedBounds | SearchedBounds] = []
    for setting in settings:
        if setting.bins("epsilon"):
            bounds.append(_binned_bounds(setting))
        elif has_searched_bounds(setting):
            bounds.append(_searched_bounds(setting))
    return bounds


def _binned_bounds(setting: DrawnSetting) -> BinnedBounds:
    """Return the bounds 1 ± epsilon of a setting that logs an epsilon for each bin."""
    epsilon_keys = setting.bins("epsilon")
    bins = []
    for key in epsilon_keys:
        number = int(key.rpartition("_")[2])
        epsilon = setting.mean(key)
        epsilon_last = setting.mean(key.replace("/epsilon/", "/epsilon_last/"))
        bounds = BoundsByStep(
            low=(1 - epsilon).clip(lower=0),
            high=1 + epsilon,
            low_last=(1 - epsilon_last).clip(lower=0),
            high_last=1 + epsilon_last,
        )
        # All bins of probability are equally wide.
        bins.append(
            BinBounds(
                probability_from=number / len(epsilon_keys),
                probability_to=(number + 1) / len(epsilon_keys),
                bounds=bounds,
            )
        )
    highest = max(1 + setting.mean(key).max() for key in (*epsilon_keys, *setting.bins("epsilon_last")))
    return BinnedBounds(label=setting.label, colour=setting.colour, bins=bins, highest=float(highest))


def _searched_bounds(setting: DrawnSetting) -> SearchedBounds:
    """Return the bounds of a setting that searches two bounds for all tokens."""
    return SearchedBounds(
        label=setting.label,
        colour=setting.colour,
        bounds=BoundsByStep(
            low=setting.mean(keys.BOUND_LOW),
            high=setting.mean(keys.BOUND_HIGH),
            low_last=setting.mean(keys.BOUND_LOW_LAST),
            high_last=setting.mean(keys.BOUND_HIGH_LAST),
        ),
        share_before=setting.mean(keys.SHARE_BEFORE),
        share_after=setting.mean(keys.SHARE_AFTER),
        target=setting.runs[0].record.loss.parameters.get("target", DEFAULT_TARGET),
    )


# --- What was clipped ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FloorByStep:
    """The shares of tokens that rounding clips before anything has moved, by step.

    Args:
        low, high: the shares at the lower bound and at the upper.
    """

    low: pandas.Series
    high: pandas.Series


@dataclass(frozen=True)
class ClippedShares:
    """The share of all tokens that a setting clips, by step.

    Args:
        label: of the setting.
        low, high: the shares that are clipped at the lower bound and at the upper.
        mean_of_both: the mean over the steps of the sum of both shares.
        highest_of_both: the highest sum of both shares.
        step_of_highest: the step with the highest sum.
        floor: the larger of the setting's two measurements of what rounding clips; None if not logged.
    """

    label: str
    low: pandas.Series
    high: pandas.Series
    mean_of_both: float
    highest_of_both: float
    step_of_highest: int
    floor: FloorByStep | None


def collect_clipped(numbers: Sequence[SettingNumbers]) -> list[ClippedShares]:
    """Return the clipped shares of the settings all of whose runs log them."""
    shares = []
    for numbers_of_setting in numbers:
        if numbers_of_setting.clipped.empty:
            continue
        shares.append(
            ClippedShares(
                label=numbers_of_setting.label,
                low=numbers_of_setting.clipped_low,
                high=numbers_of_setting.clipped_high,
                mean_of_both=float(numbers_of_setting.clipped.mean()),
                highest_of_both=float(numbers_of_setting.clipped.max()),
                step_of_highest=int(numbers_of_setting.clipped.idxmax()),
                floor=find_larger_floor(numbers_of_setting.setting),
            )
        )
    return shares


def find_larger_floor(setting: DrawnSetting) -> FloorByStep | None:
    """Return what rounding clips, by the larger of its two measurements; None if it is not logged.

    The first measurement is made in each step, the second once after each start. If the second is larger, its mean is
    used for every step.
    """
    low = setting.mean(keys.FLOOR_LOW)
    high = setting.mean(keys.FLOOR_HIGH)
    if low.empty or high.empty:
        return None
    second_low = setting.mean(keys.RECUT_LOW)
    second_high = setting.mean(keys.RECUT_HIGH)
    if len(second_low) and second_low.mean() + second_high.mean() > low.mean() + high.mean():
        return FloorByStep(
            low=pandas.Series(second_low.mean(), index=low.index),
            high=pandas.Series(second_high.mean(), index=high.index),
        )
    return FloorByStep(low=low, high=high)


def chart_shares_of_verl(numbers: Sequence[SettingNumbers], first_file: int) -> list[Chart]:
    """Return a chart of the share of tokens that verl says its loss clipped, by step, for some of the settings.

    A setting has such a chart if all its runs log verl's share, and not all of them log the plugin's.

    Args:
        numbers: the numbers of all settings.
        first_file: the number in the name of the first chart's files. Each further chart has the next number. The
            figures of `draw_clipped_shares` are named `fractions_0` and so on too, so that these numbers follow theirs.
    """
    charts: list[Chart] = []
    for numbers_of_setting in numbers:
        has_only_share_of_verl = numbers_of_setting.clipped.empty and not numbers_of_setting.clipped_by_verl.empty
        if not has_only_share_of_verl:
            continue
        label = numbers_of_setting.label
        charts.append(
            Chart(
                name=f"fractions_{first_file + len(charts)}",
                title=label,
                description=f"{keys.PG_CLIPPED} of {label} over training steps.",
                # The only metric of a chart has no name, so that the legend names the setting.
                lines=collect_lines([numbers_of_setting.setting], {keys.PG_CLIPPED: ""}),
                in_percent=True,
            )
        )
    return charts


@dataclass(frozen=True)
class MassShares:
    """The share of a setting's gradient mass outside its bounds, by region and step.

    Args:
        label: of the setting.
        shares: a row for each step and a column for each region; NaN at steps without any mass.
        outside: the mean over the steps of the share outside the bounds, which is all but the region M.
        of_clipped: the highest share of any step in LN and HP, the regions in which PPO's clip leaves no gradient.
    """

    label: str
    shares: pandas.DataFrame
    outside: float
    of_clipped: float


def collect_mass(numbers: Sequence[SettingNumbers]) -> list[MassShares]:
    """Return the gradient mass of the settings all of whose runs log it."""
    shares = []
    for numbers_of_setting in numbers:
        mass = numbers_of_setting.mass
        if mass.empty:
            continue
        shares.append(
            MassShares(
                label=numbers_of_setting.label,
                # Steps without any mass stay on the axis.
                shares=mass.reindex(numbers_of_setting.mass_steps),
                outside=float((1 - mass.M).mean()),
                of_clipped=float((mass.LN + mass.HP).max()),
            )
        )
    return shares
