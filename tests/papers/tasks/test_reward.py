"""The reward of all tasks: dispatch by data source, the same parts always, unknown sources, verl's own loader.

Not covered: the rules; each task's tests hold them.
"""

import random

import pytest
from omegaconf import OmegaConf

from verl_clipx.papers.tasks import reward
from verl_clipx.papers.tasks.catalog import definitions
from verl_clipx.papers.tasks.reward import (
    PARTS,
    check_ground_truth,
    compute_score,
    compute_score_for_evaluation,
    reward_of,
)

COUNTDOWN = {"numbers": [3, 5, 2], "target": 16}
HITAB = {"answers": ["ostholm"], "ratio": False, "rounding": False}


@pytest.mark.parametrize(
    ("data_source", "text", "truth"),
    [
        ("countdown", "<answer>(3+5)*2</answer>", COUNTDOWN),
        ("countdown_3to4", "<answer>(3+5)*2</answer>", COUNTDOWN),
        ("countdown_boxed", r"\boxed{(3+5)*2}", COUNTDOWN),
        ("hitab", r"\boxed{Ostholm}", HITAB),
        ("math500", r"\boxed{7}", "7"),
        ("math", r"\boxed{7}", "7"),
    ],
)
def test_right_answers_score_one(data_source, text, truth):
    assert compute_score(data_source, text, truth) == {"score": 1.0, "acc": 1.0, "format": 1.0}
    assert compute_score(data_source, "no answer", truth, {"index": 1}, more=1) == dict.fromkeys(PARTS, 0.0)


@pytest.mark.parametrize("name", [*definitions(), "countdown_boxed"])
@pytest.mark.parametrize("truth", [None, {}, [], b"5", object()])
def test_a_ground_truth_that_no_answer_can_meet_is_refused(name, truth):
    with pytest.raises(ValueError, match=r"ground_truth=.* needs? "):
        check_ground_truth(name, truth)


@pytest.mark.parametrize(
    ("data_source", "truth"),
    [
        ("countdown", COUNTDOWN),
        ("countdown_boxed", '{"numbers": [3, 5], "target": 8}'),
        ("hitab", HITAB),
        ("math500", "7"),
        ("math", 7),
        ("minerva", '["7", "seven"]'),
        ("knights_and_knaves", {"solution_text_format": "(1) Ann is a knight"}),
    ],
)
def test_ground_truths_that_answers_can_meet_pass(data_source, truth):
    check_ground_truth(data_source, truth)


def test_evaluation_is_conservative_where_training_is_lenient():
    lenient = ("math500", r"\boxed{0.333333}", "1/3")
    assert compute_score(*lenient) == {"score": 1.0, "acc": 1.0, "format": 1.0}
    assert compute_score_for_evaluation(*lenient) == {"score": 0.0, "acc": 0.0, "format": 1.0}
    assert compute_score_for_evaluation("math500", r"\boxed{2/6}", "1/3") == {"score": 1.0, "acc": 1.0, "format": 1.0}


@pytest.mark.parametrize("text", ["<answer>(3+5)*2</answer>", "<answer>3+5*2</answer>", ""])
def test_other_tasks_have_one_rule(text):
    assert compute_score_for_evaluation("countdown", text, COUNTDOWN) == compute_score("countdown", text, COUNTDOWN)


def test_knights_and_knaves_keeps_its_own_scale():
    truth = "(1) Ann is a knight\n(2) Bob is a knave"
    right = f"x </think> <answer> {truth} </answer>"
    assert compute_score("knights_and_knaves", right, truth) == {"score": 3.0, "acc": 1.0, "format": 1.0}
    wrong = right.replace("knave", "knight")
    assert compute_score("knights_and_knaves", wrong, truth) == {"score": -0.5, "acc": 0.0, "format": 1.0}
    assert compute_score("knights_and_knaves", "", truth) == {"score": -3.0, "acc": 0.0, "format": 0.0}


@pytest.mark.parametrize("data_source", [*definitions(), "countdown_boxed"])
def test_every_data_set_has_a_reward_with_all_parts(data_source):
    assert compute_score(data_source, "", None).keys() == set(PARTS)


@pytest.mark.slow
def test_rows_name_sources_with_a_reward():
    # The generated sets need no source: their rows are made here.
    for definition in definitions().values():
        if definition.hub is None and definition.name.startswith(("countdown", "knights")):
            for prompt in definition.prompts:
                row = next(iter(definition.rows(None, split=definition.splits[-1], prompt=prompt)))
                assert callable(reward_of(row["data_source"]))


def test_unknown_source_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"^data_source='gsm8k' has no reward; known are aime24, .*countdown_boxed"):
        compute_score("gsm8k", "42", "42")


def test_any_text_scores():
    generator = random.Random(0)
    alphabet = ["<answer>", "</answer>", "\\boxed{", "}", "7", "(", "\0", "é", "\ud800", "knight", "__import__"]
    for _ in range(500):
        text = "".join(generator.choices(alphabet, k=generator.randrange(12)))
        for source, truth in (("countdown", COUNTDOWN), ("hitab", HITAB), ("knights_and_knaves", "(1) A is a knight")):
            assert compute_score(source, text, truth).keys() == set(PARTS)


def test_verl_loads_it_by_module_name():
    from verl.trainer.ppo.reward import get_custom_reward_fn

    settings = {"path": f"pkg://{reward.__name__}", "name": "compute_score", "reward_kwargs": {}}
    loaded = get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": settings}}))
    assert loaded("hitab", r"\boxed{ostholm}", HITAB)["score"] == 1.0
