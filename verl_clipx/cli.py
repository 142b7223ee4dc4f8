"""The command `clipx`."""

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from verl_clipx.common.command_line import (
    AsJson,
    CommandGroup,
    end_help,
    fail,
    forget_json,
    messages_console,
    print_json,
    reporting_errors,
    working,
)
from verl_clipx.common.pages import say_where_pages_are
from verl_clipx.common.terminal import TerminalConsole, deferring_warnings, print_plain, with_whole_output
from verl_clipx.common.verl_version import installed_version

BEFORE = "Before a run"
AFTER = "After a run"
PAPERS = "The papers' experiments"


class Commands(CommandGroup):
    """The command `clipx`, which refuses empty words and lists its commands in the order of a run's life."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Parse the command line, but refuse an empty word, or an option with an empty value, before any `--`.

        A script that passes a variable without a value produces one. As a path, an empty word would mean the current
        folder.
        """
        words = args[: args.index("--")] if "--" in args else args
        for word_before, word in itertools.pairwise(["clipx", *words]):
            if word == "":
                fail(f"{word_before}: followed by an empty word. Give it a value, or leave it out.", 2)
            if word.startswith("--") and word.endswith("="):
                fail(f"{word}: followed by an empty word. Give it a value, or leave it out.", 2)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:
        """Write the commands under a heading for each part of a run's life."""
        width = formatter.width - 6 - max(map(len, self.commands))
        for heading in (BEFORE, AFTER, PAPERS):
            commands = {name: command for name, command in self.commands.items() if command.rich_help_panel == heading}
            if commands:
                with formatter.section(heading):
                    formatter.write_dl(
                        [(name, command.get_short_help_str(width)) for name, command in commands.items()]
                    )

    def invoke(self, context: typer.Context) -> Any:
        """Run the command that the command line names. A command before it in this process may have asked for JSON."""
        forget_json()
        return super().invoke(context)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    # Help by Click: rich's takes a tenth of a second to import.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
console = TerminalConsole()
# Found by name: the rest of the package works without its folder papers.
if find_spec("verl_clipx.papers") is not None:
    app.add_typer(import_module("verl_clipx.papers.commands").app, name="papers", rich_help_panel=PAPERS)


def print_version(asked: bool) -> None:
    """Print the version and exit."""
    if asked:
        print_plain(f"clipx {installed_version('verl-clipx')}")
        raise typer.Exit()


@app.callback()
def clipx(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Losses with adaptive and soft clipping for veRL: choose one, check a launch, and read what a run did."""


@app.command(
    rich_help_panel=BEFORE,
    epilog=end_help(
        reads="no files: what it shows comes with the package",
        examples=(
            "clipx demo",
            "clipx demo --out shown",
        ),
    ),
)
def demo(
    out: Annotated[Path, typer.Option(help="The folder to write the page and the two runs to.")] = Path("clipx-demo"),
) -> None:
    """Show what clipping does in two small runs.

    The runs and their finished page come with the package, and are copied to a folder. No torch or verl is needed.
    """
    from verl_clipx.analysis.demo.files import describe, write_demo

    with reporting_errors():
        write_demo(out)
    print_plain(describe(out))


@app.command(
    rich_help_panel=BEFORE,
    epilog=end_help(
        reads="no files of yours: it looks at the installed packages, the environment's variables and the machine",
        examples=(
            "clipx doctor",
            "clipx doctor --no-ray --verbose",
        ),
    ),
)
def doctor(
    verbose: Annotated[bool, typer.Option("--verbose", help="Print every finding, also the good ones.")] = False,
    ray: Annotated[bool, typer.Option(help="Also look inside a Ray worker (starts a small cluster).")] = True,
    as_json: AsJson = False,
) -> None:
    """Check whether a run would work here. The exit code is 1 if it would fail."""
    from verl_clipx.training.doctor import GPU_CHECKS, IN_A_JOB, examine_environment, format_group

    colors = {"ok": "green", "warning": "yellow", "error": "red"}
    groups = []
    with messages_console().status("looking at versions") as status:
        for group, findings in examine_environment(ray=ray):
            status.update(f"looked at {group}")
            groups.append((group, findings))
    if as_json:
        print_json(findings=[{"group": group, **asdict(part)} for group, findings in groups for part in findings])
    else:
        for group, findings in groups:
            for level, line in format_group(group, findings, verbose=verbose):
                console.print(f"[{colors[level]}]{level:8}[/]{escape(line)}", soft_wrap=True)
        print_plain(GPU_CHECKS)
        print_plain(IN_A_JOB)
    raise typer.Exit(any(part.level == "error" for _, findings in groups for part in findings))


@app.command(
    rich_help_panel=BEFORE,
    epilog=end_help(
        reads="the groups that come with the package, and your own group or module if you name one",
        examples=(
            "clipx methods",
            "clipx methods acpo",
        ),
    ),
)
def methods(
    name: Annotated[
        str | None, typer.Argument(help="A method, a group, observe, or a loss of your own as package.module:name.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the list as a table in Markdown.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the methods, or the parameters of one."""
    sys.path.insert(0, "")
    from verl_clipx.losses.groups import SWAP_GUARD, swap_by
    from verl_clipx.run.listing import describe_methods, markdown_table, parameter_row

    if markdown:
        print_plain(markdown_table())
        return
    with reporting_errors():
        descriptions = describe_methods(name)
    if as_json:
        print_json(methods=descriptions)
        return
    if name is None:
        rows = []
        for description in descriptions:
            cells = (
                description["loss_mode"] or "",
                description["summary"],
                description["source"],
                ", ".join(description["groups"]),
            )
            rows.append(list(map(escape, cells)))
        headings = ("method", "what it does", "source", "groups")
        console.print_list(f"methods: +clipx=<group> {SWAP_GUARD}", headings, rows)
        return
    (method,) = descriptions
    groups = ", ".join(method["groups"]) or f"+clipx=custom clipx.function={name}"
    console.print(f"[bold]{method['name']}[/]: {escape(method['summary'])}\n{escape(method['source'])}")
    console.print_line(f"Groups: {groups}")
    if method["groups"]:
        console.print_line(f"In a command of verl's: {swap_by(method['groups'][0])}")
    headings = ("parameter", *(f"+clipx={group}" for group in method["groups"] or ["custom"]))
    for title, of_every_method in ((f"parameters of {method['name']}", False), ("of every method", True)):
        parts = [part for part in method["parameters"] if part["of_every_method"] == of_every_method]
        if parts:
            rows = [list(map(escape, parameter_row(part))) for part in parts]
            console.print_list(f"{title}: clipx.<parameter>=…", (*headings, "allowed", "meaning", "source"), rows)


@app.command(
    rich_help_panel=BEFORE,
    epilog=end_help(
        reads="no files",
        examples=(
            "clipx metrics",
            "clipx metrics observe --markdown",
        ),
    ),
)
def metrics(
    which: Annotated[str, typer.Argument(help="The list: default or observe.", metavar="LIST")] = "default",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the list as a table in Markdown.")] = False,
) -> None:
    """List the metrics that a run logs. Each has a key, a meaning, a unit, and what it is computed over."""
    from verl_clipx.losses.applying.metric_listing import LISTS, list_metric_rows, markdown_table
    from verl_clipx.losses.base.refusal import did_you_mean

    if which not in LISTS:
        fail(f"{which!r}: must be one of {', '.join(LISTS)}.{did_you_mean(which, LISTS)}", 2)
    if markdown:
        print_plain(markdown_table(which))
        return
    rows = [
        ("\n".join(row.keys), row.meaning, row.metric.unit, row.metric.over.value) for row in list_metric_rows(which)
    ]
    headings = ("key", "meaning", "unit", "over")
    console.print_list(f"metrics: {which}", headings, [list(map(escape, row)) for row in rows])


@app.command(
    rich_help_panel=BEFORE,
    epilog=end_help(
        reads="what the command itself reads: verl's configuration, the groups, and the script that starts verl",
        examples=(
            "clipx explain -- python -m verl.trainer.main_ppo +clipx=acpo clipx.scope=mini_batch",
            "clipx explain --json -- bash recipes/quickstart/run_sums_pretrained_cpu.sh",
        ),
    ),
    options_metavar="[OPTIONS] -- COMMAND",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def explain(
    context: typer.Context,
    every: Annotated[
        bool, typer.Option("--all", help="Explain every run that the command starts, not the first.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a command would train, and what stops it.

    The command runs until verl has its configuration and would start Ray. Nothing is trained.

    Stand-ins replace ray, sbatch, srun, ssh, docker, kubectl, pip, curl, rm, mv and a few more. Everything else in a
    script does run, so don't explain a script that you would not run.
    """
    from verl_clipx.run.explain import explain as explain_command

    if not context.args:
        fail("no command given: clipx explain -- python -m verl.trainer.main_ppo KEY=VALUE …", 2)
    with reporting_errors(), working("running the command until verl has its configuration"):
        explanation = explain_command(context.args, every=every)
    if as_json:
        print_json(**explanation.content)
    else:
        for line in explanation.lines:
            console.print_row(line)
    raise typer.Exit(0 if explanation.starts else 1)


@app.command(
    "check-loss",
    rich_help_panel=BEFORE,
    epilog=end_help(
        reads="the module that you name, also from the current folder",
        examples=(
            "clipx check-loss my_losses:fading",
            "clipx check-loss verl_clipx.losses.methods.acpo:Acpo",
        ),
    ),
)
def check_loss(
    function: Annotated[str, typer.Argument(help="A loss of your own, as package.module:name.")],
) -> None:
    """Check a loss of your own. The losses of this package pass the same checks."""
    sys.path.insert(0, "")
    from verl_clipx.losses.contract.child import EndedEarly, in_child

    colors = {"kept": "green", "failed": "red", "skipped": "yellow", "remark": "yellow"}
    has_failed = False
    try:
        for check, outcome, why in in_child(lambda: checks_of(function)):
            if outcome == "failed":
                has_failed = True
            because = f"\n  {escape(why)}" if why else ""
            # Paths must not be cut at the terminal's width.
            console.print(f"[{colors[outcome]}]{outcome:7}[/] {check}{because}", soft_wrap=True)
    except EndedEarly as error:
        fail(f"clipx.function={function!r}: {error}")
    except ValueError as error:
        fail(error)
    from verl_clipx.losses.contract.runner import UNSEEN

    console.print(UNSEEN, soft_wrap=True)
    raise typer.Exit(1 if has_failed else 0)


def checks_of(function: str) -> Iterator[tuple[str, str, str]]:
    """Import the module of a loss, and yield each check of the loss with its outcome and the reason for it."""
    from verl_clipx.losses.contract.runner import check_method
    from verl_clipx.run.config import build

    yield from check_method(build(function=function).method)


@app.command(
    rich_help_panel=AFTER,
    epilog=end_help(
        reads="metrics.jsonl and metrics.run.json in the run's folder, or the one log that you name",
        examples=(
            "clipx diagnose runs/acpo",
            "clipx diagnose runs/acpo --fail-on trend",
        ),
    ),
)
def diagnose(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="A run's folder, its log (.log, .csv, .jsonl, …), or wandb://entity/project/run. Name two to compare."
        ),
    ],
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            help="Exit with 3 on a finding of this rule, or of this kind or a graver one: fact, trend, remark."
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Name the rules that could not be checked, and what each lacks.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find what went wrong in a run. Each finding has its first step, the evidence, and what to do.

    Of two runs it also says where the second departs from the first.

    Exit code 3 if a finding matches --fail-on, 1 if that can't be checked or a run can't be read, else 0.
    """
    from verl_clipx.analysis.diagnose.command import FAILED, fails, findings_as_json, format_diagnosis
    from verl_clipx.analysis.diagnose.parting import find_parting, say_where
    from verl_clipx.analysis.runs.folder import read_run

    if len(runs) > 2:
        fail(f"{len(runs)} runs: name one, or two to compare.", 2)
    with reporting_errors(), deferring_warnings(messages_console()):
        loaded_runs = [read_run(path) for path in runs]
        parting = find_parting(*loaded_runs) if len(loaded_runs) == 2 else None
        findings_by_run = []
        lines = []
        for path, run in zip(runs, loaded_runs, strict=True):
            if as_json:
                findings_by_run.append({"run": str(path), **findings_as_json(run)})
            else:
                lines += format_diagnosis(run, verbose=verbose)
        has_failed = any([fails(run, fail_on or []) for run in loaded_runs])
    if as_json and parting is None:
        print_json(**findings_by_run[0])
    elif as_json:
        print_json(runs=findings_by_run, parting=parting._asdict())
    else:
        if parting is not None:
            lines += map(escape, say_where(*(run.name for run in loaded_runs), parting))
        for line in lines:
            console.print(line, highlight=False, soft_wrap=True)
    raise typer.Exit(FAILED if has_failed else 0)


@app.command(
    rich_help_panel=AFTER,
    epilog=end_help(
        reads="the log, the record and the traces in each run's folder",
        examples=(
            "clipx report runs/grpo runs/acpo --out page",
            "clipx report runs/acpo --out page --follow",
        ),
    ),
)
def report(
    runs: Annotated[list[Path], typer.Argument(help="The runs, each by its folder or the file of its log.")],
    out: Annotated[Path, typer.Option(help="The folder for report.html, figures and numbers.")],
    title: Annotated[
        str | None, typer.Option(help="Above the page; by default the most serious finding, or else what was clipped.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="The run or the method that rewards are compared with: by default GRPO, or else the first."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Rewrite the page until the runs end, or you press Ctrl-C.")
    ] = False,
) -> None:
    """Compare runs on one page. It shows what their clipping did, in figures and numbers."""
    from verl_clipx.analysis.report import follow as following
    from verl_clipx.analysis.report.page import PAGE, write_report

    findings = []

    def write(trains: bool) -> None:
        seconds = round(following.SECONDS) if trains else None
        findings[:] = write_report(runs, out, title, baseline, reload_every=seconds)
        if trains:
            now = time.strftime("%H:%M:%S")
            console.print_line(f"{out / PAGE}: written at {now}")

    with reporting_errors(), deferring_warnings(console):
        if follow:
            with contextlib.suppress(KeyboardInterrupt):
                following.follow_runs(runs, write, lambda why: console.print(f"waiting: {why}", markup=False))
        else:
            write(False)
    for finding in findings:
        console.print(f"[bold]{escape(finding.head)}[/] {escape(finding.text)}", highlight=False)
    if any("See docs/" in finding.text for finding in findings):
        console.print_line(say_where_pages_are())
    console.print_line(f"{out / PAGE}")


@app.command(
    rich_help_panel=AFTER,
    epilog=end_help(
        reads="the run's record and its traces, which it writes with clipx.trace.every=N",
        examples=(
            "clipx replay runs/acpo",
            "clipx replay runs/acpo +clipx=bapo +clipx=acpo clipx.alpha=1,2",
        ),
    ),
)
def replay(
    run: Annotated[Path, typer.Argument(help="A run with traces: its folder or the file of its log.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="The methods, such as +clipx=acpo clipx.alpha=1,2 +clipx=bapo; by default the run's own."),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="The step; by default the last one with traces and advantages.")
    ] = None,
    as_json: AsJson = False,
    tokens: Annotated[int, typer.Option(min=0, help="How many changed tokens --json lists.")] = 200,
) -> None:
    """Apply other methods to the tokens of a run. Show what each would clip, and which tokens would change."""
    sys.path.insert(0, "")
    from verl_clipx.analysis.replay.command import replay_run
    from verl_clipx.analysis.replay.output import print_replayed, replayed_as_json

    with reporting_errors():
        result = replay_run(run, settings or [], step=step)
        if as_json:
            print_json(**replayed_as_json(result, tokens))
        else:
            print_replayed(console, result)


@app.command(
    rich_help_panel=AFTER,
    epilog=end_help(
        reads="the log and the record in each run's folder",
        examples=(
            "clipx certify runs/grpo vs runs/acpo",
            "clipx certify runs/grpo-1 runs/grpo-2 vs runs/acpo-1 runs/acpo-2 --vary 'clipx.*'",
        ),
    ),
)
def certify(
    runs: Annotated[
        list[str],
        typer.Argument(help="Runs of the first arm, the word vs, runs of the second.", metavar="RUNS vs RUNS"),
    ],
    vary: Annotated[
        list[str] | None,
        typer.Option(help="A key that should differ between the arms, or a pattern of keys; by default the loss's."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check whether two groups of runs may be compared.

    Exit code 0 if every question passed, 1 if one failed, 3 if these runs have no evidence for some.
    """
    from verl_clipx.analysis.certify import certify as command

    with reporting_errors(), deferring_warnings(messages_console()):
        answers = command.certify(runs, vary or [])
    if as_json:
        print_json(answers=[asdict(answer) | {"verdict": answer.verdict.value} for answer in answers])
    else:
        for line in command.format_answers(answers):
            console.print(escape(line), highlight=False, soft_wrap=True)
    raise typer.Exit(command.exit_code(answers))


@app.command(
    rich_help_panel=AFTER,
    epilog=end_help(
        reads="the run's record and its traces, and the checkpoints' weights and tokenizer",
        examples=(
            "clipx recompute runs/acpo runs/acpo/checkpoints/global_step_2",
            "clipx recompute runs/acpo base_model runs/acpo/checkpoints/global_step_1 --step 2",
        ),
    ),
)
def recompute(
    run: Annotated[Path, typer.Argument(help="A run with traces: its folder or the file of its log.")],
    checkpoints: Annotated[
        list[Path], typer.Argument(help="Folders in Hugging Face's form, or verl's global_step_N of FSDP.")
    ],
    step: Annotated[list[int] | None, typer.Option(help="A traced step, or several; by default all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find out which weights sampled a run's tokens. Its traced tokens are scored with checkpoints.

    Exit code 0 if it is the version that the trace says, 1 if it is not, 3 if these checkpoints don't decide it.
    """
    from verl_clipx.analysis.recompute import recompute as command

    with reporting_errors(), deferring_warnings(messages_console()), working("scoring the traced tokens"):
        answers = command.recompute(run, checkpoints, step or [])
    if as_json:
        print_json(answers=[asdict(answer) | {"verdict": answer.verdict} for answer in answers])
    else:
        for answer in answers:
            console.print(escape(command.say(answer)), highlight=False, soft_wrap=True)
    verdicts = {answer.verdict for answer in answers}
    if "failed" in verdicts:
        raise typer.Exit(1)
    if "undecided" in verdicts:
        raise typer.Exit(3)
    raise typer.Exit(0)


def main() -> None:
    """Run the command `clipx`."""
    with_whole_output(app)


if __name__ == "__main__":
    main()
