"""Reproducible rollouts: each sample has its own seed, and rows come in a fixed order."""
