"""The tokenizer and the warm start of the tiny policy for knights and knaves, with fits of a few steps.

Not covered: the accuracy that the default fit reaches; docs/tasks/knights_and_knaves.md has a measured run.
"""

import re

import pytest
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from verl_clipx.papers.tasks.knights_and_knaves import policy
from verl_clipx.papers.tasks.knights_and_knaves.dataset import tiny_rows
from verl_clipx.papers.tasks.knights_and_knaves.policy import WORDS, build_puzzle_tokenizer
from verl_clipx.papers.tasks.knights_and_knaves.prompt import build_compact_response
from verl_clipx.papers.tasks.knights_and_knaves.puzzle import solve, split_of
from verl_clipx.papers.tasks.knights_and_knaves.reward import compute_score
from verl_clipx.papers.tasks.knights_and_knaves.wording import word_solution
from verl_clipx.papers.tasks.tiny_policy import warm_start
from verl_clipx.papers.tasks.tiny_policy.model import ModelConfig
from verl_clipx.papers.tasks.tiny_policy.sampling import mean_scores
from verl_clipx.papers.tasks.tiny_policy.warm_start import WarmStartConfig

SMALL = WarmStartConfig(
    steps=3, batch_size=4, model=ModelConfig(hidden_size=64, intermediate_size=64, num_layers=1, max_length=64)
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def puzzles():
    return policy.draw_training_puzzles(300, seed=0)


def truth_of(puzzle):
    return word_solution(puzzle.solution, "ABC"[: len(puzzle.solution)])


def test_a_response_is_a_dozen_tokens_and_decodes_to_itself(tmp_path):
    tokenizer = build_puzzle_tokenizer()
    response = build_compact_response((True, False, True))
    ids = tokenizer.encode(response)
    assert [tokenizer.decode([token]) for token in ids] == [
        *("<think>", "</think>", "<answer>"),
        *("A", " is a knight", "\n", "B", " is a knave", "\n", "C", " is a knight", "</answer>"),
    ]
    assert tokenizer.decode(ids, skip_special_tokens=True) == response
    assert all(len(tokenizer.encode(word)) == 1 for word in WORDS)


def test_training_puzzles_are_of_the_training_split(puzzles):
    assert {split_of(puzzle) for puzzle in puzzles} == {"train"}
    assert all(solve(puzzle.statements) == [puzzle.solution] for puzzle in puzzles)
    share_of_two = sum(len(puzzle.statements) == 2 for puzzle in puzzles) / len(puzzles)
    assert share_of_two == pytest.approx(policy.SHARE_OF_TWO, abs=0.08)
    assert policy.draw_training_puzzles(50, seed=0) == puzzles[:50]
    assert policy.draw_training_puzzles(50, seed=1) != puzzles[:50]


@pytest.mark.parametrize(("mistakes", "right", "missing"), [(0.0, 1.0, 0.0), (1.0, 0.0, 1.0), (0.4, 0.6, 0.4)])
def test_share_of_mistakes(puzzles, mistakes, right, missing):
    examples = policy.build_examples(puzzles, mistakes, seed=0)
    scores = [
        compute_score("", example.response, truth_of(puzzle))["score"]
        for example, puzzle in zip(examples, puzzles, strict=True)
    ]
    assert scores.count(3.0) / len(scores) == pytest.approx(right, abs=0.1)
    assert scores.count(-1.0) / len(scores) == pytest.approx(missing, abs=0.1)
    assert scores.count(3.0) + scores.count(-1.0) == len(scores)


def test_saved_policy_loads_and_is_found_again(puzzles, tmp_path, monkeypatch):
    folder = policy.fit_policy(puzzles, 0.5, SMALL, tmp_path, num_threads=1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    text = build_compact_response((True, False))
    assert tokenizer.encode(text) == build_puzzle_tokenizer().encode(text)
    assert model.config.vocab_size == len(tokenizer)
    assert folder.name == "knights_and_knaves-4fa408b6ad03050e"
    monkeypatch.setattr(warm_start, "fit", None)  # a call would raise
    assert policy.fit_policy(puzzles, 0.5, SMALL, tmp_path, num_threads=2) == folder


def test_other_puzzles_mistakes_or_seeds_are_another_policy(puzzles, tmp_path):
    folders = {
        policy.fit_policy(puzzles, 0.5, SMALL, tmp_path, 1),
        policy.fit_policy(puzzles[1:], 0.5, SMALL, tmp_path, 1),
        policy.fit_policy(puzzles, 0.0, SMALL, tmp_path, 1),
        policy.fit_policy(puzzles, 0.5, WarmStartConfig(3, 4, seed=1, model=SMALL.model), tmp_path, 1),
    }
    assert len(folders) == 4


def test_interrupted_fit_leaves_nothing_behind(puzzles, tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", interrupt)
    with pytest.raises(KeyboardInterrupt):
        policy.fit_policy(puzzles, 0.5, SMALL, tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_no_puzzles_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^examples is empty"):
        policy.fit_policy([], 0.5, SMALL, tmp_path, 1)


def test_mean_scores_of_a_policy_that_knows_one_answer(puzzles, tmp_path):
    config = WarmStartConfig(steps=150, batch_size=4, learning_rate=1e-2, model=SMALL.model)
    first = puzzles[0]
    folder = policy.fit_policy([first] * 4, 0.0, config, tmp_path, 1)
    known = row_of(first)
    other = {**known, "reward_model": {"ground_truth": "(1) D is a knight"}}
    means = mean_scores(folder, [known] * 20, 0, compute_score)
    assert means["acc"] == pytest.approx(1.0, abs=0.1)
    assert mean_scores(folder, [known, other] * 20, 0, compute_score)["acc"] == pytest.approx(0.5, abs=0.05)


def row_of(puzzle):
    prompt = policy.build_compact_prompt(puzzle.statements)
    return {"data_source": "", "prompt": prompt, "reward_model": {"ground_truth": truth_of(puzzle)}}


@pytest.fixture
def run_command_line():
    app = typer.Typer()
    app.command()(policy.main)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.slow
def test_prints_the_folder_alone_and_finds_it_again(run_command_line, tmp_path):
    arguments = (tmp_path, "--steps", 2, "--examples", 40, "--num-threads", 1)
    first, second = run_command_line(*arguments), run_command_line(*arguments)
    assert first.exit_code == second.exit_code == 0
    (folder,) = tmp_path.iterdir()
    assert first.stdout == second.stdout == f"{folder}\n"
    count = sum(1 for _ in tiny_rows(None, split="test", prompt="kk_compact"))
    # Two steps teach next to nothing: a puzzle more or less has the right format, by chance and by rounding.
    found = re.search(rf"held out, {count} puzzles: score (-[\d.]+), acc 0.000", first.stderr.replace("\n", " "))
    assert found and float(found[1]) == pytest.approx(-3, abs=0.2)


@pytest.mark.parametrize(("key", "value"), [("steps", "0"), ("mistakes", "1.5"), ("mistakes", "-0.1")])
def test_names_the_bad_key(run_command_line, tmp_path, key, value):
    result = run_command_line(tmp_path, "--examples", 4, f"--{key}", value)
    assert result.exit_code == 2
    assert f"{key}={value}" in result.stderr
    assert list(tmp_path.iterdir()) == []
