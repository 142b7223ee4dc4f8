r"""Finds the final answer in what a data set states as one, and tells prose from an answer."""

import re

from verl_clipx.papers.responses import find_last_boxed
from verl_clipx.papers.tasks.math.spelling import clean
from verl_clipx.papers.tasks.math.units import is_harmless

# What GSM8K writes between a solution and its answer.
_MARK = "####"
_MAX_BOX = 2000
_STATED = re.compile(r"\banswer(?:\s+is)?\s*[:=]?\s+(?!is\b)(?P<answer>[^\n]*?\S)\s*\Z", re.IGNORECASE)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_COMMAND = re.compile(r"\\[A-Za-z]+")

# Short answers in words, such as "not enough information", have no number and few words; sentences have more.
_MOST_WORDS = 5
_MOST_WORDS_BESIDE_NUMBERS = 2


def final_answer(stated: str) -> str:
    r"""Return what follows GSM8K's `####` or "the answer is", or what stands in a box; otherwise the whole text."""
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
    words = [word for word in _WORD.findall(_COMMAND.sub(" ", clean(answer))) if _is_spoken(word)]
    has_number = re.search(r"\d", answer) is not None
    return len(words) > (_MOST_WORDS_BESIDE_NUMBERS if has_number else _MOST_WORDS)


def _is_spoken(word: str) -> bool:
    has_vowel = re.search("[AEIOUYaeiouy]", word) is not None
    return has_vowel and not is_harmless(re.sub("(?<=..)s$", "", word.lower()))
