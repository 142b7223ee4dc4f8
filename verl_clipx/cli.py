"""The command `clipx`."""

import contextlib
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from verl_clipx.common.command_line import (
    AsJson,
    fail,
    failing,
    forget_json,
    installed_version,
    messages_console,
    print_json,
)
from verl_clipx.common.configs_folder import configs_folder
from verl_clipx.common.extras import missing_tool
from verl_clipx.common.listed import print_list
from verl_clipx.common.terminal import TerminalConsole, print_plain, warnings_on, with_whole_output
from verl_clipx.papers.evaluation.commands import app as evaluation_app
from verl_clipx.papers.tables.recipe_commands import recipe_app
from verl_clipx.papers.tables.table_commands import table_app
from verl_clipx.papers.tasks.commands import app as data_app


class Commands(TyperGroup):
    """The command group, which fails with a one-line message if a tool's package is missing."""

    def invoke(self, context: typer.Context) -> Any:
        """Run the command named on the command line."""
        forget_json()
        try:
            return super().invoke(context)
        except ModuleNotFoundError as error:
            message = missing_tool(f"clipx {context.invoked_subcommand}", error)
            if message is None:
                raise
            fail(message)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = TerminalConsole()
app.add_typer(data_app, name="data")
app.add_typer(evaluation_app, name="eval")
app.add_typer(recipe_app, name="recipe")
app.add_typer(table_app, name="table")


def print_version(asked: bool) -> None:
    """Prints the version and exits."""
    if asked:
        print_plain(f"clipx {installed_version('verl-clipx')}")
        raise typer.Exit()


@app.callback()
def clipx(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Losses with adaptive and soft clipping for veRL: what there is, whether it works here, what a run did."""


@app.command()
def doctor(
    ray: Annotated[bool, typer.Option(help="Also look inside a Ray worker (starts a small cluster).")] = True,
    options: Annotated[
        bool, typer.Option("--options", help="Print docs/support.md's lists of verl's options.")
    ] = False,
    keys: Annotated[
        bool, typer.Option("--keys", help="Print docs/support.md's list of the keys that are refused.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print everything that was found.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check this environment. Exit code 0 if runs can work here, 1 if something will fail."""
    if as_json and (keys or options):
        fail("--json prints what the checks found; --keys and --options print Markdown. Leave one of them out.", 2)
    if keys:
        from verl_clipx.run.verl_keys import refusal_list

        print_plain(refusal_list())
        return
    if options:
        from verl_clipx.run.support import support_list

        print_plain(support_list())
        return
    from verl_clipx.check.doctor import GPU_CHECKS, TESTED, examine, lines_of

    colours, groups = {"ok": "green", "warning": "yellow", "error": "red"}, []
    with messages_console().status("looking at versions") as status:
        for group, findings in examine(ray=ray):
            status.update(f"looked at {group}")
            groups.append((group, findings))
    if as_json:
        print_json(findings=[{"group": group, **asdict(one)} for group, findings in groups for one in findings])
    else:
        for group, findings in groups:
            for level, line in lines_of(group, findings, verbose=verbose):
                console.print(f"[{colours[level]}]{level:8}[/]{escape(line)}", soft_wrap=True)
        print_plain("\n".join([*([TESTED] if verbose else []), GPU_CHECKS]))
    raise typer.Exit(any(one.level == "error" for _, findings in groups for one in findings))


@app.command()
def methods(
    name: Annotated[
        str | None, typer.Argument(help="A method, a group, observe, or a loss of your own as package.module:name.")
    ] = None,
    parameters: Annotated[list[str] | None, typer.Argument(help="With --plot, clipx.<parameter>=… .")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/methods.md.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw its gradient weight F over the ratio: .svg, .png.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, or the parameters of one, or draw one."""
    sys.path.insert(0, "")
    from verl_clipx.run.listing import listed, markdown_table, parameter_row

    if markdown:
        print_plain(markdown_table())
        return
    if plot is not None:
        draw_method(name, parameters or [], plot)
        return
    if parameters:
        fail(f"{parameters[0]}: parameters go with --plot FILE.", 2)
    with failing():
        found = listed(name)
    if as_json:
        print_json(methods=found)
        return
    if name is None:
        rows = [(one["loss_mode"] or "", one["summary"], one["source"], ", ".join(one["groups"])) for one in found]
        headings = ("method", "what it does", "source", "groups")
        print_list(console, "methods: +clipx=<group>", headings, [list(map(escape, row)) for row in rows])
        return
    (method,) = found
    groups = ", ".join(method["groups"]) or f"+clipx=custom clipx.function={name}"
    console.print(f"[bold]{method['name']}[/]: {escape(method['summary'])}\n{escape(method['source'])}")
    console.print_line(f"Groups: {groups}")
    values = [f"+clipx={group}" for group in method["groups"]] or ["default"]
    for title, of_every_method in ((f"parameters of {method['name']}", False), ("of every method", True)):
        rows = [
            list(map(escape, parameter_row(one)))
            for one in method["parameters"]
            if one["of_every_method"] == of_every_method
        ]
        if rows:
            headings = ("parameter", *values, "allowed", "meaning", "source")
            print_list(console, f"{title}: clipx.<parameter>=…", headings, rows)


@app.command()
def metrics(
    which: Annotated[str, typer.Argument(help="default, all (what clipx.metrics=all adds) or observe.")] = "default",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/metrics.md.")] = False,
) -> None:
    """List the metrics that a run logs: key, meaning, unit, and what each is computed over."""
    from verl_clipx.common.suggestions import did_you_mean
    from verl_clipx.loss.metric_listing import LISTS, markdown_table, rows_of

    if which not in LISTS:
        fail(f"{which!r}: must be one of {', '.join(LISTS)}.{did_you_mean(which, LISTS)}", 2)
    if markdown:
        print_plain(markdown_table(which))
        return
    rows = [("\n".join(row.keys), row.meaning, row.metric.unit, row.metric.over.value) for row in rows_of(which)]
    headings = ("key", "meaning", "unit", "over")
    print_list(console, f"metrics: {which}", headings, [list(map(escape, row)) for row in rows])


def draw_method(name: str | None, parameters: list[str], path: Path) -> None:
    """Draws the gradient weight of a method.

    Args:
        name: name of the method, or of a Hydra group that chooses one.
        parameters: Hydra overrides of the node clipx, such as clipx.alpha=2.
        path: file to write the figure to.
    """
    from omegaconf import OmegaConf

    from verl_clipx.report.weight_figure import draw_weights
    from verl_clipx.run.config import Observe, build
    from verl_clipx.run.groups import group_settings

    with failing():
        for word in parameters:
            if not re.fullmatch(r"clipx(\.\w+)+=.*", word, re.DOTALL):
                raise ValueError(f"{word}: write clipx.<parameter>=<value>.")
        given = OmegaConf.to_container(OmegaConf.from_dotlist(parameters))
        of_group = group_settings(name) if (configs_folder() / "clipx" / f"{name}.yaml").is_file() else {"method": name}
        settings = build(**{**of_group, **given.get("clipx", {})})
        if isinstance(settings, Observe):
            raise ValueError(f"{name}: has no gradient weight of its own.")
        draw_weights(settings.method, path)
    console.print_line(str(path))


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def explain(
    context: typer.Context,
    run_preparations: Annotated[
        bool, typer.Option("--run-preparations", help="Also run rm, mv, pip and downloads, not stand-ins for them.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Go on after the first run, to explain all that the command starts.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a command would train, and what stops it: run it up to verl's configuration, without Ray.

    clipx explain -- python -m verl.trainer.main_ppo KEY=VALUE …

    clipx explain -- bash run.sh KEY=VALUE …

    What a script does before it trains, it does; launchers, pip, downloads, rm and mv are replaced by stand-ins. This
    is no sandbox: don't explain a script that you would not run.
    """
    from verl_clipx.run.explain import explain as explain_command

    if not context.args:
        fail("no command given: clipx explain -- python -m verl.trainer.main_ppo KEY=VALUE …", 2)
    with failing():
        found = explain_command(context.args, run_preparations=run_preparations, every=every)
    if as_json:
        runs = [{key: value for key, value in answer.items() if key != "text"} for answer in found.answers]
        print_json(runs=runs, stood_in=found.stood_in, stops=found.stops)
    else:
        for line in found.lines:
            console.print_line(line)
    raise typer.Exit(0 if found.starts else 1)


@app.command("check-loss")
def check_loss(
    function: Annotated[str, typer.Argument(help="A loss of your own, as package.module:name.")],
) -> None:
    """Check a loss of your own against the contract that every loss must keep."""
    sys.path.insert(0, "")
    from verl_clipx.check.contract import check_method
    from verl_clipx.run.config import build

    with failing():
        method = build(function=function).method
    failed = False
    for name, failure in check_method(method):
        failed |= failure is not None
        said = f"[green]kept[/]   {name}" if failure is None else f"[red]failed[/] {name}\n  {escape(failure)}"
        # Paths must not be cut at the terminal's width.
        console.print(said, soft_wrap=True)
    raise typer.Exit(1 if failed else 0)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Of each run, its folder or the file of its log.")],
    out: Annotated[Path, typer.Option(help="The folder for report.html, figures and numbers.")],
    title: Annotated[str | None, typer.Option(help="Above the page; by default it names what is compared.")] = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="The run or the method that rewards are compared with: by default GRPO, or else the first."),
    ] = None,
    replay: Annotated[
        list[str] | None,
        typer.Option(help="Other settings on the traced tokens, as of clipx replay: '+clipx=acpo clipx.alpha=1,2'."),
    ] = None,
    match: Annotated[
        list[str] | None,
        typer.Option(help="Find a parameter on these tokens: 'clip_fraction=0.01 +clipx=acpo clipx.alpha=0,4'."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Write the page anew until the runs end, or Ctrl-C.")
    ] = False,
) -> None:
    """Compare runs: write one page that shows what their clipping did, in figures and numbers."""
    if replay or match:
        # The user's own loss may be in the working directory.
        sys.path.insert(0, "")
    from verl_clipx.report import follow as following
    from verl_clipx.report.page import PAGE, write_report

    findings = []

    def write(trains: bool) -> None:
        seconds = round(following.SECONDS) if trains else None
        words = [word for text in replay or [] for word in text.split()]
        findings[:] = write_report(runs, out, title, baseline, replayed=words, matched=match, reload_every=seconds)
        if trains:
            now = time.strftime("%H:%M:%S")
            console.print_line(f"{out / PAGE}: written at {now}")

    with failing(), warnings_on(console):
        if follow:
            with contextlib.suppress(KeyboardInterrupt):
                following.follow(runs, write, lambda why: console.print(f"waiting: {why}", markup=False))
        else:
            write(False)
    for finding in findings:
        console.print(f"[bold]{escape(finding.head)}[/] {escape(finding.text)}", highlight=False)
    console.print_line(f"{out / PAGE}")


@app.command()
def diagnose(
    run: Annotated[Path, typer.Argument(help="The run's folder or the file of its log.")],
    as_json: AsJson = False,
) -> None:
    """Say what went wrong in a run: from which step on, what shows it and what to do."""
    from verl_clipx.diagnose.base_rates import MEASURES, rates
    from verl_clipx.diagnose.rules import diagnose, say_nothing_was_found
    from verl_clipx.runs.folder import read_run

    with failing(), warnings_on(messages_console()):
        of_run = read_run(run)
        found = diagnose(of_run)
        none_found = "" if found else say_nothing_was_found(of_run)
    if as_json:
        rows = [
            {
                "finding": one.rule.name,
                "onset": one.onset.step,
                "evidence": one.onset.evidence,
                "heuristic": one.rule.heuristic,
                "remedy": one.rule.remedy,
                "link": one.rule.link,
                "usual": {name: rates().get(name) for name in one.rule.reads if name in MEASURES},
            }
            for one in found
        ]
        print_json(run=str(run), findings=rows)
        return
    for one in found:
        console.print(f"[bold]{escape(one.head)}[/] {escape(one.text)}", highlight=False)
    if none_found:
        console.print(none_found, markup=False, highlight=False)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="A run with traces: its folder or the file of its log.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="+clipx=acpo clipx.alpha=1,2 +clipx=bapo … ; without any, the run's own."),
    ] = None,
    step: Annotated[int | None, typer.Option(help="The step; by default the last traced one with advantages.")] = None,
    match: Annotated[
        str | None,
        typer.Option(help="Find the parameter: clip_fraction=0.02, positive_share=… or entropy_clip_estimate=… ."),
    ] = None,
    as_json: AsJson = False,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens whose gradient appears or goes, in --json.")] = 200,
) -> None:
    """Apply methods to the tokens that a run traced: what would each clip, and which tokens would change?"""
    sys.path.insert(0, "")
    from verl_clipx.replay.command import content_of, print_replayed, replay_run

    with failing():
        found = replay_run(run, settings or [], step=step, match=match)
        if as_json:
            print_json(**content_of(found, tokens))
        else:
            print_replayed(console, found)


def main() -> None:
    """Entry point."""
    with_whole_output(app)


if __name__ == "__main__":
    main()
