"""DGPO's five regions, at and around the bounds. Does not cover metrics computed from them."""

import torch

from verl_clipx.losses.bounds import Bounds
from verl_clipx.losses.regions import REGIONS, region_members


def _names(ratio, advantages, bounds):
    members = region_members(torch.tensor([ratio]), torch.tensor([advantages]), bounds)
    assert tuple(members) == REGIONS
    table = torch.stack([tokens[0].bool() for tokens in members.values()])
    assert (table.sum(0) == 1).all()
    return [REGIONS[row] for row in table.int().argmax(0).tolist()]


def test_regions_by_hand():
    ratio = [0.5, 2.0, 0.5, 2.0, 1.0, 1.0]
    advantages = [-1.0, 1.0, 1.0, -1.0, 1.0, -1.0]
    assert _names(ratio, advantages, Bounds(0.8, 1.2)) == ["LN", "HP", "LP", "HN", "M", "M"]


def test_equality_and_zero_advantages_are_in_the_middle():
    ratio = [0.75, 0.75, 1.25, 1.25, 0.1, 9.0]
    advantages = [-1.0, 1.0, 1.0, -1.0, 0.0, 0.0]
    assert _names(ratio, advantages, Bounds(0.75, 1.25)) == ["M"] * 6


def test_no_bounds_no_regions():
    assert _names([1e-30, 1e30], [-1.0, 1.0], Bounds(0.0, torch.inf)) == ["M", "M"]


def test_bounds_may_differ_between_tokens():
    bounds = Bounds(torch.tensor([[0.9, 0.5]]), torch.tensor([[1.1, 1.5]]))
    assert _names([0.7, 0.7], [-1.0, -1.0], bounds) == ["LN", "M"]
    assert _names([1.3, 1.3], [1.0, 1.0], bounds) == ["HP", "M"]
