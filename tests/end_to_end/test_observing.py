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
ROWS, SIZE = 16, 8
GRPO = ("+clipx=grpo", "clipx.receipt=off", "clipx.compile=false")
METRICS, TRACES = "the metrics of the loss", "the traces"
# What raises, and what the log calls the part that goes off.
PLANTED = {
    **dict.fromkeys(["policy_loss.sum_other_metrics", "loss_function.exact_metrics", "observe.observed_sums"], METRICS),
    **dict.fromkeys(
        [f"training_worker.{name}" for name in ("exclude_rejected_tokens", "merge_metrics_of_passes", "ages")], METRICS
    ),
    "compiled.token_loss": METRICS,
    "update_fingerprints.hash_field": "the fingerprints of updates",
    "tracer.trace_method": TRACES,
}
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier")
WORLDS = [1, 2, pytest.param(4, marks=pytest.mark.matrix)]


def train(worker, rows, rank, world, order=range(SIZE), micro_batch=1):
    """The metrics of a rollout batch, whose updates have the same rows on any number of ranks, in some order."""
    part = SIZE // world
    updates = [[rows[first + at] for at in order] for first in range(0, ROWS, SIZE)]
    data = mini_batch([row for of in updates for row in of[rank * part : (rank + 1) * part]], sequences=SIZE)
    tu.assign_non_tensor(data, mini_batch_size=SIZE, epochs=1, use_dynamic_bsz=False)
    tu.assign_non_tensor(data, micro_batch_size_per_gpu=micro_batch)
    return tu.get(worker.train_mini_batch(data), "metrics")


def fail_in(name, whole, calls, here, *given, **named):
    """Stands for a function that raises on one rank, and within an update if each micro-batch calls it."""
    calls.append(name)
    if here and (len(calls) > 1 or name in ("merge_metrics_of_passes", "ages", "hash_field")):
        raise ZeroDivisionError("planted")
    return whole(*given, **named)


def observe_on_rank(rank, world, policy, rows, folder):
    """Returns updates' fingerprints in two orders, our collectives, and all ranks' metrics after each failure."""
    worker, rows = build_worker(policy), torch.load(rows, weights_only=False)
    collectives, forward_step = [], worker.engine.forward_step
    worker.engine.optimizer_step = lambda: 1.0

    def begin(*overrides):
        worker.set_loss_fn(partial(ppo_loss, config=actor_config(overrides)))

    def counted(function, *given, **named):
        if "verl_clipx" in sys._getframe(1).f_code.co_filename:
            collectives.append(function.__name__)
        return function(*given, **named)

    def without_hashes(micro_batch, *given, **named):
        assert HASHES not in micro_batch
        return forward_step(micro_batch, *given, **named)

    begin(*GRPO)
    with ExitStack() as patched:
        patched.enter_context(patch.object(worker.engine, "forward_step", without_hashes))
        for name in COLLECTIVES:
            whole = getattr(torch.distributed, name)
            patched.enter_context(patch.object(torch.distributed, name, partial(counted, whole)))
        orders = [train(worker, rows, rank, world), train(worker, rows, rank, world, (3, 0, 7, 1, 6, 2, 5, 4), 2)]
    trace, failed = ("trace=prompts", "trace.fraction=1", "trace.every=1", f"trace.folder={folder}"), {}
    for planted in PLANTED:
        module, name = planted.split(".")
        owner, calls = (
            importlib.import_module(
                f"verl_clipx.{'losses.applying' if module == 'compiled' else 'training.worker'}.{module}"
            ),
            [],
        )
        group = ("+clipx=observe",) if module == "observe" else GRPO
        begin(*group, *(("+clipx/trace=prompts", *(f"clipx.{key}" for key in trace[1:])) if module == "tracer" else ()))
        before = train(worker, rows, rank, world)
        assert "clipx/ratio_mean" in before and not [key for key in before if key.startswith(OFF)]
        with patch.object(owner, name, partial(fail_in, name, getattr(owner, name), calls, rank == world - 1)):
            after = [train(worker, rows, rank, world) for _ in range(2)][-1]
        assert calls, planted
        failed[planted] = [None] * world
        own = {key: of for key, of in after.items() if "clipx" in key}
        off_here = sorted(worker.observers.off)
        torch.distributed.all_gather_object(failed[planted], (own, off_here))
    return [metrics[UPDATES] for metrics in orders], collectives, failed


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("observing"), {}
    policy, rows = make_policy(folder / "policy"), make_rows(folder, ROWS, masked=(3, 11), drift=0.3)

    def on(world):
        if world not in found:
            found[world] = on_ranks(world, observe_on_rank, policy, rows, folder / f"traces{world}")
        return found[world]

    on.rows = torch.load(rows, weights_only=False)
    return on


def of_trainer(rows):
    """The fingerprint of rows as verl's v0 trainer pads them."""

    def padded(of, left=False):
        return pad_sequence([row.flip(0) for row in of], batch_first=True).flip(1) if left else pad_sequence(of, True)

    prompts, responses = zip(*(row["ids"].tensor_split([row["prompt"]]) for row in rows), strict=True)
    tensors = {"prompts": padded(prompts, left=True), "responses": padded(responses)}
    present = [padded([torch.ones_like(row) for row in of], of is prompts) for of in (prompts, responses)]
    tensors |= {"response_mask": padded([row["mask"] for row in rows]), "attention_mask": torch.cat(present, 1)}
    tensors |= {"advantages": padded([row["advantage"] for row in rows])}
    return fingerprints_of(hash_batch(DataProto.from_dict(tensors=tensors)))["rows"]


@pytest.mark.parametrize("world", WORLDS)
def test_an_updates_fingerprint_depends_on_its_rows_alone_and_costs_no_collective(results, world):
    (first, second), collectives, _ = results(world)
    assert [hexadecimal([one]) for one in first] == [of_trainer(results.rows[at : at + SIZE]) for at in (0, SIZE)]
    assert first == second and first[0] != first[1] and not collectives
    assert hexadecimal(first) == of_trainer(results.rows)


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
