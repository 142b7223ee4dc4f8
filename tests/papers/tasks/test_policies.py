"""The commands that prepare the tiny policies, with fits of two steps, and the share of mistakes that they learn from.

Not covered: what a full fit reaches (docs/dev/tasks.md has measured runs); reversal's, which takes minutes.
"""

import re

import pytest
import typer
from typer.testing import CliRunner

from verl_clipx.papers.tasks.countdown import policy as countdown
from verl_clipx.papers.tasks.countdown.config import CountdownConfig
from verl_clipx.papers.tasks.countdown.generator import generate_problems
from verl_clipx.papers.tasks.knights_and_knaves import policy as knights_and_knaves
from verl_clipx.papers.tasks.knights_and_knaves.wording import word_solution
from verl_clipx.papers.tasks.reward import compute_score

pytestmark = pytest.mark.usefixtures("one_thread")

# What two steps reach on the held-out problems: next to nothing.
REACHED = {
    countdown: r"held-out reward 0\.0",
    knights_and_knaves: r"held out, 128 puzzles: score -(?:2\.[89]|3).*, acc 0\.0",
}


@pytest.fixture(params=REACHED, ids=lambda module: module.__name__.split(".")[-2])
def policy(request):
    return request.param


def run(policy, *arguments):
    app = typer.Typer()
    app.command()(policy.main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.slow
def test_it_prints_the_folder_alone_and_finds_it_again(policy, tmp_path):
    arguments = (tmp_path, "--steps", 2, "--examples", 40, "--num-threads", 1)
    first, second = run(policy, *arguments), run(policy, *arguments)
    assert first.exit_code == second.exit_code == 0
    (folder,) = tmp_path.iterdir()
    assert first.stdout == second.stdout == f"{folder}\n"
    assert re.search(REACHED[policy], first.stderr.replace("\n", " ")), first.stderr
    assert run(policy, *arguments, "--seed", 1).stdout != first.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("key", "value"), [("steps", "0"), ("mistakes", "1.5"), ("mistakes", "-0.1")])
def test_it_names_the_bad_key(policy, tmp_path, key, value):
    result = run(policy, tmp_path, "--examples", 4, f"--{key}", value)
    assert result.exit_code == 2
    assert f"{key}={value}" in result.stderr
    assert list(tmp_path.iterdir()) == []


def examples_of(policy, mistakes, seed=0):
    """Demonstrations, and the ground truths of their problems."""
    if policy is countdown:
        problems = generate_problems(CountdownConfig(), 500, 0, "train")
        truths = [{"numbers": problem.numbers, "target": problem.target} for problem in problems]
        return countdown.build_examples(problems, "+-", mistakes, seed), truths
    puzzles = knights_and_knaves.draw_training_puzzles(500, 0)
    truths = [word_solution(puzzle.solution, "ABC"[: len(puzzle.solution)]) for puzzle in puzzles]
    return knights_and_knaves.build_examples(puzzles, mistakes, seed), truths


@pytest.mark.parametrize("mistakes", [0.0, 0.4, 1.0])
def test_the_share_of_mistakes_is_the_given_one(policy, mistakes):
    examples, truths = examples_of(policy, mistakes)
    source = policy.__name__.split(".")[-2]
    scores = [compute_score(source, one.response, truth) for one, truth in zip(examples, truths, strict=True)]
    right, rest = 1.0 if policy is countdown else 3.0, 0.0 if policy is countdown else -1.0
    assert {parts["score"] for parts in scores} <= {right, rest}
    share = sum(parts["score"] == rest for parts in scores) / len(scores)
    assert share == pytest.approx(mistakes, abs=0.06 if 0 < mistakes < 1 else 0)
    assert examples_of(policy, mistakes)[0] == examples
    assert (examples_of(policy, mistakes, seed=1)[0] != examples) == (
        mistakes == 0.4 or (policy is countdown and mistakes > 0)
    )
