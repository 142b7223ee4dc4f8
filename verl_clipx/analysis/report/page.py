"""`clipx report`: one page about the given runs, with its figures and its numbers.

The runs are read (reading.py), analysed (analysis.py), drawn (draw.py) and rendered (render.py).
"""

from collections.abc import Sequence
from pathlib import Path

import pandas
from pandas.api.types import is_numeric_dtype

from verl_clipx.analysis.report.analysis import Analysis, analyse
from verl_clipx.analysis.report.draw import Plate, draw_plates
from verl_clipx.analysis.report.drawing import FORMATS, save, style
from verl_clipx.analysis.report.reading import read_runs
from verl_clipx.analysis.report.render import render
from verl_clipx.common.files import no_formula, read_text, replacing, write_text
from verl_clipx.common.sentences import Finding

PAGE = "report.html"
FIGURES = "figures"
METRICS = "metrics.csv"

# A file in the folder of the figures, which lists them, so that the next report removes these files and nothing else.
WRITTEN = ".written"
# What to do where only verl's own count of clipped tokens is known.
HINT = "+clipx=observe clipx.receipt=auto adds both sides by themselves, exactly, and leaves the loss as it is."


def write_report(
    paths: list[Path],
    out: Path,
    title: str | None = None,
    baseline: str | None = None,
    *,
    reload_every: int | None = None,
) -> list[Finding]:
    """Compare runs: writes report.html, figures as SVG and PNG, and the numbers as CSV.

    Args:
        paths: of each run, its folder or the file of its log; at least one.
        out: the folder to write to. What an earlier report wrote there is replaced; all else stays.
        title: the headline; by default the gravest finding, or else what was clipped, or else what is compared.
        baseline: the run or method that the others' rewards are compared with; by default GRPO, or else the first.
        reload_every: seconds after which a browser loads the page again; None: never.

    Returns:
        The page's sentences: what the runs are diagnosed with, what was clipped, where that is known, and remarks.

    Raises:
        FileNotFoundError: a run has no log.
        ValueError: a log or a trace cannot be read, a run is named twice, there are too many settings, a file that no
            report wrote stands where a figure would, or no run or method has the baseline's name.
    """
    runs = read_runs(paths, baseline)
    analysis = analyse(runs, title)
    with style():
        plates = draw_plates(analysis)
        drawings = save_figures(plates, out / FIGURES)
    page = render(analysis, plates, drawings, reload_every=reload_every)
    write_csv(out / METRICS, analysis.steps)
    write_text(out / PAGE, page)
    return list_sentences(analysis)


def save_figures(plates: Sequence[Plate], folder: Path) -> dict[str, str]:
    """Write the figures in each format, in the place of those of the report before.

    Returns:
        From the name of a panel to its SVG.

    Raises:
        ValueError: a file that no report wrote has the name of a figure.
    """
    panels = [panel for plate in plates for panel in plate.panels]
    names = [f"{panel.name}.{kind}" for panel in panels for kind in FORMATS]
    remove_figures_before(names, folder)
    for panel in panels:
        save(panel.drawing, folder, panel.name)
    return {panel.name: read_text(folder / f"{panel.name}.svg") for panel in panels}


def remove_figures_before(names: Sequence[str], folder: Path) -> None:
    """Remove the figures of the report before, and list the names of this one's.

    Args:
        names: of this report's files, which are not written yet.
        folder: that of the figures.

    Raises:
        ValueError: a file that no report wrote has the name of a figure.
    """
    listed = []
    if (folder / WRITTEN).exists():
        listed = read_text(folder / WRITTEN).splitlines()
    # A name that leads to another folder is none that a report wrote.
    before = {name for name in listed if name == Path(name).name}
    foreign = sorted(name for name in {*names} - before if (folder / name).exists())
    if foreign:
        raise ValueError(
            f"{folder / foreign[0]}: no report wrote this file, and this report would replace it. Choose another --out."
        )
    for name in before:
        (folder / name).unlink(missing_ok=True)
    write_text(folder / WRITTEN, "".join(f"{name}\n" for name in names))


def write_csv(path: Path, table: pandas.DataFrame) -> None:
    """Write a table without texts or names of columns that a spreadsheet would take for formulas."""
    texts = {name: column.map(no_formula) for name, column in table.items() if not is_numeric_dtype(column)}
    harmless = table.assign(**texts).rename(columns=no_formula)
    with replacing(path) as partial:
        # The line ends of RFC 4180: with a bare line feed, Python would leave a carriage return in a cell unquoted.
        harmless.to_csv(partial, index=False, lineterminator="\r\n")


def list_sentences(analysis: Analysis) -> list[Finding]:
    """Return what the command prints of a page."""
    alarms = analysis.alarms if analysis.news is None else [analysis.news, *analysis.alarms]
    sentences = [Finding(alarm.head, alarm.text) for alarm in alarms]
    if analysis.clipping:
        hint = HINT if analysis.clipped_by_verl else ""
        sentences.append(Finding(f"{analysis.clipping}.", hint))
    sentences += [Finding(remark.head, remark.text) for remark in analysis.remarks]
    return sentences
