"""A run's health: the numbers by hand, through what verl's trainers call, and what happens beyond a limit.

Covers: verl's compute_data_metrics in both of its layouts, its v1 trainers' own metrics, its Tracking; clipx.health and
its limits from the command line; the page's first sentence. The worker's part is in test_training_worker.py; not
covered: a run (tests/end_to_end).
"""

import json
from types import SimpleNamespace

import numpy
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl import DataProto
from verl.trainer.ppo import metric_utils
from verl.trainer.ppo.v1 import trainer_base
from verl.utils.tracking import Tracking

from tests.claims.configuration import merged
from tests.runs.example_runs import write_log
from verl_clipx.diagnose.findings import findings
from verl_clipx.run.resolve import instantiated
from verl_clipx.runs.run import read_run, settings_of
from verl_clipx.trainer import hooks

NAN = float("nan")


def batch(scores, *, advantages=None, log_probs=None, lengths=(2, 2, 2, 2), prompts=(1, 1, 2, 2), **non_tensors):
    """Four responses of two tokens to two prompts, as verl's trainers give them to their metrics."""
    mask = (torch.arange(2) < torch.tensor(lengths)[:, None]).long()
    of_tokens = torch.zeros(4, 2)
    of_tokens[:, 0] = torch.tensor(scores)
    tensors = {
        "prompts": torch.tensor(prompts)[:, None],
        "responses": torch.ones(4, 2).long(),
        "response_mask": mask,
        "attention_mask": torch.cat([torch.ones(4, 1).long(), mask], 1),
        "token_level_scores": of_tokens,
        "token_level_rewards": of_tokens,
        "advantages": torch.zeros(4, 2) if advantages is None else torch.tensor(advantages),
        "returns": torch.zeros(4, 2),
    }
    if log_probs is not None:
        tensors["old_log_probs"] = torch.tensor(log_probs)
    return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors)


def logged(*arguments, **named):
    """What verl's function makes of a batch, as far as it is health."""
    found = metric_utils.compute_data_metrics(batch(*arguments, **named), use_critic=False)
    return {key.removeprefix("health/"): value for key, value in found.items() if key.startswith("health/")}


@pytest.fixture(autouse=True)
def run_of():
    """Begins a run in this process's trainer, with a clipx node or without; at first one that cuts at two tokens."""

    def begin(longest, node):
        config = {"trainer": {}, "data": {"max_response_length": longest}, "clipx": node}
        return Tracking("project", "run", ["console"], config=config)

    begin(2, {"log": False})
    yield begin
    begin(2, None)


def test_of_a_healthy_step_all_is_zero():
    numbers = logged([0.0, 1.0, 1.0, 0.0], lengths=(1, 1, 1, 1))
    assert numbers == {"not_finite/rewards": 0, "not_finite/advantages": 0, "alike_prompts": 0, "cut_responses": 0}


def test_prompts_whose_samples_score_alike():
    assert logged([1.0, 1.0, 0.0, 1.0])["alike_prompts"] == 0.5
    assert logged([1.0, 1.0, 0.0, 0.0])["alike_prompts"] == 1
    # By uid where the trainer names it; a prompt with one sample says nothing.
    named = {"uid": numpy.array(["a", "b", "c", "c"], dtype=object)}
    assert logged([1.0, 1.0, 0.0, 1.0], **named)["alike_prompts"] == 0
    assert "alike_prompts" not in logged([1.0] * 4, uid=numpy.array(["a", "b", "c", "d"], dtype=object))
    # NaN is like nothing, itself included; an aborted response has no score.
    assert logged([NAN, NAN, 1.0, 1.0])["alike_prompts"] == 0.5
    assert logged([1.0, 0.0, 0.0, 1.0], lengths=(2, 0, 2, 2))["alike_prompts"] == 0


def test_what_is_not_finite_is_counted_by_responses():
    numbers = logged(
        [NAN, float("inf"), 0.0, 0.0],
        # Of the last response the second token is beyond its end.
        advantages=[[0.0, 0.0], [NAN, NAN], [0.0, 0.0], [0.0, NAN]],
        log_probs=[[0.0, 0.0], [0.0, 0.0], [-float("inf"), 0.0], [0.0, NAN]],
        lengths=(2, 2, 2, 1),
    )
    assert (numbers["not_finite/rewards"], numbers["not_finite/advantages"]) == (2, 1)
    assert numbers["not_finite/log_probs"] == 1


def test_a_run_without_a_node_logs_verls_metrics_alone(run_of):
    run_of(2, None)
    assert logged([NAN, 1.0, 1.0, 0.0]) == {}
    metrics = metric_utils.compute_data_metrics(batch([0.0, 1.0, 1.0, 0.0]), use_critic=False)
    assert metrics == metric_utils.compute_data_metrics.__wrapped__(batch([0.0, 1.0, 1.0, 0.0]), use_critic=False)


def test_responses_are_cut_at_the_runs_length_and_not_at_the_batchs(run_of):
    assert logged([0.0] * 4, lengths=(2, 1, 1, 1))["cut_responses"] == 0.25
    run_of(3, {"log": False})
    assert logged([0.0] * 4, lengths=(2, 1, 1, 1))["cut_responses"] == 0
    run_of(None, {"log": False})
    assert "cut_responses" not in logged([0.0] * 4)


def test_answers_without_a_verdict_in_the_older_trainer():
    assert logged([0.0] * 4, undecided=numpy.array([1.0, 0.0, 0.0, 0.0], dtype=object))["undecided"] == 0.25
    assert "undecided" not in logged([0.0] * 4)


@pytest.mark.parametrize(
    ("node", "verdicts", "share", "asks"),
    [({"log": False}, [1.0, 0.0], 0.5, 2), ({"log": False}, [None, None], None, 1), (None, [1.0, 0.0], None, 0)],
)
def test_answers_without_a_verdict_in_the_v1_trainers(monkeypatch, run_of, node, verdicts, share, asks):
    run_of(2, node)
    extras = [{"reward_extra_info": {} if value is None else {"undecided": value}} for value in verdicts]
    fetched = []

    def kv_batch_get(**named):
        assert named["keys"] == ["a", "b"] and named["select_fields"] == ["extra_fields"]
        fetched.append(named)
        # As TransferQueue does.
        return TensorDict({"extra_fields": NonTensorStack(*map(NonTensorData, extras))}, batch_size=[len(extras)])

    monkeypatch.setattr(trainer_base, "tq", SimpleNamespace(kv_batch_get=kv_batch_get))
    trainer, step = SimpleNamespace(), SimpleNamespace(keys=["a", "b", "b"], partition_id="train")
    step.tags = [{}, {"is_padding": False}, {"is_padding": True}]

    def compute(batch, metrics, timing_raw, global_steps, epoch):
        metrics["of verl"] = 1

    for _ in range(2):
        metrics = {}
        hooks._add_verdicts(trainer_base, compute, trainer, (step, metrics, {}), {"global_steps": 1, "epoch": 0})
        assert metrics.pop("of verl") == 1
        assert metrics == ({} if share is None else {"health/undecided": share})
    # A reward without verdicts is asked once.
    assert len(fetched) == asks


def test_verls_v1_trainer_calls_it():
    assert trainer_base.PPOTrainer._compute_metrics.__wrapped__.__name__ == "_compute_metrics"


@pytest.fixture
def tracking(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))

    def start(**node):
        config = {"trainer": {"logger": ["file"]}, "clipx": {"method": "acpo", **node}}
        return Tracking("project", "run", ["file"], config=config)

    return start


STEPS = {"health/cut_responses": 0.6, "actor/clipx/skipped_updates": 1.0, "health/not_finite/rewards": NAN}


def test_beyond_a_limit_a_run_warns_once_for_each(tracking, caplog):
    run = tracking()
    run.log({"health/cut_responses": 0.5, "actor/clipx/skipped_updates": 0}, 1)
    assert caplog.text == ""
    for step in (2, 3):
        run.log(dict(STEPS), step)
    assert caplog.text.count("clipx.health: in step 2 ") == 3 and "in step 3" not in caplog.text
    assert "health/cut_responses is 0.6 (share of the responses with" in caplog.text
    assert "clipx.health_limits.cut_responses=0.5" in caplog.text


def test_with_stop_it_ends_the_run_and_the_step_is_in_the_log(tracking, tmp_path):
    run = tracking(health="stop", health_limits={"skipped_updates": 1, "not_finite": 0, "cut_responses": 1})
    run.log({"actor/clipx/skipped_updates": 1.0, "health/cut_responses": 1.0}, 1)
    with pytest.raises(
        RuntimeError, match=r"clipx\.health=stop: in step 2 health/not_finite/rewards is 3 .*_finite=0\."
    ):
        run.log({"health/not_finite/rewards": 3}, 2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]


@pytest.mark.parametrize("group", ["+clipx=acpo", "+clipx=observe"])
def test_the_limits_are_keys_of_every_run(group):
    def node(**keys):
        return merged([group], {f"clipx.{key}": value for key, value in keys.items()}).clipx

    built = instantiated(node(**{"health": "stop", "health_limits.cut_responses": 0.25}))
    assert (built.health, built.health_limits.cut_responses, built.health_limits.undecided) == ("stop", 0.25, 0.1)
    for keys, message in (
        ({"health": "off"}, r"clipx\.health=off"),
        ({"health_limits.undecided": 2}, r"clipx\.health_limits\.undecided=2"),
        ({"health_limits.skipped_updates": -1}, r"clipx\.health_limits\.skipped_updates=-1"),
    ):
        with pytest.raises(ValueError, match=message):
            instantiated(node(**keys))


def test_the_page_begins_with_it(tmp_path):
    steps = [{"actor/pg_loss": 0.1, "health/alike_prompts": 0.25, "health/undecided": 0.0} for _ in range(3)]
    steps[1] |= {"health/not_finite/rewards": 2.0, "actor/clipx/not_finite/rank": 1.0, "health/alike_prompts": 0.75}
    write_log(tmp_path / "run" / "metrics.jsonl", steps)
    first = findings(settings_of([read_run(tmp_path / "run")]))[0]
    assert first.head == "run had values that are not finite."
    assert "rewards not finite in 2 responses of 1 step, first in step 2; first on rank 1, in step 2" in first.text
    assert "prompts whose samples all scored alike: 41.7\u202f%, at most 75.0\u202f% in step 2" in first.text
    assert "answers on which the verifier had no verdict: none" in first.text
