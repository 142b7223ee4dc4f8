"""What the plugin leaves behind in verl's engine, on one rank: nothing but the bounds.

Covers, with the real training worker and FSDP2 engine: observing changes neither random numbers, weights, gradients,
engine mode, offload state, data nor memory; a step whose gradient is not finite is not remembered, and an
advantage or old log-probability that is not finite makes it one, in every method; a run with one
update per rollout batch says so, once; a checkpoint whose state of the bounds is cut short or missing stops with an
error, or starts afresh when asked to.
Not covered: memory of an accelerator, packing and sequence parallelism.
"""

import contextlib
import gc
import itertools
import logging
import math
from functools import partial
from pathlib import Path

import pytest
import torch

from verl_clipx.methods import BUILT_IN

from .training_ranks import actor_config, build_worker, make_policy, make_rows, mini_batch, on_ranks

pytestmark = pytest.mark.end_to_end

ACPO = ("+clipx=acpo", "clipx.alpha=0.5")
LAGGED = (*ACPO, "clipx.scope=lagged")
# Of the whole run, so that each rollout batch gets one update.
ONE_UPDATE = (*ACPO, "actor_rollout_ref.actor.ppo_mini_batch_size=8")


def prepared(worker, rows, overrides):
    """Sets the loss and returns a mini-batch of all rows in micro-batches of three."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import ppo_loss

    worker.set_loss_fn(partial(ppo_loss, config=actor_config(overrides)))
    data = mini_batch(rows, sequences=len(rows))
    tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=3)
    return data


def bytes_of_tensors():
    """Bytes of every live tensor's storage."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        with contextlib.suppress(Exception):
            if isinstance(thing, torch.Tensor):
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def weights(worker):
    return {name: value.full_tensor().clone() for name, value in worker.engine.module.named_parameters()}


def differences_after_observing(rank, world, policy, rows):
    """What an observation changed."""
    from verl_clipx.training.step import OptimizerStep

    worker = build_worker(Path(policy))
    data = prepared(worker, torch.load(rows, weights_only=False), ACPO)
    engine = worker.engine
    # The first observation fills caches of PyTorch and verl.
    observation = worker._observe(data, OptimizerStep())
    moves = []
    engine.to = lambda **arguments: moves.append(arguments)
    engine._is_offload_param = True
    keys, weights_before = sorted(data.keys()), weights(worker)
    engine.module.train()
    torch.manual_seed(5)
    generator, memory = torch.get_rng_state(), bytes_of_tensors()
    again = worker._observe(data, OptimizerStep())
    equal_generator = torch.equal(generator, torch.get_rng_state())
    kept_memory = bytes_of_tensors() - memory
    ours = len(moves)
    with engine.eval_mode():
        pass
    engine._is_offload_param = False
    del engine.to
    return {
        "counted": float(observation.statistics[:5].sum()),
        "repeatable": torch.equal(observation.statistics, again.statistics),
        "random numbers": equal_generator,
        "memory": kept_memory,
        "own bytes": again.statistics.untyped_storage().nbytes(),
        "gradients": [name for name, value in engine.module.named_parameters() if value.grad is not None],
        "weights": [name for name, value in weights(worker).items() if not torch.equal(value, weights_before[name])],
        "keys": sorted(set(data.keys()) ^ set(keys)),
        "engine mode": engine.mode,
        "moves of an observation": ours,
        "moves of verl's own mode": len(moves) - ours,
        "last move": str(moves[-1]["device"]),
    }


def after_an_infinite_gradient(rank, world, policy, rows):
    """Two ordinary steps, one with an infinite advantage, one ordinary again: the state and the weights after each."""
    worker = build_worker(Path(policy))
    loaded = torch.load(rows, weights_only=False)
    found = []
    planner = None
    for broken in (False, False, True, False):
        data = prepared(worker, loaded, LAGGED)
        # One worker keeps one planner through a run; set_loss_fn makes a new one.
        planner = planner or worker.planner
        worker.planner = planner
        if broken:
            data["advantages"].values()[0] = torch.inf
        worker.train_batch(data)
        planner.flush()
        statistics = planner.state.statistics["update_0"].clone()
        found.append((planner.state.step, statistics, weights(worker), worker.gradient_norm))
    return found


def steps_with_a_number_that_is_not_finite(rank, world, policy, rows):
    """Of every method and kind of input: whether the norm was finite, the weights that moved, the state's steps."""
    worker = build_worker(Path(policy))
    loaded = torch.load(rows, weights_only=False)
    found = {}
    for name in BUILT_IN:
        overrides = (f"+clipx={name}", "actor_rollout_ref.rollout.calculate_log_probs=true")
        for field, value in itertools.product(("advantages", "old_log_probs"), (torch.nan, torch.inf, -torch.inf)):
            data = prepared(worker, loaded, overrides)
            data[field].values()[0] = value
            before = weights(worker)
            worker.train_batch(data)
            moved = [key for key, weight in weights(worker).items() if not torch.equal(weight, before[key])]
            found[name, field, value] = (math.isfinite(worker.gradient_norm), moved, worker.planner.state.step)
    return found


def notices(rank, world, policy):
    """What the worker logs when the loss is set, for a run with one update a rollout batch and one with two."""
    from verl.workers.utils.losses import ppo_loss

    worker = build_worker(Path(policy))
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("verl_clipx.training.worker").addHandler(handler)
    counts = []
    for prompts in (8, 16):
        worker.set_loss_fn(partial(ppo_loss, config=actor_config((*ONE_UPDATE, f"data.train_batch_size={prompts}"))))
        counts.append(len(heard))
    return counts, heard


def after_a_checkpoint(rank, world, policy, rows, folder):
    """Steps of the state after a checkpoint was loaded: whole, cut short, missing, and as wanted by missing_state."""
    loaded = torch.load(rows, weights_only=False)
    worker = build_worker(Path(policy))
    worker.train_batch(prepared(worker, loaded, LAGGED))
    actor = Path(folder) / "global_step_1" / "actor"
    worker.save_checkpoint(str(actor), global_step=1)
    (state,) = actor.glob("clipx_state.json")
    whole = state.read_text()

    def load(content, *overrides):
        state.unlink(missing_ok=True)
        if content is not None:
            state.write_text(content)
        prepared(worker, loaded, (*LAGGED, *overrides))
        try:
            worker.load_checkpoint(str(actor))
        except RuntimeError as error:
            return str(error)
        return worker.planner.state.step

    fresh = "clipx.missing_state=fresh"
    return {
        "whole": load(whole),
        "cut short": load(whole[:100]),
        "missing": load(None),
        "cut short, fresh": load(whole[:100], fresh),
        "missing, fresh": load(None, fresh),
    }


def each(rank, world, calls):
    """The results of several functions in one process: a start costs more than what they do."""
    return [function(rank, world, *arguments) for function, *arguments in calls]


@pytest.fixture(scope="module")
def found(policy, rows, tmp_path_factory):
    """What the functions above found, by their names."""
    given = (str(policy), str(rows))
    calls = [
        (differences_after_observing, *given),
        (after_an_infinite_gradient, *given),
        (steps_with_a_number_that_is_not_finite, *given),
        (notices, str(policy)),
        (after_a_checkpoint, *given, str(tmp_path_factory.mktemp("checkpoint"))),
    ]
    results = on_ranks(1, each, calls)
    return {function.__name__: result for (function, *_), result in zip(calls, results, strict=True)}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def rows(policy):
    return make_rows(policy, 9, masked=(4,), drift=0.4)


def test_observing_leaves_no_trace(found):
    found = found["differences_after_observing"]
    assert found["counted"] > 20 and found["repeatable"]
    assert found["random numbers"]
    assert found["gradients"] == found["weights"] == found["keys"] == []
    assert found["engine mode"] is None
    # The statistics themselves, and nothing of the size of a mini-batch.
    assert found["memory"] <= found["own bytes"] + 64
    # Loaded and offloaded as verl does around its own forward passes.
    assert found["moves of an observation"] == found["moves of verl's own mode"] == 2
    assert found["last move"] == "cpu"


def test_a_skipped_step_is_not_remembered(found):
    first, second, skipped, third = found["after_an_infinite_gradient"]
    assert [state[0] for state in (first, second, skipped, third)] == [1, 2, 2, 3]
    assert not torch.isfinite(torch.tensor(skipped[3])) and torch.isfinite(torch.tensor(second[3]))
    assert torch.equal(second[1], skipped[1]) and not torch.equal(first[1], second[1])
    assert torch.isfinite(third[1]).all() and not torch.equal(skipped[1], third[1])
    assert all(torch.equal(second[2][name], skipped[2][name]) for name in second[2])
    assert any(not torch.equal(third[2][name], skipped[2][name]) for name in third[2])


def test_whatever_is_not_finite_skips_the_step_of_every_method(found):
    found = found["steps_with_a_number_that_is_not_finite"]
    assert len(found) == 6 * len(BUILT_IN)
    assert {key: result for key, result in found.items() if result != (False, [], 0)} == {}


def test_one_update_per_rollout_batch_is_said_once(found):
    (after_one, after_two), heard = found["notices"]
    assert after_one == after_two == 1
    assert "one update per rollout batch" in heard[0] and "ppo_mini_batch_size" in heard[0]


def test_a_checkpoint_without_a_state_needs_a_word(found):
    found = found["after_a_checkpoint"]
    assert found["whole"] == 1
    assert "is cut short or not a state of this plugin" in found["cut short"]
    for broken in ("cut short", "missing"):
        assert "To start the bounds afresh: clipx.missing_state=fresh" in found[broken]
        assert found[f"{broken}, fresh"] == 0
