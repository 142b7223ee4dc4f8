"""What the plugin leaves behind in verl's engine, on one rank: nothing but the bounds.

Covers, with the real training worker and FSDP2 engine: observing changes neither random numbers, weights, gradients,
engine mode, offload state, data nor memory; a step whose gradient is not finite is not remembered, and an advantage or
old log-probability that is not finite makes it one, in every method; a checkpoint whose state of the bounds is cut
short or missing stops with an error, or starts afresh when asked to; +clipx=observe leaves every weight after an update
to the last bit what it is without the plugin's node, under several of verl's losses; what is counted where tokens are
rejected; verl's Tinker worker, which steps by itself, gets fixed bounds and exact metrics, and stops where the
mini-batch is needed; where the configuration gives a rollout batch one update, no extra pass is made; that verl's fused
kernels fail with untied embeddings. Not covered: memory of an accelerator, packing and sequence parallelism.
"""

import contextlib
import gc
import itertools
import traceback
from functools import partial
from pathlib import Path

import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.utils.losses import ppo_loss

from tests.cpu.policy import random_policy, save_checkpoint
from verl_clipx.common.decided_from import DecidedFrom
from verl_clipx.methods import BUILT_IN
from verl_clipx.worker.step import OptimizerStep, RolloutBatch

from .method_checks import FRACTIONS
from .training_ranks import actor_config, build_worker, make_policy, make_rows, mini_batch, on_ranks

pytestmark = pytest.mark.end_to_end

ACTOR = "actor_rollout_ref.actor"
POLICY_LOSS = f"{ACTOR}.policy_loss"
ACPO = ("+clipx=acpo", "clipx.alpha=0.5")
LAGGED = (*ACPO, "clipx.scope=lagged")
# Of the whole run, so that each rollout batch gets one update.
ONE_UPDATE = (*ACPO, "actor_rollout_ref.actor.ppo_mini_batch_size=8")


def prepared(worker, rows, overrides):
    """Sets the loss and returns a mini-batch of all rows in micro-batches of three."""
    worker.set_loss_fn(partial(ppo_loss, config=actor_config(overrides)))
    for observer in worker.observers:
        # The receipt: the rows' old log-probabilities are made up, and not recomputed as the line says.
        observer.open = False
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


def differing(weights, others):
    return [name for name, value in weights.items() if not torch.equal(value, others[name])]


def restorer(worker):
    """A function that gives the worker the weights that it has now, and an optimizer without a memory."""
    originals = {name: value.detach().clone() for name, value in worker.engine.module.named_parameters()}

    def restore():
        with torch.no_grad():
            for name, value in worker.engine.module.named_parameters():
                value.copy_(originals[name])
        worker.engine.optimizer.state.clear()

    return restore


def own_metrics(output):
    """The plugin's metrics of an update, over all ranks."""
    metrics = tu.get(output, "metrics")
    return {key: Metric.aggregate_dp(value) for key, value in metrics.items() if key.startswith("clipx/")}


def differences_after_observing(rank, world, policy, rows):
    """What an observation changed."""
    worker = build_worker(Path(policy))
    data = prepared(worker, torch.load(rows, weights_only=False), ACPO)
    engine = worker.engine
    # The first observation fills caches of PyTorch and verl.
    step = OptimizerStep(decided_from=DecidedFrom.MINI_BATCH)
    observation = worker.extra_pass(data, step, [])["statistics"]
    moves = []
    engine.to = lambda **arguments: moves.append(arguments)
    engine._is_offload_param = True
    keys, weights_before = sorted(data.keys()), weights(worker)
    engine.module.train()
    torch.manual_seed(5)
    generator, memory = torch.get_rng_state(), bytes_of_tensors()
    again = worker.extra_pass(data, step, [])["statistics"]
    equal_generator = torch.equal(generator, torch.get_rng_state())
    kept_memory = bytes_of_tensors() - memory
    ours = len(moves)
    with engine.eval_mode():
        pass
    engine._is_offload_param = False
    del engine.to
    return {
        "counted": float(observation[:5].sum()),
        "repeatable": torch.equal(observation, again),
        "random numbers": equal_generator,
        "memory": kept_memory,
        "own bytes": again.untyped_storage().nbytes(),
        "gradients": [name for name, value in engine.module.named_parameters() if value.grad is not None],
        "weights": differing(weights(worker), weights_before),
        "keys": sorted(set(data.keys()) ^ set(keys)),
        "engine mode": engine.mode,
        "moves of an observation": ours,
        "moves of verl's own mode": len(moves) - ours,
        "last move": str(moves[-1]["device"]),
    }


def after_an_infinite_gradient(rank, world, policy, rows):
    """Two ordinary steps, one with an infinite advantage, one ordinary again: state, weights and skips after each."""
    worker = build_worker(Path(policy))
    loaded = torch.load(rows, weights_only=False)
    found = []
    state = None
    for broken in (False, False, True, False):
        data = prepared(worker, loaded, LAGGED)
        # One worker keeps one state through a run; set_loss_fn makes a new one.
        state = worker.state = state or worker.state
        if broken:
            data["advantages"].values()[0] = torch.inf
        worker.batch = RolloutBatch()
        worker.train_batch(data)
        if state.waiting is not None:
            state.remember(worker._all_reduce(state.waiting[1]), average=0.0)
        found.append((state.step, state.statistics["update_0"].clone(), weights(worker), worker.batch.skipped))
    return found


def steps_with_a_number_that_is_not_finite(rank, world, policy, rows):
    """Of every method, with the kinds of input in turn: the skipped updates, the weights that moved, the state's steps.

    Every method with every kind is in tests/worker/test_policy_loss.py, without an engine.
    """

    worker = build_worker(Path(policy))
    loaded = torch.load(rows, weights_only=False)
    found = {}
    kinds = itertools.product(("advantages", "old_log_probs"), (torch.nan, torch.inf, -torch.inf))
    for name, (field, value) in zip(BUILT_IN, itertools.cycle(kinds), strict=False):
        data = prepared(worker, loaded, (f"+clipx={name}", "actor_rollout_ref.rollout.calculate_log_probs=true"))
        data[field].values()[0] = value
        before, worker.batch = weights(worker), RolloutBatch()
        worker.train_batch(data)
        found[name, field, str(value)] = (worker.batch.skipped, differing(weights(worker), before), worker.state.step)
    return found


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
        return worker.state.step

    fresh = "clipx.missing_state=fresh"
    return {
        "whole": load(whole),
        "cut short": load(whole[:100]),
        "missing": load(None),
        "cut short, fresh": load(whole[:100], fresh),
        "missing, fresh": load(None, fresh),
    }


# verl's losses, and what makes gspo clip and clip_cov draw random numbers for these rows.
OBSERVED = {
    "vanilla": (),
    "gspo": (f"{ACTOR}.clip_ratio_low=0.01", f"{ACTOR}.clip_ratio_high=0.01"),
    "clip_cov": (f"{POLICY_LOSS}.clip_cov_lb=0.01", f"{POLICY_LOSS}.clip_cov_ratio=0.2"),
}


def updates_with_and_without_observe(rank, world, policy, rows):
    """By loss: the weights before an update, and weights and metrics after one without and one with +clipx=observe."""
    loaded = torch.load(rows, weights_only=False)
    worker = build_worker(Path(policy))
    before, found, restore = weights(worker), {}, restorer(worker)
    for loss_mode, needed in OBSERVED.items():
        found[loss_mode] = [before]
        for group in ((), ("+clipx=observe",)):
            restore()
            overrides = (*group, f"{POLICY_LOSS}.loss_mode={loss_mode}", *needed, f"{ACTOR}.entropy_coeff=0.01")
            data = prepared(worker, loaded, overrides)
            tu.assign_non_tensor(data, mini_batch_size=len(loaded), epochs=1, calculate_entropy=True)
            torch.manual_seed(7)
            output = worker.train_mini_batch(data)
            found[loss_mode].append((weights(worker), tu.get(output, "metrics"), torch.rand(1)))
    return found


def observed_under_rejection(rank, world, policy, rows):
    """Metrics of +clipx=observe and of the same loss of the plugin's, two sequences of the mini-batch rejected."""
    worker, found = build_worker(Path(policy)), []
    for group in ("observe", "grpo"):
        correction = "algorithm.rollout_correction.rollout_rs"
        rejection = (f"{correction}=token_k1", f"{correction}_threshold=0.98_1.02")
        overrides = (f"+clipx={group}", "clipx.metrics=all", *rejection)
        data = prepared(worker, torch.load(rows, weights_only=False), overrides)
        for sequence in data["response_mask"].unbind()[:2]:
            sequence.zero_()
        worker.engine.optimizer_step = lambda: 1.0
        found.append(own_metrics(worker.train_batch(data)))
    return found


def tinker_s_update(rank, world, policy, rows):
    """An update by verl's Tinker worker and by train_batch: weights and metrics; and what mini_batch and Lopti say."""
    from verl.workers.engine_workers_tinker import TinkerTrainingWorker

    loaded = torch.load(rows, weights_only=False)
    worker = build_worker(Path(policy), TinkerTrainingWorker)
    before, restore = weights(worker), restorer(worker)

    def update(step):
        restore()
        metrics = own_metrics(step(prepared(worker, loaded, ("+clipx=grpo",))))
        return weights(worker), metrics

    def split(data):
        worker.optimizer_zero_grad()
        output = worker.forward_backward(data)
        worker.optimizer_step()
        return output

    def refusal(call, *overrides):
        data = prepared(worker, loaded, overrides)
        try:
            call(data)
        except RuntimeError as error:
            return str(error)

    return {
        "before": before,
        "train_batch": update(worker.train_batch),
        "split": update(split),
        "mini_batch": refusal(worker.forward_backward, *ACPO),
        "lopti": refusal(worker.train_batch, "+clipx=grpo", "+clipx/update=lopti"),
    }


def first_updates(rank, world, policy, rows):
    """The first update's forwards and largest epsilon with one and two updates; the last's with more than announced."""
    loaded = torch.load(rows, weights_only=False)
    worker = build_worker(Path(policy))
    engine, found = worker.engine, {}
    original, forwards = engine.forward_step, []
    engine.forward_step = lambda *args, **kwargs: (forwards.append(1), original(*args, **kwargs))[1]
    # The receipt would stop a run that makes other updates than its line says.
    announced = (*ONE_UPDATE, "clipx.receipt=off")
    for updates, prompts in (("one", 8), ("two", 16)):
        data = prepared(worker, loaded, (*announced, f"data.train_batch_size={prompts}"))
        tu.assign_non_tensor(data, mini_batch_size=len(loaded), epochs=1)
        forwards.clear()
        metrics = tu.get(worker.train_mini_batch(data), "metrics")
        found[updates] = len(forwards), max(metrics[f"clipx/epsilon/bin_{k}"][0] for k in range(5))
    # As verl's v1 trainer does where an agent loop returns more rows, or the critic's mini-batch is larger.
    data = prepared(worker, loaded, (*announced, "data.train_batch_size=8"))
    tu.assign_non_tensor(data, mini_batch_size=len(loaded) // 3, epochs=1)
    metrics = tu.get(worker.train_mini_batch(data), "metrics")
    found["more than announced"] = max(metrics[f"clipx/epsilon_last/bin_{k}"][0] for k in range(5))
    return found


def fused_kernels(rank, world, folder):
    """verl's own log-probabilities by fused kernels, of tied and of untied embeddings, or where they fail."""
    found = {}
    engine = (f"{ACTOR}.strategy=fsdp2", "actor_rollout_ref.model.use_fused_kernels=True")
    fused = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}, "use_remove_padding": True}
    policies = [save_checkpoint(Path(folder) / str(tied), random_policy(tied=tied)) for tied in (True, False)]
    # Before verl replaces the forward pass of transformers' model; this function is the last in its process.
    rows = [make_rows(policy, 3, masked=(), drift=0.4) for policy in policies]
    for tied, policy, drawn in zip((True, False), policies, rows, strict=True):
        worker, loaded = build_worker(policy, engine=engine, **fused), torch.load(drawn, weights_only=False)
        data = mini_batch(loaded, sequences=len(loaded))
        tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=3, compute_loss=False)
        tu.assign_non_tensor(data, calculate_entropy=False)
        try:
            found[tied] = worker.infer_batch(data)["log_probs"].values()
        except RuntimeError as error:
            frames = traceback.extract_tb(error.__traceback__)
            of_verl = next(frame for frame in frames if "vocab" in frame.line)
            found[tied] = f"{Path(of_verl.filename).name}: {of_verl.line}: {error}"
    return found


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
        (after_a_checkpoint, *given, str(tmp_path_factory.mktemp("checkpoint"))),
        (updates_with_and_without_observe, *given),
        (observed_under_rejection, *given),
        (tinker_s_update, *given),
        (first_updates, *given),
        (fused_kernels, str(tmp_path_factory.mktemp("fused"))),
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
    assert [state[3] for state in (first, second, skipped, third)] == [0, 0, 1, 0]
    assert torch.equal(second[1], skipped[1]) and not torch.equal(first[1], second[1])
    assert torch.isfinite(third[1]).all() and not torch.equal(skipped[1], third[1])
    assert differing(second[2], skipped[2]) == [] != differing(third[2], skipped[2])


def test_whatever_is_not_finite_skips_the_step_of_every_method(found):
    found = found["steps_with_a_number_that_is_not_finite"]
    assert len(found) == len(BUILT_IN) and len({key[1:] for key in found}) == 6
    assert {key: result for key, result in found.items() if result != (1, [], 0)} == {}


def test_a_checkpoint_without_a_state_needs_a_word(found):
    found = found["after_a_checkpoint"]
    assert found["whole"] == 1
    assert "is cut short or not a state of this plugin" in found["cut short"]
    for broken in ("cut short", "missing"):
        assert "To start the bounds afresh, set clipx.missing_state=fresh" in found[broken]
        assert found[f"{broken}, fresh"] == 0


@pytest.mark.parametrize("loss_mode", OBSERVED)
def test_observe_changes_no_bit_of_the_weights_after_an_update(found, loss_mode):
    before, *both = found["updates_with_and_without_observe"][loss_mode]
    (plain_weights, plain_metrics, plain_random), (observed_weights, observed_metrics, observed_random) = both
    assert differing(before, plain_weights) != [] == differing(plain_weights, observed_weights)
    assert torch.equal(plain_random, observed_random)
    # What is left out is about time and memory.
    kept = {key for key in plain_metrics if not key.startswith("perf/") and key != "mfu"}
    assert {key: observed_metrics[key] for key in kept} == {key: plain_metrics[key] for key in kept}
    added = observed_metrics.keys() - plain_metrics.keys()
    assert {"clipx/ratio_mean", "clipx/clip_fraction_low", "clipx/gradient_mass/M"} <= added
    assert 0 < observed_metrics["clipx/effective_sample_size"][0] < 1
    assert not [key for key in added if key.startswith("clipx_sum/")]
    assert observed_metrics["clipx/clip_fraction"][0] > 0


def test_rejected_tokens_are_not_counted(found):
    observed, ours = found["observed_under_rejection"]
    regions = [f"clipx/{name}" for name in FRACTIONS.values()]
    for metrics in (observed, ours):
        # Of the loss that is PPO's, what it clips on either side is what lies there.
        assert sum(metrics[region] for region in regions) == pytest.approx(1, abs=1e-9)
    for key in (*regions, "clipx/ratio_mean", "clipx/gradient_mass/M"):
        assert observed[key] == pytest.approx(ours[key], rel=1e-6), key


def test_verls_tinker_worker_gets_fixed_bounds_with_exact_metrics_and_stops_for_the_rest(found):
    found = found["tinker_s_update"]
    (weights_of_batch, metrics_of_batch), (weights_of_split, metrics_of_split) = found["train_batch"], found["split"]
    assert differing(found["before"], weights_of_split) != [] == differing(weights_of_batch, weights_of_split)
    assert metrics_of_batch == metrics_of_split and metrics_of_split["clipx/ratio_mean"] > 0
    assert "clipx.scope=mini_batch" in found["mini_batch"] and "Tinker" in found["mini_batch"]
    assert "+clipx/update=lopti" in found["lopti"]


def test_verls_fused_kernels_fail_where_fsdp2_shards_the_output_embedding_by_itself(found):
    found = found["fused_kernels"]
    assert found[True].isfinite().all()
    line = "torch_functional.py: logits = (hidden_states @ vocab_weights.t()) / temperature"
    assert found[False].startswith(f"{line}: aten.mm.default got mixed torch.Tensor and DTensor")


def test_one_update_a_rollout_batch_is_at_ratio_1_by_the_configuration_and_others_are_observed(found):
    forwards, epsilon = found["first_updates"]["one"]
    assert forwards == 3 and epsilon == pytest.approx(0.2, rel=1e-9)
    forwards, epsilon = found["first_updates"]["two"]
    assert forwards == 6 and epsilon > 0.25
    assert found["first_updates"]["more than announced"] > 0.25
