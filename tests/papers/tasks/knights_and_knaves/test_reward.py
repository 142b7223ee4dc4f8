"""Logic-RL's reward: every total by hand, and both kinds of prompt.

Not covered: hostile text and verl's reward manager (tests/papers/tasks).
"""

import re
from pathlib import Path

import pytest
import yaml

from verl_clipx.papers.tasks.knights_and_knaves.reward import compute_score

TRUTH = "(1) Zoey is a knight\n(2) Liam is a knave\n(3) Ava is a knight"
OTHER_NAMES = "(1) Łukasz is a knight\n(2) Zoë is a knave"

RIGHT = {"score": 3.0, "acc": 1.0, "format": 1.0, "parsed": 1.0}
WRONG = {"score": -0.5, "acc": 0.0, "format": 1.0, "parsed": 1.0}
UNPARSED = {"score": -1.0, "acc": 0.0, "format": 1.0, "parsed": 0.0}
NO_FORMAT = {"score": -3.0, "acc": 0.0, "format": 0.0, "parsed": 0.0}


def score(text, truth=TRUTH, **kwargs):
    return compute_score("knights_and_knaves", text, truth, extra_info={"index": 0}, more=1, **kwargs)


def respond(answer=TRUTH, reasoning="Zoey cannot lie."):
    return f"{reasoning}</think><answer>{answer}</answer>"


OUTCOMES = {"right": RIGHT, "wrong": WRONG, "unparsed": UNPARSED, "wrong form": NO_FORMAT}
LISTS = yaml.safe_load(Path(__file__).with_name("answers.yaml").read_text(encoding="utf-8"))


def filled(text):
    """A text of answers.yaml."""
    if change := re.fullmatch("{answer with (.*) for (.*)}", text):
        return TRUTH.replace(change[2], change[1])
    text = text.replace("{prompt}", LISTS["prompt"]).replace("{wrong}", respond(TRUTH.replace("knave", "knight")))
    return text.replace("{answer}", TRUTH).replace("{response}", respond())


@pytest.mark.parametrize(
    ("outcome", "text"), [(key, text) for key, texts in LISTS["answers"].items() for text in texts]
)
def test_answers_by_hand(outcome, text):
    assert score(respond(filled(text))) == OUTCOMES[outcome]
    assert score(f"<think>{respond(filled(text))}") == OUTCOMES[outcome]


@pytest.mark.parametrize("text", LISTS["wrong_forms"])
def test_wrong_form_scores_the_least_though_the_answer_is_right(text):
    assert score(filled(text)) == NO_FORMAT


@pytest.mark.parametrize(
    ("think_in_prompt", "with_think", "without_think"),
    [(None, RIGHT, RIGHT), (True, NO_FORMAT, RIGHT), (False, RIGHT, NO_FORMAT)],
)
def test_who_opens_the_reasoning(think_in_prompt, with_think, without_think):
    assert score(f"<think>{respond()}", think_in_prompt=think_in_prompt) == with_think
    assert score(respond(), think_in_prompt=think_in_prompt) == without_think


@pytest.mark.parametrize("think_in_prompt", [None, True, False])
@pytest.mark.parametrize(("outcome", "text"), LISTS["with_prompt"])
def test_prompt_and_response_together_as_the_release_reads_them(text, outcome, think_in_prompt):
    assert score(filled(text), think_in_prompt=think_in_prompt) == OUTCOMES[outcome]


@pytest.mark.parametrize(("outcome", "text"), LISTS["responses"])
def test_other_responses(outcome, text):
    assert score(filled(text)) == OUTCOMES[outcome]


def test_names_of_any_letters_and_the_truth_of_the_released_files():
    assert score(respond("Zoë is a knave, Łukasz is a knight"), OTHER_NAMES) == RIGHT
    assert score(respond("Zoe is a knave, Łukasz is a knight"), OTHER_NAMES) == UNPARSED
    assert score(respond(), {"solution_text_format": TRUTH, "statements": "(('lying', 1),)"}) == RIGHT
