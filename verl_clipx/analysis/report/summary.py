"""The table that the page begins with: a few numbers of each setting."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy
import pandas

from verl_clipx.analysis.replay.traced_numbers import TAKEN
from verl_clipx.analysis.report.numbers import SettingNumbers
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.settings import GRPO_METHOD, Setting
from verl_clipx.analysis.runs.traced import unlike_grpo
from verl_clipx.common.sentences import percent
from verl_clipx.common.statistics.estimate import MIN_SEEDS, estimate_over_seeds


class SummaryCell(NamedTuple):
    """A cell's text, and a note below it; both are empty where nothing is known."""

    text: str = ""
    note: str = ""


UNKNOWN = SummaryCell()


class SummaryRow(NamedTuple):
    """A row: its name, a note below the name, and a cell for each setting."""

    name: str
    note: str
    cells: list[SummaryCell]


def summarise(numbers: Sequence[SettingNumbers]) -> list[SummaryRow]:
    """Return the rows in which the cell of at least one setting has a text.

    Args:
        numbers: the numbers of each setting, in the order of the columns.
    """
    rows = [
        SummaryRow(name="Tokens clipped low", note="A < 0", cells=[_clipped_low(setting) for setting in numbers]),
        SummaryRow(name="Tokens clipped high", note="A > 0", cells=[_clipped_high(setting) for setting in numbers]),
        SummaryRow(
            name="Tokens clipped",
            note="both sides, as verl counts",
            cells=[_clipped_by_verl(setting) for setting in numbers],
        ),
        SummaryRow(
            name="Tokens masked", note="before any clip", cells=[_masked(setting.setting) for setting in numbers]
        ),
        SummaryRow(
            name="Gradient taken by clipping", note="", cells=[_taken_by_clipping(setting) for setting in numbers]
        ),
        SummaryRow(name="Tokens unlike GRPO’s", note="", cells=[_unlike_grpo(setting) for setting in numbers]),
        SummaryRow(name="Highest KL", note="from the old policy", cells=[_highest_kl(setting) for setting in numbers]),
        SummaryRow(name="Reward", note="", cells=_rewards([setting.setting for setting in numbers])),
        SummaryRow(name="Held-out reward", note="", cells=[_held_out(setting.setting) for setting in numbers]),
    ]
    return [row for row in rows if any(cell.text for cell in row.cells)]


def _clipped_low(numbers: SettingNumbers) -> SummaryCell:
    """Return the share of tokens below the lower bound, where PPO clips those with A < 0."""
    return _clipped(numbers, numbers.clipped_low, "LN")


def _clipped_high(numbers: SettingNumbers) -> SummaryCell:
    """Return the share of tokens above the upper bound, where PPO clips those with A > 0."""
    return _clipped(numbers, numbers.clipped_high, "HP")


def _clipped(numbers: SettingNumbers, share: pandas.Series, region: str) -> SummaryCell:
    """Return the share of tokens beyond a bound.

    Args:
        numbers: the setting's numbers.
        share: the share of tokens beyond the bound, by step.
        region: the region beyond the bound in which PPO clips, LN or HP.
    """
    if numbers.clipped.empty:
        return UNKNOWN
    has_gradient = len(numbers.mass) > 0 and numbers.mass[region].max() > 0
    note = "outside, with a gradient" if has_gradient else ""
    return SummaryCell(percent(share.mean()), note)


def _clipped_by_verl(numbers: SettingNumbers) -> SummaryCell:
    """Return the share of tokens that verl counts as clipped; nothing if the plugin's own counts are known."""
    if len(numbers.clipped) or numbers.clipped_by_verl.empty:
        return UNKNOWN
    return SummaryCell(percent(numbers.clipped_by_verl.mean()))


def _masked(setting: Setting) -> SummaryCell:
    """Return the share of tokens that a mask takes out. The note says the shares for each sign of the advantage."""
    shares = {}
    for sign, key in keys.MASKED.items():
        share = setting.mean(key)
        if len(share):
            shares[sign] = share.mean()
    if not shares:
        return UNKNOWN
    note = ", ".join(f"{percent(share)} {sign}" for sign, share in shares.items())
    whole_responses = sum(setting.mean(key).mean() for key in keys.MASKED_SEQUENCES)
    if whole_responses > 0:
        note += f"; {whole_responses:.1f} whole responses an update"
    return SummaryCell(percent(sum(shares.values())), note)


def _taken_by_clipping(numbers: SettingNumbers) -> SummaryCell:
    """Return the share of the gradient's mass that the clip took in the traced step."""
    if numbers.step_numbers is None or numpy.isnan(numbers.step_numbers[TAKEN].value):
        return UNKNOWN
    return SummaryCell(percent(*numbers.step_numbers[TAKEN], digits=2), f"in step {numbers.update.step}")


def _unlike_grpo(numbers: SettingNumbers) -> SummaryCell:
    """Return how many traced tokens GRPO's rule would have treated otherwise; nothing for GRPO, where it is none."""
    if numbers.update is None:
        return UNKNOWN
    count = int(unlike_grpo(numbers.update.tokens).sum())
    total = len(numbers.update.tokens)
    if count == 0 and numbers.setting.runs[0].method == GRPO_METHOD:
        return UNKNOWN
    return SummaryCell(f"{count} of {total}", f"{percent(count / total)}, in step {numbers.update.step}")


def _highest_kl(numbers: SettingNumbers) -> SummaryCell:
    """Return the highest KL divergence of any step, in nats a token. The note has its step, and the median."""
    if numbers.kl.empty:
        return UNKNOWN
    note = f"step {numbers.kl.idxmax()}; the median is {numbers.kl.median():.2g}"
    return SummaryCell(f"{numbers.kl.max():.2g}", note)


def _rewards(settings: Sequence[Setting]) -> list[SummaryCell]:
    """Return each setting's mean reward over the steps that all settings have.

    If there are no such steps, it is the mean over the setting's own steps.
    """
    tables = []
    for setting in settings:
        table = setting.table(keys.REWARD)
        tables.append(table[table.index > 0])
    common_steps = sorted(set.intersection(*[set(table.index) for table in tables]))
    cells = []
    for setting, table in zip(settings, tables, strict=True):
        compared = table.loc[common_steps] if common_steps else table
        if compared.empty:
            cells.append(UNKNOWN)
            continue
        means = setting.by_seed(compared).mean().to_numpy()
        steps = "1 step" if len(compared) == 1 else f"{len(compared)} steps"
        cells.append(_over_seeds(means, steps))
    return cells


def _held_out(setting: Setting) -> SummaryCell:
    """Return the held-out reward at the last validation that all runs have, after an update."""
    steps_of_runs = [{reward.step for reward in run.held_out} for run in setting.runs]
    step = max(set.intersection(*steps_of_runs), default=0)
    if step == 0:
        return UNKNOWN
    rewards = [reward for run in setting.runs for reward in run.held_out if reward.step == step]
    if len(rewards) == 1:
        return SummaryCell(str(rewards[0].reward), f"95\u202f% over {len(rewards[0].by_problem)} problems, step {step}")
    means = setting.by_seed(pandas.DataFrame([[reward.reward.mean for reward in rewards]])).iloc[0].to_numpy()
    return _over_seeds(means, f"step {step}")


def _over_seeds(means: numpy.ndarray, basis: str) -> SummaryCell:
    """Return the mean over seeds, with a 95 % interval if there are at least MIN_SEEDS seeds.

    Args:
        means: the mean of each seed, at least one.
        basis: what each mean is over, such as "20 steps".
    """
    if len(means) < MIN_SEEDS:
        seeds = "one seed" if len(means) == 1 else "two seeds"
        return SummaryCell(f"{means.mean():.3f}", f"{basis}; {seeds}: no verdict")
    return SummaryCell(str(estimate_over_seeds(means)), f"{basis}; 95\u202f% over {len(means)} seeds")
