"""Scores stored completions with a reward function. Scores are stored separately so that they can be recomputed."""

import importlib
import math
import re
import sys
from collections.abc import Callable
from numbers import Real
from typing import Any

import pandas

from verl_clipx.papers.evaluation.benchmark import Benchmark
from verl_clipx.papers.responses import final_part, find_last_boxed, tagged_answer

PART = "reward/"
"""Prefix of the columns that hold the reward function's output."""

COPIED = ("question", "sample", "seed", "length", "truncated")
"""Columns of the completions that the scores repeat, so that nothing else has to read the texts again."""

MAX_ANSWER_LENGTH = 2000


def load_member(name: str, option: str, kind: Any) -> Any:
    """Import a function or a constant.

    Args:
        name: `package.module:name`; modules of the working directory count.
        kind: type of what is wanted.

    Raises:
        ValueError: the name is malformed, or there is no such module or member of this type.
    """
    module_name, _, member = name.partition(":")
    if not (module_name and member):
        raise ValueError(f"{option} {name}: write package.module:name")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module_name), member)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{option} {name}: cannot import it ({error})") from error
    if not isinstance(found, kind):
        raise ValueError(f"{option} {name}: is of the type {type(found).__name__}, not {kind.__name__}")
    return found


def check_ground_truths(benchmark: Benchmark, reward: Callable[..., Any]) -> None:
    """Refuse a benchmark with a ground truth that the reward cannot use, if its module has `check_ground_truth`.

    Args:
        reward: the function; `check_ground_truth(data_source, ground_truth)` in the same module raises ValueError.
    """
    check = getattr(sys.modules[reward.__module__], "check_ground_truth", None)
    for row, question in enumerate(benchmark.questions if check else []):
        try:
            check(question.data_source, question.ground_truth)
        except ValueError as error:
            raise ValueError(f"--benchmark {benchmark.path}, row {row}: {error}") from None


def extract_answer(text: str) -> str | None:
    r"""Return a response's last answer: the content of its last `<answer>…</answer>`, else of its last `\boxed{…}`.

    As in the rewards, text before the last `</think>` or inside an unclosed `<think>` is ignored; otherwise truncated
    responses would vote. A box inside the tags is unwrapped. White space is removed, so that "1, 2" and "1,2" are the
    same vote. Nothing is evaluated: answers that are equal only mathematically are different votes.

    Returns:
        The answer, or None if it is missing, empty or longer than `MAX_ANSWER_LENGTH`.
    """
    tagged = tagged_answer(text, MAX_ANSWER_LENGTH)
    boxed = find_last_boxed(final_part(text) if tagged is None else tagged, MAX_ANSWER_LENGTH)
    return re.sub(r"\s+", "", (tagged if boxed is None else boxed) or "") or None


def score_samples(samples: pandas.DataFrame, benchmark: Benchmark, reward: Callable[..., Any]) -> pandas.DataFrame:
    """Score every completion as verl's reward manager would.

    Args:
        samples: from `read_completions`.
        reward: called with data_source, solution_str, ground_truth, extra_info; returns a number or a dict with the key
            "score". Numbers in a dict are kept; keys that some completions lack are left out. If the dict has "pred",
            this is the answer that votes, as in verl's validation.

    Returns:
        One row per completion: question, sample, seed, length, truncated, answer, and a float column `reward/<part>`
        for every part.

    Raises:
        RuntimeError: the reward raised, or did not return a finite number; the message names the completion.
    """
    rows = []
    for sample in samples.itertuples():
        question = benchmark.questions[sample.question]
        try:
            returned = reward(
                data_source=question.data_source,
                solution_str=sample.text,
                ground_truth=question.ground_truth,
                extra_info=dict(question.extra_info),
            )
            parts = returned if isinstance(returned, dict) else {"score": returned}
            row = {column: getattr(sample, column) for column in COPIED}
            row |= {"answer": parts["pred"] if "pred" in parts else extract_answer(sample.text), **_numbers(parts)}
        except Exception as error:
            raise RuntimeError(
                f"the reward failed on benchmark {benchmark.name}, question {sample.question}, sample {sample.sample} "
                f"({type(error).__name__}: {error}). All completions are kept. Fix it and run `clipx eval score`."
            ) from error
        rows.append(row)
    everywhere = [key for key in rows[0] if all(key in row for row in rows)]
    return pandas.DataFrame({key: [row[key] for row in rows] for key in everywhere})


def _numbers(parts: dict[str, Any]) -> dict[str, float]:
    numbers = {PART + key: float(value) for key, value in parts.items() if isinstance(value, Real)}
    if PART + "score" not in numbers or not all(map(math.isfinite, numbers.values())):
        raise ValueError(f"returned {parts!r}, which is not a finite number `score` with other finite numbers")
    return numbers
