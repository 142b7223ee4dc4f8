"""Where the ratio comes from: the parts of log(current / rollout probability) that a setting logs, in a sentence."""

import pandas

from verl_clipx.diagnostics.runs import Setting
from verl_clipx.diagnostics.sentences import Finding, percent

# As logged under actor/clipx/anatomy, to what a page calls it; the last one is the sum of the others.
PARTS = {
    "engine_mismatch": "engine mismatch",
    "mismatch_and_staleness": "mismatch and staleness",
    "recomputation": "recomputation",
    "update": "updates",
    "all_parts": "all parts",
}
QUANTILES = {"median": "50", "p90": "90", "p99": "99", "p99_9": "99.9"}
# A share of positive values that noise does not have.
ONE_SIDED = 0.05


def parts_of(setting: Setting) -> pandas.DataFrame:
    """A row a part that a setting logs, its columns means over steps; without rows under clipx.metrics=default."""
    names = (*QUANTILES, "positive", "over_bounds")
    found = {
        part: {name: setting.mean(f"actor/clipx/anatomy/{part}/{name}").mean() for name in names} for part in PARTS
    }
    return pandas.DataFrame.from_dict(found, orient="index").dropna(subset=[*QUANTILES])


def what_moved_the_ratio(setting: Setting) -> Finding | None:
    """The largest part of the log-ratio, and what each would carry over the bounds; None where none is logged."""
    parts = parts_of(setting)
    known = parts.drop(index="all_parts", errors="ignore")
    if known.empty:
        return None
    largest = known.p99.idxmax()
    each = "; ".join(f"{PARTS[part]} {row.p99:.2g} nats{_over(row.over_bounds)}" for part, row in known.iterrows())
    text = f"99\u202f% of the tokens have no more than this of each part of log(current / rollout): {each}."
    if not {"engine_mismatch", "mismatch_and_staleness"} & set(known.index):
        text += " What the rollout adds is not known: it returned no log-probabilities."
    elif setting.runs[0].configuration.get("algorithm.rollout_correction.bypass_mode"):
        text += " In bypass mode the clip acts on all of them."
    else:
        text += " The clip acts on recomputation and updates only."
    of_engines = known.positive.get("engine_mismatch", 0.5)
    if min(of_engines, 1 - of_engines) < ONE_SIDED:
        text += f" The engine mismatch is above 0 for {percent(of_engines)} of the tokens, where noise has 50\u202f%: "
        text += "look for top_p and top_k."
    return Finding(f"What moved {setting.label}’s ratio most was {_called(largest)}.", text)


def _over(share: float) -> str:
    return "" if pandas.isna(share) else f" (by itself {percent(share)} of the tokens over the bounds)"


def _called(part: str) -> str:
    return {"update": "its own updates", "recomputation": "recomputation at equal weights"}.get(part, PARTS[part])
