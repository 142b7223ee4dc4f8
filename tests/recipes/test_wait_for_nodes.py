"""Waiting for a Ray cluster's nodes, with a stand-in for Ray. Not covered: Ray (tests/end_to_end/ray_nodes.py)."""

import runpy
from types import SimpleNamespace

import pytest

from .shell import RECIPES

wait_for_nodes = runpy.run_path(str(RECIPES / "cluster" / "wait_for_nodes.py"))["wait_for_nodes"]


def nodes(*addresses, dead=""):
    return [{"NodeManagerAddress": address, "Alive": address not in dead} for address in addresses]


def with_ray(monkeypatch, *answers):
    """Ray answers these nodes, one list after the other; returns the addresses that were joined."""
    left, joined = iter(answers), []
    ray = SimpleNamespace(init=lambda address, **_: joined.append(address), nodes=lambda: next(left))
    monkeypatch.setitem(wait_for_nodes.__globals__, "ray", ray)
    return joined


def test_it_waits_until_enough_nodes_are_alive(monkeypatch):
    joined = with_ray(monkeypatch, nodes("b"), nodes("b", "a", dead="a"), nodes("b", "a"))
    assert wait_for_nodes("b:6379", 2, seconds=30, poll=0) == ["a", "b"] and joined == ["b:6379"]


def test_at_the_deadline_it_names_the_nodes_that_came(monkeypatch):
    with_ray(monkeypatch, nodes("a", "b", "c", dead="b"))
    with pytest.raises(TimeoutError, match=r"2 of 3 nodes joined a:6379 within 0 s: a, c"):
        wait_for_nodes("a:6379", 3, seconds=0)
