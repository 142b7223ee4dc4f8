"""What the plugin leaves behind in verl's engine (FSDP2, one rank, without Ray): nothing but the bounds. Covers: an
observation's traces; a step that is not finite; a checkpoint that goes on under verl's own loss; +clipx=observe under
several of verl's losses; verl's Tinker worker; fused kernels. Not covered: every method's steps that are not finite, a
checkpoint without a state, rejected tokens, when an extra pass is made (tests/training/worker,
tests/run/test_schedule.py); memory of an accelerator, packing, sequence parallelism.
"""

import contextlib
import gc
import traceback
from functools import partial
from pathlib import Path

import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.utils.losses import ppo_loss

from tests.training.cpu.policy import random_policy, save_checkpoint
from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.training.worker.step import OptimizerStep, RolloutBatch

from .training_ranks import actor_config, build_worker, make_policy, make_rows, mini_batch, on_ranks

pytestmark = pytest.mark.end_to_end

ACTOR = "actor_rollout_ref.actor"
POLICY_LOSS = f"{ACTOR}.policy_loss"
ACPO = ("+clipx=acpo", "clipx.alpha=0.5")
LAGGED = (*ACPO, "clipx.scope=lagged")
# verl's losses, and what makes gspo clip and clip_cov draw random numbers for these rows.
OBSERVED_LOSSES = {
    "vanilla": (),
    "gspo": (f"{ACTOR}.clip_ratio_low=0.01", f"{ACTOR}.clip_ratio_high=0.01"),
    "clip_cov": (f"{POLICY_LOSS}.clip_cov_lb=0.01", f"{POLICY_LOSS}.clip_cov_ratio=0.2"),
}


def prepare(worker, rows, overrides):
    """Sets the loss and returns a mini-batch of all rows in micro-batches of three."""
    worker.set_loss_fn(partial(ppo_loss, config=actor_config(overrides)))
    for observer in [*worker.observers]:
        # The receipt: the rows' old log-probabilities are made up, and not recomputed as the line says.
        worker.observers.remove(observer)
    data = mini_batch(rows, sequences=len(rows))
    tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=3)
    return data


def bytes_of_tensors():
    """Bytes of every live tensor's storage."""
    gc.collect()
    storages = {}
    for candidate in gc.get_objects():
        with contextlib.suppress(Exception):
            if isinstance(candidate, torch.Tensor):
                storage = candidate.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def weights(worker):
    return {name: value.full_tensor().clone() for name, value in worker.engine.module.named_parameters()}


def differing(weights, others):
    return [name for name, value in weights.items() if not torch.equal(value, others[name])]


def make_restore(worker):
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


def refusal(call, *arguments):
    """What a call is refused with, or nothing."""
    try:
        call(*arguments)
    except RuntimeError as error:
        return str(error)
    return ""


def check_observing_leaves_no_trace(policy, rows, _):
    worker = build_worker(policy)
    engine = worker.engine
    data = prepare(worker, rows, ACPO)
    # The first observation fills caches of PyTorch and verl.
    step = OptimizerStep(decided_from=DecidedFrom.MINI_BATCH)
    observation = worker.extra_pass(data, step, [])["statistics"]
    moves = []
    engine.to = lambda **arguments: moves.append(str(arguments["device"]))
    engine._is_offload_param = True
    keys = sorted(data.keys())
    weights_before = weights(worker)
    engine.module.train()
    torch.manual_seed(5)
    generator = torch.get_rng_state()
    memory = bytes_of_tensors()
    again = worker.extra_pass(data, step, [])["statistics"]
    assert torch.equal(generator, torch.get_rng_state())
    # The statistics themselves, and nothing of the size of a mini-batch: 64 bytes are a few numbers.
    assert bytes_of_tensors() - memory <= again.untyped_storage().nbytes() + 64
    # ACPO's statistics begin with the number of tokens in each of its bins.
    tokens_per_bin = observation[: worker.policy_loss.clipx.method.bins]
    assert float(tokens_per_bin.sum()) > 20
    assert torch.equal(observation, again)
    moves_of_extra_pass = len(moves)
    with engine.eval_mode():
        pass
    moves_of_verl = len(moves) - moves_of_extra_pass
    # Loaded and offloaded as verl does around its own forward passes.
    assert moves_of_extra_pass == moves_of_verl == 2 and moves[-1] == "cpu" and engine.mode is None
    assert all(value.grad is None for value in engine.module.parameters())
    assert differing(weights(worker), weights_before) == [] and sorted(data.keys()) == keys


def check_a_skipped_step_is_not_remembered(policy, rows, _):
    worker = build_worker(policy)
    state = None
    steps, skipped, statistics, weights_after = [], [], [], []
    for has_infinite_advantage in (False, False, True, False):
        data = prepare(worker, rows, LAGGED)
        # One worker keeps one state through a run; set_loss_fn makes a new one.
        state = state or worker.state
        worker.state = state
        if has_infinite_advantage:
            data["advantages"].values()[0] = torch.inf
        worker.batch = RolloutBatch()
        worker.train_batch(data)
        if state.waiting is not None:
            state.keep_waiting(worker._all_reduce(state.waiting.of_this_rank))
        steps.append(state.step)
        skipped.append(worker.batch.skipped)
        statistics.append(state.statistics["update_0"].clone())
        weights_after.append(weights(worker))
    assert steps == [1, 2, 2, 3]
    assert skipped == [0, 0, 1, 0]
    first, second, after_skipped, last = statistics
    assert torch.equal(second, after_skipped) and not torch.equal(first, second)
    assert last.isfinite().all() and not torch.equal(after_skipped, last)
    assert differing(weights_after[1], weights_after[2]) == []
    assert differing(weights_after[3], weights_after[2]) != []


def check_a_checkpoint_of_acpo_goes_on_under_verls_own_loss(policy, rows, folder):
    actor = str(folder / "global_step_7" / "actor")
    worker = build_worker(policy)
    worker.train_batch(prepare(worker, rows, ACPO))
    trained = weights(worker)
    worker.save_checkpoint(actor, global_step=7)
    assert (folder / "global_step_7/actor/clipx_state.json").exists()
    # Workers that never had the plugin's loss: what they do does not depend on the plugin's file.
    after = []
    for _ in range(2):
        resumed = build_worker(policy)
        data = prepare(resumed, rows, ())
        resumed.load_checkpoint(actor)
        assert resumed.policy_loss is None and differing(weights(resumed), trained) == []
        assert own_metrics(resumed.train_batch(data)) == {}
        after.append(weights(resumed))
        (folder / "global_step_7/actor/clipx_state.json").unlink(missing_ok=True)
    assert differing(*after) == [] and differing(after[0], trained)


def check_observe_changes_no_bit_of_the_weights_after_an_update(policy, rows, _):
    worker = build_worker(policy)
    before = weights(worker)
    restore = make_restore(worker)
    for loss_mode, needed in OBSERVED_LOSSES.items():
        outcomes = []
        for group in ((), ("+clipx=observe",)):
            restore()
            overrides = (*group, f"{POLICY_LOSS}.loss_mode={loss_mode}", *needed, f"{ACTOR}.entropy_coeff=0.01")
            data = prepare(worker, rows, overrides)
            tu.assign_non_tensor(data, mini_batch_size=len(rows), epochs=1, calculate_entropy=True)
            torch.manual_seed(7)
            output = worker.train_mini_batch(data)
            outcomes.append((weights(worker), tu.get(output, "metrics"), torch.rand(1)))
        (plain_weights, plain, plain_random), (observed_weights, observed, observed_random) = outcomes
        assert differing(before, plain_weights) != [] == differing(plain_weights, observed_weights), loss_mode
        assert torch.equal(plain_random, observed_random), loss_mode
        # What is left out is about time and memory.
        kept = {key for key in plain if not key.startswith("perf/") and key != "mfu"}
        assert {key: observed[key] for key in kept} == {key: plain[key] for key in kept}, loss_mode
        added = observed.keys() - plain.keys()
        assert {"clipx/ratio_mean", "clipx/clip_fraction_low", "clipx/gradient_mass/M"} <= added
        assert 0 < observed["clipx/effective_sample_size"][0] < 1 and observed["clipx/clip_fraction"][0] > 0
        assert not [key for key in added if key.startswith("clipx_sum/")]


def check_verls_tinker_worker_gets_fixed_bounds_with_exact_metrics_and_stops_for_the_rest(policy, rows, _):
    from verl.workers.engine_workers_tinker import TinkerTrainingWorker

    worker = build_worker(policy, TinkerTrainingWorker)
    before = weights(worker)
    restore = make_restore(worker)

    def train_in_calls(data):
        worker.optimizer_zero_grad()
        output = worker.forward_backward(data)
        worker.optimizer_step()
        return output

    restore()
    metrics_of_batch = own_metrics(worker.train_batch(prepare(worker, rows, ("+clipx=grpo",))))
    weights_of_batch = weights(worker)
    restore()
    metrics_of_calls = own_metrics(train_in_calls(prepare(worker, rows, ("+clipx=grpo",))))
    weights_of_calls = weights(worker)
    assert differing(before, weights_of_calls) != []
    assert differing(weights_of_batch, weights_of_calls) == []
    assert metrics_of_batch == metrics_of_calls and metrics_of_calls["clipx/ratio_mean"] > 0
    message = refusal(worker.forward_backward, prepare(worker, rows, ACPO))
    assert "clipx.scope=mini_batch" in message and "Tinker" in message, message
    message = refusal(worker.train_batch, prepare(worker, rows, ("+clipx=grpo", "+clipx/update=lopti")))
    assert "+clipx/update=lopti" in message, message


def check_verls_fused_kernels_fail_where_fsdp2_shards_the_output_embedding_by_itself(policy, rows, folder):
    """The last in its process: verl replaces the forward pass of transformers' model."""
    fused = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}, "use_remove_padding": True}
    policies = [save_checkpoint(folder / str(tied), random_policy(tied=tied)) for tied in (True, False)]
    # Drawn before that.
    files = [make_rows(policy, 3, masked=(), drift=0.4) for policy in policies]
    for tied, policy, file in zip((True, False), policies, files, strict=True):
        engine = (f"{ACTOR}.strategy=fsdp2", "actor_rollout_ref.model.use_fused_kernels=True")
        worker, loaded = build_worker(policy, engine=engine, **fused), torch.load(file, weights_only=False)
        data = mini_batch(loaded, sequences=len(loaded))
        tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=3, compute_loss=False)
        tu.assign_non_tensor(data, calculate_entropy=False)
        if tied:
            assert worker.infer_batch(data)["log_probs"].values().isfinite().all()
            continue
        with pytest.raises(RuntimeError, match=r"aten\.mm\.default got mixed torch\.Tensor and DTensor") as failure:
            worker.infer_batch(data)
        place, *_ = [entry for entry in traceback.extract_tb(failure.tb) if "vocab" in entry.line]
        assert place.filename.endswith("torch_functional.py")
        assert place.line == "logits = (hidden_states @ vocab_weights.t()) / temperature"


CHECKS = [check for name, check in globals().items() if name.startswith("check_")]


def run_checks(_rank: int, _world: int, folder: Path) -> dict[str, str]:
    """Run all checks, and return the traceback of each that fails, by the check's name.

    They share a process, because starting one takes longer than the checks do. `on_ranks` calls this.
    """
    policy = make_policy(folder / "policy")
    failures = {}
    # Enough drift that verl's losses clip some tokens; one of the sequences has no token that counts.
    rows = torch.load(make_rows(policy, 9, masked=(4,), drift=0.4), weights_only=False)
    for check in CHECKS:
        try:
            check(policy, rows, folder)
        # pytest.raises fails with an exception of the second kind, which is not an Exception.
        except (Exception, pytest.fail.Exception):
            failures[check.__name__] = traceback.format_exc()
    return failures


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    return on_ranks(1, run_checks, tmp_path_factory.mktemp("engine"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_a_check_in_verls_engine_holds(failures, check):
    assert check.__name__ not in failures, failures[check.__name__]
