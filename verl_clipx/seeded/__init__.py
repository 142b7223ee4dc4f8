"""Rollouts whose samples are a function of the seed: an agent loop that seeds each, and rows in a fixed order."""
