"""What several of these scripts need. Each of them adds only its own overrides."""


def actor_config(*overrides: str):
    """verl's ActorConfig under overrides."""
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass

    needed = [
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return omega_conf_to_dataclass(compose("ppo_trainer", [*needed, *overrides]).actor_rollout_ref.actor)
