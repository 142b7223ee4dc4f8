"""What a user checks: a loss of their own by the contract of methods, the installation, and what sampled a run."""
