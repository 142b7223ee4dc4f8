"""Waiting for a Ray cluster's nodes, with a stand-in for Ray. Not covered: Ray."""

import importlib.util

import pytest

from .shell import RECIPES

spec = importlib.util.spec_from_file_location("wait_for_nodes", RECIPES / "cluster" / "wait_for_nodes.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)


def nodes(*addresses, dead=()):
    return [{"NodeManagerAddress": address, "Alive": address not in dead} for address in addresses]


@pytest.fixture
def ray(monkeypatch):
    class Ray:
        joined = None
        answers = ()

        def init(self, address, **_):
            self.joined = address

        def nodes(self):
            answer, *rest = self.answers
            self.answers = rest or [answer]
            return answer

    ray = Ray()
    monkeypatch.setattr(module, "ray", ray)
    return ray


def test_it_waits_until_enough_nodes_are_alive(ray):
    ray.answers = [nodes("b"), nodes("b", "a", dead=("a",)), nodes("b", "a")]
    assert module.wait_for_nodes("b:6379", 2, seconds=30, poll=0) == ["a", "b"]
    assert ray.joined == "b:6379"


def test_at_the_deadline_it_names_the_nodes_that_came(ray):
    ray.answers = [nodes("a", "b", "c", dead=("b",))]
    with pytest.raises(TimeoutError, match=r"2 of 3 nodes joined a:6379 within 0 s: a, c"):
        module.wait_for_nodes("a:6379", 3, seconds=0)
