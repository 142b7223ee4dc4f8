"""The papers' runs and tables."""
