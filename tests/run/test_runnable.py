"""What verl would stop at minutes after the start, or pass over in silence, refused when the driver decides.

Covers: by overrides on verl's configuration: epochs, the loss to observe, the trainer's mode, rollout correction and
the log-probabilities that it needs; that verl's own functions refuse what is refused and take what is taken. Not
covered: that a run's start and `clipx explain` refuse the same (test_start.py, tests/run/test_explain.py).
"""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo import core_algos, rollout_corr_helper

from tests.claims.configuration import ACTOR, merged
from tests.hydra_main import ENTRIES, MAIN_PPO, composed
from verl_clipx.run.runnable import TRAINER_MODE, USE_V1, is_registered_in_the_source, misplaced_keys
from verl_clipx.run.start import decide

CORRECTION = "algorithm.rollout_correction"
LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs"


def decided(group, values):
    return decide(merged([f"+clipx={group}"], values), group=group)


@pytest.mark.parametrize("group", ["acpo", "observe"])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({f"{ACTOR}.ppo_epochs": 0}, rf"{ACTOR}\.ppo_epochs=0: no update would be made\. Set it to a whole number"),
        ({f"{ACTOR}.ppo_epochs": -2}, r"ppo_epochs=-2: no update"),
        ({f"{ACTOR}.ppo_epochs": 0.5}, r"ppo_epochs=0\.5: no update"),
        (
            {TRAINER_MODE: "nonsense"},
            r"trainer\.v1\.trainer_mode=nonsense with trainer\.use_v1=True: .* colocate_async, separate_async, sync,",
        ),
        # A key of trainer.v1 that is no trainer.
        ({TRAINER_MODE: "sampler"}, r"trainer_mode=sampler with trainer\.use_v1=True: verl has no such trainer"),
        (
            {f"{CORRECTION}.rollout_is": "nonsense"},
            rf"{CORRECTION}\.rollout_is=nonsense, {CORRECTION}\.rollout_is_threshold=2\.0: .*'token'.* set "
            rf"{CORRECTION}\.rollout_is=null",
        ),
        (
            {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": "5_0.5"},
            r"rollout_is_threshold=5_0\.5: .*lower bound must be <= upper",
        ),
        (
            {f"{CORRECTION}.rollout_rs": "token_k9", f"{CORRECTION}.rollout_rs_threshold": 2},
            r"rollout_rs=token_k9, .*rollout_rs_threshold=2: .*'token_k1'.* set algorithm\..*rollout_rs=null",
        ),
        ({f"{CORRECTION}.rollout_rs": "token_k1"}, r"rollout_rs_threshold=None: .*must be provided"),
        (
            {LOG_PROBS: False, f"{CORRECTION}.bypass_mode": True},
            rf"{CORRECTION}\.bypass_mode=True with {LOG_PROBS}=False: .*Set {LOG_PROBS}=True, or {CORRECTION}\.bypass",
        ),
        (
            {LOG_PROBS: False, f"{CORRECTION}.rollout_is": "token"},
            rf"{CORRECTION}\.rollout_is=token with {LOG_PROBS}=False: .*, or {CORRECTION}\.rollout_is=null",
        ),
        (
            {LOG_PROBS: False, f"{CORRECTION}.rollout_rs": "token_k1", f"{CORRECTION}.rollout_rs_threshold": "0.5_2"},
            rf"{CORRECTION}\.rollout_rs=token_k1 with {LOG_PROBS}=False",
        ),
    ],
)
def test_it_is_refused_with_its_keys_and_what_to_do(group, values, message):
    with pytest.raises(ValueError, match=message):
        decided(group, values)


@pytest.mark.parametrize(
    "values",
    [
        {LOG_PROBS: False},
        {LOG_PROBS: False, f"{CORRECTION}.bypass_mode": False},
        {USE_V1: False, TRAINER_MODE: "nonsense"},
        {"rollout": {"nnodes": 1}, TRAINER_MODE: "nonsense"},
        {TRAINER_MODE: None},
        *({TRAINER_MODE: mode} for mode in ("sync", "colocate_async", "separate_async")),
        {f"{CORRECTION}.rollout_is": "sequence", f"{CORRECTION}.rollout_is_threshold": "0.5_5.0"},
        {f"{CORRECTION}.rollout_rs": "token_k1,seq_mean_k3", f"{CORRECTION}.rollout_rs_threshold": "0.5_2,0.01"},
    ],
)
@pytest.mark.parametrize("group", ["grpo", "observe"])
def test_what_verl_runs_is_not_refused(group, values):
    assert decided(group, values).line


def test_any_of_verls_losses_is_observed_and_no_other():
    key = f"{ACTOR}.policy_loss.loss_mode"
    own = [name for name in core_algos.POLICY_LOSS_REGISTRY if not name.startswith("clipx_")]
    assert {"vanilla", "gspo", "bypass_mode"} <= set(own)
    for name in own:
        values = {key: name, f"{ACTOR}.policy_loss.dro_beta": 0.1}
        assert f"verl's own loss {name}, observed" in decided("observe", values).line
    with pytest.raises(ValueError, match=rf"{key}=ppo with \+clipx=observe: .*cispo.*vanilla.*EXTERNAL_MODULES"):
        decided("observe", {key: "ppo"})


def test_what_verls_own_loss_lacks_is_said_when_it_is_observed():
    key, loss_mode = f"{ACTOR}.policy_loss.dro_beta", f"{ACTOR}.policy_loss.loss_mode"
    for beta in (None, 0):
        with pytest.raises(
            ValueError, match=rf"{loss_mode}=dro with {key}=(null|0): verl's dro needs a penalty above 0"
        ):
            decided("observe", {loss_mode: "dro", key: beta})
    with pytest.raises(
        ValueError, match=r"policy_loss\.tau_neg=1\.2 with \+clipx=observe: verl does not have this key"
    ):
        decided("observe", {f"{ACTOR}.policy_loss.tau_neg": 1.2})
    decided("observe", {loss_mode: "dro", key: 0.1, f"{ACTOR}.tau_neg": 1.2})


def test_a_loss_that_somebody_registered_is_observed(monkeypatch):
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "somebody_s", lambda **_: None)
    assert "loss somebody_s" in decided("observe", {f"{ACTOR}.policy_loss.loss_mode": "somebody_s"}).line


def test_a_trainer_that_somebody_registered_is_taken(monkeypatch):
    from verl.trainer.ppo.v1 import trainer_base

    for mode in trainer_base.TRAINER_REGISTRY:
        assert is_registered_in_the_source(mode)
    monkeypatch.setitem(trainer_base.TRAINER_REGISTRY, "somebody_s", SimpleNamespace)
    assert not is_registered_in_the_source("somebody_s")
    assert decided("grpo", {TRAINER_MODE: "somebody_s"}).line


def test_verl_passes_over_a_correction_without_the_rollouts_log_probabilities():
    # And stops at one that it does not know only when it has a batch.
    with pytest.raises(ValueError, match="Invalid rollout_is"):
        rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
            torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), rollout_is="nonsense"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "words"),
    [
        *((MAIN_PPO, [f"model_engine={engine}"]) for engine in ("dp", "megatron", "veomni", "torchtitan")),
        (list(ENTRIES)[1], ["hydra.searchpath=[pkg://verl.trainer.config]"]),
        (list(ENTRIES)[2], []),
        (MAIN_PPO, ["+hardware=cpu", "+clipx=acpo", "+clipx/select=high_entropy"]),
    ],
)
def test_what_verl_composes_by_itself_is_nowhere_misplaced(module, words):
    assert misplaced_keys(composed(module, words)[0]) == []


@pytest.mark.parametrize("group", ["acpo", "grpo", "observe"])
@pytest.mark.parametrize("key", ["actor.clip_ratio_high", "algorithm.kl_loss_coef", "clip_ratio", "critic.tau_pos"])
def test_a_key_of_the_loss_elsewhere_is_refused_under_every_group(group, key):
    with pytest.raises(
        ValueError, match=rf"^{key}=0\.3: nothing reads it there\. Set {ACTOR}\.{key.rpartition('.')[2]},"
    ):
        decided(group, {key: 0.3})


def test_what_verl_passes_on_to_other_code_may_have_any_name():
    free = ["reward.custom_reward_function.reward_kwargs", "actor_rollout_ref.model.override_config"]
    assert decided("acpo", {f"{node}.clip_ratio": 0.3 for node in free})


def test_facts_of_a_configuration_that_has_changed_since_it_was_resolved_are_refused():
    config = merged(["+clipx=acpo"])
    OmegaConf.resolve(config)
    decide(config, group="acpo")
    config.actor_rollout_ref.actor.ppo_epochs = 2
    with pytest.raises(ValueError, match=r"policy_loss\.run\.epochs=1: the plugin reads this fact about the run"):
        decide(config, group="acpo")
