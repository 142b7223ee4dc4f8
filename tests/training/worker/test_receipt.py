"""The receipt: the gradient that verl's loss really has on log_prob, against the announced one.

Through verl's own ppo_loss everything that is announced passes, and every planted fault (`PLANTED`) is found, or passes
where it is listed as invisible. Not covered: real engines (tests/end_to_end); the trainer's process without a receipt
(tests/training/trainer/test_receipt.py).
"""

import copy
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from verl.trainer.distillation import distillation_ppo_loss
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu
from verl.workers.config import DistillationConfig, DistillationLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from tests.composition import built_once
from tests.jagged import jagged, micro_batch
from tests.messages import assert_names
from tests.neighbours import neighbours
from tests.training.worker.updates import ROWS, Update, plan_with_extra_pass
from verl_clipx.losses.contract.contract import example
from verl_clipx.losses.methods import BUILT_IN
from verl_clipx.run.config import build
from verl_clipx.training.worker import policy_loss as policy_loss_module
from verl_clipx.training.worker import step as step_module
from verl_clipx.training.worker.checks import Check
from verl_clipx.training.worker.layout import TokenPass, pad_rows
from verl_clipx.training.worker.receipt import DECISION, INFINITE_DECISIONS, SETTINGS
from verl_clipx.training.worker.step import OptimizerStep, RolloutBatch, in_micro_batch

REPOSITORY = Path(__file__).parents[3]
ACTOR = "actor_rollout_ref.actor"
# Updates of a rollout batch by verl's own defaults.
ANNOUNCED_UPDATES = 4
THREE_MICRO_BATCHES = ([0, 3], [1, 4], [2, 5])

CORRECTION = "algorithm.rollout_correction"
LOG_PROBS_RETURNED = "actor_rollout_ref.rollout.calculate_log_probs=true"
# From a criterion of rejection to its threshold: those of verl's presets, and each level and estimator.
CRITERIA = {
    "seq_mean_k1": "0.999_1.001",
    "seq_mean_k3": "0.01",
    "seq_sum_k2": "0.5",
    "seq_max_k2": "0.1",
    "token_k1": "0.5_2",
    "token_k3": "0.05",
}


def rejection_overrides(criterion, *, bypass=True):
    """The overrides of a run that rejects tokens by a criterion: in the loss, or without bypass in verl's trainer."""
    return (
        LOG_PROBS_RETURNED,
        f"{CORRECTION}.bypass_mode={bypass}",
        f"{CORRECTION}.rollout_rs={criterion}",
        f"{CORRECTION}.rollout_rs_threshold='{CRITERIA[criterion]}'",
    )


def assert_receipt_holds(config):
    """Train two updates, and assert that the receipt says that they are as announced."""
    update = Update(config)
    update.run()
    update.run(largest_move=0.5)
    assert 0 <= update.end_rollout_batch(ANNOUNCED_UPDATES) < 1e-5
    method = config.policy_loss.clipx.method
    assert_names(
        str(update.receipt),
        "receipt",
        f"clipx_{method.name}",
        config.loss_agg_mode,
        "2 micro-batches",
        "2 updates",
    )


@pytest.mark.parametrize("method", BUILT_IN)
def test_the_receipt_of_every_method_holds(actor, few_probes, method):
    assert_receipt_holds(actor(f"+clipx={method}", LOG_PROBS_RETURNED))


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=[] if name in ("acpo", "grpo") else pytest.mark.matrix) for name in BUILT_IN],
)
def test_the_receipt_of_every_method_holds_at_every_probe(actor, method):
    assert_receipt_holds(actor(f"+clipx={method}", LOG_PROBS_RETURNED))


@pytest.mark.parametrize(
    ("method", "target", "value"),
    [("grpo", "clip_fraction", 0.1), ("ipo", "clip_fraction", 0.1), ("two_sided", "second_moment", 0.05)],
)
def test_the_receipt_holds_of_bounds_that_hold_a_target(actor, few_probes, method, target, value):
    overrides = (f"+clipx={method}", f"+clipx/hold={target}", f"clipx.hold.value={value}")
    assert_receipt_holds(actor(*overrides))
    train_after_extra_pass(actor(*overrides), noise=1e-6)


def make_step_of_lopti(name, rows=ROWS):
    """A step of one of Lopti's passes."""
    token_pass = TokenPass(name, 0.5, True)
    return OptimizerStep(token_pass, counted_tokens=float(token_pass.tokens(micro_batch(example(), rows)[0]).sum()))


LOPTI = ("+clipx=grpo", "+clipx/update=lopti")
KL_TERM = (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.5")
ENTROPY_BONUS = f"{ACTOR}.entropy_coeff=0.01"
TOKEN_WEIGHTS = (LOG_PROBS_RETURNED, f"{CORRECTION}.rollout_is=token")


ORIGINAL_LOSS = policy_loss_module.policy_loss


def with_changed_arguments(**changes):
    """Return ACPO's loss with some arguments changed, each by a function of all arguments."""

    def loss(**arguments):
        changed = {name: change(arguments) for name, change in changes.items()}
        return ORIGINAL_LOSS("acpo", **arguments | changed)

    return loss


def with_other_bounds(change):
    """Return ACPO's loss under other statistics and another decision, a function of the step's."""

    def loss(**arguments):
        step = policy_loss_module.current_micro_batch().step
        step.statistics, step.decision = change(step.statistics, step.decision)
        return ORIGINAL_LOSS("acpo", **arguments)

    return loss


def with_changed_value(change):
    """Return ACPO's loss with another value, a function of its value and of log_prob."""

    def loss(**arguments):
        value, metrics = ORIGINAL_LOSS("acpo", **arguments)
        return change(value, arguments["log_prob"]), metrics

    return loss


def with_factor(factor):
    """Return ACPO's loss multiplied by a factor."""
    return with_changed_value(lambda value, _: value * factor)


def with_normaliser(**changes):
    """Return ACPO's loss, aggregated over other numbers than those of the mini-batch."""

    def loss(**arguments):
        with mock.patch.dict(arguments["config"].global_batch_info, changes):
            return ORIGINAL_LOSS("acpo", **arguments)

    return loss


def compose_outside_a_worker(*overrides):
    """Return a configuration with the sizes of a mini-batch, which a worker would set."""
    config = copy.deepcopy(built_once(overrides))
    config.global_batch_info.update(dp_size=1, batch_num_tokens=30, global_batch_size=6)
    return config


def loss_of_another_method(registered):
    """Return another method's loss, with its defaults."""

    def loss(**arguments):
        with in_micro_batch(None):
            return ORIGINAL_LOSS(registered, **arguments | {"config": compose_outside_a_worker(f"+clipx={registered}")})

    return loss


def loss_of_verl(name):
    """Return the loss that is registered under a name when it is called."""

    def loss(**arguments):
        return core_algos.POLICY_LOSS_REGISTRY[name](**arguments)

    return loss


def with_gradient_only_where(keep):
    """Return ACPO's loss with a gradient only on some tokens, a mask made of the arguments."""

    def loss(**arguments):
        log_prob = arguments["log_prob"]
        arguments["log_prob"] = torch.where(keep(arguments), log_prob, log_prob.detach())
        return ORIGINAL_LOSS("acpo", **arguments)

    return loss


LOSSES = {
    "the sign": with_factor(-1.0),
    # At one token.
    "not a number": with_changed_value(lambda value, log_prob: value + log_prob[0, 0] * math.nan),
    "not a number and the sign": with_changed_value(lambda value, log_prob: log_prob[0, 0] * math.nan - value),
    "twice as much": with_factor(2.0),
    "one per cent more": with_factor(1.01),
    "nothing": with_factor(0.0),
    "no gradient": with_changed_value(lambda value, log_prob: value.detach() + 0 * log_prob.sum()),
    "the micro-batch's bounds": with_other_bounds(lambda statistics, decision: (None, None)),
    "half of epsilon": with_other_bounds(lambda statistics, decision: (statistics, decision * 0.5)),
    "no correction weights": with_changed_arguments(rollout_is_weights=lambda given: None),
    "squared correction weights": with_changed_arguments(
        rollout_is_weights=lambda given: given["rollout_is_weights"] ** 2
    ),
    "another aggregation": with_changed_arguments(loss_agg_mode=lambda given: "seq-mean-token-mean"),
    "a sum for a mean": with_changed_arguments(loss_agg_mode=lambda given: "token-sum"),
    "the micro-batch's number of tokens": with_normaliser(batch_num_tokens=12),
    "another number of ranks": with_normaliser(dp_size=2),
    "advantages without their sign": with_changed_arguments(advantages=lambda given: given["advantages"].abs()),
    "advantages of 1 and -1": with_changed_arguments(advantages=lambda given: given["advantages"].sign()),
    "normalised advantages": with_changed_arguments(
        advantages=lambda given: given["advantages"] - given["advantages"].mean()
    ),
    "only positive tokens": with_changed_arguments(advantages=lambda given: given["advantages"].clamp(min=0)),
    "only negative tokens": with_changed_arguments(advantages=lambda given: given["advantages"].clamp(max=0)),
    "clipped advantages": with_changed_arguments(advantages=lambda given: given["advantages"].clamp(-1, 1)),
    "advantages one token late": with_changed_arguments(advantages=lambda given: given["advantages"].roll(1, dims=1)),
    "another sequence's advantages": with_changed_arguments(advantages=lambda given: given["advantages"].flip(0)),
    "a ratio of 1": with_changed_arguments(old_log_prob=lambda given: given["log_prob"].detach()),
    "the ratio upside down": with_changed_arguments(
        old_log_prob=lambda given: 2 * given["log_prob"].detach() - given["old_log_prob"]
    ),
    "half of the log-ratio": with_changed_arguments(
        old_log_prob=lambda given: (given["log_prob"].detach() + given["old_log_prob"]) / 2
    ),
    "the sequence's ratio": with_changed_arguments(
        old_log_prob=lambda given: (
            given["log_prob"].detach() - (given["log_prob"].detach() - given["old_log_prob"]).mean(-1, True)
        )
    ),
    "a ratio of at most 2": with_changed_arguments(
        old_log_prob=lambda given: torch.maximum(given["old_log_prob"], given["log_prob"].detach() - math.log(2))
    ),
    "a sequence without gradient": with_gradient_only_where(
        lambda given: torch.arange(len(given["log_prob"]))[:, None] > 0
    ),
    "last tokens without gradient": with_gradient_only_where(
        lambda given: given["response_mask"].roll(-1, dims=1).bool()
    ),
    "verl's vanilla": loss_of_verl("vanilla"),
    "verl's gspo": loss_of_verl("gspo"),
    "verl's gpg": loss_of_verl("gpg"),
    "verl's cispo": loss_of_verl("cispo"),
    "clipx_grpo": loss_of_another_method("grpo"),
    "clipx_dgpo": loss_of_another_method("dgpo"),
    "clipx_cispo": loss_of_another_method("cispo"),
    "clipx_aspo": loss_of_another_method("aspo"),
}


def train_another_loss(loss, actor, monkeypatch, _):
    """Trains ACPO with another loss under its name."""
    config = actor("+clipx=acpo", *TOKEN_WEIGHTS)
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "clipx_acpo", loss)
    method = config.policy_loss.clipx.method
    statistics = torch.arange(method.statistics_size, dtype=torch.float64) + 5
    update = Update(config, OptimizerStep(statistics=statistics, decision=method.decide(statistics)))
    update.run(rollout_weight=0.25)


def with_finite_tokens_only(factor):
    """Return GRPO's loss of the tokens that are not NaN, multiplied by a factor."""

    def loss(**arguments):
        known = arguments["log_prob"].isfinite()
        arguments["log_prob"] = torch.where(known, arguments["log_prob"], arguments["old_log_prob"])
        value, metrics = ORIGINAL_LOSS("grpo", **arguments)
        return factor * value, metrics

    return loss


def train_with_a_nan_token(loss, actor, monkeypatch, _):
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "clipx_grpo", loss)
    Update(actor("+clipx=grpo")).run(nan_at=(1, 2))


# What is left of mask, log_prob and old_log_prob, given the right rejection.
REJECTIONS = {
    "a dropped rejection": lambda right, mask, new, old: mask.clone(),
    "everything rejected": lambda right, mask, new, old: torch.zeros_like(mask),
    "what should remain rejected": lambda right, mask, new, old: mask & ~right.remaining(mask, new, old),
    "a whole micro-batch rejected for one token": (
        lambda right, mask, new, old: mask & bool((right.remaining(mask, new, old) == mask).all())
    ),
    "a hundred times the divergence allowed": (
        lambda right, mask, new, old: right.remaining(mask, old + (new - old) / 100, old)
    ),
    "a divergence from another policy": lambda right, mask, new, old: right.remaining(mask, new, old - 1),
}


def train_with_another_rejection(wrong, actor, monkeypatch, criterion):
    right_rejection_of = policy_loss_module.rejection_of

    def wrong_rejection_of(policy_loss):
        right = right_rejection_of(policy_loss)

        def remaining(mask, new, old):
            return wrong(right, mask, new.detach(), old)

        return SimpleNamespace(remaining=remaining)

    monkeypatch.setattr(policy_loss_module, "rejection_of", wrong_rejection_of)
    Update(actor("+clipx=grpo", *rejection_overrides(criterion))).run()


def undo_rejection(data):
    """Leaves the data as verl's trainers would hand them on in decoupled mode, had they rejected nothing."""
    data["loss_mask"] = data["response_mask"].clone()
    distance = 0.03 * torch.arange(len(data["old_log_probs"].values()))
    rollout = data["old_log_probs"].values() - distance
    data["rollout_log_probs"] = torch.nested.nested_tensor_from_jagged(rollout, offsets=data["old_log_probs"].offsets())


def train_with(*overrides, make_step=None, rollout_batch=None, updates_made=None, loss_mode=None, **run):
    """Return a fault that trains one update.

    Args:
        overrides: of the run.
        make_step: returns the optimizer step; None: a step that knows nothing.
        rollout_batch: the one that is trained on; None: a new one.
        updates_made: how many were made when the rollout batch ends; None: it does not end.
        loss_mode: in place of the configuration's.
        run: as for `Update.run`.
    """

    def plant(actor, monkeypatch, variant):
        config = actor(*overrides)
        if loss_mode is not None:
            object.__setattr__(config.policy_loss, "loss_mode", loss_mode)
        step = None if make_step is None else make_step()
        update = Update(config, step, batch=rollout_batch)
        update.run(**run)
        return None if updates_made is None else update.end_rollout_batch(updates_made)

    return plant


MODIFIERS = {
    "shaping": ("+clipx/shaping=advantage_reweighting",),
    "pull": ("+clipx/pull=k2", "clipx.pull.coefficient=0.3"),
    "selection": ("+clipx/select=high_entropy",),
    "the other half selected": ("+clipx/select=high_entropy", "clipx.select.ratio=0.6"),
}


def train_without_modifier(name, actor, monkeypatch, _):
    trained_modifiers = MODIFIERS["selection"] if name == "the other half selected" else ()
    trained_config = compose_outside_a_worker("+clipx=grpo", *trained_modifiers)

    def loss(**arguments):
        return ORIGINAL_LOSS("grpo", **arguments | {"config": trained_config})

    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "clipx_grpo", loss)
    Update(actor("+clipx=grpo", *MODIFIERS[name])).run()


def train_after_extra_pass(config, split=([ROWS],), *, ranks=1, noise=0.0):
    """An update at ratio 1 whose bounds were decided by an extra pass, by some of the micro-batches and ranks."""
    batch = example()
    deviations = torch.randn(batch["mask"].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch["log_prob"] = batch["old_log_prob"] + noise * deviations
    step = plan_with_extra_pass(config, batch, split, all_reduce=lambda vector: vector * ranks)
    assert config.policy_loss.run.record.schedule.may_need_extra_pass and step.statistics is not None
    update = Update(config, step)
    update.run()
    return update


def bounds_of_tokens(number):
    """Return what the message must name of bounds from another number of tokens than the 25 of the mini-batch."""
    return "bounds", f"{number} tokens", "25", "trained on"


# What the extra pass saw instead of the mini-batch, and what the receipt's message must name.
WRONG_EXTRA_PASSES = {
    "as many tokens, farther from ratio 1": (dict(noise=0.2), ("bounds", "differ", "trained on")),
    "one micro-batch of four": (dict(split=([[1]],)), bounds_of_tokens("7")),
    "one of two ranks": (dict(ranks=0.5), bounds_of_tokens("12.5")),
    "two ranks counted twice": (dict(ranks=2), bounds_of_tokens("50")),
    "all but the micro-batch of one token": (dict(split=([[0, 1], [2, 3]],)), bounds_of_tokens("24")),
    "nothing": (dict(ranks=0), bounds_of_tokens("0")),
}


@pytest.mark.parametrize("method", [name for name in BUILT_IN if build(name).adaptive])
def test_the_weights_of_other_passes_may_differ_by_rounding(actor, few_probes, method):
    # The sums of M2PO move by half under rounding alone, its decision does not.
    train_after_extra_pass(actor(f"+clipx={method}", LOG_PROBS_RETURNED), noise=1e-6)


def train_after_wrong_extra_pass(arguments, actor, monkeypatch, _):
    train_after_extra_pass(actor("+clipx=acpo"), **arguments)


def begin_update_without_bounds(actor, monkeypatch, _):
    Update(actor("+clipx=acpo")).receipt.begin_update(OptimizerStep(), RolloutBatch())


def unnoticed_fault(changed_settings=None, **run):
    """Return a fault that changes the gradient, and that the receipt does not find.

    Args:
        changed_settings: of the configuration that verl's loss function has.
        run: as for `Update.run`.
    """

    def plant(actor, monkeypatch, _):
        faulty = Update(actor("+clipx=grpo", *KL_TERM))
        right = Update(actor("+clipx=grpo", *KL_TERM))
        for name, value in (changed_settings or {}).items():
            object.__setattr__(faulty.receipt.loss_fn.keywords["config"], name, value)
        assert not torch.allclose(faulty.run(**run), right.run())
        return faulty.end_rollout_batch(ANNOUNCED_UPDATES)

    return plant


def train_another_loss_from_the_second_rollout_batch_on(actor, monkeypatch, _):
    update = Update(actor("+clipx=acpo"))
    first_gradient = update.run()
    largest_difference = update.end_rollout_batch(ANNOUNCED_UPDATES)
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "clipx_acpo", with_factor(-1.0))
    assert not torch.allclose(update.run(), first_gradient)
    return largest_difference


def turn_sign_from_second_micro_batch_on(actor, monkeypatch, _):
    def turn_sign(data):
        monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "clipx_acpo", with_factor(-1.0))

    train_in_parts(change=turn_sign, changed_micro_batches={1})(actor, monkeypatch, _)


def count_own_tokens(data):
    """Gives a micro-batch its own number of tokens in place of the mini-batch's."""
    tu.assign_non_tensor(data, batch_num_tokens=int(pad_rows(data["response_mask"]).sum()))


def change_old_log_probs(change_row, micro_batches=None):
    """Return a fault that changes each row of old_log_probs in some micro-batches; None: in all."""

    def change(data):
        data["old_log_probs"] = jagged([change_row(row) for row in data["old_log_probs"].unbind()])

    return train_in_parts(change=change, changed_micro_batches=micro_batches)


def train_other_tokens_in_second_pass(actor, monkeypatch, _):
    """The pass is right, and the worker restricts the loss to the other tokens."""
    original = step_module.restrict
    monkeypatch.setattr(step_module, "restrict", lambda output, data, tokens: original(output, data, ~tokens))
    make_step = partial(make_step_of_lopti, "high")
    train_with(*LOPTI, make_step=make_step, rollout_batch=SECOND_PASS)(actor, monkeypatch, _)


def train_beside_rank_with_twice_the_factor(actor, monkeypatch, _):
    """Trains on one rank of two, of which the other multiplies its losses by twice as much."""
    update = Update(actor("+clipx=grpo"))
    update.receipt.all_reduce = lambda vector: vector + vector * (1 + (torch.arange(len(vector)) == 1))
    update.run(change=lambda data: tu.assign_non_tensor(data, dp_size=2, batch_num_tokens=50, global_batch_size=12))


def clear_mask(data):
    data["response_mask"] = data["response_mask"] * False
    tu.assign_non_tensor(data, batch_num_tokens=0)


train_in_parts = partial(train_with, "+clipx=acpo", micro_batches=THREE_MICRO_BATCHES)
SECOND_PASS = RolloutBatch(updates_before_pass=ANNOUNCED_UPDATES)
TWO_UPDATES = ("+clipx=grpo", "data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=4")
REJECTION_BY_TRAINER = rejection_overrides("token_k3", bypass=False)


class Fault(NamedTuple):
    """A fault that the receipt finds.

    Attributes:
        plant: (actor, monkeypatch, variant) -> None; trains with the fault.
        facts: what the receipt's message must name.
        variants: of the fault, each of which is found.
    """

    plant: Callable
    facts: Sequence[str]
    variants: Sequence[str] = ("",)


# What the messages of the receipt's checks must name. Each of them tells its check from all others.
GRADIENT_ON_COPIES = ("gradient", "ratios")
GRADIENT_IN_TRAINING = ("gradient", "backward pass")
OTHER_TERM = ("policy's term", "KL", "entropy", "distillation")
STALE_OLD_LOG_PROBS = ("old_log_probs", "recomputed", "nats", "0.001")
OTHER_SETTINGS_THAN_RANKS = ("settings", "other ranks")
OTHER_BOUNDS_THAN_RANKS = ("bounds", "other ranks")
NOTHING_COMPARED = ("no token", "rollout batch", "compared")


def gradient_on_output(name):
    return "gradient", f"model's {name}"


def factors_within_update(low, high):
    return "multiplied", "micro-batches", f"{low} to {high}"


def factor_after_first_update(factor, *, first):
    return "multiplied", "this update", factor, "first one", first


def number_of_updates(number, *, announced):
    return f"{number} updates", "rollout batch", announced, "announced"


def add_term(add):
    """Return a fault that trains another loss function than verl's.

    Args:
        add: (verl's loss, the log-probabilities, a function that returns the policy's term) -> the loss.
    """

    def plant(actor, monkeypatch, _):
        config = actor("+clipx=grpo", *KL_TERM)

        def loss_fn(config, model_output, data, dp_group=None):
            loss, metrics = ppo_loss(config, model_output, data)

            def policy_term():
                return ORIGINAL_LOSS("grpo", **arguments_of(config, model_output, data))[0]

            return add(loss, model_output["log_probs"].values(), policy_term), metrics

        Update(config, loss_fn=partial(loss_fn, config=config)).run()

    return plant


def arguments_of(config, model_output, data):
    """What verl's ppo_loss calls a policy loss with."""
    fields = data.select("response_mask", "old_log_probs", "advantages").to_padded_tensor()
    log_prob = no_padding_2_padding(model_output["log_probs"], data)
    return dict(
        old_log_prob=fields["old_log_probs"],
        log_prob=log_prob,
        advantages=fields["advantages"],
        response_mask=fields["response_mask"].to(bool),
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=None,
    )


OTHER_TERMS = {
    "half the sum of the log-probabilities": lambda loss, log_prob, policy: loss + 0.5 * log_prob.sum(),
    "minus three times the policy's term": lambda loss, log_prob, policy: loss - 3 * policy(),
    "a hundredth of the policy's term": lambda loss, log_prob, policy: loss + 0.01 * policy(),
    "the square of the log-probabilities": lambda loss, log_prob, policy: loss + 1e-2 * log_prob.square().mean(),
    "one token's log-probability": lambda loss, log_prob, policy: loss - 0.1 * log_prob[5],
}


def add_entropy_term(add, *overrides):
    """Return a fault that trains another loss function than verl's.

    Args:
        add: (verl's loss, the entropies) -> the loss.
        overrides: beside the method's.
    """

    def plant(actor, monkeypatch, _):
        config = actor("+clipx=grpo", *overrides)

        def loss_fn(config, model_output, data, dp_group=None):
            loss, metrics = ppo_loss(config, model_output, data)
            return add(loss, model_output["entropy"].values()), metrics

        Update(config, loss_fn=partial(loss_fn, config=config)).run()

    return plant


FAULTS_OF_ENTROPY = {
    "a tenth of the entropies": add_entropy_term(lambda loss, entropy: loss + 0.1 * entropy.sum()),
    "the entropies beside a bonus": add_entropy_term(lambda loss, entropy: loss - entropy.sum(), ENTROPY_BONUS),
    "the square of the entropies": add_entropy_term(lambda loss, entropy: loss + entropy.square().mean()),
    "one token's entropy": add_entropy_term(lambda loss, entropy: loss - 0.1 * entropy[5]),
}


def register_later_hook(change):
    """Return a fault that registers a hook on the log-probabilities after the receipt's, in each micro-batch."""

    def plant(actor, monkeypatch, _):
        update = Update(actor("+clipx=grpo"))
        end_micro_batch = update.receipt.end_micro_batch

        def end_and_register(micro_batch, loss, model_output, data, dp_group):
            end_micro_batch(micro_batch, loss, model_output, data, dp_group)
            model_output["log_probs"].register_hook(change)

        update.receipt.end_micro_batch = end_and_register
        update.run(THREE_MICRO_BATCHES)

    return plant


def multiply_losses(first, second, **receipt_attributes):
    """Return a fault that trains two updates.

    Args:
        first, second: the factors on the losses of each update's micro-batches.
        receipt_attributes: that the receipt gets before.
    """

    def plant(actor, monkeypatch, _):
        update = Update(actor("+clipx=grpo"))
        for name, value in receipt_attributes.items():
            setattr(update.receipt, name, value)
        update.run(loss_factors=first)
        micro_batches = THREE_MICRO_BATCHES if len(second) > 1 else (ROWS,)
        update.run(micro_batches, loss_factors=second)

    return plant


def train_beside_other_rank(place, difference):
    """Return a fault that trains on one rank of two, of which the other has another number in a place of the sums."""

    def plant(actor, monkeypatch, _):
        config = actor("+clipx=acpo")
        method = config.policy_loss.clipx.method
        statistics = torch.arange(method.statistics_size, dtype=torch.float64) + 5
        update = Update(config, OptimizerStep(statistics=statistics, decision=method.decide(statistics)))
        update.receipt.all_reduce = lambda vector: 2 * vector + difference * (torch.arange(len(vector)) == place)
        update.run(change=lambda data: tu.assign_non_tensor(data, dp_size=2, batch_num_tokens=50, global_batch_size=12))

    return plant


SINGLE_FAULTS = {
    **{f"verl's loss and {name}": Fault(plant=add_term(add), facts=OTHER_TERM) for name, add in OTHER_TERMS.items()},
    **{
        f"verl's loss and {name}": Fault(plant=plant, facts=gradient_on_output("entropy"))
        for name, plant in FAULTS_OF_ENTROPY.items()
    },
    "a later hook that turns the sign": Fault(
        plant=register_later_hook(lambda gradient: -gradient),
        facts=GRADIENT_IN_TRAINING,
    ),
    "a later hook that doubles": Fault(
        plant=register_later_hook(lambda gradient: 2 * gradient),
        facts=GRADIENT_IN_TRAINING,
    ),
    "a later hook that leaves nothing": Fault(
        plant=register_later_hook(lambda gradient: 0 * gradient),
        facts=GRADIENT_IN_TRAINING,
    ),
    "another factor in the second update": Fault(
        plant=multiply_losses([0.5], [0.7]),
        facts=factor_after_first_update("0.7", first="0.5"),
    ),
    "twice the factor in the second update": Fault(
        plant=multiply_losses([0.5], [1.0]),
        facts=factor_after_first_update("1", first="0.5"),
    ),
    # A scaler changes its factor by powers of two, and 0.75 / 0.5 is none.
    "another factor beside a scaler": Fault(
        plant=multiply_losses([0.5], [0.75], scaled=True),
        facts=factor_after_first_update("0.75", first="0.5"),
    ),
    "another rank's settings": Fault(plant=train_beside_other_rank(SETTINGS, 1000.0), facts=OTHER_SETTINGS_THAN_RANKS),
    "another rank's bounds": Fault(plant=train_beside_other_rank(DECISION, 0.01), facts=OTHER_BOUNDS_THAN_RANKS),
    "another rank's infinite bound": Fault(
        plant=train_beside_other_rank(INFINITE_DECISIONS, 1.0),
        facts=OTHER_BOUNDS_THAN_RANKS,
    ),
    "verl's loss under its own name": Fault(
        plant=train_with("+clipx=acpo", loss_mode="vanilla"),
        facts=(*GRADIENT_ON_COPIES, "clipx_acpo"),
    ),
    "no weights of verl's trainer": Fault(
        plant=train_with("+clipx=grpo", *TOKEN_WEIGHTS),
        facts=("without the weights", f"{CORRECTION}.rollout_is=token"),
    ),
    "no rejection of verl's trainer": Fault(
        plant=train_with("+clipx=grpo", *REJECTION_BY_TRAINER, change=undo_rejection),
        facts=("14 tokens", "rejects", f"{CORRECTION}.rollout_rs=token_k3"),
    ),
    "a term that the engine adds": Fault(
        plant=train_with("+clipx=grpo", engine_term=lambda log_prob: log_prob.square().sum()),
        facts=GRADIENT_IN_TRAINING,
    ),
    "an engine that leaves the loss aside": Fault(
        plant=train_with("+clipx=grpo", loss_factors=[()]),
        facts=("no backward pass", "1 of 1 micro-batches"),
    ),
    "no backward pass of a later micro-batch": Fault(
        plant=train_in_parts(loss_factors=(1, 1, ())),
        facts=("no backward pass", "1 of 3 micro-batches"),
    ),
    "a later micro-batch of the opposite sign": Fault(
        plant=turn_sign_from_second_micro_batch_on, facts=GRADIENT_IN_TRAINING
    ),
    "an engine that turns a later micro-batch's sign": Fault(
        plant=train_in_parts(loss_factors=(1, 1, -1)),
        facts=factors_within_update("-1", "1"),
    ),
    "an engine that scales a later micro-batch": Fault(
        plant=train_in_parts(loss_factors=(1, 0.5, 1)),
        facts=factors_within_update("0.5", "1"),
    ),
    "two backward passes of a later micro-batch": Fault(
        plant=train_in_parts(loss_factors=(1, (1, 1), 1)),
        facts=factors_within_update("1", "2"),
    ),
    # The mean of 0.5 on this rank and 1 on the other is 0.75.
    "an engine that scales a rank": Fault(
        plant=train_beside_rank_with_twice_the_factor,
        facts=("a rank's", "multiplied", "0.5", "all ranks", "0.75"),
    ),
    "each micro-batch's own number of tokens": Fault(
        plant=train_in_parts(change=count_own_tokens),
        facts=("divided", "5, 8, 12 tokens", "25"),
    ),
    "stale old log-probabilities in a later micro-batch": Fault(
        plant=change_old_log_probs(lambda row: row - 0.01, {2}),
        facts=(*STALE_OLD_LOG_PROBS, "0.01"),
    ),
    "stale old log-probabilities": Fault(
        plant=change_old_log_probs(lambda row: row - 0.01),
        facts=(*STALE_OLD_LOG_PROBS, "0.01"),
    ),
    "shifted old log-probabilities": Fault(
        plant=change_old_log_probs(lambda row: row.roll(1)),
        facts=STALE_OLD_LOG_PROBS,
    ),
    "old log-probabilities at another temperature": Fault(
        plant=change_old_log_probs(lambda row: row * 1.25),
        facts=STALE_OLD_LOG_PROBS,
    ),
    "Lopti's second pass repeats the first": Fault(
        plant=train_with(*LOPTI, make_step=partial(make_step_of_lopti, "low"), rollout_batch=SECOND_PASS),
        facts=("Lopti's pass", "high tokens", "low ones"),
    ),
    # Two passes of 4 updates each.
    "one pass of Lopti's two": Fault(
        plant=train_with(*LOPTI, make_step=partial(make_step_of_lopti, "low"), updates_made=ANNOUNCED_UPDATES),
        facts=number_of_updates("4", announced="8"),
    ),
    "the other tokens in Lopti's second pass": Fault(
        plant=train_other_tokens_in_second_pass,
        facts=GRADIENT_ON_COPIES,
    ),
    "nothing to compare": Fault(
        plant=train_with("+clipx=grpo", "clipx.receipt=stop", change=clear_mask, updates_made=ANNOUNCED_UPDATES),
        facts=NOTHING_COMPARED,
    ),
    "the sign of all tokens but one that is NaN": Fault(
        plant=partial(train_with_a_nan_token, with_finite_tokens_only(-1)),
        facts=GRADIENT_ON_COPIES,
    ),
    "twice as much at all tokens but one that is NaN": Fault(
        plant=partial(train_with_a_nan_token, with_finite_tokens_only(2)),
        facts=GRADIENT_ON_COPIES,
    ),
    # Two mini-batches of 4 in a batch of 8.
    "a skipped update": Fault(
        plant=train_with(*TWO_UPDATES, updates_made=1),
        facts=number_of_updates("1", announced="2"),
    ),
    "a second epoch": Fault(
        plant=train_with(*TWO_UPDATES, updates_made=4),
        facts=number_of_updates("4", announced="2"),
    ),
    "bounds that nobody decided": Fault(
        plant=begin_update_without_bounds, facts=("no bounds", "clipx.scope=mini_batch")
    ),
}
# Faults that the receipt does not find: each returns the difference that the receipt logs.
INVISIBLE = {
    "other advantages from verl's trainer": unnoticed_fault(
        change=lambda data: data.set("advantages", -data["advantages"])
    ),
    "another coefficient of verl's KL term": unnoticed_fault({"kl_loss_coef": 1.0}),
    "a factor on the whole loss": unnoticed_fault(loss_factors=[3.0]),
    "another loss after the first rollout batch": train_another_loss_from_the_second_rollout_batch_on,
}


def planted_faults():
    """Return every fault that is found, by its name.

    docs/swap.md has their number, and the kinds that are invisible.
    """
    faults = {}
    for name, loss in LOSSES.items():
        faults[f"loss: {name}"] = Fault(
            plant=partial(train_another_loss, loss),
            facts=(*GRADIENT_ON_COPIES, "clipx_acpo"),
        )
    for name, wrong in REJECTIONS.items():
        faults[f"rejection: {name}"] = Fault(
            plant=partial(train_with_another_rejection, wrong),
            facts=(*GRADIENT_ON_COPIES, "clipx_grpo"),
            variants=tuple(CRITERIA),
        )
    for name in MODIFIERS:
        faults[f"without: {name}"] = Fault(
            plant=partial(train_without_modifier, name),
            facts=(*GRADIENT_ON_COPIES, "clipx_grpo"),
        )
    for name, (arguments, facts) in WRONG_EXTRA_PASSES.items():
        faults[f"statistics: {name}"] = Fault(plant=partial(train_after_wrong_extra_pass, arguments), facts=facts)
    return faults | SINGLE_FAULTS


PLANTED = planted_faults()
CASES = [(name, variant) for name, fault in PLANTED.items() for variant in fault.variants]


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_a_planted_fault_is_found(actor, monkeypatch, few_probes, name, variant):
    fault = PLANTED[name]
    with pytest.raises(RuntimeError) as raised:
        fault.plant(actor, monkeypatch, variant)
    assert_names(str(raised.value), "receipt", *fault.facts, "clipx.receipt=warn")


@pytest.mark.parametrize("name", INVISIBLE)
def test_a_fault_that_is_listed_as_invisible_leaves_the_receipt_as_it_is(actor, monkeypatch, few_probes, name):
    assert INVISIBLE[name](actor, monkeypatch, "") < 1e-5


GROUPS = sorted(
    file.stem
    for file in (REPOSITORY / "configs/clipx").glob("*.yaml")
    # These have no loss of their own.
    if file.stem not in ("base", "custom", "observe")
)
# From GROUP.PARAMETER to the reason why a change of the parameter is not found: the gradient stays the same, or differs
# by less than a millionth of that at F = 1, or only on tokens that the 25 of these tests and their probes don't have.
WITHOUT_EFFECT = {
    "acpo.min_tokens": "a single ratio in a bin does not vary either",
    "acpo_reference.variance_epsilon": "1e-8 beside the variance, below what a gradient resolves",
    "dcpo.largest_ratio": "above an old probability of 0.3 %, the bound on the divergence comes first",
    "dcpo_reference.largest_ratio": "above an old probability of 0.3 %, the bound on the divergence comes first",
    "clip_cov.share": "of the probes' tokens it is less than one, and one is taken",
    "kl_cov.share": "of the probes' tokens it is less than one, and one is taken",
    "cppo_reference.weight_last": "a token's weight is that of its place among 8,192, and these are the first 25",
    "cppo_reference.length": "a token's weight is that of its place among 8,192, and these are the first 25",
    "bapo.epsilon": "only contribution=ratio reads it",
    "bapo_reference.epsilon": "1e-8 of the negative tokens' contribution",
    "bapo_reference.lower_step": "no step helps, because N only grows, and the last one is cut to the range",
}
CLIPPED_WITHIN_CLAMP = ("aspo", "ce_gppo_reference", "cispo", "dapo", "dcpo", "dppo", "grpo", "sapo")
for group in GROUPS:
    if group.startswith(CLIPPED_WITHIN_CLAMP) or group in (
        "acpo_reference",
        "bapo_reference",
        "ipo_reference",
        "two_sided",
    ):
        WITHOUT_EFFECT[f"{group}.log_ratio_clamp"] = "beyond it the token is clipped already, or its ratio is e^-20"


def train_under_another_name(actor, monkeypatch, announced_group, trained_group, method=None):
    """Trains one group's loss, or that of a changed method of it, under the name of an announced group's."""
    announced = actor(f"+clipx={announced_group}", LOG_PROBS_RETURNED)
    trained = actor(f"+clipx={trained_group}", LOG_PROBS_RETURNED)
    if method is not None:
        object.__setattr__(trained.policy_loss.clipx, "method", method)
    trained.global_batch_info.update(dp_size=1, batch_num_tokens=25, global_batch_size=6)

    def loss(**arguments):
        return ORIGINAL_LOSS(trained.policy_loss.clipx.method.name, **arguments | {"config": trained})

    # As in a run: the worker decides by the announced method, and another loss stands under its name.
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, f"clipx_{announced.policy_loss.clipx.method.name}", loss)
    Update(announced).run()


def is_found(train):
    """Whether the receipt stops a training."""
    try:
        train()
    except RuntimeError as error:
        assert "receipt: " in str(error)
        return True
    return False


def groups_to_tell_apart(group):
    """The other groups of a group's own method, and the next group of another one."""
    method = method_of(group)
    place = GROUPS.index(group)
    with_same_method = [name for name in GROUPS if method_of(name) is method and name != group]
    with_other_methods = [name for name in GROUPS[place:] + GROUPS[:place] if method_of(name) is not method]
    return [*with_same_method, with_other_methods[0]]


def method_of(group):
    return type(built_once((f"+clipx={group}", LOG_PROBS_RETURNED)).policy_loss.clipx.method)


@pytest.mark.slow
@pytest.mark.parametrize("announced", GROUPS)
def test_another_group_of_settings_is_found(actor, monkeypatch, announced):
    for trained in groups_to_tell_apart(announced):
        with monkeypatch.context() as patched:
            assert is_found(partial(train_under_another_name, actor, patched, announced, trained)), trained


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_every_parameter_changed_by_a_twentieth_is_found(actor, monkeypatch, group):
    method = actor(f"+clipx={group}", LOG_PROBS_RETURNED).policy_loss.clipx.method
    # For each parameter, a method in which only that parameter is changed.
    changed_methods = {}
    for other in neighbours(method, 0.05):
        (name,) = [key for key, value in other.parameters.items() if value != method.parameters[key]]
        changed_methods.setdefault(name, other)
    for name, other in changed_methods.items():
        if f"{group}.{name}" not in WITHOUT_EFFECT:
            with monkeypatch.context() as patched:
                assert is_found(partial(train_under_another_name, actor, patched, group, group, other)), name


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_verls_entropy_bonus_is_no_fault(actor, few_probes, mode):
    assert_receipt_holds(actor("+clipx=grpo", ENTROPY_BONUS, f"{ACTOR}.loss_agg_mode={mode}", *KL_TERM))


def train_with_distillation(actor, loss_mode, added_term, **loss_settings):
    """Trains an update under verl's distillation, and returns it.

    Args:
        loss_mode: of the distillation.
        added_term: what is added to verl's loss, a function of the model's output.
        loss_settings: of the distillation, beside its loss_mode.
    """
    config = actor("+clipx=grpo", ENTROPY_BONUS)
    loss_config = DistillationLossConfig(loss_mode=loss_mode, topk=2, use_task_rewards=True, **loss_settings)
    distillation = DistillationConfig(enabled=False, distillation_loss=loss_config)
    object.__setattr__(distillation, "enabled", True)

    def loss_fn(config, distillation_config, model_output, data, dp_group=None):
        loss, metrics = distillation_ppo_loss(config, distillation_config, model_output, data)
        return loss + added_term(model_output), metrics

    def add_teacher(data):
        lengths = data["prompts"].offsets().diff() + data["responses"].offsets().diff()
        teacher = [torch.linspace(-2, -1, int(length))[:, None] for length in lengths]
        data["teacher_logprobs"] = torch.nested.as_nested_tensor(teacher, layout=torch.jagged)

    def make_outputs(offsets):
        if loss_mode != "forward_kl_topk":
            return {}
        losses = torch.linspace(0.1, 1, int(offsets[-1])).requires_grad_(True)
        values = {"distillation_losses": losses, "student_mass": losses.detach(), "teacher_mass": losses.detach()}
        return {key: torch.nested.nested_tensor_from_jagged(value, offsets=offsets) for key, value in values.items()}

    update = Update(config, loss_fn=partial(loss_fn, config=config, distillation_config=distillation))
    update.run(change=add_teacher, make_outputs=make_outputs)
    return update


@pytest.mark.parametrize("loss_mode", ["k3", "forward_kl_topk"])
def test_verls_distillation_is_no_fault(actor, few_probes, loss_mode):
    update = train_with_distillation(actor, loss_mode, lambda output: 0.0, distillation_loss_coef=0.5)
    assert 0 <= update.end_rollout_batch(1, updates_before_pass=3) < 1e-5


@pytest.mark.parametrize(
    ("loss_mode", "output", "facts"),
    [
        ("k3", "log_probs", OTHER_TERM),
        ("forward_kl_topk", "distillation_losses", gradient_on_output("distillation_losses")),
        ("forward_kl_topk", "entropy", gradient_on_output("entropy")),
    ],
)
def test_a_term_beside_verls_distillation_is_found(actor, few_probes, loss_mode, output, facts):
    with pytest.raises(RuntimeError) as raised:
        train_with_distillation(actor, loss_mode, lambda model_output: 0.1 * model_output[output].values().sum())
    assert_names(str(raised.value), *facts)


def test_the_page_has_the_number_of_planted_faults():
    (number,) = re.findall(r"tests\s+plant\s+(\d+)\s+faults", (REPOSITORY / "docs/swap.md").read_text())
    assert int(number) == len(PLANTED) + 1 >= 50


def test_a_token_that_is_nan_ends_no_run(actor, few_probes):
    update = Update(actor("+clipx=grpo"))
    update.run(nan_at=(1, 2))
    assert 0 <= update.end_rollout_batch(ANNOUNCED_UPDATES) < 1e-5


def test_a_fault_is_a_warning_under_receipt_warn(actor, monkeypatch, few_probes, caplog):
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "clipx_acpo", with_factor(-1.0))
    update = Update(actor("+clipx=acpo", "clipx.receipt=warn"))
    update.run()
    assert_names(caplog.text, "receipt", *GRADIENT_ON_COPIES, "clipx_acpo")
    assert update.end_rollout_batch(ANNOUNCED_UPDATES) == pytest.approx(2, rel=1e-3)


def test_what_is_compared_on_copies_stops_on_every_engine_and_the_rest_where_tests_ran(
    actor, monkeypatch, few_probes, caplog
):
    with monkeypatch.context() as patched:
        patched.setitem(core_algos.POLICY_LOSS_REGISTRY, "clipx_acpo", with_factor(-1.0))
        with pytest.raises(RuntimeError) as raised:
            Update(actor("+clipx=acpo"), tested=False).run()
    assert_names(str(raised.value), *GRADIENT_ON_COPIES)
    Update(actor("+clipx=grpo"), tested=False).run(loss_factors=[()])
    assert_names(caplog.text, "no backward pass", "1 of 1 micro-batches")
    with pytest.raises(RuntimeError) as raised:
        Update(actor("+clipx=grpo", "clipx.receipt=stop"), tested=False).run(loss_factors=[()])
    assert_names(str(raised.value), "no backward pass", "1 of 1 micro-batches")


def test_where_nothing_can_be_compared_auto_warns(actor, caplog):
    difference = train_with("+clipx=grpo", change=clear_mask, updates_made=ANNOUNCED_UPDATES)(actor, None, "")
    assert math.isnan(difference)
    assert_names(caplog.text, *NOTHING_COMPARED)


def assert_receipt_counts_failures(update, at_least):
    """Assert that a receipt which warned says so where it is logged and printed."""
    failed = update.metrics(ANNOUNCED_UPDATES)["clipx/receipt_failed"]
    assert failed >= at_least
    assert_names(str(update.receipt), "warned", f"{failed:g} checks")


def test_another_loss_is_counted_where_the_receipt_only_warns(actor, monkeypatch, few_probes):
    """Under auto it would stop the run, since it is compared on copies."""
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "clipx_acpo", with_factor(-1.0))
    update = Update(actor("+clipx=acpo", "clipx.receipt=warn"), tested=False)
    update.run()
    assert_receipt_counts_failures(update, at_least=2)


# Faults of an engine, as arguments of `Update.run`.
FAULTS_OF_ENGINE = {
    "no backward pass": dict(loss_factors=[()]),
    "stale old log-probabilities": dict(change=lambda data: data.set("old_log_probs", data["old_log_probs"] + 1)),
    "another number of tokens": dict(change=count_own_tokens, micro_batches=THREE_MICRO_BATCHES),
}


@pytest.mark.parametrize("receipt", ["warn", "auto"])
@pytest.mark.parametrize("name", FAULTS_OF_ENGINE)
def test_a_fault_of_an_untested_engine_is_counted_where_the_receipt_only_warns(actor, few_probes, name, receipt):
    update = Update(actor("+clipx=acpo", f"clipx.receipt={receipt}"), tested=False)
    update.run(**FAULTS_OF_ENGINE[name])
    assert_receipt_counts_failures(update, at_least=1)


def test_a_receipt_whose_checks_all_hold_logs_0_and_does_not_speak_of_warnings(actor, few_probes):
    update = Update(actor("+clipx=acpo"))
    update.run()
    assert update.metrics(ANNOUNCED_UPDATES)["clipx/receipt_failed"] == 0.0 and "warned" not in str(update.receipt)


def test_a_check_that_failed_on_another_rank_counts_once(actor, few_probes):
    """On three ranks, of which the other two warned of their weights."""
    update = Update(actor("+clipx=acpo"), tested=False)
    update.run()
    failures_of_others = torch.tensor([2.0 if check is Check.WEIGHTS else 0.0 for check in Check])
    sums_of_others = torch.cat([torch.zeros(3), failures_of_others])
    update.receipt.all_reduce = lambda vector: vector + sums_of_others
    assert update.metrics(ANNOUNCED_UPDATES)["clipx/receipt_failed"] == 1.0


def test_a_rank_that_compared_nothing_says_that_another_did(actor, capsys):
    """Rank 0 of two. None of its responses has a token, and the other rank has compared 7 tokens."""
    update = Update(actor("+clipx=grpo"), tested=False)
    update.receipt.rank = 0
    update.run(change=clear_mask)
    sums_of_the_other_rank = torch.zeros(3 + len(Check))
    sums_of_the_other_rank[0] = 7
    update.receipt.all_reduce = lambda vector: vector + sums_of_the_other_rank
    update.metrics(ANNOUNCED_UPDATES)
    printed = capsys.readouterr().out
    assert_names(printed, "this rank could compare no token", "other ranks made 7 comparisons")
    assert "nothing shows" not in printed


def test_a_rank_of_a_pipeline_that_sees_no_loss_neither_warns_nor_prints(actor, caplog, capsys):
    """The first stage of a pipeline, which has no outputs. Not covered: Megatron itself, which has such stages."""
    update = Update(actor("+clipx=grpo"), tested=False)
    update.receipt.rank = 0
    update.receipt.has_outputs = False
    update.begin()
    update.observers.end_update(update.step)
    assert update.metrics(ANNOUNCED_UPDATES)["clipx/receipt_failed"] == 0.0
    assert not caplog.text and not capsys.readouterr().out


def test_old_log_probs_within_the_tolerance_of_the_precision_end_no_run(actor, few_probes):
    def move(distance, data):
        data["old_log_probs"] = data["old_log_probs"] + distance

    for half_precision, distance in ((False, 5e-4), (True, 0.03)):
        update = Update(actor("+clipx=grpo"))
        update.receipt.half = half_precision
        update.run(change=partial(move, distance))


@pytest.mark.parametrize(("first", "second"), [([0.5], [2.0]), ([1024.0], [512.0])])
def test_a_factor_that_a_scaler_changes_by_powers_of_two_ends_no_run(actor, monkeypatch, few_probes, first, second):
    multiply_losses(first, second, scaled=True)(actor, monkeypatch, "")


def test_a_factor_that_is_the_number_of_micro_batches_ends_no_run(actor, monkeypatch, few_probes):
    multiply_losses([1.0], [3.0, 3.0, 3.0])(actor, monkeypatch, "")


def test_a_loss_called_twice_and_trained_once_ends_no_run(actor, few_probes):
    update = Update(actor("+clipx=grpo"))
    update.run((ROWS, ROWS), loss_factors=[(), 1.0])
    assert update.metrics(ANNOUNCED_UPDATES) == {
        "clipx/receipt": pytest.approx(0, abs=1e-5),
        "clipx/receipt_failed": 0.0,
    }


def test_a_loss_evaluated_once_more_without_a_graph_ends_no_run(actor, few_probes):
    update = Update(actor("+clipx=grpo"))
    loss_function = update.loss_function

    def evaluate_before(model_output, data):
        with torch.no_grad():
            loss_function(model_output=model_output, data=data)
        return loss_function(model_output=model_output, data=data)

    update.loss_function = evaluate_before
    update.run(THREE_MICRO_BATCHES)
    assert update.metrics(ANNOUNCED_UPDATES)["clipx/receipt_failed"] == 0.0


@pytest.mark.parametrize("name", ["acpo", "grpo", "cispo"])
@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl", "k3+"])
def test_each_of_verls_kl_terms_is_known(actor, few_probes, name, kind):
    update = Update(actor(f"+clipx={name}", *KL_TERM, f"{ACTOR}.kl_loss_type={kind}"))
    update.run(largest_move=0.001)
    assert update.metrics(ANNOUNCED_UPDATES)["clipx/receipt_failed"] == 0.0


def test_a_complete_receipt_costs_nothing_and_none_changes_gradients_or_data(actor, monkeypatch, few_probes):
    update = Update(actor("+clipx=acpo"))
    data_and_copies = []

    def keep_with_copy(data):
        data_and_copies.append((data, data.clone()))

    with_receipt = update.run(change=keep_with_copy)
    ((data, copy_made_before),) = data_and_copies
    for key in ("old_log_probs", "advantages"):
        assert torch.equal(pad_rows(data[key]), pad_rows(copy_made_before[key]))
    update.end_rollout_batch(ANNOUNCED_UPDATES)
    loss = core_algos.POLICY_LOSS_REGISTRY["clipx_acpo"]
    calls = []

    def counting_loss(**arguments):
        calls.append(arguments)
        return loss(**arguments)

    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "clipx_acpo", counting_loss)
    without_receipt = update.run()
    assert torch.equal(with_receipt, without_receipt)
    assert len(calls) == 1
