"""Data sets, prompts and rewards, a folder a task."""
