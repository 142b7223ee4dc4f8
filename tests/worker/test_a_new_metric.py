"""A metric is added in one place: an entry in shared_metrics.py, in a copy of the package.

Covers: it is logged, exact however the mini-batch is split over micro-batches and ranks, and it is in the list that
`clipx metrics` is made of, in TensorBoard's charts and on the page of `clipx report`, with its meaning. Not covered:
metrics of a method's own (test_logged_metrics.py).
"""

import json
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ENTRY = """
    CLIPPED(
        "ratio_above_two",
        "fraction of tokens with a ratio above 2",
        each=lambda seen: (None, seen.counted & (seen.t.ratio > 2)),
        chart="far ratios",
    ),
"""

SCRIPT = """
import json, re, sys
sys.path.insert(0, "")
import torch
from pathlib import Path
from tests.composition import built_once
from tests.runs.example_runs import write_run
from tests.worker.test_logged_metrics import SPLITS, WHOLE, logged, random_batch
from verl_clipx.report.page import write_report
from verl_clipx.loss.metric_listing import markdown_table, tensorboard_charts

actor = lambda *overrides: built_once(overrides)
key = "clipx/ratio_above_two"
batch = random_batch(0)
ratio = (batch["log_prob"] - batch["old_log_prob"]).exp()
run = write_run(Path("run"), "grpo", steps=3, traced=False)
log = run / "metrics.jsonl"
lines = [json.loads(line) for line in log.read_text().splitlines()]
for line in lines:
    line["data"]["actor/" + key] = 0.1 * line["step"]
log.write_text("".join(json.dumps(line) + chr(10) for line in lines))
write_report([run], Path("page"))
print(json.dumps({
    "page": Path("page/report.html").read_text(),
    "numbers": Path("page/metrics.csv").read_text(),
    "expected": int(((ratio > 2) & batch["mask"]).sum()) / int(batch["mask"].sum()),
    "logged": [logged(actor, group, "default", cut)[key] for group in ("grpo", "acpo", "observe")
               for cut in (WHOLE, *SPLITS)],
    "rows": [row for row in markdown_table("default").splitlines() if key in row],
    "chart": tensorboard_charts()["far ratios"],
}))
"""


@pytest.mark.slow
def test_one_entry_is_logged_listed_and_charted(run_fresh, tmp_path):
    for folder in ("verl_clipx", "configs", "hydra_plugins", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "golden"))
    entries = tmp_path / "verl_clipx" / "base" / "shared_metrics.py"
    text = entries.read_text(encoding="utf-8")
    assert text.count("OF_TOKENS = (\n") == 1
    entries.write_text(text.replace("OF_TOKENS = (\n", f"OF_TOKENS = ({ENTRY}"), encoding="utf-8")
    result = run_fresh(SCRIPT, tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["expected"] > 0
    assert found["logged"] == pytest.approx([found["expected"]] * 12, rel=1e-9)
    assert found["rows"] == ["| `clipx/ratio_above_two` | fraction of tokens with a ratio above 2 |"]
    assert "<h3>far ratios</h3>" in found["page"]
    assert "ratio_above_two: fraction of tokens with a ratio above 2 (fraction of tokens)" in found["page"]
    assert "actor/clipx/ratio_above_two" in found["numbers"].splitlines()[0]
    assert found["chart"] == ["Multiline", ["^actor/clipx/ratio_above_two$"]]
