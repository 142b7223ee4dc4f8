"""Fixtures shared by the claims."""

import pytest


@pytest.fixture(autouse=True)
def a_cluster_to_join(monkeypatch):
    """Without one, the plugin refuses to train without an accelerator."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
