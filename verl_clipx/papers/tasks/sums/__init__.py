"""Sums of two numbers below 100, which a model of 135 million parameters can learn."""
