r"""Finds the final answer in a text that a data set states as the answer, and tells prose from an answer."""

import re

from verl_clipx.papers.responses import find_last_boxed
from verl_clipx.papers.tasks.math.spelling import clean
from verl_clipx.papers.tasks.math.units import is_harmless

# What GSM8K writes between a solution and its answer.
_MARK = "####"
# The largest number of characters of an answer in a box.
_MAX_BOX = 2000
# What follows the last word "answer", to the end of the text.
_STATED = re.compile(r"\banswer(?:\s+is)?\s*[:=]?\s+(?!is\b)(?P<answer>[^\n]*?\S)\s*\Z", re.IGNORECASE)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_COMMAND = re.compile(r"\\[A-Za-z]+")

# The most words of an answer that is no sentence, such as "not enough information". Beside a number, there are fewer.
_MOST_WORDS = 5
_MOST_WORDS_BESIDE_NUMBERS = 2


def final_answer(stated: str) -> str:
    r"""Return the final answer in a text that a data set states as the answer.

    It is what follows GSM8K's `####`; else the content of the last box; else what follows "the answer is"; else the
    whole text.
    """
    if _MARK in stated:
        return stated.rpartition(_MARK)[2].strip()
    box = find_last_boxed(stated, _MAX_BOX)
    if box is not None:
        return box.strip()
    answer = _STATED.search(stated)
    return answer["answer"].rstrip(".") if answer else stated


def is_prose(answer: str) -> bool:
    """Return whether an answer is a sentence, which only a response in the same words would equal."""
    if "\n" in answer.strip():
        return True
    without_commands = _COMMAND.sub(" ", clean(answer))
    words = [word for word in _WORD.findall(without_commands) if _is_of_sentence(word)]
    has_number = re.search(r"\d", answer) is not None
    most_words = _MOST_WORDS_BESIDE_NUMBERS if has_number else _MOST_WORDS
    return len(words) > most_words


def _is_of_sentence(word: str) -> bool:
    """Return whether a word counts as one of a sentence: it has a vowel, and does not name a unit."""
    has_vowel = re.search("[AEIOUYaeiouy]", word) is not None
    without_plural = re.sub("(?<=..)s$", "", word.lower())
    return has_vowel and not is_harmless(without_plural)
