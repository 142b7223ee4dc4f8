"""Reversal: write a text backwards; an answer is scored by how much of it is right."""
