"""Reproducible rollouts: each sample has its own seed, and rows come in a fixed order."""

# The agent loop's name in verl's registry, which +clipx/rollout=seeded chooses.
AGENT_LOOP = "clipx_seeded_single_turn"
