"""The policy loss as verl calls it: keyword arguments, ActorConfig, aggregation, metrics, host syncs, peak memory. Not
covered: the weights and agreement with verl's own losses (tests/losses/methods), the worker (test_training_worker.py),
memory of compiled losses (docs/dev/measurements.md).
"""

import itertools
from functools import cache

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.utils.losses import ppo_loss

from tests.composition import built_once
from tests.golden.runs import registered_loss
from tests.host_syncs import counted_host_syncs
from tests.jagged import micro_batch
from verl_clipx.losses.contract.contract import example
from verl_clipx.losses.methods import BUILT_IN
from verl_clipx.training.worker.step import MicroBatch, in_micro_batch

ACTOR = "actor_rollout_ref.actor"
LOG_PROBS_RETURNED = "actor_rollout_ref.rollout.calculate_log_probs=true"


def asked_for(config):
    """What the method asks for besides the fixture's tensors."""
    return {name: example()[name] for name in config.policy_loss.clipx.method.asks_for}


def call(name, config, tensors, **changes):
    """verl's call of a registered policy loss; returns loss, gradient and metrics."""
    arguments = {**tensors, "loss_agg_mode": config.loss_agg_mode, **changes}
    arguments["log_prob"] = arguments["log_prob"].clone().requires_grad_(True)
    loss, metrics = get_policy_loss_fn(name)(
        config=config, rollout_is_weights=arguments.pop("weights", None), **arguments
    )
    loss.backward()
    return loss.detach(), arguments["log_prob"].grad, metrics


@pytest.mark.parametrize("method", [*BUILT_IN, None])
def test_one_host_sync_per_micro_batch(actor, tensors, method):
    if method is None:
        config = actor()
        name = "vanilla"
        asked = {}
    else:
        config = actor(f"+clipx={method}")
        name = f"clipx_{method}"
        asked = asked_for(config)
    config.global_batch_info.update(dp_size=1, batch_num_tokens=25, global_batch_size=5, loss_scale_factor=None)
    with counted_host_syncs() as counter:
        call(name, config, tensors, **asked)
    assert counter.count == (3 if method is None else 1), counter.calls


def test_without_a_group_verls_own_bounds_apply_and_unknown_keywords_are_ignored(actor, tensors):
    keys = ("clip_ratio_low=0.1", "clip_ratio_high=0.3", "clip_ratio_c=4", "policy_loss.loss_mode=clipx_grpo")
    config = actor(*(f"{ACTOR}.{key}" for key in keys))
    loss, gradient, _ = call("clipx_grpo", config, tensors, an_argument_of_a_later_verl=1)
    expected_loss, expected_gradient, _ = call("vanilla", config, tensors)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("group", ["grpo", "acpo"])
def test_verls_ppo_loss_in_somebody_elses_worker_stops(actor, monkeypatch, group):
    data, output = micro_batch(example(), [0, 1])
    # Outside a distributed process it is a bare function, whoever calls it.
    ppo_loss(actor(f"+clipx={group}"), output, data)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match=rf"clipx_{group} .*set_loss_fn.*scope.*TrainingWorker"):
        ppo_loss(actor(f"+clipx={group}"), output, data)


@pytest.mark.parametrize(
    ("overrides", "called_method", "message"),
    [
        (["+clipx=grpo", "+clipx/update=lopti"], "grpo", r"clipx\.update: .*worker"),
        (["+clipx=bapo", "clipx.weight=rollout", "clipx.target=1"], "bapo", "needs rollout_log_prob: .*calculate_log"),
        (["+clipx=m2po"], "m2po", "clipx_m2po needs rollout_log_prob"),
        (["+clipx=grpo", "+clipx/mask=opsm", "clipx.mask.delta=0.01"], "grpo", "needs rollout_log_prob"),
        (["+clipx=acpo"], "bapo", r"loss_mode=clipx_bapo: contradicts clipx\.method=acpo"),
        (["+clipx=grpo", "+clipx/select=high_entropy"], "grpo", r"clipx\.select needs entropy: .*pass entropy="),
    ],
)
def test_what_a_bare_call_cannot_do_is_refused(actor, tensors, overrides, called_method, message):
    config = actor(*overrides, LOG_PROBS_RETURNED)
    with pytest.raises(ValueError, match=message):
        call(f"clipx_{called_method}", config, tensors)


def test_the_sum_norm_aggregation_needs_its_constant(actor, tensors):
    with pytest.raises(ValueError, match="loss_scale_factor"):
        call("clipx_grpo", actor("+clipx=grpo"), tensors, loss_agg_mode="seq-mean-token-sum-norm")


# Methods, and overrides of a selection.
SELECTIONS = [
    *((method, ("+clipx/select=high_entropy",)) for method in BUILT_IN),
    ("grpo", ("+clipx/select=low_entropy",)),
    ("grpo", ("+clipx/select=high_entropy", "clipx.select.over=mini_batch")),
    ("cispo", ("+clipx/select=low_entropy", "clipx.select.over=mini_batch", "clipx.select.normaliser=all")),
    # Without statistics, there is one graph to make.
    ("grpo", ("+clipx/select=high_entropy", "clipx.compile=true")),
    pytest.param("acpo", ("+clipx/select=high_entropy", "clipx.compile=true"), marks=pytest.mark.matrix),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "selection"), SELECTIONS)
def test_whatever_is_not_finite_makes_verl_skip_the_step_under_modifiers_too(actor, tensors, method, selection):
    config = actor(f"+clipx={method}", "+clipx/shaping=advantage_reweighting", *selection)
    mask = tensors["response_mask"]
    generator = torch.Generator().manual_seed(0)
    entropy = torch.rand(mask.shape, generator=generator)
    weights = torch.rand(mask.shape, generator=generator)
    finite = {**tensors, **asked_for(config), "entropy": entropy, "weights": weights}
    finite = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in finite.items()}
    selected = config.policy_loss.clipx.select.selected(entropy, mask)
    place_kept = tuple(selected.nonzero()[0].tolist())
    place_dropped = tuple((mask & ~selected).nonzero()[0].tolist())
    names = [name for name, tensor in finite.items() if tensor.is_floating_point()]
    assert {"log_prob", "old_log_prob", "advantages", "entropy", "weights"} <= {*names}
    for value in (torch.nan, torch.inf, -torch.inf):
        outside_mask = {name: finite[name].masked_fill(~mask, value) for name in names}
        loss, gradient, _ = call(f"clipx_{method}", config, finite | outside_mask)
        assert loss.isfinite() and gradient.isfinite().all()
        # And without any token in the mask.
        everywhere = dict.fromkeys(names, torch.full(mask.shape, value))
        _, gradient, _ = call(f"clipx_{method}", config, finite | everywhere | {"response_mask": mask & False})
        assert not gradient.any()
        for name, place in itertools.product(names, (place_kept, place_dropped)):
            tensor = finite[name].clone()
            tensor[place] = value
            arguments = finite | {name: tensor}
            # In half precision too, which a gradient could be cut off to.
            for dtype in (torch.float32, torch.bfloat16):
                arguments["log_prob"] = arguments["log_prob"].to(dtype)
                loss, gradient, _ = call(f"clipx_{method}", config, arguments)
                assert not loss.isfinite() and not gradient[place].isfinite(), (name, value, place, dtype)


# Wide enough that what is kept of a sequence weighs nothing.
SHAPE = 16, 2048


@cache
def peak_memory(*overrides: str) -> int:
    """Most bytes that a loss and its backward pass hold at a time, by torch's own record."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(SHAPE, generator=generator) * 4
    inputs = {
        "old_log_prob": old,
        "log_prob": old + 0.3 * torch.randn(SHAPE, generator=generator),
        "advantages": torch.randn(SHAPE[0], 1, generator=generator).expand(SHAPE).contiguous(),
    }
    lengths = torch.randint(SHAPE[1] // 4, SHAPE[1] + 1, (SHAPE[0], 1), generator=generator)
    inputs["response_mask"] = torch.arange(SHAPE[1]) < lengths
    config = built_once(overrides)
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded,
        in_micro_batch(MicroBatch(rollout_log_prob=old)),
    ):
        registered_loss(config, inputs)
    held = most = 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        held += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, held)
    return most


@pytest.mark.parametrize("method", BUILT_IN)
def test_no_loss_takes_more_memory_than_vanilla(method):
    vanilla = peak_memory()
    # BAPO keeps the place of each token among its candidates, CTPO and CPPO each token's bounds, KPop two divergences.
    allowed = {"bapo": 1.05, "ctpo": 1.2, "cppo": 1.1, "kpop": 1.15}.get(method, 1) * vanilla
    assert 0.5 * vanilla < peak_memory(f"+clipx={method}", LOG_PROBS_RETURNED, "clipx.compile=false") <= allowed
