"""A run folder for tests: three steps of BAPO, validated before and after."""

import json
from pathlib import Path

from verl_clipx.diagnostics.run_log import RunFolder


def log_line(step: int, **data: float) -> str:
    """A line of verl's file log."""
    return json.dumps({"step": step, "data": data}) + "\n"


def write_run(folder: Path) -> RunFolder:
    """Writes metrics, the last line of them cut short, and validations of two problems with two samples each."""
    folder.mkdir(parents=True, exist_ok=True)
    run = RunFolder(folder)
    bounds = [(1.2, 0.6), (1.5, 0.7), (3.0, 0.9)]
    lines = [log_line(0, **{"val-core/countdown/acc/mean@2": 0.25})]
    for step, (high, low) in enumerate(bounds, start=1):
        data = {"critic/score/mean": 0.1 * step, "actor/clipx/c_high": high, "actor/clipx/c_low": low}
        data |= {f"actor/clipx/gradient_mass/{name}": 0.0 for name in ("LN", "HP", "LP")}
        data |= {"actor/clipx/gradient_mass/HN": 0.1, "actor/clipx/gradient_mass/M": 0.3, "actor/entropy": 1.0}
        data |= {"actor/clipx/clip_fraction_low": 0.02, "actor/clipx/clip_fraction_high": 0.01}
        lines.append(log_line(step, **data))
    run.metrics.write_text("".join(lines) + '{"step": 4, "data": {"half wri')
    run.validation.mkdir()
    for step, scores in ((0, [(1, 0), (0, 0)]), (3, [(1, 1), (1, 0)])):
        lines = [
            json.dumps({"input": f"problem {index}", "score": score})
            for index, pair in enumerate(scores)
            for score in pair
        ]
        (run.validation / f"{step}.jsonl").write_text("\n".join(lines))
    return run
