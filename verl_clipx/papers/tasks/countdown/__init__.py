"""Countdown: reach a target with the given numbers, each used exactly once, by + - * /."""
