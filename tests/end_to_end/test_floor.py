"""The floor by verl's engine (FSDP2 over gloo, without Ray). Covers: bfloat16 rounds and float32 doesn't, both
measurements, their cost, two ranks and five micro-batches. Not covered: packing with flash attention, GPUs (tests/gpu).
"""

import sys
from functools import partial
from unittest.mock import patch

import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

from .training_ranks import actor_config, build_worker, log_probs_of_all, make_policy, make_rows, mini_batch, on_ranks

pytestmark = pytest.mark.end_to_end

# The prefixes of what the two measurements log.
FIRST_MEASUREMENT = "clipx/floor/"
SECOND_MEASUREMENT = "clipx/floor_recut/"


@pytest.fixture(scope="module")
def policy_and_rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("floor")
    return make_policy(folder), make_rows(folder, 10, masked=(3,), drift=0.2)


def measure_floors(rank, world, policy, rows, precision, micro_batch_size, recomputed):
    """Of each of two rollout batches of one update: metrics, forward passes, and the plugin's collectives."""
    rows = torch.load(rows, weights_only=True)
    forwards = []
    collectives = []
    worker = build_worker(policy, precision=precision)
    worker.engine._autocast_dtype = precision if precision.itemsize < 8 else torch.float32
    if recomputed:
        data = mini_batch(rows, sequences=len(rows))
        tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=len(rows))
        for row, log_prob in zip(rows, log_probs_of_all(worker, data, rows)[: len(rows)], strict=True):
            row["old"] = log_prob
    share = rows[rank * len(rows) // world : (rank + 1) * len(rows) // world]
    worker.engine.optimizer_step = lambda: 1.0
    worker.set_loss_fn(partial(ppo_loss, config=actor_config(("+clipx=grpo", "clipx.receipt=off"))))
    all_reduce = torch.distributed.all_reduce
    forward_step = worker.engine.forward_step

    def counted_all_reduce(*args, **kwargs):
        if "verl_clipx" in sys._getframe(1).f_code.co_filename:
            collectives.append("all_reduce")
        return all_reduce(*args, **kwargs)

    def counted_forward(*args, **kwargs):
        forwards.append(len(args[0] if args else kwargs["micro_batch"]))
        return forward_step(*args, **kwargs)

    rollout_batches = []
    for _ in range(2):
        data = mini_batch(share, sequences=len(rows))
        tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=micro_batch_size)
        tu.assign_non_tensor(data, num_mini_batch=1, epochs=1)
        with (
            patch.object(torch.distributed, "all_reduce", counted_all_reduce),
            patch.object(worker.engine, "forward_step", counted_forward),
        ):
            metrics = tu.get(worker.train_mini_batch(data), "metrics")
        values = {key: values[0] for key, values in metrics.items() if "/floor" in key}
        rollout_batches.append((values, list(forwards), len(collectives)))
        forwards.clear()
        collectives.clear()
    return rollout_batches


def test_two_ranks_and_five_micro_batches_give_the_same_sums_and_the_second_pass_is_made_once(policy_and_rows):
    arguments = (*policy_and_rows, torch.float64)
    whole = on_ranks(1, measure_floors, *arguments, 10, False)
    parts = on_ranks(1, measure_floors, *arguments, 2, False)
    ranks = on_ranks(2, measure_floors, *arguments, 5, False)
    for first, second in (whole, parts, ranks):
        assert any(key.startswith(SECOND_MEASUREMENT) for key in first[0])
        assert not any(key.startswith(SECOND_MEASUREMENT) for key in second[0])
    # A pass over the rows in half as large micro-batches, before the update, in the first rollout batch alone.
    assert [forwards for _, forwards, _ in whole] == [[5, 5, 10], [10]]
    assert [forwards for _, forwards, _ in parts] == [[1] * 10 + [2] * 5, [2] * 5]
    # No collective, whatever is measured.
    assert {collectives for of_case in (whole, parts, ranks) for _, _, collectives in of_case} == {0}
    expected, _, _ = whole[0]
    assert len(expected) == 36 and expected[f"{FIRST_MEASUREMENT}log_ratio"] > 0.1
    for values, _, _ in (parts[0], ranks[0]):
        assert values.keys() == expected.keys()
        for key, value in expected.items():
            assert values[key] == pytest.approx(value, rel=1e-12, abs=1e-14), key


def test_float32_has_no_floor_and_bfloat16_has_one(policy_and_rows):
    (single, _, _), _ = on_ranks(1, measure_floors, *policy_and_rows, torch.float32, 2, True)
    (half, _, _), _ = on_ranks(1, measure_floors, *policy_and_rows, torch.bfloat16, 2, True)
    for name in (FIRST_MEASUREMENT, SECOND_MEASUREMENT):
        assert 0 <= single[f"{name}log_ratio"] <= 1e-6
        assert single[f"{name}clip_fraction_low"] == single[f"{name}clip_fraction_high"] == 0
    assert half[f"{SECOND_MEASUREMENT}log_ratio"] > 1e-3
