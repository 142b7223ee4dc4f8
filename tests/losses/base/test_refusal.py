"""The one error of refused settings: its text, its fields, several in one, pickled as by Ray; and what a mistyped name
could have meant. Not covered: where commands say it (tests/test_command_line.py).
"""

import pickle

import pytest

from verl_clipx.losses.base.refusal import NO_VALUE, Refusal, did_you_mean, raise_refusals

WRONG_ALPHA = Refusal("clipx.alpha", -1, "must be a number (at least 0)", "Set it to 3.")
SHAPING_WITHOUT_METHOD = Refusal("clipx.shaping", NO_VALUE, "is chosen without a method", "Choose one.")


def test_its_text_names_key_value_reason_and_advice():
    assert str(WRONG_ALPHA) == "clipx.alpha=-1: must be a number (at least 0). Set it to 3."
    assert str(SHAPING_WITHOUT_METHOD) == "clipx.shaping: is chosen without a method. Choose one."
    assert str(Refusal("clipx.dual_clip", None, "must be a number")) == "clipx.dual_clip=null: must be a number."


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("grpo", "grpo"),
        ("none", "none"),
        ("-", "-"),
        ("", "''"),
        ("8x7b", "'8x7b'"),
        ("2026-11-30", "'2026-11-30'"),
        ("-1", "'-1'"),
        (".5", "'.5'"),
        ("inf", "'inf'"),
        ("-.inf", "'-.inf'"),
        ("false", "'false'"),
        ("On", "'On'"),
        ("null", "'null'"),
    ],
)
def test_a_string_that_could_be_taken_for_another_value_is_quoted(text, shown):
    refusal = Refusal("clipx.log", text, "must be true or false")
    assert str(refusal) == f"clipx.log={shown}: must be true or false."


def test_all_refusals_are_raised_together_and_each_once():
    raise_refusals([None])
    with pytest.raises(Refusal) as raised:
        raise_refusals([None, WRONG_ALPHA, SHAPING_WITHOUT_METHOD, WRONG_ALPHA])
    assert [refusal.key for refusal in raised.value.all] == ["clipx.alpha", "clipx.shaping"]
    assert str(raised.value) == f"{WRONG_ALPHA}\n{SHAPING_WITHOUT_METHOD}"


def test_refusals_survive_pickle():
    with pytest.raises(Refusal) as raised:
        raise_refusals([WRONG_ALPHA, SHAPING_WITHOUT_METHOD])
    unpickled = pickle.loads(pickle.dumps(raised.value))
    assert str(unpickled) == str(raised.value)
    assert unpickled.value == -1
    assert unpickled.others[0].value is NO_VALUE


@pytest.mark.parametrize(
    ("word", "known", "sentence"),
    [
        ("acp0", ["acpo", "bapo"], " Did you mean acpo?"),
        # Known under two headings, named once.
        ("acp0", ["acpo", "acpo"], " Did you mean acpo?"),
        # Letters that changed places come before words that are nearer by difflib.
        ("gpro", ["gppo", "grpo"], " Did you mean grpo?"),
        ("epsilon_mx", ["epsilon_min", "epsilon_max"], " Did you mean epsilon_max or epsilon_min?"),
        ("nothing", ["acpo"], ""),
        ("acpo", [], ""),
    ],
)
def test_the_nearest_known_words_are_named_once(word, known, sentence):
    assert did_you_mean(word, known) == sentence


def test_a_prefix_stands_before_the_nearest_known_word():
    assert did_you_mean("acp0", ["acpo"], "+clipx=") == " Did you mean +clipx=acpo?"
