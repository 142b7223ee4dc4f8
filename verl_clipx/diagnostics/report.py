"""A run's summary for people: reward before and after, what clipping did, where everything is."""

import pandas

from verl_clipx.diagnostics.figures import run_figure
from verl_clipx.diagnostics.held_out import HeldOutReward, held_out_rewards
from verl_clipx.diagnostics.run_log import RunFolder, read_run_log


def change(before: HeldOutReward, after: HeldOutReward) -> str:
    """How the reward changed, and whether the intervals overlap."""
    verdict = "the intervals do not overlap"
    if before.low <= after.high and after.low <= before.high:
        verdict = "the intervals overlap: no clear change"
    return f"{after.mean - before.mean:+.3f} ({verdict})"


def what_clipping_did(log: pandas.DataFrame) -> list[str]:
    """Sentences on clip fractions, gradient mass outside the bounds, and adaptive bounds."""

    def mean(column: str) -> float | None:
        return float(log[column].mean()) if column in log and log[column].notna().any() else None

    lines = []
    low, high = mean("actor/clipx/clip_fraction_low"), mean("actor/clipx/clip_fraction_high")
    if low is not None and high is not None:
        lines.append(f"tokens below the lower bound with A < 0: {low:.2%}; above the upper with A > 0: {high:.2%}")
    masses = {name: mean(f"actor/clipx/gradient_mass/{name}") for name in ("LN", "HP", "LP", "HN", "M")}
    if None not in masses.values() and sum(masses.values()) > 0:
        outside = 1 - masses["M"] / sum(masses.values())
        lines.append(f"gradient mass |F*A| outside the bounds: {outside:.2%}")
    if "actor/clipx/c_high" in log:
        for side, column in (("upper", "actor/clipx/c_high"), ("lower", "actor/clipx/c_low")):
            bound = log[column].dropna()
            lines.append(f"{side} bound: mean {bound.mean():.3f}, from {bound.min():.3f} to {bound.max():.3f}")
    epsilons = sorted(column for column in log if column.startswith("actor/clipx/epsilon/bin_"))
    if epsilons:
        means = ", ".join(f"{log[column].mean():.3f}" for column in epsilons)
        lines.append(f"mean epsilon per probability bin, improbable tokens first: {means}")
    return lines


def write_report(folder: RunFolder, title: str) -> str:
    """Draws the figure and writes the summary of a run.

    Args:
        folder: where the run wrote.
        title: what was run.

    Returns:
        The summary as Markdown, also written to `report.md`.

    Raises:
        FileNotFoundError: the run logged nothing.
    """
    log = read_run_log(folder.metrics)
    held_out = held_out_rewards(folder.validation)
    run_figure(log, held_out, title, folder.figure)
    lines = [f"# {title}", ""]
    if held_out:
        before, after = held_out[0], held_out[-1]
        lines.append(f"Held-out reward, mean and 95 % interval over {after.problems} problems:")
        lines.append(f"- before (step {before.step}): {before}")
        lines.append(f"- after (step {after.step}): {after}")
        if len(held_out) > 1:
            lines.append(f"- change: {change(before, after)}")
        lines.append("")
    lines.append("What clipping did, over all updates:")
    lines += [f"- {line}" for line in what_clipping_did(log)] or ["- nothing was logged: the loss is not of the plugin"]
    lines += ["", "Files:"]
    named = {"figure": folder.figure, "metrics of every step": folder.metrics}
    named |= {"held-out generations": folder.validation, "checkpoint": folder.checkpoints}
    lines += [f"- {name}: {path}" for name, path in named.items() if path.exists()]
    text = "\n".join(lines) + "\n"
    folder.report.write_text(text)
    return text
