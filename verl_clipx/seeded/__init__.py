"""Rollouts that repeat: each sample from a seed of its own, rows in a fixed order."""
