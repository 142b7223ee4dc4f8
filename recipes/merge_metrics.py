"""Merges the metrics of a run's successive starts: merge_metrics.py OUT PART …

A part is a file of lines {"step": …, "data": {…}} as verl's file logger writes them; missing parts are skipped, and so
is a last line that a killed process left unfinished. Of a step that several parts have, the later part's values win.
"""

import json
import os
import sys
from pathlib import Path


def merge(parts: list[Path]) -> dict[int, dict]:
    """The values of each step.

    Args:
        parts: files in the order of the starts.

    Raises:
        ValueError: a line other than the last is not JSON; names the file and the line.
    """
    steps: dict[int, dict] = {}
    for part in parts:
        lines = part.read_text().splitlines() if part.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
            except json.JSONDecodeError as error:
                if number == len(lines):
                    break
                raise ValueError(f"{part}, line {number}: not a line of verl's file logger: {line[:80]!r}") from error
            steps.setdefault(entry["step"], {}).update(entry["data"])
    return steps


def main(out: Path, parts: list[Path]) -> None:
    """Writes OUT whole or not at all; nothing if there is nothing to write."""
    steps = merge(parts)
    if not steps:
        return
    unfinished = out.with_name(out.name + ".unfinished")
    unfinished.write_text("".join(json.dumps({"step": step, "data": steps[step]}) + "\n" for step in sorted(steps)))
    os.replace(unfinished, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(part) for part in sys.argv[2:]])
