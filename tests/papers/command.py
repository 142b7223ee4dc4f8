"""The command line, as tests of the papers' part call it."""

from typer.testing import CliRunner

from verl_clipx.cli import app


def clipx(*words: object, code: int | None = 0) -> str:
    """Run the command, which must end with this exit code (None: any); its output without line breaks."""
    done = CliRunner(env={"COLUMNS": "400"}).invoke(app, list(map(str, words)))
    assert code in (None, done.exit_code) and isinstance(done.exception, SystemExit | None), done.output
    return " ".join(done.output.split())
