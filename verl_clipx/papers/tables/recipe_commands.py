"""The command `clipx papers recipe`: list the presets, show what one sets and why, check the data of its run."""

from pathlib import PurePosixPath
from typing import Annotated, Any

import typer
from rich.markup import escape

from verl_clipx.common.command_line import end_help, fail, reporting_errors
from verl_clipx.common.terminal import TerminalConsole, print_plain

app = typer.Typer(no_args_is_help=True, help="The papers' trainings as presets: +recipe=<paper>/<name>.")
console = TerminalConsole()

Preset = Annotated[str, typer.Argument(help="The preset; `clipx papers recipe list` names them.")]
COLOURS = {"paper": "green", "script": "cyan", "choice": "yellow", "method": "blue", "override": "magenta"}


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
    """List the presets. Each with method, model, data, updates a rollout batch, and the table row that it fills."""
    from verl_clipx.papers.tables.presets import preset_names

    names = [name for name in preset_names() if containing in name]
    if not names:
        fail(f"no preset has {containing!r} in its name; `clipx papers recipe list` names them all")
    headings = ("name", "method", "model", "data", "updates", "row")
    console.print_list("presets: +recipe=<name>", headings, [list(map(escape, summary_of(name))) for name in names])


def summary_of(name: str) -> tuple[str, ...]:
    """Return a preset's row in the list, without composing verl's configuration.

    Returns:
        Name, method, model, data set, optimizer steps for each rollout batch, and the table's row that it trains. What
        the preset leaves to verl is empty.
    """
    from omegaconf import OmegaConf

    from verl_clipx.papers.tables.origins import groups_of, title_of
    from verl_clipx.papers.tables.presets import updates_a_step, values_of

    values = values_of(name)

    def path(key: str) -> PurePosixPath:
        value = OmegaConf.select(values, key)
        return PurePosixPath(value if isinstance(value, str) else "")

    method = " ".join(group.removeprefix("clipx=").removeprefix("clipx/") for group in groups_of(name))
    from verl_clipx.run.keys import MODEL_PATH, TRAINING_FILES

    model = path(MODEL_PATH).name
    data = path(TRAINING_FILES).parent.name
    return name, method, model, data, str(updates_a_step(values) or ""), title_of(name)


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
    from verl_clipx.papers.tables.origins import LABELS, is_wiring, overridden, read_origins, title_of
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
            # What a group leaves to the class of its method has an origin, too.
            with open_dict(config):
                config[NODE] = completed(OmegaConf.to_container(config[NODE], resolve=False))
        rows = []
        for _, origin in sorted(read_origins(name).items()):
            if is_wiring(origin):
                continue
            value_in_run = _value(config, origin.key, resolve=False)
            shown = origin if value_in_run == origin.value else overridden(origin)
            kind = f"[{COLOURS.get(shown.kind, 'red')}]{shown.kind or 'none'}[/]"
            value = escape(_as_text(_value(config, origin.key, resolve=True)))
            rows.append((escape(origin.key), value, kind, escape(f"{shown.comment}  ({origin.file})")))
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
    """Check that a reward can use the data's ground truths. Exit code 1 if it can't; only files that are here count."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from verl_clipx.papers.tables.ground_truths import unusable_ground_truth
    from verl_clipx.papers.tables.presets import compose_preset

    with reporting_errors(HydraException, OmegaConfBaseException):
        fault = unusable_ground_truth(compose_preset(name, overrides or []))
    if fault:
        fail(f"{fault}. Every response to it would count as wrong.")
    console.print_line("The reward can use the ground truths of all data files that are here.")


def _value(config: Any, key: str, *, resolve: bool) -> Any:
    from omegaconf import OmegaConf

    parent, _, last = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    if OmegaConf.is_missing(node, last):
        return "???"
    plain = OmegaConf.to_container(node, resolve=False)[last] if not resolve else node[last]
    return OmegaConf.to_container(plain, resolve=True) if OmegaConf.is_config(plain) else plain


def _as_text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return "null" if value is None else str(value)
