"""The reward through its doors: form and skill told apart, hostile text, the common reward, verl's loader.

Not covered: reasoning-gym's verifiers themselves, beyond the answers below; training (tests/end_to_end).
"""

import json

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.reward import get_custom_reward_fn

from verl_clipx.papers.tasks import reward as common
from verl_clipx.papers.tasks.reasoning_gym.reward import (
    check_ground_truth,
    compute_score,
    compute_score_of_last_answer,
)

SUM = json.dumps({"answer": "42", "metadata": {"source_dataset": "chain_sum"}})


def parts(text, truth=SUM):
    return tuple(compute_score("reasoning_gym_chain_sum", text, truth)[key] for key in ("acc", "format", "skill"))


@pytest.mark.parametrize(
    ("text", "right", "bare", "able"),
    [
        ("42", 1, 1, 1),
        (" 42\n", 1, 1, 1),
        ("+42", 1, 1, 1),
        ("41", 0, 1, 0),
        ("-42", 0, 1, 0),
        ("40 + 2 = 42", 0, 0, 1),
        ("The answer is 42.", 0, 0, 1),
        ("42 is the sum of 40 and 2", 0, 0, 0),
        ("I don't know", 0, 0, 0),
        ("", 0, 0, 0),
        ("<think>42", 0, 0, 0),
        ("<think>40 and 2</think>42", 1, 1, 1),
    ],
)
def test_form_and_skill_are_told_apart(text, right, bare, able):
    assert parts(text) == (right, bare, able)
    # Of the last number skill is all that counts.
    last = compute_score_of_last_answer("", text, SUM)
    assert last == {"score": able, "acc": able, "format": bare, "skill": able}


def test_the_score_is_the_verifiers_own():
    # It gives a share for an answer inside a longer text: 2 of 5 characters.
    assert compute_score("", "is 42", SUM)["score"] == pytest.approx(0.4)
    assert compute_score("", "42", SUM)["score"] == 1 and compute_score("", "7", SUM)["score"] == 0


def test_of_the_last_word_the_score_is_the_verifiers_too():
    word = json.dumps({"answer": "tac", "metadata": {"source_dataset": "spell_backward"}})
    # Two of three letters stand where they belong.
    whole, found = (score("", "tab", word) for score in (compute_score, compute_score_of_last_answer))
    assert found["score"] == whole["score"] and 0 < found["score"] < 1 and found["acc"] == 0
    assert compute_score_of_last_answer("", "It is tab", word) == found | {"format": 0.0}


@pytest.mark.parametrize("text", ["4" * 300, "\0", "1e999999999", "NaN", "Infinity", "🙂", "{}", None, 42, b"42"])
@pytest.mark.parametrize("score", [compute_score, compute_score_of_last_answer])
def test_hostile_text_earns_nothing(score, text):
    assert score("", text, SUM) == {"score": 0.0, "acc": 0.0, "format": 0.0, "skill": 0.0}


@pytest.mark.parametrize("truth", ["", "{", None, [], {"answer": "42"}, {"answer": "42", "metadata": {}}, b"42"])
def test_a_ground_truth_that_no_verifier_knows_is_refused_and_scores_nothing(truth):
    assert compute_score("", "42", truth)["score"] == 0.0
    with pytest.raises(ValueError, match=r"reasoning-gym's tasks need .* its verifier accepts"):
        check_ground_truth("reasoning_gym_chain_sum", truth)


def test_the_common_reward_scores_by_it():
    scored = common.compute_score("reasoning_gym_chain_sum", "42", SUM)
    assert scored == {"score": 1.0, "acc": 1.0, "format": 1.0}


@pytest.mark.parametrize("name", ["compute_score", "compute_score_of_last_answer"])
def test_verl_loads_it_by_the_recipes_keys(name):
    config = {"path": "pkg://verl_clipx.papers.tasks.reasoning_gym.reward", "name": name}
    function = get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": config}}))
    scored = function(data_source="reasoning_gym_chain_sum", solution_str="42", ground_truth=SUM, extra_info={})
    assert scored == {"score": 1.0, "acc": 1.0, "format": 1.0, "skill": 1.0}
