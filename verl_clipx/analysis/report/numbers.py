"""What the logs and traces say of each setting, computed once for the table, the title and the figures."""

from collections.abc import Mapping
from dataclasses import dataclass

import pandas

from verl_clipx.analysis.diagnose.findings import clipped_share, mass_shares
from verl_clipx.analysis.replay.traced_numbers import TracedNumber
from verl_clipx.analysis.report.palette import DrawnSetting
from verl_clipx.analysis.report.reading import ReadRuns
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.traced import TracedUpdate


@dataclass(frozen=True)
class SettingNumbers:
    """What is known of a setting.

    Each series is by step and has the mean over the setting's runs. It is empty if one of the runs did not log it.

    Args:
        setting: its label, colour and runs.
        clipped_low, clipped_high: the shares of all tokens that are beyond the lower or the upper bound, where PPO's
            clip acts.
        clipped: the share of tokens beyond either bound.
        clipped_by_verl: the share that verl itself counts as clipped.
        mass: the share of the gradient's mass in each region, a row for each step, without steps that have no mass.
        mass_steps: the steps at which the mass was logged, also those without any.
        kl: the KL divergence from the old policy, in nats a token.
        update: the traced update that the page shows; None without traces.
        step_numbers: what clipping did in the update's whole step; None without traces, or where it is not finite.
    """

    setting: DrawnSetting
    clipped_low: pandas.Series
    clipped_high: pandas.Series
    clipped: pandas.Series
    clipped_by_verl: pandas.Series
    mass: pandas.DataFrame
    mass_steps: pandas.Index
    kl: pandas.Series
    update: TracedUpdate | None = None
    step_numbers: Mapping[str, TracedNumber] | None = None

    @property
    def label(self) -> str:
        """What the page calls the setting."""
        return self.setting.label

    @property
    def has_gradient_outside(self) -> bool:
        """Whether tokens that PPO's clip would act on are known to keep a gradient, as under soft clipping.

        It is also False if the gradient's mass was not logged.
        """
        # The regions in which PPO's clip takes the gradient away.
        mass_where_ppo_clips = self.mass[["LN", "HP"]].to_numpy()
        return len(self.mass) > 0 and bool(mass_where_ppo_clips.max() > 0)


def compute_numbers(runs: ReadRuns) -> list[SettingNumbers]:
    """Return the numbers of each setting, in the order of `runs.settings`."""
    update_by_label = {update.setting.label: update for update in runs.updates}
    return [
        SettingNumbers(
            setting=setting,
            clipped_low=setting.mean(keys.CLIPPED_LOW),
            clipped_high=setting.mean(keys.CLIPPED_HIGH),
            clipped=clipped_share(setting),
            clipped_by_verl=setting.mean(keys.PG_CLIPPED),
            mass=mass_shares(setting),
            # The regions are logged together, so that each has the same steps as M.
            mass_steps=setting.mean(keys.MASS["M"]).index,
            kl=setting.mean(keys.KL),
            update=update_by_label.get(setting.label),
            step_numbers=runs.step_numbers.get(setting.label),
        )
        for setting in runs.settings
    ]
