"""A user's reward that raises, returns no score or hangs, as verl loads and calls it.

Covers: verl's get_custom_reward_fn with a file of the user's, plain and asynchronous; that scores of every kind which
verl takes pass unchanged, NaN among them (test_health.py). Not covered: what verl's trainers do next
(docs/reliability.md).
"""

import asyncio
import logging
import pickle
import time

import numpy
import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.reward import get_custom_reward_fn

from verl_clipx.diagnostics import reward_guard

ROW = {
    "data_source": numpy.str_("mine"),
    "solution_str": "the response",
    "ground_truth": "5",
    "extra_info": {"index": 17},
}


@pytest.fixture(params=["def", "async def"])
def reward(request, tmp_path):
    """Writes a reward's body into a file and scores a row with it, as verl does."""

    def score(body, **row):
        path = tmp_path / "mine.py"
        path.write_text(
            f"import time\n{request.param} score(data_source, solution_str, ground_truth, extra_info):\n    {body}\n"
        )
        config = {"reward": {"custom_reward_function": {"path": str(path), "name": "score"}}}
        found = get_custom_reward_fn(OmegaConf.create(config))(**{**ROW, **row})
        return asyncio.run(found) if asyncio.iscoroutine(found) else found

    return score


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return 1 / 0", r"it raised ZeroDivisionError: division by zero"),
        ("return 'right'", r"it returned 'right' \(str\) as the score, which must be a number"),
        ("return None", r"it returned None \(NoneType\) as the score"),
        ("return {'score': '1'}", r"it returned '1' \(str\) as the score"),
        ("return {'acc': 1.0}", r"it returned a dict without score \(acc\)"),
        ("return [1.0]", r"it returned \[1\.0\] \(list\)"),
    ],
)
def test_what_is_no_score_is_named_with_its_row(reward, body, problem):
    named = r"mine\.py:score .*\(data_source='mine', .*extra_info\.index=17\): "
    with pytest.raises(RuntimeError, match=named + problem):
        reward(body)


@pytest.mark.parametrize("score", [1, 0.5, True, {"score": 0.5, "acc": 1.0}, float("nan")])
def test_a_score_passes_as_it_is(reward, score):
    text = repr(score).replace("nan", "float('nan')")
    assert repr(reward(f"return {text}")) == repr(score)


def test_scalars_of_arrays_and_tensors_pass():
    for score in (numpy.float32(0.5), numpy.array(0.5), torch.tensor(0.5)):
        assert reward_guard.guarded(lambda of=score, **_: of, "mine")(**ROW) is score


def test_one_that_hangs_is_named_while_it_does(reward, monkeypatch, caplog):
    monkeypatch.setattr(reward_guard, "WATCHER", reward_guard.Watcher(0.04))
    caplog.set_level(logging.WARNING)
    assert reward("time.sleep(0.3); return 1.0") == 1.0
    assert caplog.text.count("has not returned for 0.04 s (data_source='mine'") == 1 and "'the response'" in caplog.text
    caplog.clear()
    reward("return 1.0")
    time.sleep(0.2)
    assert caplog.text == ""


def test_it_can_be_sent_to_another_process():
    """As verl's reward manager for PRIME does."""
    again = pickle.loads(pickle.dumps(reward_guard.guarded(nothing, "mine")))
    assert again(**ROW) == 0.0


def nothing(**_):
    """A reward."""
    return 0.0


def test_without_a_reward_of_the_users_there_is_none():
    assert get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": None}})) is None
