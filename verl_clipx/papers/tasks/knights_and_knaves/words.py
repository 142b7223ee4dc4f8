"""A reward that also counts inference-related words (AR-Lopti, Figure 5, Table 5), for `clipx eval run --reward`."""

import re
from typing import Any

from verl_clipx.papers.tasks.knights_and_knaves import reward

# Largest number of characters between an "if" and its "then", which must be in one sentence.
_APART = 300
# The words of Table 5; verbs count also in the past tense, and nouns in the plural (Appendix C.1.1).
CATEGORIES = {
    "analysis": r"\b(?:analyzed?|consider(?:ed)?|look(?:ed)? at|check(?:ed)?|examined?)\b",
    "statement": r"\b\w+['\u2019]s? statements?\b",
    "causal_indicator": r"\b(?:since|because|due to|given that)\b",
    "conclusion_indicator": r"\b(?:so|thus|hence|as a result|consequently|therefore)\b",
    "assumption": rf"\bassumed?\b|\bif\b[^.!?\n]{{1,{_APART}}}?\bthen\b",
    "assertion": r"\b(?:must be|definite)\b",
}
"""A pattern for each category; every match counts as one word."""

_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in CATEGORIES.items()}

check_ground_truth = reward.check_ground_truth


def compute_score(data_source: str, solution_str: str, ground_truth: Any, **kwargs: Any) -> dict[str, float]:
    """Score one response, and count its inference-related words.

    Returns:
        The reward's parts and, for each of `CATEGORIES`, how often its words occur in the response.

    Source: AR-Lopti, Figure 5. The paper says "frequency", which this project reads as the count in a response.
    """
    counts = {name: float(len(pattern.findall(solution_str))) for name, pattern in _PATTERNS.items()}
    return reward.compute_score(data_source, solution_str, ground_truth, **kwargs) | counts
