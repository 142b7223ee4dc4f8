"""The second step of the page: everything that it says and draws, in one value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas

from verl_clipx.analysis.diagnose.findings import Alarm, compare_rewards, find_alarms
from verl_clipx.analysis.report.charts import (
    OUTCOMES,
    SAMPLES,
    BinnedBounds,
    Chart,
    ClippedShares,
    DeclaredCharts,
    MassShares,
    SearchedBounds,
    chart_shares_of_verl,
    collect_bounds,
    collect_charts,
    collect_clipped,
    collect_declared,
    collect_mass,
)
from verl_clipx.analysis.report.compared import (
    ComparedSetting,
    list_differences,
    list_settings,
    list_versions,
    tabulate_steps,
)
from verl_clipx.analysis.report.numbers import compute_numbers
from verl_clipx.analysis.report.reading import ReadRuns
from verl_clipx.analysis.report.summary import SummaryRow, summarise
from verl_clipx.analysis.report.title import choose_gravest, name_comparison, say_what_was_clipped
from verl_clipx.analysis.report.token_view import Section, choose_sections
from verl_clipx.analysis.report.tokens import TokenSpread, spread_tokens
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.trained import describe_training
from verl_clipx.common.sentences import Finding


@dataclass(frozen=True)
class Analysis:
    """Everything that the page says and draws.

    Args:
        title: of the page.
        news: what the runs are diagnosed with, as the title says it; None if the title says anything else.
        alarms: what else they are diagnosed with.
        clipping: what each setting's clip did to how many tokens; empty if the log of one doesn't say.
        remarks: which seeds collapsed, where none did, and how the rewards compare.
        trained: lines that say what was trained, and when.
        settings: what is compared, with its runs.
        baseline: the label of the setting that the others' rewards are compared with.
        differences: what sets the settings apart: a key of the configuration to the value of each setting.
        unknown: the names of the runs without a configuration.
        versions: of the packages that the runs were made with, such as "verl 0.9.1".
        summary: the rows of the table of numbers.
        spreads: of each setting with traces, its tokens by ratio and probability.
        sections: of each setting with traces, the tokens that are shown one by one.
        outcomes: the charts of reward, entropy, KL and gradient norm.
        bounds: of each setting whose bounds move, these by step.
        clipped: of each setting that logs them, the shares of tokens clipped at each bound.
        clipped_by_verl: the charts of the settings of which only verl's own share of clipped tokens is known.
        mass: of each setting that logs it, the share of the gradient's mass in each region.
        samples: the charts of length and scores of the responses.
        declared: the charts of the other metrics.
        has_errors: whether the rewards have standard errors over prompts.
        has_held_out: whether a run was validated on held-out problems.
        masks: whether a run logs tokens that a mask takes out.
        longest: the number of steps of the longest log.
        steps: the metrics of all runs, a row for each step.
    """

    title: str
    news: Alarm | None
    alarms: Sequence[Alarm]
    clipping: str
    remarks: Sequence[Alarm | Finding]
    trained: Sequence[str]
    settings: Sequence[ComparedSetting]
    baseline: str
    differences: Mapping[str, Sequence[str]]
    unknown: Sequence[str]
    versions: Sequence[str]
    summary: Sequence[SummaryRow]
    spreads: Sequence[TokenSpread]
    sections: Sequence[Section]
    outcomes: Sequence[Chart]
    bounds: Sequence[BinnedBounds | SearchedBounds]
    clipped: Sequence[ClippedShares]
    clipped_by_verl: Sequence[Chart]
    mass: Sequence[MassShares]
    samples: Sequence[Chart]
    declared: DeclaredCharts
    has_errors: bool
    has_held_out: bool
    masks: bool
    longest: int
    steps: pandas.DataFrame

    @property
    def runs(self) -> int:
        """The number of runs."""
        return sum(len(setting.runs) for setting in self.settings)

    @property
    def fewest_seeds(self) -> int:
        """The number of seeds of the setting that has the fewest."""
        return min(setting.seeds for setting in self.settings)

    @property
    def searches(self) -> bool:
        """Whether a setting searches its bounds."""
        return any(isinstance(setting, SearchedBounds) for setting in self.bounds)


def analyse(runs: ReadRuns, title: str | None = None) -> Analysis:
    """Compute everything that the page says and draws.

    Args:
        runs: as they were read.
        title: the page's; by default the gravest finding, what was clipped, or what is compared.
    """
    numbers = compute_numbers(runs)
    settings = list(runs.settings)
    labels = [setting.label for setting in settings]
    diagnosed = find_alarms(settings, runs.baseline)
    alarms = [alarm for alarm in diagnosed if alarm.kind is not None]
    clipping = say_what_was_clipped(numbers)
    clipped = collect_clipped(numbers)
    news = None if title else choose_gravest(alarms, clipping_is_known=len(clipped) == len(settings))
    if not title:
        title = news.head.removesuffix(".") if news else clipping or name_comparison(labels)
    return Analysis(
        title=title,
        news=news,
        alarms=[alarm for alarm in alarms if alarm is not news],
        clipping=clipping,
        remarks=[*(alarm for alarm in diagnosed if alarm.kind is None), *compare_rewards(settings, runs.baseline)],
        trained=describe_training({setting.label: setting.runs for setting in settings}),
        settings=list_settings(runs.settings),
        baseline=runs.baseline.label,
        differences=list_differences(runs.settings),
        unknown=[run.name for run in runs.runs if not run.configuration],
        versions=list_versions(runs.runs),
        summary=summarise(numbers),
        spreads=[spread_tokens(update) for update in runs.updates],
        sections=choose_sections(runs.updates),
        outcomes=collect_charts(runs.settings, OUTCOMES),
        bounds=collect_bounds(runs.settings),
        clipped=clipped,
        clipped_by_verl=chart_shares_of_verl(numbers, first_file=len(clipped)),
        mass=collect_mass(numbers),
        samples=collect_charts(runs.settings, SAMPLES),
        declared=collect_declared(runs.settings),
        has_errors=any(len(run.values(keys.REWARD_ERROR)) for run in runs.runs),
        has_held_out=any(run.held_out for run in runs.runs),
        masks=any(key in run.log for run in runs.runs for key in keys.MASKED.values()),
        longest=max(len(run.log) for run in runs.runs),
        steps=tabulate_steps(runs.settings),
    )
