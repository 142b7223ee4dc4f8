"""Five hundred drawn configurations of verl's keys: each is announced and true, or refused with the keys named.

Covers, composed in this process and decided by the driver: what is announced trains as announced, by verl's own
ppo_loss (and its distillation loss) on a micro-batch through the worker's calls with the receipt, which must not stop;
where verl has the same loss, its gradient under the same keys of verl's is ours, with KL, entropy and distillation
terms; what is refused is one of the keys that the table calls so, named with a second one. Every key of the table on
the loss's path is drawn or says why not. Not covered: engines, ranks, Lopti's passes.
"""

import copy
import dataclasses
import re
from collections import Counter
from functools import partial

import pytest
import torch
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from torch.testing import assert_close
from verl.trainer.distillation import distillation_ppo_loss
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss

from tests.composition import built_once
from tests.jagged import jagged
from tests.worker.drawn import NOT_DRAWN, VALUES, Drawn, composed, drawn
from tests.worker.updates import Update
from verl_clipx.base.refusal import Refusal
from verl_clipx.run.start import decide
from verl_clipx.run.verl_keys import (
    ACTOR,
    BYPASS,
    CLIP_KEYS,
    LOSS_TYPE,
    NOT_IN_VERL,
    ON_THE_PATH,
    REFUSED,
    ROLLOUT_IS,
    ROLLOUT_RS,
    TAKEN,
    TASK_REWARDS,
    WITH_ROLLOUT_IS,
    WITH_ROLLOUT_RS,
    row_of,
    verl_key,
)
from verl_clipx.worker.layout import pad_rows
from verl_clipx.worker.loss_function import with_micro_batch
from verl_clipx.worker.step import OptimizerStep

NUMBER, FEW = 500, 60

# verl's loss that a group is, and what verl's keys say to be it where they are not drawn.
OF_VERL = {
    "grpo": ("vanilla", {}),
    "dapo": ("vanilla", {"clip_ratio_high": 0.28}),
    "cispo": ("cispo", {}),
    "gspo": ("gspo", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    "sapo": ("sapo", {}),
    "dppo": ("dppo_tv", {"clip_ratio_c": 5.0}),
    "dppo_kl": ("dppo_kl", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 5.0}),
    "dro": ("dro", {"policy_loss.dro_beta": 0.05}),
    "observe": ("vanilla", {}),
}


def test_every_key_on_the_path_is_drawn_or_says_why_not():
    keys = {row.key for row in ON_THE_PATH}
    assert {row_of(key).key for key in (*VALUES, *NOT_DRAWN)} == keys
    assert not set(VALUES) & set(NOT_DRAWN)


def loss_function(config):
    """verl's loss function of a configuration, as its worker makes it."""
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    if not config.distillation.enabled:
        return actor, partial(ppo_loss, config=actor)
    node = OmegaConf.masked_copy(config.distillation, ["_target_", "enabled", "distillation_loss"])
    return actor, partial(distillation_ppo_loss, config=actor, distillation_config=omega_conf_to_dataclass(node))


def as_the_trainer(config):
    """What verl's trainer, by its own code, makes of the samples' weights and mask, and the teacher's server adds."""
    correction = config.algorithm.rollout_correction
    said = {key.rpartition(".")[2]: OmegaConf.select(config, key) for key in (*OF_WEIGHTS, *OF_REJECTION)}

    def change(data):
        # From none in the first sequence, which no criterion rejects, to half a nat.
        apart = [0.04 * row * (torch.arange(9).remainder(7) - 2) for row in range(6)]
        rollout = [old - by[: len(old)] for old, by in zip(data["old_log_probs"].unbind(), apart, strict=True)]
        data["rollout_log_probs"] = jagged(rollout)
        # A teacher's log-probabilities come for each token of prompt and response.
        tokens = [len(prompt) + len(row) for prompt, row in zip(data["prompts"], data["responses"], strict=True)]
        teacher = [torch.linspace(-2, -0.1, length)[:, None] for length in tokens]
        data["teacher_logprobs"] = jagged(teacher)
        if correction.bypass_mode:
            data["rollout_log_probs"] = data["old_log_probs"]
            return
        mask, old, rollout = (pad_rows(data[key]) for key in ("response_mask", "old_log_probs", "rollout_log_probs"))
        data["loss_mask"] = data["response_mask"].clone()
        of_batch, left, _ = compute_rollout_correction_and_rejection_mask(old, rollout, mask.float(), **said)
        if correction.rollout_is is not None:
            data["rollout_is_weights"] = of_batch.batch["rollout_is_weights"]
        if correction.rollout_rs is not None:
            data["response_mask"] = left.bool()

    return change


OF_WEIGHTS, OF_REJECTION = (ROLLOUT_IS, *WITH_ROLLOUT_IS), (ROLLOUT_RS, *WITH_ROLLOUT_RS)


def outcome(number):
    """Decides a configuration, holds it to what the driver says, and returns "refused" or "announced"."""
    one = drawn(number)
    config = one.config()
    try:
        decision = decide(config, named=one.values, group=one.group)
        OmegaConf.resolve(config.actor_rollout_ref.actor.policy_loss)
    except Refusal as refusal:
        hold_refusal(one, refusal)
        return "refused"
    hold_taken_over(one, config, decision)
    try:
        gradients = trained(one, config)
    except InstantiationException as refusal:
        # What verl's own configuration of distillation says.
        assert "verl.workers.config.distillation" in str(refusal), one
        return "refused by verl"
    same = verl_s_own(one)
    if same is None:
        return "announced"
    for gradient, expected in zip(gradients, trained_by_verl(one, same), strict=True):
        assert_close(gradient, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()) + 1e-9)
    return "announced, verl's own gradient"


def hold_refusal(one: Drawn, refusal: Refusal):
    """Each refusal is about a drawn key that the table says may be refused, and names a second key."""
    for part in refusal.all:
        keys = {part.key, *re.findall(r"(?:[a-z_]\w*\.)+\w+|\+clipx", str(part))}
        about = [key for key in one.values if key in keys]
        assert about and len(keys) > 1, f"{one}: {part}"
        rows = [row_of(key) for key in about]
        assert any(row.refusal is not None or row.fate == TAKEN for row in rows), f"{one}: {part}"


def hold_taken_over(one: Drawn, config, decision):
    """No drawn key that is refused was let through, and each that is taken over is the method's parameter."""
    for key, value in one.values.items():
        fate = row_of(key).fate
        if one.group == "observe":
            assert decision.line.startswith("clipx: verl's own loss")
        elif fate == REFUSED:
            harmless = {LOSS_TYPE: value == "ppo_clip", TASK_REWARDS: value or not config.distillation.enabled}
            assert harmless.get(key, False), f"{one}: {key} was let through"
        elif fate == TAKEN:
            hold_clip_key(one, config, key, value)


def hold_clip_key(one: Drawn, config, key, value):
    """A drawn clip key is the parameters that the method's class says, or it is named as not used."""
    policy_loss = omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)
    method, name, readers = policy_loss.clipx.method, key.removeprefix(f"{ACTOR}."), 0
    for field in dataclasses.fields(method):
        verl = verl_key(type(method), field.name)
        if verl is None or name not in (*verl.names, verl.instead):
            continue
        readers += 1
        if name == verl.instead and any(f"{ACTOR}.{other}" in one.values for other in verl.names):
            continue
        ours, current = value if value is None else verl.conversion.convert(value), getattr(method, field.name)
        is_silent = value is None and name == "policy_loss.dro_beta"
        bounds_nothing = current is None and ours is not None and ours <= 0
        assert is_silent or bounds_nothing or current == pytest.approx(ours), f"{one}: {field.name}"
    unused = value is not None and value != CLIP_KEYS[name] and not readers
    assert (policy_loss.run.unused.get(key) == value) if unused else key not in policy_loss.run.unused, one


def trained(one: Drawn, config):
    """The gradients of two updates through the worker's calls, which the receipt must not stop."""
    actor, loss_fn = loss_function(config)
    step = OptimizerStep(entropy_wanted=config.actor_rollout_ref.actor.entropy_coeff != 0)
    change = as_the_trainer(config)
    if one.group == "observe":
        wrapped = with_micro_batch(loss_fn, actor.policy_loss.clipx, lambda: step)
        return updates(wrapped, change)
    update = Update(actor, step, loss_fn=loss_fn)
    gradients = [update.run(change=change), update.run(moved=0.5, change=change)]
    assert 0 <= update.end_rollout_batch(actor.policy_loss.run.updates) < 1e-4, one
    assert f"under {config.actor_rollout_ref.actor.loss_agg_mode} to " in str(update.receipt)
    return gradients


def updates(function, change):
    """The same two updates by another loss function, without a receipt."""
    update = Update(grpo(), loss_fn=function)
    update.loss_function = function
    return [update.run(change=change), update.run(moved=0.5, change=change)]


def grpo():
    """Any configuration, for updates that follow another one."""
    return copy.deepcopy(built_once(("+clipx=grpo",)))


def verl_s_own(one: Drawn):
    """verl's configuration of the same loss of its own; None where it has none, or reads the keys another way."""
    if one.group not in OF_VERL or one.modifiers:
        return None
    loss_mode, keys = OF_VERL[one.group]
    values = {f"{ACTOR}.{key}": value for key, value in keys.items()} | {f"{ACTOR}.policy_loss.loss_mode": loss_mode}
    if one.values.get(BYPASS) and one.group != "observe":
        return None
    for key, value in one.values.items():
        name = key.removeprefix(f"{ACTOR}.policy_loss.")
        if name in NOT_IN_VERL:
            values[f"{ACTOR}.{name}"] = value
        elif not (value is None and key in values):
            values[key] = value
    if f"{ACTOR}.clip_ratio" in one.values and one.group != "observe":
        for key in ("clip_ratio_low", "clip_ratio_high"):
            if f"{ACTOR}.{key}" not in one.values:
                values[f"{ACTOR}.{key}"] = None
    if one.values.get(f"{ACTOR}.clip_ratio_c", 0) is None and one.group != "observe":
        values[f"{ACTOR}.clip_ratio_c"] = 1e9
    if loss_mode == "sapo" and values.get(f"{ACTOR}.loss_agg_mode") != "seq-mean-token-mean":
        return None
    return composed((), values)


def trained_by_verl(one: Drawn, config):
    _, loss_fn = loss_function(config)
    function = partial(without_entropy, loss_fn, config.actor_rollout_ref.actor.entropy_coeff != 0)
    return updates(function, as_the_trainer(config))


def without_entropy(loss_fn, wanted, model_output, data, dp_group=None):
    """verl's engines return the entropy only where it is asked for."""
    output = {key: value for key, value in model_output.items() if wanted or key != "entropy"}
    return loss_fn(model_output=output, data=data, dp_group=dp_group)


def outcomes(numbers):
    found = Counter(outcome(number) for number in numbers)
    print(dict(found))
    # Neither a driver that refuses everything nor one that lets everything through would pass.
    assert all(found[kind] > len(numbers) / 10 for kind in ("refused", "announced", "announced, verl's own gradient"))


@pytest.mark.slow
def test_a_few_of_them_are_announced_and_true_or_refused(few_probes):
    outcomes(range(FEW))


@pytest.mark.slow
@pytest.mark.matrix
def test_all_of_them_are_announced_and_true_or_refused(few_probes):
    outcomes(range(FEW, NUMBER))
