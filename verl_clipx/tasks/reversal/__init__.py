"""Reversal: write a text backwards, each answer scored by how much of it is right."""
