"""`clipx report`: one page about the given runs, with its figures and its numbers."""

import re
from pathlib import Path

import pandas
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from pandas.api.types import is_numeric_dtype

from verl_clipx.analysis.diagnose.findings import diagnoses, rewards
from verl_clipx.analysis.report import palette
from verl_clipx.analysis.report.drawing import FORMATS, MOST_STEPS, inline, save, style
from verl_clipx.analysis.report.log_figures import log_plates
from verl_clipx.analysis.report.palette import DrawnSetting
from verl_clipx.analysis.report.summary import describe, headline, summary
from verl_clipx.analysis.report.token_view import token_sections
from verl_clipx.analysis.report.trace_figures import trace_plates
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.analysis.runs.run import Run
from verl_clipx.analysis.runs.settings import Setting, baseline_of, differing_values, settings_of
from verl_clipx.analysis.runs.traced import TracedUpdate, traced_updates
from verl_clipx.analysis.runs.trained import what_was_trained
from verl_clipx.common.files import no_formula, read_text, replacing, write_text
from verl_clipx.common.sentences import Finding, number
from verl_clipx.common.statistics.estimate import MIN_SEEDS

PAGE, FIGURES, METRICS = "report.html", "figures", "metrics.csv"

# A file in the folder of the figures, which lists them, so that the next report removes these files and nothing else.
WRITTEN = ".written"

environment = Environment(
    loader=PackageLoader("verl_clipx.analysis.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def _breakable(text: str) -> Markup:
    """Lets a narrow column break a text within keys and paths, nowhere else in a word, and not in `A < 0`."""
    html = re.sub(r"([/_=](?=\w)|\.(?=[A-Za-z_]))", r"\1<wbr>", str(escape(text)))
    return Markup(re.sub(r"\bA (&[lg]t;) 0", "A\u00a0\\1\u00a00", html))


environment.filters["breakable"] = _breakable
environment.globals |= {"number": number, "palette": palette, "PG_CLIPPED": keys.PG_CLIPPED}
environment.globals |= {"MOST_STEPS": MOST_STEPS, "MIN_SEEDS": MIN_SEEDS}


def write_report(
    paths: list[Path],
    out: Path,
    title: str | None = None,
    baseline: str | None = None,
    *,
    reload_every: int | None = None,
) -> list[Finding]:
    """Compares runs: writes report.html, figures as SVG and PNG, and the numbers as CSV.

    Args:
        paths: of each run, its folder or the file of its log; at least one.
        out: the folder to write to. What an earlier report wrote there is replaced; all else stays.
        title: the headline; by default it says what was clipped or, where no log says that, names what is compared.
        baseline: the run or method that the others' rewards are compared with; by default GRPO, or else the first.
        reload_every: seconds after which a browser loads the page again; None: never.

    Returns:
        The page's sentences: what was clipped, where that is known, alarms and remarks.

    Raises:
        FileNotFoundError: a run has no log.
        ValueError: a log or a trace cannot be read, a run is named twice, there are too many settings, a file that no
            report wrote stands where a figure would, or no run or method has the baseline's name.
    """
    settings, updates, compared_with = _read(paths, baseline)
    described = describe(settings, updates)
    alarms, remarks = diagnoses(settings, compared_with), rewards(settings, compared_with)
    said = headline(described)
    runs = [run for setting in settings for run in setting.runs]
    with style():
        plates = [*trace_plates(updates), *log_plates(settings)]
        written = [f"{panel.name}.{kind}" for plate in plates for panel in plate.panels for kind in FORMATS]
        _remove_those_before(written, out / FIGURES)
        for panel in (panel for plate in plates for panel in plate.panels):
            save(panel.drawing, out / FIGURES, panel.name)
    _write_csv(out / METRICS, pandas.concat([_shown(one, run) for one in settings for run in one.runs]))
    sections = token_sections(updates)
    page = environment.get_template("report.html").render(
        title=title or said,
        reload_every=reload_every,
        settings=settings,
        alarms=alarms,
        summary=summary(described),
        remarks=remarks,
        baseline=compared_with.label,
        differences=_differences(settings),
        unknown=[run.name for run in runs if not run.configuration],
        trained=what_was_trained(runs),
        runs=runs,
        plates=plates,
        figure=lambda panel: inline(read_text(out / FIGURES / f"{panel.name}.svg"), panel.name, panel.description),
        sections=sections,
        opens="grpo" if any(section.clipped["GRPO"] for section in sections) else "own",
        data=[section.numbers for section in sections],
    )
    write_text(out / PAGE, page)
    hint = "+clipx=observe adds both sides by themselves, exactly, and leaves the loss as it is."
    of_title = [Finding(f"{said}.", hint if said.startswith("verl counted") else "")] if said else []
    return [*of_title, *alarms, *remarks]


def _read(paths: list[Path], baseline: str | None) -> tuple[list[DrawnSetting], list[TracedUpdate], Setting]:
    """Returns the runs as settings with their colours, what they traced, and the setting that others are compared with.

    Raises:
        FileNotFoundError, ValueError: as for `write_report`.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError("a run is named twice: name each once.")
    settings = palette.with_colours(settings_of([read_run(path) for path in paths]))
    return settings, traced_updates(settings), baseline_of(settings, baseline)


def _remove_those_before(names: list[str], folder: Path) -> None:
    """Removes the figures of the report before, and lists the names of this one's.

    Raises:
        ValueError: a file that no report wrote has the name of a figure.
    """
    listed = read_text(folder / WRITTEN).splitlines() if (folder / WRITTEN).exists() else []
    before = {name for name in listed if name == Path(name).name}
    if foreign := sorted(name for name in {*names} - before if (folder / name).exists()):
        raise ValueError(f"{folder / foreign[0]}: no report wrote it, and this one would. Choose another --out.")
    for name in before:
        (folder / name).unlink(missing_ok=True)
    write_text(folder / WRITTEN, "".join(f"{name}\n" for name in names))


def _shown(setting: Setting, run: Run) -> pandas.DataFrame:
    """Returns the metrics that the figures show, a row a step."""
    columns = [name for name in run.log if name in keys.DRAWN or name.startswith(keys.OWN)]
    named = {"run": run.name, "setting": setting.label, "seed": run.seed}
    return run.log[columns].reset_index().assign(**named)[[*named, "step", *columns]]


def _write_csv(path: Path, table: pandas.DataFrame) -> None:
    """Writes a table without texts or names of columns that a spreadsheet would take for formulas."""
    texts = {name: column.map(no_formula) for name, column in table.items() if not is_numeric_dtype(column)}
    with replacing(path) as partial:
        # The line ends of RFC 4180: with a bare line feed, Python would leave a carriage return in a cell unquoted.
        harmless = table.assign(**texts).rename(columns=no_formula)
        harmless.to_csv(partial, index=False, lineterminator="\r\n")


def _differences(settings: list[Setting]) -> dict[str, list[str]]:
    """Returns what sets the settings apart, the plugin's keys first; parameters of some methods share a row."""
    rows = {
        key: [value and value.strip('"') for value in values]
        for key, values in differing_values([setting.runs[0] for setting in settings]).items()
    }
    of_some = {key[6:]: rows.pop(key) for key in list(rows) if key.startswith("clipx.") and None in rows[key]}
    ordered = sorted(rows, key=lambda key: (not key.startswith("clipx."), key))
    shared = {key: ["–" if value is None else value for value in rows[key]] for key in ordered}
    own = [
        ", ".join(f"{name} {values[index]}" for name, values in of_some.items() if values[index] is not None)
        for index in range(len(settings))
    ]
    return shared | ({"the method’s own": own} if of_some else {})
