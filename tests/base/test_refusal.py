"""The one error of refused settings: its text, its fields, several in one, pickled as by Ray."""

import pickle

import pytest

from verl_clipx.base.refusal import ABSENT, Refusal, refuse

FIRST = Refusal("clipx.alpha", -1, "must be a number (at least 0)", "Set it to 3.")
SECOND = Refusal("clipx.shaping", ABSENT, "is chosen without a method", "Choose one.")


def test_its_text_names_key_value_reason_and_advice():
    assert str(FIRST) == "clipx.alpha=-1: must be a number (at least 0). Set it to 3."
    assert str(SECOND) == "clipx.shaping: is chosen without a method. Choose one."
    assert str(Refusal("clipx.dual_clip", None, "must be a number")) == "clipx.dual_clip=null: must be a number."


def test_all_refusals_are_raised_together_and_each_once():
    refuse([None])
    with pytest.raises(Refusal) as raised:
        refuse([None, FIRST, SECOND, FIRST])
    assert [part.key for part in raised.value.all] == ["clipx.alpha", "clipx.shaping"]
    assert str(raised.value) == f"{FIRST}\n{SECOND}"
    again = pickle.loads(pickle.dumps(raised.value))
    assert str(again) == str(raised.value) and again.value == -1 and again.others[0].value is ABSENT
