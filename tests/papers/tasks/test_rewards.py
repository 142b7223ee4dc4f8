"""What the rewards of all tasks have in common: hostile text, truths that no answer meets, threads, verl's own loader.

Not covered: the rules; each task's tests hold them.
"""

import random
import time
import tracemalloc
import warnings
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import yaml

from verl_clipx.papers.evaluation.scores import import_object
from verl_clipx.papers.tasks.catalog import definitions
from verl_clipx.papers.tasks.reward import PARTS, check_ground_truth, compute_score, compute_score_for_evaluation

COUNTDOWN = {"numbers": [3, 5, 2], "target": 16}
HITAB = {"answers": ["ostholm"], "ratio": False, "rounding": False}
PEOPLE = "(1) Zoey is a knight\n(2) Liam is a knave"

# data source: ground truth, what surrounds an answer, a right answer
TASKS = {
    "countdown": (COUNTDOWN, "<answer>{}</answer>", "(3+5)*2"),
    "countdown_boxed": (COUNTDOWN, r"\boxed{{{}}}", "(3+5)*2"),
    "hitab": (HITAB, r"\boxed{{{}}}", "Ostholm"),
    "knights_and_knaves": (PEOPLE, "</think><answer>{}</answer>", PEOPLE),
    "math500": ("7", r"\boxed{{{}}}", "7"),
    "reversal": ("cba", "<answer>{}</answer>", "cba"),
    "sums": ("42", "{}", "42"),
}
BEST = {"knights_and_knaves": 3.0}
WORST = {"knights_and_knaves": -3.0}

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
    of_task = EARNED[task]
    reward = import_object(of_task["reward"], "reward", object)
    parts = reward(task, response, of_task["truth"], extra_info={}, more=1)
    assert parts == pytest.approx(dict(zip(of_task["parts"], values, strict=True)))


@pytest.mark.parametrize("source", TASKS)
def test_a_right_answer_earns_the_most_and_none_the_least(source):
    truth, around, right = TASKS[source]
    best = {"score": BEST.get(source, 1.0), "acc": 1.0, "format": 1.0}
    assert compute_score(source, around.format(right), truth, {"index": 1}, more=1) == best
    assert compute_score_for_evaluation(source, around.format(right), truth) == best
    for other in ("no answer", None, 16, b"7", ["7"], float("nan"), object()):
        assert compute_score(source, other, truth) == {"score": WORST.get(source, 0.0), "acc": 0.0, "format": 0.0}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_wrong_quickly_and_silently(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for source, (truth, around, _) in TASKS.items():
        started = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Python warns about "3(5)" when it compiles it
            for text in (around.format(HOSTILE[name]), HOSTILE[name]):
                assert compute_score(source, text, truth)["acc"] == 0.0, source
        # Ample for one pass over that much text on a busy machine; comparing each piece with each other takes hours.
        assert time.process_time() - started < 10, source
    assert list(tmp_path.iterdir()) == []


def test_megabytes_are_not_kept():
    texts = [HOSTILE[name] for name in ("nothing", "whole answers", "names")]
    tracemalloc.start()
    for source, (truth, around, _) in TASKS.items():
        for text in texts:
            compute_score(source, around.format(text), truth)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 300_000 and peak < 5 * max(map(len, texts))


UNMET = [None, 16.5, [], {}, b"5", object(), "", "x" * 9999, "[1, 2]", '{"numbers": [3', {"target": 16}, {"answers": 3}]
UNMET += [{"numbers": numbers, "target": 16} for numbers in (None, 3, "352", ["3", "5", "2"], [[3], [5]], np.array(3))]
UNMET += [{"numbers": range(10**12), "target": 16}, {"solution_text_format": None}]
UNMET += [
    {"numbers": [3, 5, 2], "target": target} for target in (None, "16", Decimal("1e999999999"), float("nan"), [16])
]
UNMET += [{"answers": answers} for answers in (None, "x", [1], [])]


@pytest.mark.parametrize("truth", UNMET, ids=lambda truth: repr(truth).split(" at ")[0][:40])
def test_a_truth_that_no_answer_meets_scores_zero_and_raises_nothing(truth):
    for source, (_, around, right) in TASKS.items():
        assert compute_score(source, around.format(right), truth)["acc"] == 0.0, source


@pytest.mark.parametrize("name", [*definitions(), "countdown_boxed"])
def test_every_data_set_has_a_reward_with_all_parts_that_refuses_such_a_truth(name):
    assert compute_score(name, "", None).keys() == set(PARTS)
    for truth in (None, {}, [], b"5", object()):
        with pytest.raises(ValueError, match=r"ground_truth=.* needs? "):
            check_ground_truth(name, truth)


def test_truths_that_answers_can_meet_pass():
    met = {source: [truth] for source, (truth, _, _) in TASKS.items()} | {"minerva": ['["7", "seven"]'], "math": [7]}
    met["countdown"].append('{"numbers": [3, 5], "target": 8}')
    met["knights_and_knaves"].append({"solution_text_format": PEOPLE})
    for source, truths in met.items():
        for truth in truths:
            check_ground_truth(source, truth)


def test_any_pieces_are_scored():
    generator = random.Random(0)
    pieces = ["<answer>", "</answer>", "\\boxed{", "}", "7", "(", "\0", "é", "\ud800", "knight", "eval", "</think>"]
    pieces += [r"\frac", r"\sqrt", *"{^_!%xi,", "3.5", r"\pi", r"\text{cm}", r"\begin{pmatrix}"]
    for _ in range(500):
        text = "".join(generator.choices(pieces, k=generator.randrange(12)))
        for source, (truth, around, _) in TASKS.items():
            for response in (text, around.format(text)):
                parts = compute_score(source, response, truth)
                assert parts.keys() == set(PARTS) and parts["acc"] <= parts["format"]
                careful = compute_score_for_evaluation(source, response, truth)
                assert careful["acc"] <= parts["acc"] and careful["format"] == parts["format"]
                assert WORST.get(source, 0.0) <= parts["score"] <= BEST.get(source, 1.0)


def test_the_source_decides_the_reward_for_evaluation_too_and_an_unknown_one_is_named():
    lenient = ("math500", r"\boxed{0.333333}", "1/3")
    assert (compute_score(*lenient)["acc"], compute_score_for_evaluation(*lenient)["acc"]) == (1.0, 0.0)
    with pytest.raises(ValueError, match=r"^data_source='gsm8k' has no reward; known are aime24, .*countdown_boxed"):
        compute_score("gsm8k", "42", "42")
