"""What a mistyped name could have meant. Not covered: where commands say it (tests/test_command_line.py)."""

import pytest

from verl_clipx.common.suggestions import did_you_mean


@pytest.mark.parametrize(
    ("word", "known", "sentence"),
    [
        ("acp0", ["acpo", "bapo"], " Did you mean acpo?"),
        # Known under two headings, named once.
        ("acp0", ["acpo", "acpo"], " Did you mean acpo?"),
        # Letters that changed places come before words that are nearer by difflib.
        ("gpro", ["gppo", "grpo"], " Did you mean grpo?"),
        ("epsilon_mx", ["epsilon_min", "epsilon_max"], " Did you mean epsilon_max or epsilon_min?"),
        *(("nothing", ["acpo"], ""), ("acpo", [], "")),
    ],
)
def test_the_nearest_known_words_are_named_once(word, known, sentence):
    assert did_you_mean(word, known) == sentence
    assert did_you_mean("acp0", ["acpo"], "+clipx=") == " Did you mean +clipx=acpo?"
