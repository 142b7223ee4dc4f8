"""The tiny policies of Countdown and of knights and knaves: demonstrations, tokens, and the commands with tiny fits.

Not covered: what a full fit reaches (docs/tasks has measured runs); reversal's, which takes minutes.
"""

import re
from pathlib import Path

import pytest
import typer
import yaml
from transformers import AutoTokenizer
from typer.testing import CliRunner

from verl_clipx.papers.evaluation.scores import import_object
from verl_clipx.papers.tasks.countdown import policy as countdown
from verl_clipx.papers.tasks.countdown.generator import CountdownConfig, generate_problems
from verl_clipx.papers.tasks.knights_and_knaves import policy as knights_and_knaves
from verl_clipx.papers.tasks.knights_and_knaves.prompt import build_compact_response
from verl_clipx.papers.tasks.knights_and_knaves.puzzle import solve, split_of
from verl_clipx.papers.tasks.knights_and_knaves.wording import word_solution
from verl_clipx.papers.tasks.reward import compute_score
from verl_clipx.papers.tasks.tiny_policy.model import ModelConfig
from verl_clipx.papers.tasks.tiny_policy.sampling import mean_scores
from verl_clipx.papers.tasks.tiny_policy.warm_start import WarmStartConfig

pytestmark = pytest.mark.usefixtures("limit_torch_to_one_thread")

# What is printed of two steps on the held-out problems: they reach next to nothing.
HELD_OUT_SCORES = {
    countdown: r"held out, 256 problems: score 0\.0.*",
    knights_and_knaves: r"held out, 128 problems: score -(?:2\.[89]|3).*, acc 0\.0",
}


@pytest.fixture(params=HELD_OUT_SCORES, ids=lambda module: module.__name__.split(".")[-2])
def policy(request):
    return request.param


def run(policy, *arguments):
    app = typer.Typer()
    app.command()(policy.main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.slow
def test_it_prints_the_folder_alone_and_finds_it_again(policy, tmp_path):
    arguments = (tmp_path, "--steps", 2, "--examples", 40, "--num-threads", 1)
    first = run(policy, *arguments)
    second = run(policy, *arguments)
    assert first.exit_code == second.exit_code == 0
    (folder,) = tmp_path.iterdir()
    assert first.stdout == second.stdout == f"{folder}\n"
    assert re.search(HELD_OUT_SCORES[policy], first.stderr.replace("\n", " ")), first.stderr
    assert run(policy, *arguments, "--seed", 1).stdout != first.stdout


@pytest.mark.parametrize(("key", "value"), [("steps", "0"), ("mistakes", "1.5"), ("mistakes", "-0.1")])
def test_it_names_the_bad_key(policy, tmp_path, key, value):
    result = run(policy, tmp_path, "--examples", 4, f"--{key}", value)
    assert result.exit_code == 2
    assert f"{key}={value}" in result.stderr
    assert list(tmp_path.iterdir()) == []


PUZZLES = knights_and_knaves.draw_training_puzzles(500, 0)
TRUTHS = [word_solution(puzzle.solution, "ABC"[: len(puzzle.solution)]) for puzzle in PUZZLES]


def build_examples(policy, mistakes, seed=0):
    """Return demonstrations, and the ground truths of their problems."""
    if policy is countdown:
        problems = generate_problems(CountdownConfig(), 500, 0, "train")
        truths = [{"numbers": problem.numbers, "target": problem.target} for problem in problems]
        return countdown.build_examples(problems, "+-", mistakes, seed), truths
    return knights_and_knaves.build_examples(PUZZLES, mistakes, seed), TRUTHS


@pytest.mark.parametrize("mistakes", [0.0, 0.4, 1.0])
def test_the_share_of_mistakes_is_the_given_one(policy, mistakes):
    examples, truths = build_examples(policy, mistakes)
    source = policy.__name__.split(".")[-2]
    scores = []
    for example, truth in zip(examples, truths, strict=True):
        scores.append(compute_score(source, example.response, truth)["score"])
    score_if_right, score_if_wrong = (1.0, 0.0) if policy is countdown else (3.0, -1.0)
    assert {*scores} <= {score_if_right, score_if_wrong}
    share = scores.count(score_if_wrong) / len(scores)
    assert share == pytest.approx(mistakes, abs=0.06 if 0 < mistakes < 1 else 0)


@pytest.mark.parametrize("mistakes", [0.0, 0.4, 1.0])
def test_a_seed_decides_the_mistakes(policy, mistakes):
    examples, _ = build_examples(policy, mistakes)
    repeated, _ = build_examples(policy, mistakes)
    assert repeated == examples
    of_another_seed, _ = build_examples(policy, mistakes, seed=1)
    # A mistake in Countdown is drawn itself; of knights and knaves only which answers have one.
    depends_on_seed = mistakes > 0 if policy is countdown else 0 < mistakes < 1
    assert (of_another_seed != examples) == depends_on_seed


def test_training_puzzles_are_of_the_training_split():
    assert {split_of(puzzle) for puzzle in PUZZLES} == {"train"}
    assert all(solve(puzzle.statements) == [puzzle.solution] for puzzle in PUZZLES)
    share_of_two = sum(len(puzzle.statements) == 2 for puzzle in PUZZLES) / len(PUZZLES)
    assert share_of_two == pytest.approx(knights_and_knaves.SHARE_OF_TWO, abs=0.06)
    assert knights_and_knaves.draw_training_puzzles(50, seed=0) == PUZZLES[:50]
    assert knights_and_knaves.draw_training_puzzles(50, seed=1) != PUZZLES[:50]


def test_the_policy_of_puzzles_answers_in_a_dozen_tokens_and_is_scored(tmp_path):
    shape = ModelConfig(hidden_size=64, intermediate_size=64, num_layers=1, max_length=64)
    config = WarmStartConfig(steps=150, batch_size=4, learning_rate=1e-2, model=shape)
    folder = knights_and_knaves.fit_policy([PUZZLES[0]] * 4, 0.0, config, tmp_path, 1)
    tokenizer, response = AutoTokenizer.from_pretrained(folder), build_compact_response((True, False, True))
    ids = tokenizer.encode(response)
    assert [tokenizer.decode([token]) for token in ids] == [
        *("<think>", "</think>", "<answer>"),
        *("A", " is a knight", "\n", "B", " is a knave", "\n", "C", " is a knight", "</answer>"),
    ]
    assert tokenizer.decode(ids, skip_special_tokens=True) == response
    prompt = knights_and_knaves.build_compact_prompt(PUZZLES[0].statements)
    known, other = (
        {"data_source": "knights_and_knaves", "prompt": prompt, "reward_model": {"ground_truth": truth}}
        for truth in (TRUTHS[0], "(1) D is a knight")
    )
    assert mean_scores(folder, [known] * 20, 0, compute_score)["acc"] == pytest.approx(1.0, abs=0.1)
    assert mean_scores(folder, [known, other] * 20, 0, compute_score)["acc"] == pytest.approx(0.5, abs=0.05)


BAD = yaml.safe_load(Path(__file__).with_name("bad_values.yaml").read_text())


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [(name, key, value) for name, keys in BAD.items() for key, values in keys.items() for value in values],
)
def test_a_bad_value_is_named_with_its_key(settings, key, value):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{key}={value!r} ')}"):
        import_object(settings, "settings", type)(**{key: value})
