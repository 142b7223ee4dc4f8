"""The command of docs/results/reversal.md that prints a seed's numbers beside the committed ones runs as printed.

Not covered: the training and the collection before it (tests/one_process/test_kept_runs.py).
"""

import json
import subprocess

from .documents import ROOT, blocks_of


def test_the_seed_is_printed_beside_the_committed_one(tmp_path):
    page = (ROOT / "docs/results/reversal.md").read_text()
    (block,) = [one.text for one in blocks_of(page) if "by_seed" in one.text]
    command = block[block.index("python -c") :]
    committed = ROOT / "docs/results/reversal.json"
    (tmp_path / "docs/results").mkdir(parents=True)
    (tmp_path / "docs/results/reversal.json").symlink_to(committed)
    own = [
        {"row": "GRPO, 4 updates", "column": "reward", "by_seed": {"1": 0.5}},
        {"row": "DAPO, 4 updates", "column": "reward"},
    ]
    (tmp_path / "runs/tables").mkdir(parents=True)
    (tmp_path / "runs/tables/reversal.json").write_text(json.dumps({"cells": own}))
    printed = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    (reward,) = [
        cell["by_seed"]["1"]
        for cell in json.loads(committed.read_text())["cells"]
        if (cell["row"], cell["column"]) == ("GRPO, 4 updates", "reward")
    ]
    assert f"reward {reward} docs/results/reversal.json\n" in printed
    assert printed.endswith("reward 0.5 runs/tables/reversal.json\n") and len(printed.splitlines()) == 5
