"""A run's health: the numbers by hand, through what verl's trainers call, and what the rules say while it trains. Not
covered: the worker's part (tests/training/worker/test_training_worker.py), a run (tests/end_to_end).
"""

import importlib
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

from tests.composition import composition
from verl_clipx.analysis.runs import keys
from verl_clipx.common.pages import folder_of_pages
from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.run.resolve import build_target
from verl_clipx.training.trainer import hooks
from verl_clipx.training.trainer.health import standard_error

NAN = float("nan")
INF = float("inf")
# Every module of verl's that imports compute_data_metrics by name.
TRAINERS = (
    "verl.trainer.ppo.ray_trainer",
    "verl.trainer.ppo.v1.trainer_base",
    "verl.experimental.separation.ray_trainer",
)


def make_batch(scores, *, advantages=None, log_probs=None, lengths=(2, 2, 2, 2), prompts=(1, 1, 2, 2), **non_tensors):
    """Four responses of two tokens to two prompts, as verl's trainers give them to their metrics."""
    mask = (torch.arange(2) < torch.tensor(lengths)[:, None]).long()
    token_scores = torch.zeros(4, 2)
    token_scores[:, 0] = torch.tensor(scores)
    tensors = {
        "prompts": torch.tensor(prompts)[:, None],
        "responses": torch.ones(4, 2).long(),
        "response_mask": mask,
        "attention_mask": torch.cat([torch.ones(4, 1).long(), mask], 1),
        "token_level_scores": token_scores,
        "token_level_rewards": token_scores,
        "advantages": torch.zeros(4, 2) if advantages is None else torch.tensor(advantages),
        "returns": torch.zeros(4, 2),
    }
    if log_probs is not None:
        tensors["old_log_probs"] = torch.tensor(log_probs)
    return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors)


def compute_health(scores, **fields):
    """What verl's function makes of a batch, as far as it is health."""
    metrics = metric_utils.compute_data_metrics(make_batch(scores, **fields), use_critic=False)
    return {key.removeprefix("health/"): value for key, value in metrics.items() if key.startswith("health/")}


@pytest.fixture(autouse=True)
def begin_run():
    """Begins a run in this process's trainer, with a clipx node or without; at first one that cuts at two tokens."""

    def begin(longest, node):
        config = {"trainer": {}, "data": {"max_response_length": longest}, "clipx": node}
        Tracking("project", "run", ["console"], config=config)

    begin(2, {"log": False})
    yield begin
    begin(2, None)


def uids(text):
    """A field with a character of the text as the uid of each response's prompt."""
    return {"uid": numpy.array([*text], dtype=object)}


@pytest.mark.parametrize(
    ("scores", "fields", "expected"),
    [
        ([0.0, 1.0, 1.0, 0.0], dict(lengths=(1, 1, 1, 1)), {"alike_prompts": 0, "cut_responses": 0, "undecided": None}),
        ([0.0, 1.0, 1.0, 0.0], {}, {"not_finite/rewards": 0, "not_finite/advantages": 0, "not_finite/log_probs": None}),
        ([1.0, 1.0, 0.0, 1.0], {}, {"alike_prompts": 0.5}),
        ([1.0, 1.0, 0.0, 0.0], {}, {"alike_prompts": 1}),
        # By uid where the trainer names it; a prompt with one sample says nothing.
        ([1.0, 1.0, 0.0, 1.0], uids("abcc"), {"alike_prompts": 0}),
        ([1.0, 1.0, 1.0, 1.0], uids("abcd"), {"alike_prompts": None}),
        # NaN is like nothing, itself included; an aborted response has no score.
        ([NAN, NAN, 1.0, 1.0], {}, {"alike_prompts": 0.5, "not_finite/rewards": 2}),
        ([1.0, 0.0, 0.0, 1.0], dict(lengths=(2, 0, 2, 2)), {"alike_prompts": 0}),
        # Of the last response the second token is beyond its end.
        (
            [0.0, 0.0, 0.0, 0.0],
            dict(advantages=[[0.0, 0.0], [0.0, 0.0], [NAN, NAN], [0.0, NAN]], lengths=(2, 2, 2, 1)),
            {"not_finite/advantages": 1},
        ),
        (
            [0.0, 0.0, 0.0, 0.0],
            dict(log_probs=[[0.0, 0.0], [0.0, 0.0], [-INF, 0.0], [0.0, NAN]], lengths=(2, 2, 2, 1)),
            {"not_finite/log_probs": 1},
        ),
        (
            [0.0, 0.0, 0.0, 0.0],
            dict(undecided=numpy.array([1.0, 0.0, 0.0, 0.0], dtype=object)),
            {"undecided": 0.25},
        ),
    ],
)
def test_a_steps_numbers_by_hand(scores, fields, expected):
    metrics = compute_health(scores, **fields)
    for key, value in expected.items():
        assert metrics.get(key) == value, key


@pytest.mark.parametrize(
    ("scores", "prompts", "expected"),
    [
        # Equal groups: the prompts' means are 0.5, 1.0, 0.0, with standard deviation 0.5.
        ([0.0, 1.0, 0.0, 1.0, 1.0, 0.0], [2, 1, 0, 0, 1, 2], 0.5 / 3**0.5),
        # Mean 1/3; totals of what is left: (1 - 1/3), (0 - 2/3): 4/9 + 4/9, times 2, the root over 3 responses.
        ([1.0, 0.0, 0.0], [5, 7, 7], (16 / 9) ** 0.5 / 3),
        # One prompt, or none.
        ([0.0, 1.0], [3, 3], None),
        ([], [], None),
    ],
)
def test_the_standard_error_is_over_the_prompts_totals(scores, prompts, expected):
    error = standard_error(torch.tensor(scores), torch.tensor(prompts, dtype=torch.int64))
    assert error == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("fields", [{}, uids("aabb")], ids=["v1", "uid"])
def test_every_trainer_logs_the_standard_error_beside_the_mean(trainer, fields):
    compute = importlib.import_module(trainer).compute_data_metrics
    batch = make_batch([1.0, 0.0, 0.0, 9.0], lengths=(2, 2, 1, 0), **fields)
    metrics = compute(batch=batch, use_critic=False)
    assert metrics["critic/score/mean"] == pytest.approx(1 / 3)
    # Totals of what is left of the mean: 1/3 and -1/3.
    assert metrics[keys.REWARD_ERROR] == pytest.approx((4 / 9) ** 0.5 / 3)


@pytest.mark.parametrize(
    ("rollout", "cut"),
    [
        # Prompts of 2, 3 and 4 tokens with responses of 6, 5 and 4 as in verl's issue 7823, and one of 2 and 4. The
        # first has data.max_response_length.
        (dict(max_model_len=8), 0.75),
        (dict(max_model_len=9), 0.25),
        (dict(max_model_len=9, name="sglang"), 0.75),
        (dict(max_model_len=None), 0.25),
        (dict(max_model_len=8, response_length=4), 1),
        (dict(response_length=5), 0.5),
    ],
)
@pytest.mark.parametrize("with_lengths", [False, True])
def test_responses_that_fill_the_servers_context_are_cut(rollout, cut, with_lengths):
    config = {"trainer": {}, "data": {"max_response_length": 6}, "clipx": {"log": False}}
    Tracking("project", "run", ["console"], config=config | {"actor_rollout_ref": {"rollout": rollout}})
    prompt_lengths = torch.tensor([2, 3, 4, 2])
    response_lengths = torch.tensor([6, 5, 4, 4])
    # Prompts are padded on the left.
    prompt_mask = torch.arange(4) >= 4 - prompt_lengths[:, None]
    mask = torch.arange(6) < response_lengths[:, None]
    tensors = {
        "prompts": torch.zeros(4, 4).long(),
        "responses": torch.zeros(4, 6).long(),
        "response_mask": mask.long(),
        "attention_mask": torch.cat([prompt_mask, mask], 1).long(),
        **{name: torch.zeros(4, 6) for name in ("token_level_scores", "token_level_rewards", "advantages", "returns")},
    }
    if with_lengths:
        tensors |= {"prompt_length": prompt_lengths.float(), "response_length": response_lengths.float()}
    batch = DataProto.from_dict(tensors=tensors)
    assert metric_utils.compute_data_metrics(batch, use_critic=False)["health/cut_responses"] == cut


def test_responses_are_cut_at_the_runs_length_and_a_run_without_a_node_logs_verls_metrics_alone(begin_run):
    for longest, cut in ((2, 0.25), (3, 0), (None, None)):
        begin_run(longest, {"log": False})
        assert compute_health([0.0] * 4, lengths=(2, 1, 1, 1)).get("cut_responses") == cut
    begin_run(2, None)
    compute = metric_utils.compute_data_metrics
    batch = make_batch([0.0, 1.0, 1.0, 0.0])
    assert compute(batch, use_critic=False) == compute.__wrapped__(batch, use_critic=False)


@pytest.mark.parametrize(
    ("node", "verdicts", "share", "fetches"),
    [
        pytest.param({"log": False}, [1.0, 0.0], 0.5, 2, id="a reward with verdicts is asked in each step"),
        pytest.param({"log": False}, [None, None], None, 1, id="a reward without verdicts is asked once"),
        pytest.param(None, [1.0, 0.0], None, 0, id="in a run without a node nobody is asked"),
    ],
)
def test_answers_without_a_verdict_in_the_v1_trainers(monkeypatch, begin_run, node, verdicts, share, fetches):
    begin_run(2, node)
    extras = [{"reward_extra_info": {} if value is None else {"undecided": value}} for value in verdicts]
    fetched = []

    def kv_batch_get(**named):
        assert named["keys"] == ["a", "b"] and named["select_fields"] == ["extra_fields"]
        fetched.append(named)
        # As TransferQueue does.
        return TensorDict({"extra_fields": NonTensorStack(*map(NonTensorData, extras))}, batch_size=[len(extras)])

    # The queue that the trainer itself has, which in a run in one process is not TransferQueue's module.
    monkeypatch.setattr(trainer_base, "tq", SimpleNamespace(kv_batch_get=kv_batch_get))
    tags = [{}, {"is_padding": False}, {"is_padding": True}]
    trainer = SimpleNamespace()
    step = SimpleNamespace(keys=["a", "b", "b"], partition_id="train", tags=tags)

    def compute(batch, metrics, timing_raw, global_steps, epoch):
        metrics["of verl"] = 1

    for _ in range(2):
        metrics = {}
        hooks.add_verdicts(compute, trainer, (step, metrics, {}), {"global_steps": 1, "epoch": 0})
        assert metrics.pop("of verl") == 1
        assert metrics == ({} if share is None else {"health/undecided": share})
    assert len(fetched) == fetches
    assert trainer_base.PPOTrainer._compute_metrics.__wrapped__.__name__ == "_compute_metrics"


@pytest.fixture
def start_run(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))

    def start(**node):
        folder = {"default_local_dir": str(tmp_path / "checkpoints"), "resume_mode": "auto"}
        config = {"trainer": {"logger": ["file"], **folder}, "clipx": {"method": "acpo", **node}}
        return Tracking("project", "run", ["file"], config=config)

    return start


NOT_FINITE = {"health/not_finite/rewards": 2.0, "critic/score/mean": NAN}


def test_a_fact_warns_in_its_step_and_a_trend_when_it_lasts_each_once(start_run, caplog):
    run = start_run(method="bapo")
    # What a report remarks is not said while a run trains.
    bounds = {"actor/clipx/c_low": 0.6, "actor/clipx/c_high": 1.2, "health/undecided": 0.5}
    bounds |= {f"actor/clipx/positive_share_{when}": 0.5 for when in ("before", "after")}
    for step, cut in enumerate((0.9, 0.1, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6), 1):
        facts = {"health/cut_responses": cut, "actor/clipx/skipped_updates": float(step in (2, 4))}
        run.log(bounds | facts, step)
        assert caplog.text.count("skipped updates from step 2 on: ") == 0
        assert ("skipped updates from step 2 on." in caplog.text) == (step >= 2)
        assert ("responses cut at the limit from step 3 on." in caplog.text) == (step >= 5)
    assert caplog.text.count("clipx.health: this run: ") == 2
    assert caplog.text.count(f"the pages named docs/… in {folder_of_pages()}") == 1
    assert "health/cut_responses 0.6, at most 0.9" in caplog.text and "Raise data.max_response_length" in caplog.text


def test_with_stop_a_new_fact_alone_ends_a_run_that_goes_on_and_its_step_is_in_the_log(start_run, tmp_path, caplog):
    run = start_run()
    for step in (1, 2):
        run.log({"health/cut_responses": 1.0, **NOT_FINITE}, step)
    (tmp_path / "checkpoints/global_step_2").mkdir(parents=True)
    (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("2")
    caplog.clear()
    # It is not stopped by what its log holds, and its trends go on.
    resumed = start_run(health="stop")
    for step in (3, 4):
        resumed.log({"health/cut_responses": 1.0, "critic/score/mean": 0.5}, step)
    assert "responses cut at the limit from step 1 on." in caplog.text
    message = r"clipx\.health=stop: values that are not finite from step 5 on: .*rewards of 2 responses"
    with pytest.raises(RuntimeError, match=message):
        resumed.log(dict(NOT_FINITE), 5)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("key", "stops"),
    [("actor/kl_loss", True), ("critic/vf_loss", True), ("rollout_corr/kl", False), ("actor/clipx/receipt", False)],
)
def test_a_run_is_ended_by_what_the_training_computes_alone(start_run, key, stops):
    run = start_run(health="stop")
    run.log({"actor/kl_loss": 0.1, key: 0.1}, 1)
    if not stops:
        run.log({"actor/kl_loss": 0.1, key: NAN}, 2)
        return
    with pytest.raises(RuntimeError, match=f"values that are not finite from step 2 on: not finite: {key} in 1 step"):
        run.log({key: NAN}, 2)


@pytest.mark.parametrize("group", ["+clipx=acpo", "+clipx=observe"])
def test_whether_a_run_stops_for_its_health_is_a_key_of_every_run(group):
    assert build_target(composition(group, "clipx.health=stop").clipx).health == "stop"
    with pytest.raises(Refusal) as refusal:
        build_target(composition(group, "clipx.health=off").clipx)
    assert (refusal.value.key, refusal.value.value) == ("clipx.health", "off")
