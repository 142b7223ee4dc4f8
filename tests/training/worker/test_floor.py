"""The floor as a worker logs it. Covers: when it is logged, that it is exact over micro-batches and ranks, its cost,
and its second measurement with how that cuts the rows. Not covered: the sums by hand
(tests/losses/applying/test_floor.py) and the engine (tests/end_to_end/test_floor.py).
"""

from types import SimpleNamespace

import pytest
import torch
from verl.utils import tensordict_utils as tu

from tests.host_syncs import counted_host_syncs
from tests.jagged import jagged, micro_batch
from tests.training.worker.updates import ROWS, SPLITS, WHOLE, VerlsWorker, aggregated, loss_function
from verl_clipx.losses.contract.examples import example
from verl_clipx.training.worker.observe import observe_registered
from verl_clipx.training.worker.recut import reverse_in_smaller_micro_batches
from verl_clipx.training.worker.step import MeasuredFloor, OptimizerStep
from verl_clipx.training.worker.training_worker import ClipxTraining

GROUPS = ("grpo", "dapo", "acpo", "gspo", "observe")
BYPASS = "algorithm.rollout_correction.bypass_mode=True"
FIVE = [[[0], [1], [2], [3], [4, 5]]]


class Worker(ClipxTraining, VerlsWorker):
    """The plugin's part of a worker on the stand-in for verl's."""


@pytest.fixture
def train(actor, monkeypatch):
    def build(*overrides, moved=0.02, further=None):
        """A function that trains a rollout batch of one update, with further fields, and returns its metrics."""
        monkeypatch.setattr("verl_clipx.training.worker.training_worker.get_device_id", lambda: "cpu")
        observe_registered("vanilla")
        batch = example()
        batch["log_prob"] = batch["old_log_prob"] + moved
        data, output = micro_batch(batch, ROWS)
        output["log_probs"].requires_grad_(True)
        for name, values in (further or {}).items():
            data[name] = values
        worker = Worker(actor("clipx.receipt=off", *overrides), output)
        return lambda: tu.get(worker.train_mini_batch(data.clone()), "metrics")

    return build


def floors(metrics, name="floor"):
    return {key: values for key, values in metrics.items() if key.startswith(f"clipx/{name}/")}


@pytest.mark.parametrize("group", GROUPS)
def test_each_rollout_batch_logs_its_first_updates_distance_from_ratio_1(train, group):
    rollout_batch = train(f"+clipx={group}", "actor_rollout_ref.rollout.calculate_log_probs=True")
    for _ in range(2):
        metrics = rollout_batch()
        assert metrics["clipx/floor/log_ratio"] == [pytest.approx(0.02, rel=1e-5)]
        assert metrics["clipx/floor/clip_fraction_low"] == metrics["clipx/clip_fraction_low"]
        assert metrics["clipx/floor/clip_fraction_high"] == metrics["clipx/clip_fraction_high"]
        tokens = sum(metrics[f"clipx/floor/tokens/bin_{k}"][0] for k in range(5))
        assert tokens == example()["mask"].sum()
        sums = sum(metrics[f"clipx/floor/log_ratio_sum/bin_{k}"][0] for k in range(5))
        assert sums == pytest.approx(0.02 * tokens, rel=1e-5)


@pytest.mark.parametrize(
    "overrides", [(BYPASS,), ("trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.rollout.nnodes=1")]
)
def test_nothing_is_called_a_floor_where_the_first_update_shows_the_samplers_distance(train, overrides):
    metrics = train("+clipx=grpo", "actor_rollout_ref.rollout.calculate_log_probs=True", *overrides)()
    assert "clipx/ratio_mean" in metrics
    assert not floors(metrics) and not floors(metrics, "floor_recut")


def test_of_loptis_two_passes_the_first_updates_tokens_are_logged_once(train):
    metrics = train("+clipx=grpo", "+clipx/update=lopti")()
    assert len(metrics["clipx/floor/log_ratio"]) == 1
    assert not [key for key in metrics if key.startswith(("clipx/low/floor", "clipx/high/floor"))]


def test_a_run_without_a_node_has_none(actor, train):
    config = actor()
    data, output = micro_batch(example(), ROWS)
    worker = Worker(config, output)
    metrics = tu.get(worker.train_mini_batch(data), "metrics")
    assert not [key for key in metrics if "floor" in key]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("split", [FIVE, *SPLITS.values()])
def test_the_numbers_are_exact_over_micro_batches_and_ranks(actor, group, split):
    observe_registered("vanilla")
    config = actor(f"+clipx={group}", "actor_rollout_ref.rollout.calculate_log_probs=True", "clipx.receipt=off")
    batch = example()

    def found(parts):
        step = OptimizerStep(at_ratio_one=True)
        return {key: value for key, value in aggregated(loss_function(config, step), batch, parts).items() if of(key)}

    def of(key):
        # Without a step's own bounds each micro-batch decides for itself, so its clip fractions are others.
        return key.startswith("clipx/floor/") and ("clip_fraction" not in key or group != "acpo")

    whole, parts = found(WHOLE), found(split)
    assert len(whole) >= 16 and whole.keys() == parts.keys()
    for key, value in whole.items():
        assert parts[key] == pytest.approx(value, rel=1e-12), key


@pytest.mark.parametrize("group", ["grpo", "observe"])
def test_the_floor_takes_no_host_sync_more(actor, group):
    observe_registered("vanilla")
    config, calls = actor(f"+clipx={group}"), []
    for at_ratio_one in (False, True):
        data, output = micro_batch(example(), ROWS)
        output["log_probs"].requires_grad_(True)
        function = loss_function(config, OptimizerStep(at_ratio_one=at_ratio_one))
        with counted_host_syncs() as syncs:
            function(model_output=output, data=data)
        calls.append(sorted(syncs.calls))
    assert calls[0] == calls[1]


@pytest.mark.parametrize("group", GROUPS)
def test_the_second_measurement_of_the_same_numbers_is_equal_and_made_once(train, group):
    rollout_batch = train(f"+clipx={group}", "actor_rollout_ref.rollout.calculate_log_probs=True", moved=0.3)
    metrics = rollout_batch()
    first, second = floors(metrics), floors(metrics, "floor_recut")
    assert len(second) == len(first) >= 18
    for key, (value,) in first.items():
        assert second[key.replace("floor", "floor_recut")] == [pytest.approx(value, rel=1e-9)], key
    assert not floors(rollout_batch(), "floor_recut")


def test_no_further_pass_is_made_where_routes_of_experts_are_replayed(train, monkeypatch):
    passes = []
    monkeypatch.setattr(VerlsWorker, "forward_of_reversed_rows", lambda *_, **__: passes.append(1))
    rollout_batch = train("+clipx=grpo", further={"routed_experts": torch.zeros(len(ROWS), 2)})
    metrics = rollout_batch()
    assert not passes and not floors(metrics, "floor_recut") and floors(metrics)


def test_the_second_measurement_travels_with_the_first_micro_batch_alone(actor):
    config = actor("+clipx=grpo")
    step = OptimizerStep(at_ratio_one=True, recut=MeasuredFloor({"clipx/floor_recut/log_ratio": 3.0}, {}, {}))
    function = loss_function(config, step)
    logged = []
    for rows in ([0, 1], [2, 3, 4, 5]):
        data, output = micro_batch(example(), rows, total=30)
        logged.append(function(model_output=output, data=data)[1])
    assert logged[0]["clipx/floor_recut/log_ratio"].values == [0.1]
    assert "clipx/floor_recut/log_ratio" not in logged[1]


class RoundingWorker(Worker):
    """Its passes without gradient are away from its training, up and down by turns, by so many nats."""

    def __init__(self, config, output, rounding, precision):
        self.rounding = rounding
        precise = vars(Worker.engine_config) | {"mixed_precision": {"param_dtype": precision}}
        self.engine_config = SimpleNamespace(**precise)
        super().__init__(config, output)

    def forward_of_reversed_rows(self, data, loss_function, forward_only):
        own = self.output
        other = own["log_probs"].detach().clone()
        other.values().add_(self.rounding * (-1) ** torch.arange(len(other.values())))
        self.output = {"log_probs": other}
        super().forward_of_reversed_rows(data, loss_function, forward_only)
        self.output = own


@pytest.fixture
def distance_of_the_receipt(actor, monkeypatch, caplog):
    def warned(moved, rounding, precision="bf16"):
        """What the receipt says of old_log_probs so many nats away from the first update, with such a second pass."""
        monkeypatch.setattr("verl_clipx.training.worker.training_worker.get_device_id", lambda: "cpu")
        batch = example()
        batch["log_prob"] = batch["old_log_prob"] + moved
        data, output = micro_batch(batch, ROWS)
        output["log_probs"].requires_grad_(True)
        worker = RoundingWorker(actor("+clipx=grpo", "clipx.receipt=warn"), output, rounding, precision)
        worker.train_mini_batch(data)
        messages = [record.getMessage() for record in caplog.records]
        return [message for message in messages if "nats away on average" in message]

    return warned


@pytest.mark.parametrize(
    ("moved", "rounding", "most"),
    [
        # Where rounding is not known, and the end that no rounding moves.
        (0.049, 0.0, None),
        (0.051, 0.0, "0.05"),
        (0.051, 0.02, "0.05"),
        # Eight times what a second pass of the same weights is away, and never less than 0.01.
        (0.031, 0.004, None),
        (0.033, 0.004, "0.032"),
        (0.009, 1e-4, None),
        (0.011, 1e-4, "0.01"),
    ],
)
def test_the_receipt_allows_old_log_probs_a_distance_by_the_second_pass(distance_of_the_receipt, moved, rounding, most):
    warnings = distance_of_the_receipt(moved, rounding)
    assert len(warnings) == (most is not None)
    assert most is None or f"{moved:.2g} nats away on average, more than {most}" in warnings[0]


def test_in_float32_the_receipt_allows_them_the_same_distance_whatever_the_second_pass_is(distance_of_the_receipt):
    assert not distance_of_the_receipt(0.0009, 1e-5, "fp32")
    assert "0.011 nats away on average, more than 0.001" in distance_of_the_receipt(0.011, 0.004, "fp32")[0]


def mini_batch(lengths):
    """Rows with prompts of two tokens and so many tokens in all; each response holds its row's number."""
    responses = [torch.full((length - 2,), row) for row, length in enumerate(lengths)]
    fields = {"prompts": jagged([torch.zeros(2)] * len(lengths)), "responses": jagged(responses)}
    return tu.get_tensordict(fields)


def keys_of(lengths, *, dynamic=False, packed=False, size=4, tokens=64):
    cut = {
        "use_dynamic_bsz": dynamic,
        "max_token_len_per_gpu": tokens,
        "micro_batch_size_per_gpu": size,
        "use_fused_kernels": False,
        "use_remove_padding": packed,
    }
    other = reverse_in_smaller_micro_batches(mini_batch(lengths), cut)
    if other is None:
        return None
    rows = [int(row[0]) for row in other["responses"].unbind()]
    assert rows == list(range(len(lengths)))[::-1]
    return {key: tu.get(other, key=key) for key in cut}


def test_padded_rows_are_cut_into_half_as_many_a_micro_batch():
    assert keys_of([9, 5, 7, 8], size=4)["micro_batch_size_per_gpu"] == 2
    # Every micro-batch has equally many rows, as verl asserts.
    assert keys_of([9] * 9, size=9)["micro_batch_size_per_gpu"] == 3
    # One padded row can't be cut further, and a larger micro-batch might not fit.
    assert keys_of([9, 5, 7, 8], size=1) is None


def test_packed_rows_are_cut_into_half_the_tokens_and_never_below_the_longest_row():
    # Of the micro-batches of two rows the larger has 15 tokens.
    half = keys_of([4, 3, 7, 8], packed=True, size=2)
    assert half["use_dynamic_bsz"] is True and half["max_token_len_per_gpu"] == 8
    assert keys_of([4, 3, 7, 8], packed=True, size=4)["max_token_len_per_gpu"] == 11
    # All rows fit into one micro-batch, of which half is taken.
    assert keys_of([4, 3, 7, 8], dynamic=True, tokens=64)["max_token_len_per_gpu"] == 11
    assert keys_of([4, 3, 7, 8], dynamic=True, tokens=20)["max_token_len_per_gpu"] == 10
    assert keys_of([40, 3, 7, 8], dynamic=True, tokens=50)["max_token_len_per_gpu"] == 40
