"""The table that the page begins with: a few numbers of each setting."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy
import pandas

from verl_clipx.analysis.diagnose.findings import clipped_share, mass_shares
from verl_clipx.analysis.replay.of_run import TAKEN, Number, numbers_of_step
from verl_clipx.analysis.report.trace_figures import FEW, is_clipped, probabilities
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.settings import GRPO_METHOD, Setting
from verl_clipx.analysis.runs.traced import TracedUpdate, unlike_grpo
from verl_clipx.common.sentences import percent
from verl_clipx.common.statistics.estimate import MIN_SEEDS, estimate_over_seeds

Cell = tuple[str, str]
"""A cell's text, and a note below it; both empty where nothing is known."""

UNKNOWN: Cell = ("", "")


class Row(NamedTuple):
    """A row: what it shows, a note below it, and a cell for each setting."""

    name: str
    note: str
    cells: list[Cell]


class Described(NamedTuple):
    """A setting, and where it has traces its update and the numbers of that update's step."""

    setting: Setting
    update: TracedUpdate | None = None
    numbers: dict[str, Number] | None = None


def describe(settings: Sequence[Setting], updates: Sequence[TracedUpdate]) -> list[Described]:
    """Returns the settings with what is known of them; `updates` are those of `traced_updates`."""
    of_setting = {update.setting.label: update for update in updates}
    described = []
    for setting in settings:
        update = of_setting.get(setting.label)
        found = numbers_of_step(update.run, update.step) if update else None
        described.append(Described(setting, update, found and found[0]))
    return described


def headline(described: Sequence[Described]) -> str:
    """Says in a line what each setting's clip did to how many tokens; empty if the log of one does not say."""
    first, again = {}, {}
    for one in described:
        label, clipped, of_verl = one.setting.label, clipped_share(one.setting), one.setting.mean(keys.PG_CLIPPED)
        if clipped.empty and of_verl.empty:
            return ""
        masses = mass_shares(one.setting)
        if clipped.empty:
            share = percent(of_verl.mean())
            said, more = f"verl counted {share} of the tokens of {label} as clipped", f"{share} of {label}"
            kind = "counted by verl"
        elif len(masses) and masses[["LN", "HP"]].to_numpy().max() > 0:
            said = more = f"{label} has {percent(clipped.mean())} outside its bounds, with a gradient"
            kind = "outside"
        else:
            share = percent(clipped.mean()) if clipped.max() > 0 else "none"
            said, more = f"{label} clipped {share} of the tokens{_mostly(one)}", f"{label} {share}"
            kind = "clipped"
        if kind in first:
            again[kind] += [more]
        else:
            first[kind], again[kind] = said, []
    return "; ".join(part for kind in first for part in (first[kind], *again[kind]))


def _mostly(one: Described) -> str:
    """Says of which kind most clipped tokens are, by the traced ones; empty where that isn't known."""
    if one.update is None:
        return ""
    lost, answers = one.update.tokens[is_clipped(one.update.tokens)], one.update.tokens.groupby(["prompt", "sample"])
    of_answers = answers.advantage.nunique().max() == 1
    low, high = (one.setting.mean(key).mean() for key in (keys.CLIPPED_LOW, keys.CLIPPED_HIGH))
    bad, improbable = (lost.advantage < 0) & of_answers & (low > high), probabilities(lost) < 0.5
    kinds = {
        "mostly improbable ones in bad answers": bad & improbable,
        "mostly improbable ones": improbable,
        "mostly in bad answers": bad,
    }
    return next((f", {kind}" for kind, those in kinds.items() if len(lost) >= FEW and those.mean() > 0.5), "")


def summary(described: Sequence[Described]) -> list[Row]:
    """Returns the rows in which at least one setting has something."""
    rows = [
        Row("Tokens clipped low", "A < 0", [_clipped(one.setting, "LN") for one in described]),
        Row("Tokens clipped high", "A > 0", [_clipped(one.setting, "HP") for one in described]),
        Row("Tokens clipped", "both sides, as verl counts", [_clipped_by_verl(one.setting) for one in described]),
        Row("Tokens masked", "before any clip", [_masked(one.setting) for one in described]),
        Row("Gradient taken by clipping", "", [_taken(one) for one in described]),
        Row("Tokens unlike GRPO’s", "", [_unlike(one) for one in described]),
        Row("Highest KL", "from the old policy", [_highest_kl(one.setting) for one in described]),
        Row("Reward", "", _rewards([one.setting for one in described])),
        Row("Held-out reward", "", [_held_out(one.setting) for one in described]),
    ]
    return [row for row in rows if any(text for text, _ in row.cells)]


def _clipped(setting: Setting, region: str) -> Cell:
    if clipped_share(setting).empty:
        return UNKNOWN
    share = setting.mean(keys.CLIPPED_LOW if region == "LN" else keys.CLIPPED_HIGH)
    mass = setting.mean(keys.MASS[region])
    return percent(share.mean()), "outside, with a gradient" if len(mass) and mass.max() > 0 else ""


def _clipped_by_verl(setting: Setting) -> Cell:
    of_verl = setting.mean(keys.PG_CLIPPED)
    return (percent(of_verl.mean()), "") if clipped_share(setting).empty and len(of_verl) else UNKNOWN


def _highest_kl(setting: Setting) -> Cell:
    divergence = setting.mean(keys.KL)
    if divergence.empty:
        return UNKNOWN
    return f"{divergence.max():.2g}", f"step {divergence.idxmax()}; the median is {divergence.median():.2g}"


def _masked(setting: Setting) -> Cell:
    shares = {sign: share.mean() for sign, key in keys.MASKED.items() if len(share := setting.mean(key))}
    if not shares:
        return UNKNOWN
    whole = sum(setting.mean(key).mean() for key in keys.MASKED_SEQUENCES)
    of_signs = ", ".join(f"{percent(share)} {sign}" for sign, share in shares.items())
    note = f"; {whole:.1f} whole responses an update" if whole > 0 else ""
    return percent(sum(shares.values())), f"{of_signs}{note}"


def _taken(one: Described) -> Cell:
    if one.numbers is None or numpy.isnan(one.numbers[TAKEN].value):
        return UNKNOWN
    return percent(*one.numbers[TAKEN], digits=2), f"in step {one.update.step}"


def _unlike(one: Described) -> Cell:
    if one.update is None:
        return UNKNOWN
    count, total = int(unlike_grpo(one.update.tokens).sum()), len(one.update.tokens)
    if count == 0 and one.setting.runs[0].method == GRPO_METHOD:
        return UNKNOWN
    return f"{count} of {total}", f"{percent(count / total)}, in step {one.update.step}"


def _rewards(settings: Sequence[Setting]) -> list[Cell]:
    """Means over the steps that all settings have, or, if there are none, over those of each."""
    tables = [table[table.index > 0] for table in (setting.table(keys.REWARD) for setting in settings)]
    common = sorted(set.intersection(*(set(table.index) for table in tables)))
    return [
        _over_seeds(setting.by_seed(over).mean().to_numpy(), f"{len(over)} step{'s' * (len(over) > 1)}")
        if len(over := table.loc[common] if common else table)
        else UNKNOWN
        for setting, table in zip(settings, tables, strict=True)
    ]


def _held_out(setting: Setting) -> Cell:
    step = max(set.intersection(*({one.step for one in run.held_out} for run in setting.runs)), default=0)
    if step == 0:
        return UNKNOWN
    last = [next(one for one in run.held_out if one.step == step) for run in setting.runs]
    if len(last) == 1:
        return str(last[0].reward), f"95\u202f% over {len(last[0].by_problem)} problems, step {step}"
    means = setting.by_seed(pandas.DataFrame([[one.reward.mean for one in last]])).iloc[0].to_numpy()
    return _over_seeds(means, f"step {step}")


def _over_seeds(means: numpy.ndarray, basis: str) -> Cell:
    if len(means) < MIN_SEEDS:
        return f"{means.mean():.3f}", f"{basis}; {('one seed', 'two seeds')[len(means) - 1]}: no verdict"
    return str(estimate_over_seeds(means)), f"{basis}; 95\u202f% over {len(means)} seeds"
