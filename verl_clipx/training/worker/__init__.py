"""What a step does: plan, extra pass, policy loss, state, traces."""
