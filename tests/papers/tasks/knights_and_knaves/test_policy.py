"""The tokenizer and the warm start of the tiny policy for knights and knaves, with fits of a few steps.

Not covered: the accuracy that the default fit reaches; docs/tasks/knights_and_knaves.md has a measured run.
"""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_clipx.papers.tasks.knights_and_knaves import policy
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
