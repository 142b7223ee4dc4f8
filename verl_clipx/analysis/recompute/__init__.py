"""Which checkpoint sampled a run's tokens: `clipx recompute`."""
