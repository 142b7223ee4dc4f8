"""Rewards of reasoning-gym's tasks: its verifier judges the whole response, or the last number or word in it.

In the beginning a policy gains most by form: it stops explaining, and writes a bare number. `format` measures only
that; `skill` measures whether it can solve the problem, in whatever form it answers.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from verl_clipx.common.responses import final_part
from verl_clipx.papers.tasks.ground_truth import decode_ground_truth
from verl_clipx.papers.tasks.reasoning_gym.generator import reasoning_gym

# Right answers have a few characters. The verifiers are another project's, so they never get a long text.
MAX_ANSWER_LENGTH = 256

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
_WORD = re.compile(r"[A-Za-z]+(?:['-][A-Za-z]+)*")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Score one response; no text of a policy makes it raise.

    Args:
        ground_truth: a mapping `{"answer": text, "metadata": {"source_dataset": name, …}}`, or its JSON.

    Returns:
        `score`, the verifier's score of the whole response, 0 to 1; `acc`, 1.0 if that is 1; `format`, 1.0 if the
        response is only a number, or only a word if the right answer is a word; `skill`, 1.0 if the last number or word
        in the response is right, whatever surrounds it.

    Raises:
        ModuleNotFoundError: reasoning-gym is missing.
    """
    return _scored(solution_str, ground_truth)[0]


def compute_score_of_last_answer(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Score the last number or word in a response, whatever surrounds it; otherwise like `compute_score`.

    A model that explains before it answers earns this reward from the first rollout batch on.

    Returns:
        `score`: for a number, 1.0 if it is right, else 0.0 (the verifier would give partial credit to a number that
        contains the right one); for a word, the verifier's score, 0 to 1. `acc`: 1.0 if it is right. `format` and
        `skill`: as in `compute_score`.

    Raises:
        ModuleNotFoundError: reasoning-gym is missing.
    """
    found, last = _scored(solution_str, ground_truth)
    return found | {"score": last, "acc": found["skill"]}


def _scored(solution_str: str, ground_truth: Any) -> tuple[dict[str, float], float]:
    """Return what `compute_score` returns, and the score of the last number or word."""
    truth = decode_ground_truth(ground_truth)
    text = final_part(solution_str) if isinstance(solution_str, str) else None
    answer = (text or "").strip()
    if not answer or len(answer) > MAX_ANSWER_LENGTH or not isinstance(truth, Mapping):
        return {"score": 0.0, "acc": 0.0, "format": 0.0, "skill": 0.0}, 0.0
    kind = _kind(truth)
    found = kind.findall(answer)
    score, last = _verify(answer, truth), _verify(found[-1], truth) if found else 0.0
    parts = {
        "score": score,
        "acc": float(score >= 1),
        "format": float(kind.fullmatch(answer) is not None),
        "skill": float(last >= 1),
    }
    return parts, last if kind is _WORD else parts["skill"]


def check_ground_truth(data_source: str, ground_truth: Any) -> None:
    """See `verl_clipx.papers.tasks.reward.check_ground_truth`; the data source makes no difference.

    Raises:
        ModuleNotFoundError: reasoning-gym is missing.
        ValueError: the verifier that the ground truth names does not accept its own answer.
    """
    truth = decode_ground_truth(ground_truth)
    if (
        not isinstance(truth, Mapping)
        or not isinstance(truth.get("answer"), str)
        or _verify(truth["answer"], truth) < 1
    ):
        raise ValueError(
            f"ground_truth={ground_truth!r} ({type(ground_truth).__name__}): reasoning-gym's tasks need "
            '{"answer": text, "metadata": {"source_dataset": name}}, as a mapping or as JSON, with an answer that its '
            "verifier accepts"
        )


def _kind(truth: Mapping) -> re.Pattern[str]:
    return _NUMBER if _NUMBER.fullmatch(str(truth.get("answer"))) else _WORD


def _verify(answer: str, truth: Mapping) -> float:
    try:
        name = truth["metadata"]["source_dataset"]
        return float(min(max(_verifier(name)(answer, truth), 0.0), 1.0))
    except ModuleNotFoundError:
        raise
    except Exception:
        # This runs another project's code on arbitrary text. An answer that makes it fail is not right.
        return 0.0


@lru_cache(maxsize=64)
def _verifier(name: str) -> Callable[[str, Mapping], float]:
    return reasoning_gym().get_score_answer_fn(name)
