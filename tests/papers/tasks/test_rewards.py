"""What the rewards of all tasks have in common: hostile text, truths that no answer meets, threads, verl's own loader.

Not covered: the rules; each task's tests hold them.
"""

import random
import time
import tracemalloc
import warnings
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml

from verl_clipx.papers.evaluation.scores import import_object
from verl_clipx.papers.tasks.catalog import definitions
from verl_clipx.papers.tasks.reward import PARTS, check_ground_truth, compute_score, compute_score_for_evaluation

COUNTDOWN = {"numbers": [3, 5, 2], "target": 16}
HITAB = {"answers": ["ostholm"], "ratio": False, "rounding": False}
PEOPLE = "(1) Zoey is a knight\n(2) Liam is a knave"


class Task(NamedTuple):
    """What a test has to know of a data source.

    Args:
        truth: of a problem.
        form: what surrounds an answer in a response.
        right_answer: to that problem.
        best, worst: the largest and the smallest score.
    """

    truth: Any
    form: str
    right_answer: str
    best: float = 1.0
    worst: float = 0.0


# By data source.
TASKS = {
    "countdown": Task(COUNTDOWN, "<answer>{}</answer>", "(3+5)*2"),
    "countdown_boxed": Task(COUNTDOWN, r"\boxed{{{}}}", "(3+5)*2"),
    "hitab": Task(HITAB, r"\boxed{{{}}}", "Ostholm"),
    "knights_and_knaves": Task(PEOPLE, "</think><answer>{}</answer>", PEOPLE, best=3.0, worst=-3.0),
    "math500": Task("7", r"\boxed{{{}}}", "7"),
    "reversal": Task("cba", "<answer>{}</answer>", "cba"),
    "sums": Task("42", "{}", "42"),
}

LISTS = yaml.safe_load(Path(__file__).with_name("hostile.yaml").read_text(encoding="utf-8"))
HOSTILE = LISTS["texts"] | {
    name: "".join(piece * times for piece, times in pieces) for name, pieces in LISTS["repeated"].items()
}
HOSTILE |= {"NUL": "3+\x005", "surrogate": "3+\ud8005"}


EARNED = yaml.safe_load(Path(__file__).with_name("earned.yaml").read_text())


@pytest.mark.parametrize(
    ("task", "response", "values"), [(task, row[0], row[1:]) for task in EARNED for row in EARNED[task]["responses"]]
)
def test_what_a_response_earns(task, response, values):
    entry = EARNED[task]
    reward = import_object(entry["reward"], "reward", object)
    parts = reward(task, response, entry["truth"], extra_info={}, more=1)
    assert parts == pytest.approx(dict(zip(entry["parts"], values, strict=True)))


@pytest.mark.parametrize("source", TASKS)
def test_a_right_answer_earns_the_most_and_none_the_least(source):
    task = TASKS[source]
    right_response = task.form.format(task.right_answer)
    expected = {"score": task.best, "acc": 1.0, "format": 1.0}
    assert compute_score(source, right_response, task.truth, {"index": 1}, more=1) == expected
    assert compute_score_for_evaluation(source, right_response, task.truth) == expected
    for no_answer in ("no answer", None, 16, b"7", ["7"], float("nan"), object()):
        assert compute_score(source, no_answer, task.truth) == {"score": task.worst, "acc": 0.0, "format": 0.0}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_wrong_quickly_and_silently(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for source, task in TASKS.items():
        started = time.process_time()
        with warnings.catch_warnings():
            # Python warns about "3(5)" when it compiles it.
            warnings.simplefilter("error")
            assert compute_score(source, task.form.format(HOSTILE[name]), task.truth)["acc"] == 0.0, source
            assert compute_score(source, HOSTILE[name], task.truth)["acc"] == 0.0, source
        # Ample for one pass over that much text on a busy machine; comparing each piece with each other takes hours.
        assert time.process_time() - started < 10, source
    assert list(tmp_path.iterdir()) == []


def test_megabytes_are_not_kept():
    texts = [HOSTILE[name] for name in ("nothing", "whole answers", "names")]
    tracemalloc.start()
    for source, task in TASKS.items():
        for text in texts:
            compute_score(source, task.form.format(text), task.truth)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 300_000
    assert peak < 5 * max(map(len, texts))


TRUTHS_THAT_NO_ANSWER_MEETS = [
    None,
    16.5,
    [],
    {},
    b"5",
    object(),
    "",
    "x" * 9999,
    "[1, 2]",
    '{"numbers": [3',
    {"target": 16},
    {"numbers": None, "target": 16},
    {"numbers": 3, "target": 16},
    {"numbers": "352", "target": 16},
    {"numbers": ["3", "5", "2"], "target": 16},
    {"numbers": [[3], [5]], "target": 16},
    {"numbers": np.array(3), "target": 16},
    {"numbers": range(10**12), "target": 16},
    {"numbers": [3, 5, 2], "target": None},
    {"numbers": [3, 5, 2], "target": "16"},
    {"numbers": [3, 5, 2], "target": Decimal("1e999999999")},
    {"numbers": [3, 5, 2], "target": float("nan")},
    {"numbers": [3, 5, 2], "target": [16]},
    {"solution_text_format": None},
    {"answers": 3},
    {"answers": None},
    {"answers": "x"},
    {"answers": [1]},
    {"answers": []},
]


def shorten_repr(truth):
    return repr(truth).split(" at ")[0][:40]


@pytest.mark.parametrize("truth", TRUTHS_THAT_NO_ANSWER_MEETS, ids=shorten_repr)
def test_a_truth_that_no_answer_meets_scores_zero_and_raises_nothing(truth):
    for source, task in TASKS.items():
        assert compute_score(source, task.form.format(task.right_answer), truth)["acc"] == 0.0, source


@pytest.mark.parametrize("name", [*definitions(), "countdown_boxed"])
def test_every_data_set_has_a_reward_with_all_parts_that_refuses_such_a_truth(name):
    assert compute_score(name, "", None).keys() == set(PARTS)
    for truth in (None, {}, [], b"5", object()):
        with pytest.raises(ValueError, match=r"ground_truth=.* needs? "):
            check_ground_truth(name, truth)


@pytest.mark.parametrize(
    ("source", "truth"),
    [
        *((source, task.truth) for source, task in TASKS.items()),
        ("countdown", '{"numbers": [3, 5], "target": 8}'),
        ("knights_and_knaves", {"solution_text_format": PEOPLE}),
        ("math", 7),
        ("minerva", '["7", "seven"]'),
    ],
    ids=str,
)
def test_a_truth_that_answers_can_meet_passes(source, truth):
    check_ground_truth(source, truth)


def test_any_pieces_are_scored():
    generator = random.Random(0)
    pieces = ["<answer>", "</answer>", "\\boxed{", "}", "7", "(", "\0", "é", "\ud800", "knight", "eval", "</think>"]
    pieces += [r"\frac", r"\sqrt", *"{^_!%xi,", "3.5", r"\pi", r"\text{cm}", r"\begin{pmatrix}"]
    for _ in range(500):
        text = "".join(generator.choices(pieces, k=generator.randrange(12)))
        for source, task in TASKS.items():
            for response in (text, task.form.format(text)):
                parts = compute_score(source, response, task.truth)
                assert parts.keys() == set(PARTS)
                assert parts["acc"] <= parts["format"]
                assert task.worst <= parts["score"] <= task.best
                evaluated = compute_score_for_evaluation(source, response, task.truth)
                assert evaluated["acc"] <= parts["acc"]
                assert evaluated["format"] == parts["format"]


def test_the_source_decides_the_reward_for_evaluation_too():
    rounded = ("math500", r"\boxed{0.333333}", "1/3")
    assert compute_score(*rounded)["acc"] == 1.0
    assert compute_score_for_evaluation(*rounded)["acc"] == 0.0


def test_an_unknown_source_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"^data_source='gsm8k' has no reward; known are aime24, .*countdown_boxed"):
        compute_score("gsm8k", "42", "42")
