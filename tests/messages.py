"""What a message has to say, so that a test does not hold its sentences to the letter."""

import re


def assert_names(message: str, *facts: str) -> None:
    """Assert that a message names each fact: a word, a number or a name, but not as part of a longer one."""
    missing = []
    for fact in facts:
        if not re.search(rf"(?<![\w.-]){re.escape(fact)}(?!\w|\.\d)", message):
            missing.append(fact)
    # Of a whole page the beginning tells which one it is.
    shown = message if len(message) < 3000 else f"{message[:300]} …"
    assert not missing, f"{missing} not in: {shown}"
