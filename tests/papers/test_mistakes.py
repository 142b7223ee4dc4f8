"""Commands of the papers' part with a mistake, by the list of mistakes.txt: a message, an exit code, and no file.

Not covered: files that cannot be read (tests/test_wrong_files.py), what only shows on runs and evaluations that are
there (tests/papers/evaluation, tests/papers/tables).
"""

from pathlib import Path

import pytest

from tests.analysis.runs.commands import clipx
from verl_clipx.papers.evaluation import validation_run

RUN = "{model} +hardware=cpu --benchmark {questions} --out out --max-tokens 6"


def read_mistakes():
    """Yield exit code, command and message of each."""
    for line in Path(__file__).with_name("mistakes.txt").read_text().splitlines():
        if line.startswith("# exit code "):
            code = int(line[-1])
        elif not line.startswith("#") and line:
            yield code, *line.split(" @ ")


@pytest.mark.parametrize(("code", "command", "message"), list(read_mistakes()))
def test_a_mistake_is_named_before_anything_is_written(inputs, tmp_path, monkeypatch, code, command, message):
    model, questions = inputs
    monkeypatch.setattr(validation_run, "_launch", lambda *_: pytest.fail("verl was launched"))
    monkeypatch.chdir(tmp_path)
    words = command.replace("{run}", RUN).replace("{model}", str(model)).replace("{questions}", str(questions)).split()
    assert message in clipx(*words, code=code)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
