"""Makes what `clipx demo` writes, verl_clipx/analysis/demo/shipped, the pictures of README.md and the tutorial's
notebook.

    python scripts/demo.py runs runs/quickstart   # the runs, from the folder that scripts/quickstart.sh trained them in
    python scripts/demo.py page                   # their page, the pictures and docs/tutorial.ipynb; trains nothing

The runs lose what no page shows: the traces of all steps but the last, and of validations the answers. What is kept
is as the run wrote it, but for the folder's name.
"""

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import pyarrow.parquet
import pyarrow.types
import typer
from jinja2 import Environment

from verl_clipx.analysis.demo.files import PAGE, RUNS, SHIPPED
from verl_clipx.analysis.report import palette
from verl_clipx.analysis.report.page import FIGURES, write_report
from verl_clipx.analysis.report.page import METRICS as NUMBERS
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.analysis.runs.settings import settings_of
from verl_clipx.analysis.runs.traced import HIGH, LOW, traced_updates
from verl_clipx.common.files import read_lines, write_text
from verl_clipx.run.run_files import METRICS, VALIDATION, record_path, traces_path
from verl_clipx.run.trace_format import shards_in

ROOT = Path(__file__).resolve().parents[1]
PICTURES, TUTORIAL = ROOT / "docs" / "figures", ROOT / "docs" / "tutorial.md"
# Figures of the page, to the names that they have in docs/figures.
COPIED = {"spread_0.svg": "quickstart_grpo.svg", "spread_1.svg": "quickstart_acpo.svg"}
RESPONSE, PICTURE = "quickstart_response.svg", Path(__file__).with_name("response.svg.jinja")

app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)


@app.command()
def runs(trained: Annotated[Path, typer.Argument(help="The folder of scripts/quickstart.sh's runs.")]) -> None:
    """Keeps the two runs of a quick start with seed 1."""
    shutil.rmtree(SHIPPED, ignore_errors=True)
    for name in RUNS:
        keep_run(trained / name, SHIPPED / name, str(trained.resolve()))


def keep_run(run: Path, out: Path, folder: str) -> None:
    """Copies what a page shows of a run.

    Args:
        folder: what the run's record calls the folder that it lies in, to be replaced.
    """
    write_text(out / METRICS, (run / METRICS).read_text())
    record = record_path(run / METRICS).read_text().replace(folder, "runs/quickstart")
    write_text(record_path(out / METRICS), record)
    for path in sorted((run / VALIDATION).glob("*.jsonl")):
        kept = [{name: row[name] for name in ("input", "score")} for row in map(json.loads, read_lines(path))]
        write_text(out / VALIDATION / path.name, "".join(f"{json.dumps(row)}\n" for row in kept))
    traces = shards_in(traces_path(run / METRICS))
    traces_path(out / METRICS).mkdir()
    for shard in (one for one in traces if one.step == traces[-1].step):
        table = pyarrow.parquet.read_table(shard.path_in(traces_path(run / METRICS)))
        floats = [field.name for field in table.schema if pyarrow.types.is_floating(field.type)]
        pyarrow.parquet.write_table(
            table,
            shard.path_in(traces_path(out / METRICS)),
            compression="zstd",
            compression_level=19,
            use_dictionary=[name for name in table.column_names if name not in floats],
            use_byte_stream_split=floats,
            write_statistics=False,
        )


@app.command()
def page() -> None:
    """Writes the page of the shipped runs, and the pictures."""
    make_page(SHIPPED, PICTURES)
    notebook()


def make_page(shipped: Path, pictures: Path) -> None:
    """Writes the page with its numbers into one folder, and the pictures into another."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        write_report([SHIPPED / run for run in RUNS], out)
        for name in (PAGE, NUMBERS):
            shutil.copyfile(out / name, shipped / name)
        for figure, name in COPIED.items():
            shutil.copyfile(out / FIGURES / figure, pictures / name)
    write_text(pictures / RESPONSE, draw_response())


@app.command()
def notebook() -> None:
    """Writes the notebook of docs/tutorial.md: the same texts, code and outputs."""
    write_text(TUTORIAL.with_suffix(".ipynb"), notebook_of(TUTORIAL.read_text()))


def notebook_of(page: str) -> str:
    """A page as a notebook; an output that the page cuts short is left out."""
    cells: list[dict] = []
    for part in re.split(r"(^```.*?^```$)", re.sub(r"^<!--.*?-->$", "", page, flags=re.M), flags=re.M | re.S):
        fence = re.fullmatch(r"```(\w*)\n(.*?)\n```", part, flags=re.S)
        if fence and not fence[1]:
            text = [] if "…" in fence[2] else [{"output_type": "stream", "name": "stdout", "text": fence[2]}]
            cells[-1]["outputs"] = text
        elif fence:
            source = re.sub("^", "!", fence[2], flags=re.M) if fence[1] == "bash" else fence[2]
            cells.append({"cell_type": "code", "source": source, "execution_count": None, "outputs": []})
        elif part.strip():
            cells.append({"cell_type": "markdown", "source": part.strip()})
    cells = [{"id": f"cell-{number}", "metadata": {}, **cell} for number, cell in enumerate(cells)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


# In pixels: the width of a token's letter, of its box without letters, with the gap behind it, and of the margin.
LETTER, BOX, GAP, MARGIN = 8, 18, 4, 14
TINTS = {LOW: ("#fbdccf", palette.CLIPPED_LOW), HIGH: ("#f3d3ec", palette.CLIPPED_HIGH)}


def draw_response() -> str:
    """The response of ACPO's last traced update in which GRPO would clip most tokens, under both rules, as SVG."""
    (update,) = traced_updates(settings_of([read_run(SHIPPED / RUNS[1])]))
    tokens = update.tokens
    clipped = tokens.under_grpo.isin(TINTS).groupby([tokens.prompt, tokens["sample"]], sort=False).sum()
    prompt, sample = clipped.idxmax()
    response = tokens[(tokens.prompt == prompt) & (tokens["sample"] == sample)]
    first = response.iloc[0]
    boxes, left = [], MARGIN
    for _, token in response.iterrows():
        text = token.text.strip()
        boxes.append({"left": left, "width": BOX + LETTER * len(text), "text": text, "ratio": token.ratio})
        left += boxes[-1]["width"] + GAP
    rules = {
        "GRPO’s bounds, 0.8 and 1.2": response.under_grpo,
        "ACPO’s bounds, with which it was trained": response.event,
    }
    rows = [
        (title, [box | {"tint": TINTS.get(event)} for box, event in zip(boxes, events, strict=True)])
        for title, events in rules.items()
    ]
    template = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return template.from_string(PICTURE.read_text()).render(
        palette=palette,
        width=max(560, left + MARGIN),
        margin=MARGIN,
        problem=re.sub(r"<\|.*?\|>", "", first.prompt_text).strip(),
        reward=first.score,
        advantage=first.advantage,
        rows=rows,
    )


if __name__ == "__main__":
    app()
