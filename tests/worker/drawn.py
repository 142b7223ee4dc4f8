"""Configurations drawn from the table of verl's keys: a group, modifiers, and some of verl's keys with values."""

import random
from functools import cache
from typing import Any, NamedTuple

from omegaconf import MISSING, DictConfig, OmegaConf

from tests.composition import composition
from verl_clipx.run.groups import group_names, node_of
from verl_clipx.run.verl_keys import (
    ACTOR,
    BYPASS,
    DISTILLATION,
    DISTILLATION_COEFFICIENT,
    DISTILLATION_LOSS,
    LOSS_TYPE,
    READ_BY_VERL,
    REFUSED,
    ROLLOUT_IS,
    ROLLOUT_RS,
    TAKEN,
    TASK_REWARDS,
    WITH_ROLLOUT_IS,
    WITH_ROLLOUT_RS,
    row_of,
)

POLICY_LOSS = f"{ACTOR}.policy_loss"
OF_DISTILLATION = DISTILLATION_LOSS.rpartition(".")[0]

# What is drawn of each key; NOT_DRAWN has the reason of the others.
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
        *("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    ),
    f"{ACTOR}.loss_scale_factor": (100, None),
    f"{ACTOR}.entropy_coeff": (0.0, 0.01),
    f"{ACTOR}.use_kl_loss": (True, True, False),
    f"{ACTOR}.kl_loss_coef": (0.5,),
    f"{ACTOR}.kl_loss_type": ("k1", "k2", "k3", "k3+", "abs", "low_var_kl"),
    f"{ACTOR}.strategy": ("fsdp", "fsdp2"),
    BYPASS: (True, True, False),
    ROLLOUT_IS: ("token", "sequence"),
    WITH_ROLLOUT_IS[0]: (2.0, 1.1),
    WITH_ROLLOUT_IS[1]: (True,),
    ROLLOUT_RS: ("seq_mean_k3", "token_k3", "seq_mean_k1", "token_k2,seq_max_k2"),
    WITH_ROLLOUT_RS[0]: ("0.01", "0.999_1.001", "0.5,0.5", 0.05),
    LOSS_TYPE: ("ppo_clip", "reinforce"),
    "algorithm.gamma": (0.9,),
    "algorithm.norm_adv_by_std_in_grpo": (False,),
    "algorithm.kl_ctrl.kl_coef": (0.01,),
    DISTILLATION: (True, True, False),
    TASK_REWARDS: (True, True, False),
    DISTILLATION_LOSS: ("k1", "k3", "mse"),
    DISTILLATION_COEFFICIENT: (0.5,),
    f"{OF_DISTILLATION}.use_policy_gradient": (True, False),
    f"{OF_DISTILLATION}.policy_loss_mode": ("vanilla",),
    f"{OF_DISTILLATION}.loss_max_clamp": (0.2, None),
    f"{OF_DISTILLATION}.clip_ratio": (0.1,),
    f"{OF_DISTILLATION}.clip_ratio_low": (0.1,),
    f"{OF_DISTILLATION}.clip_ratio_high": (0.4,),
    "critic.cliprange_value": (0.3,),
}

OF_LOGITS = "of the loss on the student's logits, which a micro-batch of log-probabilities doesn't have"
NOT_DRAWN = {
    f"{ACTOR}.global_batch_info": "verl fills it in",
    f"{OF_DISTILLATION}.global_batch_info": "verl fills it in",
    f"{OF_DISTILLATION}.topk": OF_LOGITS,
    f"{OF_DISTILLATION}.log_prob_min_clamp": OF_LOGITS,
    f"{OF_DISTILLATION}.use_chunked_topk": OF_LOGITS,
    f"{OF_DISTILLATION}.chunked_topk_chunk_size": OF_LOGITS,
    "critic.loss_agg_mode": "of the critic's loss",
    "critic.loss_scale_factor": "of the critic's loss",
    "algorithm.gdpo_reward_keys": "verl's trainer doesn't compose it",
    "algorithm.gdpo_reward_weights": "verl's trainer doesn't compose it",
}

# The keys that only matter together with others are drawn with them.
TOGETHER = {
    ROLLOUT_RS: WITH_ROLLOUT_RS,
    DISTILLATION: (DISTILLATION_LOSS, f"{OF_DISTILLATION}.use_policy_gradient"),
    f"{ACTOR}.use_kl_loss": (f"{ACTOR}.kl_loss_type",),
}

# Those that verl has, too, come more often. Two need bounds that a run has measured.
OF_VERL = ("grpo", "dapo", "cispo", "gspo", "sapo", "dppo", "dppo_kl", "dro", "observe")
GROUPS = OF_VERL * 3 + tuple(
    group
    for group in group_names()
    if group not in OF_VERL and "method" in node_of(group) and MISSING not in node_of(group).values()
)
MODIFIERS = ("shaping=advantage_reweighting", "select=high_entropy", "select=low_entropy")


class Drawn(NamedTuple):
    """A configuration.

    Attributes:
        group: of the method.
        modifiers: groups on top of it.
        values: verl's keys to their values.
    """

    group: str
    modifiers: tuple[str, ...]
    values: dict[str, Any]

    def __str__(self) -> str:
        values = (f"{key}={value}" for key, value in self.values.items())
        return " ".join((f"+clipx={self.group}", *(f"+clipx/{one}" for one in self.modifiers), *values))

    def config(self) -> DictConfig:
        """verl's whole configuration with it."""
        modifiers = [f"+clipx/{one}" for one in self.modifiers]
        return composed((f"+clipx={self.group}", *modifiers), self.values)


def composed(groups: tuple[str, ...], values: dict[str, Any]) -> DictConfig:
    """verl's whole configuration, whose rollout returns its log-probabilities, with groups and then values."""
    config = composition(*groups, "actor_rollout_ref.rollout.calculate_log_probs=True")
    OmegaConf.set_struct(config, False)
    for key, value in values.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


@cache
def weights() -> dict[str, int]:
    """How often each key is drawn: those that may be taken over most, those that are refused least."""
    often = {TAKEN: 6, READ_BY_VERL: 3, REFUSED: 1}
    return {key: often[row_of(key).fate] for key in VALUES}


def drawn(number: int) -> Drawn:
    """The configuration of that number; the groups come in turn."""
    chance = random.Random(number)
    keys = chance.sample(list(VALUES), counts=list(weights().values()), k=chance.choice((1, 2, 3, 4)))
    for key in tuple(keys):
        keys += TOGETHER.get(key, ())
    values = {key: chance.choice(VALUES[key]) for key in dict.fromkeys(keys)}
    modifiers = (chance.choice(MODIFIERS),) if chance.random() < 0.15 else ()
    group = GROUPS[number % len(GROUPS)]
    return Drawn(group, () if group == "observe" else modifiers, values)
