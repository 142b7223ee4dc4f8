"""Reruns of a failed run from one of verl's checkpoints, with one change an arm: which change prevents the failure."""
