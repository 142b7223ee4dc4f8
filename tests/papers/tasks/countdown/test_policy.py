"""The command that prepares the tiny policy for Countdown, with a fit of two steps.

Not covered: the reward that the default fit reaches; a run of the quick start shows that.
"""

import pytest
import typer
from typer.testing import CliRunner

from verl_clipx.papers.tasks.countdown.config import CountdownConfig
from verl_clipx.papers.tasks.countdown.generator import generate_problems
from verl_clipx.papers.tasks.countdown.policy import build_examples, main
from verl_clipx.papers.tasks.countdown.reward import compute_score

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run_command_line():
    app = typer.Typer()
    app.command()(main)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.slow
def test_prints_the_folder_alone_and_finds_it_again(run_command_line, tmp_path):
    arguments = (tmp_path, "--steps", 2, "--examples", 40, "--num-threads", 1)
    first, second = run_command_line(*arguments), run_command_line(*arguments)
    assert first.exit_code == second.exit_code == 0
    (folder,) = tmp_path.iterdir()
    assert first.stdout == second.stdout == f"{folder}\n"
    assert "held-out reward 0.0" in first.stderr
    assert run_command_line(*arguments, "--seed", 1).stdout != first.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("key", "value"), [("steps", "0"), ("mistakes", "1.5"), ("mistakes", "-0.1")])
def test_names_the_bad_key(run_command_line, tmp_path, key, value):
    result = run_command_line(tmp_path, f"--{key}", value)
    assert result.exit_code == 2
    assert f"{key}={value}" in result.stderr
    assert list(tmp_path.iterdir()) == []


def share_right(examples, problems):
    truths = [{"numbers": problem.numbers, "target": problem.target} for problem in problems]
    scores = [compute_score("", e.response, truth) for e, truth in zip(examples, truths, strict=True)]
    return sum(score["score"] for score in scores) / len(scores)


def test_share_of_mistakes():
    problems = generate_problems(CountdownConfig(), 1000, 0, "train")
    assert share_right(build_examples(problems, "+-", 0.0, 0), problems) == 1.0
    assert share_right(build_examples(problems, "+-", 1.0, 0), problems) == 0.0
    assert share_right(build_examples(problems, "+-", 0.4, 0), problems) == pytest.approx(0.6, abs=0.05)
    assert build_examples(problems, "+-", 0.4, 0) == build_examples(problems, "+-", 0.4, 0)
    assert build_examples(problems, "+-", 0.4, 0) != build_examples(problems, "+-", 0.4, 1)
