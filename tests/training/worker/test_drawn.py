"""Five hundred drawn configurations of verl's keys. Each trains as announced, with the receipt, and with the gradient
of verl's own loss where verl has the same one; or it is refused with the keys named. Not covered: engines, ranks,
Lopti.
"""

import copy
import random
import re
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hydra.errors import InstantiationException
from omegaconf import MISSING, DictConfig, OmegaConf
from torch.testing import assert_close
from verl.trainer.distillation import distillation_ppo_loss
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss

from tests.composition import built_once, composition
from tests.jagged import jagged
from tests.training.worker.updates import Update
from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.losses.groups import group_names, read_node
from verl_clipx.run.keys import (
    ACTOR,
    BYPASS,
    DISTILLATION,
    DISTILLATION_COEFFICIENT,
    DISTILLATION_LOSS,
    IS_NORMALIZE,
    IS_THRESHOLD,
    LOSS_TYPE,
    NOT_IN_VERL,
    READ_BY_VERL,
    REFUSED,
    ROLLOUT_IS,
    ROLLOUT_RS,
    ROWS,
    RS_THRESHOLD,
    TAKEN,
    TASK_REWARDS,
    row_of,
)
from verl_clipx.run.schedule import Schedule
from verl_clipx.run.start import resolve_into_config
from verl_clipx.training.worker.layout import pad_rows
from verl_clipx.training.worker.loss_function import with_micro_batch
from verl_clipx.training.worker.step import OptimizerStep

CONFIGURATIONS = 500
# Those of every run of the tests; the others are for a release.
FIRST_CONFIGURATIONS = 60

# From a group to verl's own loss that is the same: its loss_mode, and the values, by key below the actor, that verl's
# keys need for that unless they are drawn.
LOSSES_OF_VERL = {
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

POLICY_LOSS = f"{ACTOR}.policy_loss"
DISTILLATION_SETTINGS = DISTILLATION_LOSS.rpartition(".")[0]

# What is drawn of each key; NOT_DRAWN says why the others are not.
VALUES: dict[str, tuple[Any, ...]] = {
    f"{ACTOR}.clip_ratio": (0.1, 0.2, 0.3),
    f"{ACTOR}.clip_ratio_low": (0.1, 0.3, 3e-4, 10),
    f"{ACTOR}.clip_ratio_high": (0.28, 0.5, 4e-4),
    f"{ACTOR}.clip_ratio_c": (3.0, 10.0, None),
    f"{ACTOR}.tau_pos": (1.0, 2.0),
    f"{ACTOR}.tau_neg": (1.05, 4.0),
    f"{POLICY_LOSS}.tau_pos": (2.0,),
    f"{POLICY_LOSS}.tau_neg": (1.05, 1.2),
    f"{POLICY_LOSS}.dro_beta": (0.3, None),
    f"{POLICY_LOSS}.loss_mode": ("vanilla", "gspo", "dro"),
    f"{POLICY_LOSS}.clip_cov_ratio": (0.01,),
    f"{POLICY_LOSS}.clip_cov_lb": (2.0,),
    f"{POLICY_LOSS}.clip_cov_ub": (4.0,),
    f"{POLICY_LOSS}.kl_cov_ratio": (0.01,),
    f"{POLICY_LOSS}.ppo_kl_coef": (0.5,),
    f"{POLICY_LOSS}.rollout_correction.rollout_is": ("token",),
    f"{POLICY_LOSS}.rollout_correction.loss_type": ("reinforce",),
    f"{ACTOR}.loss_agg_mode": (
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ),
    f"{ACTOR}.loss_scale_factor": (100, None),
    f"{ACTOR}.entropy_coeff": (0.0, 0.01),
    f"{ACTOR}.use_kl_loss": (True, True, False),
    f"{ACTOR}.kl_loss_coef": (0.5,),
    f"{ACTOR}.kl_loss_type": ("k1", "k2", "k3", "k3+", "abs", "low_var_kl"),
    f"{ACTOR}.strategy": ("fsdp", "fsdp2"),
    BYPASS: (True, True, False),
    ROLLOUT_IS: ("token", "sequence"),
    IS_THRESHOLD: (2.0, 1.1),
    IS_NORMALIZE: (True,),
    ROLLOUT_RS: ("seq_mean_k3", "token_k3", "seq_mean_k1", "token_k2,seq_max_k2"),
    RS_THRESHOLD: ("0.01", "0.999_1.001", "0.5,0.5", 0.05),
    LOSS_TYPE: ("ppo_clip", "reinforce"),
    "algorithm.gamma": (0.9,),
    "algorithm.norm_adv_by_std_in_grpo": (False,),
    "algorithm.kl_ctrl.kl_coef": (0.01,),
    DISTILLATION: (True, True, False),
    TASK_REWARDS: (True, True, False),
    DISTILLATION_LOSS: ("k1", "k3", "mse"),
    DISTILLATION_COEFFICIENT: (0.5,),
    f"{DISTILLATION_SETTINGS}.use_policy_gradient": (True, False),
    f"{DISTILLATION_SETTINGS}.policy_loss_mode": ("vanilla",),
    f"{DISTILLATION_SETTINGS}.loss_max_clamp": (0.2, None),
    f"{DISTILLATION_SETTINGS}.clip_ratio": (0.1,),
    f"{DISTILLATION_SETTINGS}.clip_ratio_low": (0.1,),
    f"{DISTILLATION_SETTINGS}.clip_ratio_high": (0.4,),
    "critic.cliprange_value": (0.3,),
}

NOT_DRAWN = {
    # verl fills them in.
    f"{ACTOR}.global_batch_info",
    f"{DISTILLATION_SETTINGS}.global_batch_info",
    # Of the loss on the student's logits, which a micro-batch of log-probabilities doesn't have.
    f"{DISTILLATION_SETTINGS}.topk",
    f"{DISTILLATION_SETTINGS}.log_prob_min_clamp",
    f"{DISTILLATION_SETTINGS}.use_chunked_topk",
    f"{DISTILLATION_SETTINGS}.chunked_topk_chunk_size",
    # Of the critic's loss.
    "critic.loss_agg_mode",
    "critic.loss_scale_factor",
    # Every value but verl's own is refused.
    "algorithm.rollout_correction.score_centering",
    # Of a loss that is refused.
    f"{POLICY_LOSS}.local_eta",
    f"{POLICY_LOSS}.local_topk",
    # verl's trainer doesn't compose them.
    "algorithm.gdpo_reward_keys",
    "algorithm.gdpo_reward_weights",
}

# The keys that only matter together with others are drawn with them.
DRAWN_WITH = {
    ROLLOUT_RS: (RS_THRESHOLD,),
    DISTILLATION: (DISTILLATION_LOSS, f"{DISTILLATION_SETTINGS}.use_policy_gradient"),
    f"{ACTOR}.use_kl_loss": (f"{ACTOR}.kl_loss_type",),
}

# Those that verl has, too, come more often. Two need bounds that a run has measured.
GROUPS = tuple(LOSSES_OF_VERL) * 3 + tuple(
    group
    for group in group_names()
    if group not in LOSSES_OF_VERL and "method" in read_node(group) and MISSING not in read_node(group).values()
)
MODIFIERS = ("shaping=advantage_reweighting", "select=high_entropy", "select=low_entropy")


class DrawnRun(NamedTuple):
    """A configuration: the group of a method, the groups on top of it, and verl's keys to their values."""

    group: str
    modifiers: tuple[str, ...]
    values: dict[str, Any]


def compose_run(groups: tuple[str, ...], values: dict[str, Any]) -> DictConfig:
    """verl's whole configuration, whose rollout returns its log-probabilities, with groups and then values."""
    config = composition(*groups, "actor_rollout_ref.rollout.calculate_log_probs=True")
    OmegaConf.set_struct(config, False)
    for key, value in values.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


# The keys that may be taken over are drawn most, those that are refused least.
COUNT_BY_FATE = {TAKEN: 6, READ_BY_VERL: 3, REFUSED: 1}
COUNTS = [COUNT_BY_FATE[row_of(key).fate] for key in VALUES]


def draw_run(number: int) -> DrawnRun:
    """The configuration of that number; the groups come in turn."""
    chance = random.Random(number)
    keys = chance.sample(list(VALUES), counts=COUNTS, k=chance.choice((1, 2, 3, 4)))
    for key in tuple(keys):
        keys += DRAWN_WITH.get(key, ())
    values = {key: chance.choice(VALUES[key]) for key in dict.fromkeys(keys)}
    modifiers = (chance.choice(MODIFIERS),) if chance.random() < 0.15 else ()
    group = GROUPS[number % len(GROUPS)]
    if group == "observe":
        # It takes no modifiers.
        modifiers = ()
    return DrawnRun(group, modifiers, values)


def test_every_key_on_the_path_is_drawn_or_says_why_not():
    on_path = {row.key for row in ROWS.values() if row.on_path}
    decided = {row_of(key).key for key in (*VALUES, *NOT_DRAWN)}
    assert sorted(on_path - decided) == [], "give these keys values in VALUES, or say in NOT_DRAWN why they have none"
    assert sorted(decided - on_path) == [], "no row of verl_clipx/run/keys.py has these keys on the way to the loss"
    assert sorted(NOT_DRAWN & {*VALUES}) == [], "these keys are drawn and said not to be"


def build_loss_function(config):
    """verl's loss function of a configuration, as its worker makes it."""
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    if not config.distillation.enabled:
        return actor, partial(ppo_loss, config=actor)
    node = OmegaConf.masked_copy(config.distillation, ["_target_", "enabled", "distillation_loss"])
    return actor, partial(distillation_ppo_loss, config=actor, distillation_config=omega_conf_to_dataclass(node))


OPTIONS_OF_CORRECTION = (ROLLOUT_IS, IS_THRESHOLD, IS_NORMALIZE, ROLLOUT_RS, RS_THRESHOLD)


def change_as_trainer(config):
    """What verl's trainer, by its own code, makes of the samples' weights and mask, and the teacher's server adds."""
    correction = config.algorithm.rollout_correction
    options = {key.rpartition(".")[2]: OmegaConf.select(config, key) for key in OPTIONS_OF_CORRECTION}

    def change(data):
        rollout = []
        for row, old in enumerate(data["old_log_probs"].unbind()):
            # From none in the first sequence, which no criterion rejects, to half a nat.
            distance = 0.04 * row * (torch.arange(len(old)).remainder(7) - 2)
            rollout.append(old - distance)
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
        weights, remaining, _ = compute_rollout_correction_and_rejection_mask(old, rollout, mask.float(), **options)
        if correction.rollout_is is not None:
            data["rollout_is_weights"] = weights.batch["rollout_is_weights"]
        if correction.rollout_rs is not None:
            data["response_mask"] = remaining.bool()

    return change


def check_run(number):
    """Decides a drawn run, asserts that what the driver says of it is true, and returns what became of it."""
    drawn = draw_run(number)
    groups = (f"+clipx={drawn.group}", *(f"+clipx/{modifier}" for modifier in drawn.modifiers))
    config = compose_run(groups, drawn.values)
    try:
        decision = resolve_into_config(config, named=drawn.values, group=drawn.group)
        OmegaConf.resolve(config.actor_rollout_ref.actor.policy_loss)
    except Refusal as refusal:
        assert_refusal_names_keys(drawn, refusal)
        return "refused"
    assert_nothing_refused_is_served(drawn, config, decision)
    try:
        gradients = train_as_announced(drawn, config)
    except TypeError:
        # verl's vanilla loss compares it with a number, as explain says.
        assert drawn.group == "observe" and drawn.values[f"{ACTOR}.clip_ratio_c"] is None, drawn
        return "refused by verl"
    except InstantiationException as refusal:
        # What verl's own configuration of distillation says.
        assert "verl.workers.config.distillation" in str(refusal), drawn
        return "refused by verl"
    config_of_verl = compose_for_verl(drawn)
    if config_of_verl is None:
        return "announced"
    for gradient, expected in zip(gradients, train_by_verl(config_of_verl), strict=True):
        assert_close(gradient, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()) + 1e-9)
    return "announced, verl's own gradient"


def assert_refusal_names_keys(drawn: DrawnRun, refusal: Refusal):
    """Each refusal is about a drawn key that the table says may be refused, and names a second key."""
    for part in refusal.all:
        named_keys = {part.key, *re.findall(r"(?:[a-z_]\w*\.)+\w+|\+clipx", str(part))}
        drawn_keys = [key for key in drawn.values if key in named_keys]
        assert drawn_keys and len(named_keys) > 1, f"{drawn}: {part}"
        rows = [row_of(key) for key in drawn_keys]
        assert any(row.refusal is not None or row.fate == TAKEN for row in rows), f"{drawn}: {part}"


def assert_nothing_refused_is_served(drawn: DrawnRun, config, decision):
    """No drawn key that is refused was let through; tests/run/test_verl_keys.py has what is taken over."""
    if drawn.group == "observe":
        assert decision.record.line.startswith("clipx: verl's own loss")
        return
    for key, value in drawn.values.items():
        # Values that ask for nothing else than what the plugin does.
        if key == LOSS_TYPE:
            is_harmless = value == "ppo_clip"
        elif key == TASK_REWARDS:
            is_harmless = value or not config.distillation.enabled
        else:
            is_harmless = False
        assert row_of(key).fate != REFUSED or is_harmless, f"{drawn}: {key} was let through"


def train_as_announced(drawn: DrawnRun, config):
    """The gradients of two updates through the worker's calls, which the receipt must not stop."""
    actor, loss_fn = build_loss_function(config)
    step = OptimizerStep(entropy_wanted=config.actor_rollout_ref.actor.entropy_coeff != 0)
    change = change_as_trainer(config)
    if drawn.group == "observe":
        wrapped = with_micro_batch(loss_fn, actor.policy_loss.clipx, Schedule(), lambda: step)
        return train_without_receipt(wrapped, change)
    update = Update(actor, step, loss_fn=loss_fn)
    gradients = [update.run(change=change), update.run(largest_move=0.5, change=change)]
    assert 0 <= update.end_rollout_batch(actor.policy_loss.run.record.schedule.updates) < 1e-4, drawn
    assert f" under {config.actor_rollout_ref.actor.loss_agg_mode}, in " in str(update.receipt)
    return gradients


def train_without_receipt(function, change):
    """The gradients of the same two updates by another loss function; the configuration is any."""
    update = Update(copy.deepcopy(built_once(("+clipx=grpo",))), loss_fn=function)
    update.loss_function = function
    return [update.run(change=change), update.run(largest_move=0.5, change=change)]


def compose_for_verl(drawn: DrawnRun):
    """verl's configuration of the same loss of its own; None where it has none, or reads the keys another way."""
    if drawn.group not in LOSSES_OF_VERL or drawn.modifiers:
        return None
    if drawn.values.get(BYPASS) and drawn.group != "observe":
        return None
    values = values_for_verl(drawn)
    if drawn.group != "observe":
        values |= bounds_for_verl(drawn)
    aggregation = values.get(f"{ACTOR}.loss_agg_mode")
    if values[f"{POLICY_LOSS}.loss_mode"] == "sapo" and aggregation != "seq-mean-token-mean":
        return None
    return compose_run((), values)


def values_for_verl(drawn: DrawnRun) -> dict[str, Any]:
    """Return the values by key with which verl's own loss is the drawn one.

    A drawn value is taken before that of `LOSSES_OF_VERL`, unless it is null: what a null bound is for verl's loss,
    `bounds_for_verl` says, and verl's dro stops without a dro_beta.
    """
    loss_mode, needed_values = LOSSES_OF_VERL[drawn.group]
    values = {f"{ACTOR}.{key}": value for key, value in needed_values.items()}
    values[f"{POLICY_LOSS}.loss_mode"] = loss_mode
    for key, value in drawn.values.items():
        name = key.removeprefix(f"{POLICY_LOSS}.")
        # `policy_loss` has SAPO's temperatures too, but verl's loss reads the actor's.
        if name in NOT_IN_VERL:
            values[f"{ACTOR}.{name}"] = value
        elif value is not None or key not in values:
            values[key] = value
    return values


def bounds_for_verl(drawn: DrawnRun):
    """The bounds by which verl's loss clips as the plugin's: clip_ratio means both sides, and null no dual clip."""
    bounds = {}
    if f"{ACTOR}.clip_ratio" in drawn.values:
        for key in (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"):
            if key not in drawn.values:
                bounds[key] = None
    if drawn.values.get(f"{ACTOR}.clip_ratio_c", 0) is None:
        bounds[f"{ACTOR}.clip_ratio_c"] = 1e9
    return bounds


def train_by_verl(config):
    """The gradients of the same two updates by verl's own loss."""
    _, loss_fn = build_loss_function(config)
    asks_for_entropy = config.actor_rollout_ref.actor.entropy_coeff != 0

    def function(model_output, data, dp_group=None):
        # verl's engines return the entropy only where it is asked for.
        output = {key: value for key, value in model_output.items() if asks_for_entropy or key != "entropy"}
        return loss_fn(model_output=output, data=data, dp_group=dp_group)

    return train_without_receipt(function, change_as_trainer(config))


@pytest.mark.slow
@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(range(FIRST_CONFIGURATIONS), id="a few"),
        pytest.param(range(FIRST_CONFIGURATIONS, CONFIGURATIONS), marks=pytest.mark.matrix, id="the others"),
    ],
)
def test_each_is_announced_and_true_or_refused(few_probes, numbers):
    outcomes = Counter(check_run(number) for number in numbers)
    print(dict(outcomes))
    # Neither a driver that refuses everything nor one that lets everything through would pass.
    for outcome in ("refused", "announced", "announced, verl's own gradient"):
        assert outcomes[outcome] > len(numbers) / 10, outcome
