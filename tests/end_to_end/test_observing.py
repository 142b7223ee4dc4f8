"""What a worker observes, by verl's worker and FSDP2 engine: an update's fingerprint is the same on 1 and 2 ranks (and
with `-m matrix` 4), in any order and micro-batches, that of the trainer's process, and costs no collective; a part that
raises on one rank goes off on all of them. Not covered: what the trainer's process does
with it (tests/training/trainer/test_observing.py), skipped updates (tests/training/worker/test_training_worker.py).
"""

import importlib
import sys
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

from verl_clipx.training.observing import OFF, UPDATES
from verl_clipx.training.worker.fingerprints import fingerprints_of, hash_batch, hexadecimal
from verl_clipx.training.worker.update_fingerprints import HASHES

from .training_ranks import actor_config, build_worker, make_policy, make_rows, mini_batch, on_ranks

pytestmark = pytest.mark.end_to_end

# Of a rollout batch of two updates.
ROWS = 16
ROWS_OF_UPDATE = 8
GRPO = ("+clipx=grpo", "clipx.receipt=off", "clipx.compile=false")
METRICS = "the metrics of the loss"
# From the function that raises to what the log calls the part that goes off.
PLANTED = {
    "policy_loss.sum_other_metrics": METRICS,
    "loss_function.exact_metrics": METRICS,
    "observe.observed_sums": METRICS,
    "training_worker.exclude_rejected_tokens": METRICS,
    "training_worker.merge_metrics_of_passes": METRICS,
    "training_worker.ages": METRICS,
    "compiled.token_loss": METRICS,
    "update_fingerprints.hash_field": "the fingerprints of updates",
    "tracer.trace_method": "the traces",
}
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier")
WORLDS = [1, 2, pytest.param(4, marks=pytest.mark.matrix)]


def train(worker, rows, rank, world, order=range(ROWS_OF_UPDATE), micro_batch=1):
    """The metrics of a rollout batch, whose updates have the same rows on any number of ranks, in some order."""
    rows_of_rank = ROWS_OF_UPDATE // world
    rows_here = []
    for first in range(0, ROWS, ROWS_OF_UPDATE):
        rows_of_update = [rows[first + place] for place in order]
        rows_here += rows_of_update[rank * rows_of_rank : (rank + 1) * rows_of_rank]
    data = mini_batch(rows_here, sequences=ROWS_OF_UPDATE)
    tu.assign_non_tensor(data, mini_batch_size=ROWS_OF_UPDATE, epochs=1, use_dynamic_bsz=False)
    tu.assign_non_tensor(data, micro_batch_size_per_gpu=micro_batch)
    return tu.get(worker.train_mini_batch(data), "metrics")


def fail_in(name, function, calls, fails_here, *arguments, **named):
    """Stands for a function that raises on one rank, and within an update if each micro-batch calls it."""
    calls.append(name)
    if fails_here and (len(calls) > 1 or name in ("merge_metrics_of_passes", "ages", "hash_field")):
        raise ZeroDivisionError("planted")
    return function(*arguments, **named)


def observe_on_rank(rank, world, policy, rows, folder):
    """Returns updates' fingerprints in two orders, our collectives, and all ranks' metrics after each failure."""
    worker = build_worker(policy)
    rows = torch.load(rows, weights_only=False)
    collectives = []
    forward_step = worker.engine.forward_step
    worker.engine.optimizer_step = lambda: 1.0

    def begin(*overrides):
        worker.set_loss_fn(partial(ppo_loss, config=actor_config(overrides)))

    def count_call(function, *arguments, **named):
        if "verl_clipx" in sys._getframe(1).f_code.co_filename:
            collectives.append(function.__name__)
        return function(*arguments, **named)

    def forward_without_hashes(micro_batch, *arguments, **named):
        assert HASHES not in micro_batch
        return forward_step(micro_batch, *arguments, **named)

    begin(*GRPO)
    with ExitStack() as patched:
        patched.enter_context(patch.object(worker.engine, "forward_step", forward_without_hashes))
        for name in COLLECTIVES:
            collective = getattr(torch.distributed, name)
            patched.enter_context(patch.object(torch.distributed, name, partial(count_call, collective)))
        orders = [train(worker, rows, rank, world), train(worker, rows, rank, world, (3, 0, 7, 1, 6, 2, 5, 4), 2)]
    trace = (
        "+clipx/trace=prompts",
        "clipx.trace.fraction=1",
        "clipx.trace.every=1",
        f"clipx.trace.folder={folder}",
    )
    failed = {}
    for planted in PLANTED:
        module_name, name = planted.split(".")
        package = "losses.applying" if module_name == "compiled" else "training.worker"
        module = importlib.import_module(f"verl_clipx.{package}.{module_name}")
        calls = []
        overrides = ("+clipx=observe",) if module_name == "observe" else GRPO
        if module_name == "tracer":
            overrides += trace
        begin(*overrides)
        before = train(worker, rows, rank, world)
        assert "clipx/ratio_mean" in before and not [key for key in before if key.startswith(OFF)]
        failing = partial(fail_in, name, getattr(module, name), calls, rank == world - 1)
        with patch.object(module, name, failing):
            train(worker, rows, rank, world)
            after = train(worker, rows, rank, world)
        assert calls, planted
        failed[planted] = [None] * world
        own_metrics = {key: values for key, values in after.items() if "clipx" in key}
        off_here = sorted(worker.observers.off)
        torch.distributed.all_gather_object(failed[planted], (own_metrics, off_here))
    return [metrics[UPDATES] for metrics in orders], collectives, failed


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("observing")
    policy = make_policy(folder / "policy")
    rows = make_rows(folder, ROWS, masked=(3, 11), drift=0.3)
    results_by_world = {}

    def observe(world):
        if world not in results_by_world:
            results_by_world[world] = on_ranks(world, observe_on_rank, policy, rows, folder / f"traces{world}")
        return results_by_world[world]

    observe.rows = torch.load(rows, weights_only=False)
    return observe


def fingerprint_of_trainer(rows):
    """The fingerprint of rows as verl's v0 trainer pads them."""

    def pad_right(values):
        return pad_sequence(values, batch_first=True)

    def pad_left(values):
        return pad_right([row.flip(0) for row in values]).flip(1)

    prompts, responses = zip(*(row["ids"].tensor_split([row["prompt"]]) for row in rows), strict=True)
    in_prompt = pad_left([torch.ones_like(prompt) for prompt in prompts])
    in_response = pad_right([torch.ones_like(response) for response in responses])
    tensors = {
        "prompts": pad_left(prompts),
        "responses": pad_right(responses),
        "response_mask": pad_right([row["mask"] for row in rows]),
        "attention_mask": torch.cat([in_prompt, in_response], 1),
        "advantages": pad_right([row["advantage"] for row in rows]),
    }
    return fingerprints_of(hash_batch(DataProto.from_dict(tensors=tensors)))["rows"]


@pytest.mark.parametrize("world", WORLDS)
def test_an_updates_fingerprint_depends_on_its_rows_alone_and_costs_no_collective(results, world):
    (first, second), collectives, _ = results(world)
    first_update, second_update = first
    assert hexadecimal([first_update]) == fingerprint_of_trainer(results.rows[:ROWS_OF_UPDATE])
    assert hexadecimal([second_update]) == fingerprint_of_trainer(results.rows[ROWS_OF_UPDATE:])
    assert hexadecimal(first) == fingerprint_of_trainer(results.rows)
    assert first == second and first_update != second_update
    assert not collectives


@pytest.mark.parametrize("world", WORLDS[:2])
@pytest.mark.parametrize("planted", PLANTED)
def test_what_fails_on_one_rank_goes_off_on_all(results, world, planted):
    name = PLANTED[planted]
    for metrics, off_here in results(world)[2][planted]:
        assert off_here == [name]
        assert metrics[f"{OFF}{name}"] == [1.0]
        assert ("clipx/ratio_mean" in metrics) == (name != METRICS)
        assert (UPDATES in metrics) == ("fingerprints" not in name)
        assert not [key for key in metrics if key.startswith(("clipx_sum/", "clipx_report"))]
