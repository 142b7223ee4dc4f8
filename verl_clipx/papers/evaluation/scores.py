"""Scores stored completions with a reward function. Scores are stored separately so that they can be recomputed."""

import importlib
import math
import sys
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any

import pandas

from verl_clipx.common.files import read_table, replacing
from verl_clipx.papers.evaluation.benchmark import Benchmark

PART = "reward/"
"""Prefix of the columns that hold the reward function's output."""

COPIED = ("question", "sample", "seed", "length", "truncated")
"""Columns of the completions that the scores repeat, so that nothing else has to read the texts again."""


def load_function(name: str, option: str) -> Callable[..., Any]:
    """Import a function.

    Args:
        name: `package.module:function`; modules of the working directory count.

    Raises:
        ValueError: the name is malformed, or there is no such module or function.
    """
    function = _load(name, option)
    if not callable(function):
        raise ValueError(f"{option} {name}: is not a function")
    return function


def load_text(name: str, option: str) -> str:
    """Import a string constant, as `load_function` imports a function."""
    text = _load(name, option)
    if not isinstance(text, str):
        raise ValueError(f"{option} {name}: is not text")
    return text


def _load(name: str, option: str) -> Any:
    module_name, colon, member = name.partition(":")
    if not (module_name and colon and member):
        raise ValueError(f"{option} {name}: write package.module:name")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module_name), member)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{option} {name}: cannot import it ({error})") from error


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


def score_samples(
    samples: pandas.DataFrame,
    benchmark: Benchmark,
    reward: Callable[..., Any],
    answer: Callable[[str], str | None],
    on_sample: Callable[[], None] = lambda: None,
) -> pandas.DataFrame:
    """Score every completion as verl's reward manager would.

    Args:
        samples: from `read_completions`.
        reward: called with data_source, solution_str, ground_truth, extra_info; returns a number or a dict with the key
            "score". Numbers in a dict are kept; keys that some completions lack are left out.
        answer: extracts a response's answer for the majority vote.

    Returns:
        One row per completion: question, sample, seed, length, truncated, answer, and a float column `reward/<part>`
        for every part.

    Raises:
        RuntimeError: the reward or the answer function raised, or the reward did not return a finite number; the
            message names the completion.
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
            row = {column: getattr(sample, column) for column in COPIED}
            row |= {"answer": answer(sample.text), **_numbers(returned)}
        except Exception as error:
            raise RuntimeError(
                f"the reward or the answer function failed on benchmark {benchmark.name}, "
                f"question {sample.question}, sample {sample.sample} "
                f"({type(error).__name__}: {error}). All completions are kept. Fix it and run `clipx eval score`."
            ) from error
        rows.append(row)
        on_sample()
    everywhere = [key for key in rows[0] if all(key in row for row in rows)]
    return pandas.DataFrame({key: [row[key] for row in rows] for key in everywhere})


def _numbers(returned: Any) -> dict[str, float]:
    parts = returned if isinstance(returned, dict) else {"score": returned}
    numbers = {PART + key: float(value) for key, value in parts.items() if isinstance(value, Real)}
    if PART + "score" not in numbers:
        raise TypeError(f"returned {returned!r}, which does not contain a number `score`")
    if not all(map(math.isfinite, numbers.values())):
        raise ValueError(f"returned {returned!r}, whose mean cannot be computed")
    return numbers


def write_scores(path: Path, scores: pandas.DataFrame) -> None:
    """Write scores atomically."""
    with replacing(path) as partial:
        scores.to_parquet(partial, index=False)


def read_scores(path: Path) -> pandas.DataFrame:
    """Read scores."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: not scored yet; run `clipx eval score` on this evaluation's folder")
    return read_table(path).to_pandas()
