"""Resolves a run: its settings, verl's keys, the line that announces it."""
