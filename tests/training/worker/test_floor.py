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
from tests.messages import assert_names
from tests.training.worker.updates import ROWS, SPLITS, WHOLE, VerlsWorker, aggregate_metrics, loss_function
from verl_clipx.losses.contract.examples import example
from verl_clipx.training.worker.observe import observe_registered
from verl_clipx.training.worker.recut import reverse_in_smaller_micro_batches
from verl_clipx.training.worker.step import MeasuredFloor, OptimizerStep
from verl_clipx.training.worker.training_worker import ClipxTraining

GROUPS = ("grpo", "dapo", "acpo", "gspo", "observe")
BYPASS = "algorithm.rollout_correction.bypass_mode=True"
FIVE_MICRO_BATCHES = [[[0], [1], [2], [3], [4, 5]]]


class Worker(ClipxTraining, VerlsWorker):
    """The plugin's part of a worker on the stand-in for verl's."""


@pytest.fixture
def build_training(actor, monkeypatch):
    def build(*overrides, distance=0.02, further_fields=None):
        """A function that trains a rollout batch of one update, so many nats from its start, and returns metrics."""
        monkeypatch.setattr("verl_clipx.training.worker.training_worker.get_device_id", lambda: "cpu")
        observe_registered("vanilla")
        batch = example()
        batch["log_prob"] = batch["old_log_prob"] + distance
        data, output = micro_batch(batch, ROWS)
        output["log_probs"].requires_grad_(True)
        for name, values in (further_fields or {}).items():
            data[name] = values
        worker = Worker(actor("clipx.receipt=off", *overrides), output)
        return lambda: tu.get(worker.train_mini_batch(data.clone()), "metrics")

    return build


def metrics_of_floor(metrics, name="floor"):
    return {key: values for key, values in metrics.items() if key.startswith(f"clipx/{name}/")}


@pytest.mark.parametrize("group", GROUPS)
def test_each_rollout_batch_logs_its_first_updates_distance_from_ratio_1(build_training, group):
    rollout_batch = build_training(f"+clipx={group}", "actor_rollout_ref.rollout.calculate_log_probs=True")
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
def test_nothing_is_called_a_floor_where_the_first_update_shows_the_samplers_distance(build_training, overrides):
    metrics = build_training("+clipx=grpo", "actor_rollout_ref.rollout.calculate_log_probs=True", *overrides)()
    assert "clipx/ratio_mean" in metrics
    assert not metrics_of_floor(metrics) and not metrics_of_floor(metrics, "floor_recut")


def test_of_loptis_two_passes_the_first_updates_tokens_are_logged_once(build_training):
    metrics = build_training("+clipx=grpo", "+clipx/update=lopti")()
    assert len(metrics["clipx/floor/log_ratio"]) == 1
    assert not [key for key in metrics if key.startswith(("clipx/low/floor", "clipx/high/floor"))]


def test_a_run_without_a_node_has_none(actor):
    config = actor()
    data, output = micro_batch(example(), ROWS)
    worker = Worker(config, output)
    metrics = tu.get(worker.train_mini_batch(data), "metrics")
    assert not [key for key in metrics if "floor" in key]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("split", [FIVE_MICRO_BATCHES, *SPLITS.values()])
def test_the_numbers_are_exact_over_micro_batches_and_ranks(actor, group, split):
    observe_registered("vanilla")
    config = actor(f"+clipx={group}", "actor_rollout_ref.rollout.calculate_log_probs=True", "clipx.receipt=off")
    batch = example()

    def measure(split):
        step = OptimizerStep(at_ratio_one=True)
        metrics = metrics_of_floor(aggregate_metrics(loss_function(config, step), batch, split))
        if group == "acpo":
            # Without a step's own bounds each micro-batch decides for itself, so its clip fractions are others.
            metrics = {key: value for key, value in metrics.items() if "clip_fraction" not in key}
        return metrics

    of_whole = measure(WHOLE)
    of_split = measure(split)
    assert len(of_whole) >= 16 and of_whole.keys() == of_split.keys()
    for key, value in of_whole.items():
        assert of_split[key] == pytest.approx(value, rel=1e-12), key


@pytest.mark.parametrize("group", ["grpo", "observe"])
def test_the_floor_takes_no_host_sync_more(actor, group):
    observe_registered("vanilla")
    config = actor(f"+clipx={group}")

    def host_syncs(at_ratio_one):
        data, output = micro_batch(example(), ROWS)
        output["log_probs"].requires_grad_(True)
        function = loss_function(config, OptimizerStep(at_ratio_one=at_ratio_one))
        with counted_host_syncs() as syncs:
            function(model_output=output, data=data)
        return sorted(syncs.calls)

    assert host_syncs(at_ratio_one=True) == host_syncs(at_ratio_one=False)


@pytest.mark.parametrize("group", GROUPS)
def test_the_second_measurement_of_the_same_numbers_is_equal_and_made_once(build_training, group):
    rollout_batch = build_training(
        f"+clipx={group}", "actor_rollout_ref.rollout.calculate_log_probs=True", distance=0.3
    )
    metrics = rollout_batch()
    first = metrics_of_floor(metrics)
    second = metrics_of_floor(metrics, "floor_recut")
    assert len(second) == len(first) >= 18
    for key, (value,) in first.items():
        assert second[key.replace("floor", "floor_recut")] == [pytest.approx(value, rel=1e-9)], key
    assert not metrics_of_floor(rollout_batch(), "floor_recut")


def test_no_further_pass_is_made_where_routes_of_experts_are_replayed(build_training, monkeypatch):
    passes = []
    monkeypatch.setattr(VerlsWorker, "forward_of_reversed_rows", lambda *_, **__: passes.append(1))
    rollout_batch = build_training("+clipx=grpo", further_fields={"routed_experts": torch.zeros(len(ROWS), 2)})
    metrics = rollout_batch()
    assert not passes and not metrics_of_floor(metrics, "floor_recut") and metrics_of_floor(metrics)


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
        output_in_training = self.output
        rounded = output_in_training["log_probs"].detach().clone()
        rounded.values().add_(self.rounding * (-1) ** torch.arange(len(rounded.values())))
        self.output = {"log_probs": rounded}
        super().forward_of_reversed_rows(data, loss_function, forward_only)
        self.output = output_in_training


@pytest.fixture
def warnings_of_distance(actor, monkeypatch, caplog):
    def train(distance, rounding, precision="bf16"):
        """What the receipt says of old_log_probs so many nats away from the first update, with such a second pass."""
        monkeypatch.setattr("verl_clipx.training.worker.training_worker.get_device_id", lambda: "cpu")
        batch = example()
        batch["log_prob"] = batch["old_log_prob"] + distance
        data, output = micro_batch(batch, ROWS)
        output["log_probs"].requires_grad_(True)
        worker = RoundingWorker(actor("+clipx=grpo", "clipx.receipt=warn"), output, rounding, precision)
        worker.train_mini_batch(data)
        messages = [record.getMessage() for record in caplog.records]
        return [message for message in messages if "nats away on average" in message]

    return train


@pytest.mark.parametrize(
    ("distance", "rounding"),
    [
        # Where rounding is not known: 0.05.
        (0.049, 0.0),
        # Eight times what a second pass of the same weights is away, and never less than 0.01.
        (0.031, 0.004),
        (0.009, 1e-4),
    ],
)
def test_the_receipt_allows_old_log_probs_a_distance_by_the_second_pass(warnings_of_distance, distance, rounding):
    assert warnings_of_distance(distance, rounding) == []


@pytest.mark.parametrize(
    ("distance", "rounding", "limit"),
    [
        (0.051, 0.0, "0.05"),
        # No rounding moves the limit further.
        (0.051, 0.02, "0.05"),
        (0.033, 0.004, "0.032"),
        (0.011, 1e-4, "0.01"),
    ],
)
def test_the_receipt_names_a_larger_distance_and_the_limit(warnings_of_distance, distance, rounding, limit):
    (warning,) = warnings_of_distance(distance, rounding)
    assert_names(warning, f"{distance:.2g} nats away", f"more than {limit}")


def test_in_float32_the_receipt_allows_them_the_same_distance_whatever_the_second_pass_is(warnings_of_distance):
    assert warnings_of_distance(0.0009, 1e-5, "fp32") == []
    (warning,) = warnings_of_distance(0.011, 0.004, "fp32")
    assert_names(warning, "0.011 nats away", "more than 0.001")


def make_mini_batch(lengths):
    """Rows with prompts of two tokens and so many tokens in all; each response holds its row's number."""
    responses = [torch.full((length - 2,), row) for row, length in enumerate(lengths)]
    fields = {"prompts": jagged([torch.zeros(2)] * len(lengths)), "responses": jagged(responses)}
    return tu.get_tensordict(fields)


def recut(lengths, *, dynamic=False, packed=False, size=4, tokens=64):
    """The keys by which the second measurement cuts rows of some lengths; None if there is none.

    Args:
        lengths: tokens of the rows.
        dynamic, packed, size, tokens: the keys by which verl cuts them for the update.
    """
    keys = {
        "use_dynamic_bsz": dynamic,
        "max_token_len_per_gpu": tokens,
        "micro_batch_size_per_gpu": size,
        "use_fused_kernels": False,
        "use_remove_padding": packed,
    }
    reversed_batch = reverse_in_smaller_micro_batches(make_mini_batch(lengths), keys)
    if reversed_batch is None:
        return None
    rows = [int(row[0]) for row in reversed_batch["responses"].unbind()]
    assert rows == list(range(len(lengths)))[::-1]
    return {key: tu.get(reversed_batch, key=key) for key in keys}


def test_padded_rows_are_cut_into_half_as_many_a_micro_batch():
    assert recut([9, 5, 7, 8], size=4)["micro_batch_size_per_gpu"] == 2
    # Every micro-batch has equally many rows, as verl asserts.
    assert recut([9] * 9, size=9)["micro_batch_size_per_gpu"] == 3
    # One padded row can't be cut further, and a larger micro-batch might not fit.
    assert recut([9, 5, 7, 8], size=1) is None


def test_packed_rows_are_cut_into_half_the_tokens_and_never_below_the_longest_row():
    # Of the micro-batches of two rows the larger has 15 tokens.
    half = recut([4, 3, 7, 8], packed=True, size=2)
    assert half["use_dynamic_bsz"] is True and half["max_token_len_per_gpu"] == 8
    assert recut([4, 3, 7, 8], packed=True, size=4)["max_token_len_per_gpu"] == 11
    # All rows fit into one micro-batch, of which half is taken.
    assert recut([4, 3, 7, 8], dynamic=True, tokens=64)["max_token_len_per_gpu"] == 11
    assert recut([4, 3, 7, 8], dynamic=True, tokens=20)["max_token_len_per_gpu"] == 10
    assert recut([40, 3, 7, 8], dynamic=True, tokens=50)["max_token_len_per_gpu"] == 40
