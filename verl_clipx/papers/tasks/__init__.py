"""Data sets, prompts and rewards, with a folder for each task."""
