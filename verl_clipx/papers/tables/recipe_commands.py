"""The commands `clipx papers recipe list|show|check`: list presets, explain one, and check the data of its run."""

from dataclasses import astuple, dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from verl_clipx.common.command_line import end_help, fail, reporting_errors
from verl_clipx.common.terminal import TerminalConsole, print_plain

if TYPE_CHECKING:
    from omegaconf import DictConfig

app = typer.Typer(no_args_is_help=True, help="The papers' trainings as presets: +recipe=<paper>/<name>.")
console = TerminalConsole()

Preset = Annotated[str, typer.Argument(help="The preset; `clipx papers recipe list` names them.")]
COLOURS = {"paper": "green", "script": "cyan", "choice": "yellow", "method": "blue", "override": "magenta"}
"""In the table of a preset, the colour of each kind of origin."""


@app.command(
    "list",
    epilog=end_help(
        reads="no files of yours: the presets come with the package",
        examples=(
            "clipx papers recipe list",
            "clipx papers recipe list acpo/countdown",
        ),
    ),
)
def list_presets(
    containing: Annotated[
        str, typer.Argument(help="List only presets whose name contains this, such as bapo/ or _near.")
    ] = "",
) -> None:
    """List the presets.

    Beside a preset's name are its method, model and data, its updates for each rollout batch, and the row of a table
    that it fills.
    """
    from verl_clipx.papers.tables.presets import preset_names

    names = [name for name in preset_names() if containing in name]
    if not names:
        fail(f"no preset has {containing!r} in its name; `clipx papers recipe list` names them all")
    headings = ("name", "method", "model", "data", "updates", "row")
    rows = []
    for name in names:
        rows.append([escape(cell) for cell in astuple(summarise(name))])
    console.print_list("presets: +recipe=<name>", headings, rows)


@dataclass(frozen=True)
class PresetSummary:
    """A preset's row in the list of presets. A text is empty if the preset leaves the value to verl.

    Args:
        name: the preset's.
        method: the groups of configs/clipx that the preset chooses, the method first.
        model: the last part of the model's path.
        data: the name of the data set.
        updates: the number of optimizer updates for each rollout batch.
        title: names the row of a paper's table that the preset trains.
    """

    name: str
    method: str
    model: str
    data: str
    updates: str
    title: str


def summarise(name: str) -> PresetSummary:
    """Return the summary of a preset, without composing verl's configuration, which takes longer."""
    from verl_clipx.papers.tables.origins import groups_of, title_of
    from verl_clipx.papers.tables.presets import updates_a_step, values_of
    from verl_clipx.run.keys import MODEL_PATH, TRAINING_FILES

    values = values_of(name)
    groups = []
    for group in groups_of(name):
        groups.append(group.removeprefix("clipx=").removeprefix("clipx/"))
    return PresetSummary(
        name=name,
        method=" ".join(groups),
        model=_configured_path(values, MODEL_PATH).name,
        # A data set is a folder, in which each split has a file.
        data=_configured_path(values, TRAINING_FILES).parent.name,
        updates=str(updates_a_step(values) or ""),
        title=title_of(name),
    )


def _configured_path(values: "DictConfig", key: str) -> PurePosixPath:
    """Return the path that a preset sets; the empty one if it sets none, or several."""
    from omegaconf import OmegaConf

    value = OmegaConf.select(values, key)
    return PurePosixPath(value if isinstance(value, str) else "")


@app.command(
    epilog=end_help(
        reads="no files of yours: the presets come with the package, and verl's configuration with verl",
        examples=(
            "clipx papers recipe show acpo/countdown_3b_acpo_off",
            "clipx papers recipe show acpo/countdown_3b_acpo_off +hardware=a100x8 clipx.alpha=2",
        ),
    ),
)
def show(
    name: Preset,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Further overrides, such as +hardware=a100x8 clipx.alpha=2.")
    ] = None,
    all_values: Annotated[
        bool,
        typer.Option("--all", help="Print the whole resolved configuration as YAML, including verl's own defaults."),
    ] = False,
) -> None:
    """Show what a preset sets, and each value's source. All other values are verl's own defaults."""
    from hydra.errors import HydraException
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    from verl_clipx.losses.base.method import NODE
    from verl_clipx.papers.tables.origins import LABELS, is_wiring, mark_overridden, read_origins, title_of
    from verl_clipx.papers.tables.presets import check_method, compose_preset, updates_a_step
    from verl_clipx.run.config import completed

    with reporting_errors(HydraException, OmegaConfBaseException):
        with console.status("composing verl's configuration"):
            config = compose_preset(name, overrides or [])
            check_method(config)
        if all_values:
            print_plain(OmegaConf.to_yaml(config, resolve=True).rstrip("\n"))
            return
        if NODE in config:
            # The rows below include the defaults of the method's class. The preset lacks their values, so they are
            # filled in here.
            with open_dict(config):
                config[NODE] = completed(OmegaConf.to_container(config[NODE], resolve=False))
        rows = []
        for _, origin in sorted(read_origins(name).items()):
            if is_wiring(origin):
                continue
            if _read_value(config, origin.key, resolve=False) != origin.value:
                origin = mark_overridden(origin)
            kind = f"[{COLOURS.get(origin.kind, 'red')}]{origin.kind or 'none'}[/]"
            value = _as_text(_read_value(config, origin.key, resolve=True))
            source = f"{origin.comment}  ({origin.file})"
            rows.append((escape(origin.key), escape(value), kind, escape(source)))
    console.print(f"{escape(title_of(name))}\n{updates_a_step(config)} optimizer steps for each rollout batch")
    caption = "; ".join(f"{kind}: {LABELS[kind]}" for kind in COLOURS)
    console.print_list(f"+recipe={name}", ("key", "value", "origin", "what it says"), rows, caption)


@app.command(
    epilog=end_help(
        reads="the preset's Parquet files, below CLIPX_DATA",
        examples=(
            "clipx papers recipe check acpo/countdown_3b_acpo_off",
            "clipx papers recipe check dgpo/dapo17k_7b_dgpo data.val_files=test.parquet",
        ),
    ),
)
def check(
    name: Preset,
    overrides: Annotated[list[str] | None, typer.Argument(help="Further overrides, as for the run itself.")] = None,
) -> None:
    """Check that the preset's reward can use the ground truths of its data.

    Only the data files of the preset that are on this machine are read. The exit code is 1 if the reward can't use one
    of their ground truths, and 0 if nothing could be checked.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from verl_clipx.papers.tables.ground_truths import explain_unchecked, find_unusable_ground_truth
    from verl_clipx.papers.tables.presets import compose_preset

    with reporting_errors(HydraException, OmegaConfBaseException):
        config = compose_preset(name, overrides or [])
        why_unchecked = explain_unchecked(config)
        fault = find_unusable_ground_truth(config)
    if fault:
        fail(f"{fault}. Every response to this row would count as wrong.")
    if why_unchecked:
        console.print_line(f"No ground truth was checked: {why_unchecked}.")
    else:
        console.print_line("The reward can use the ground truths of all data files that are on this machine.")


def _read_value(config: "DictConfig", key: str, *, resolve: bool) -> Any:
    """Return a value of a configuration, or `???` if it is mandatory and not set.

    Args:
        resolve: whether interpolations are resolved; otherwise they are returned as written.
    """
    from omegaconf import OmegaConf

    from verl_clipx.papers.tables.against_preset import OPEN

    parent, _, last = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    if OmegaConf.is_missing(node, last):
        return OPEN
    if not resolve:
        return OmegaConf.to_container(node, resolve=False)[last]
    value = node[last]
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    return value


def _as_text(value: Any) -> str:
    """Return a value as the table of a preset shows it: a list with one item a line, None as YAML's null."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return "null" if value is None else str(value)
