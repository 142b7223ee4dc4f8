"""Where the ratio comes from: the parts of log(current / rollout probability) that a setting logs, in a sentence."""

import pandas

from verl_clipx.diagnostics.base_rates import usual
from verl_clipx.diagnostics.keys import RATIO_PARTS, of_ratio
from verl_clipx.diagnostics.runs import Setting
from verl_clipx.diagnostics.sentences import Finding, percent

QUANTILES = {"median": "50", "p90": "90", "p99": "99", "p99_9": "99.9"}
# Noise does not have so small a share of positive values, or of negative ones.
ONE_SIDED = 0.05
# In bypass mode the updates are known only in their sum with the other parts. Where that sum is more than so many times
# the largest of the others, the updates make up most of it.
MUCH_MORE = 2


def parts_of(setting: Setting) -> pandas.DataFrame:
    """A row for each part that a setting logs, with means over steps; without rows under clipx.metrics=default."""
    names = (*QUANTILES, "positive", "over_bounds")
    found = {part: {name: setting.mean(of_ratio(part, name)).mean() for name in names} for part in RATIO_PARTS}
    return pandas.DataFrame.from_dict(found, orient="index").dropna(subset=[*QUANTILES])


def what_moved_the_ratio(setting: Setting) -> Finding | None:
    """The largest part of the log-ratio, and what each would carry over the bounds; None where none is logged."""
    parts = parts_of(setting)
    known = parts.drop(index="all_parts", errors="ignore")
    if known.empty:
        return None
    largest, shown = known.p99.idxmax(), known
    if "update" not in known.index and "all_parts" in parts.index:
        shown = parts
        largest = "update" if parts.p99["all_parts"] > MUCH_MORE * known.p99.max() else largest
    each = "; ".join(
        f"{RATIO_PARTS[part]} {row.p99:.2g} nats{_over(part, row.over_bounds)}" for part, row in shown.iterrows()
    )
    text = (
        "99\u202f% of the tokens have no more than this of each part of log(current / rollout), as a mean over steps, "
    )
    text += f"counted over all tokens in buckets 7\u202f% wide: {each}."
    if not {"engine_mismatch", "mismatch_and_staleness"} & set(known.index):
        text += " What the rollout adds is not known: it returned no log-probabilities."
    elif setting.runs[0].configuration.get("algorithm.rollout_correction.bypass_mode"):
        text += " In bypass mode the clip acts on all of them, and updates after the first are known only in their sum."
    else:
        text += " The clip acts on recomputation and updates only."
    of_engines = known.positive.get("engine_mismatch", 0.5)
    # If most tokens have no mismatch at all, few are above 0 although nothing was truncated.
    if min(of_engines, 1 - of_engines) < ONE_SIDED and known["median"]["engine_mismatch"] > 0:
        text += f" The engine mismatch is above 0 for {percent(of_engines)} of the tokens, where noise has 50\u202f%: "
        text += "look for top_p and top_k."
    return Finding(f"What moved {setting.label}’s ratio most was {_called(largest)}.", text)


def _over(part: str, share: float) -> str:
    if pandas.isna(share):
        return ""
    base = usual(of_ratio(part, "over_bounds")).strip(" ()")
    return f" (by itself {percent(share)} of the tokens over the bounds; {base})"


def _called(part: str) -> str:
    return {"update": "its own updates", "recomputation": "recomputation at equal weights"}.get(part, RATIO_PARTS[part])
