"""Losses as a user would write them, in a module that no entry point knows."""

from dataclasses import dataclass

import torch

from verl_clipx import Bounds, FixedBounds, Method, Width, number, of_decision, parameter, register_loss


@dataclass(frozen=True, kw_only=True)
class WithinSpread(Method, name="tests_within_spread"):
    """Clips at a number of root mean squares of the log-ratio."""

    width: float = parameter(2.0, number(at_least=0, at_most=100), "the clip's distance from 1, in log-ratios' spreads")

    logs = (of_decision("spread", "root mean square of the log-ratio", "nats", chart="spread"),)
    statistics_size = 2

    def statistics(self, t):
        squares = torch.where(t.mask, t.log_ratio**2, 0.0)
        return torch.stack([t.mask.sum(dtype=torch.float64), squares.sum(dtype=torch.float64)])

    def decide(self, statistics):
        count, squares = statistics.unbind()
        return (squares / count.clamp(min=1)).sqrt()[None]

    def bounds(self, t, decision):
        distance = (self.width * decision).to(t.ratio.dtype)
        return Bounds(torch.exp(-distance), torch.exp(distance))

    def metrics(self, statistics, decision):
        return {"spread": decision[0]}

    def gradient_weight(self, t, bounds):
        clipped = ((t.advantages > 0) & (t.ratio > bounds.high)) | ((t.advantages < 0) & (t.ratio < bounds.low))
        return torch.where(clipped, 0.0, t.ratio)


@register_loss("tests_soft")
def soft(ratio, advantages, bounds, *, temperature: float = 2.0):
    """A sigmoid gate around the bounds."""
    gate = torch.sigmoid((bounds.high - ratio) * temperature) * torch.sigmoid((ratio - bounds.low) * temperature)
    return ratio * gate


@dataclass(frozen=True, kw_only=True)
class PlainClip(FixedBounds, name="tests_plain_clip"):
    """PPO's clip without a dual clip, whose bounds can hold a target."""

    bounds_width = Width(mask=True)

    def gradient_weight(self, t, bounds):
        return torch.where(bounds.clipped(t.ratio, t.advantages), 0.0, t.ratio)


@register_loss("tests_plain_clip_function", bounds_width=Width(mask=True))
def plain_clip(ratio, advantages, bounds):
    """PlainClip as a function."""
    return torch.where(bounds.clipped(ratio, advantages), 0.0, ratio)


@dataclass(frozen=True, kw_only=True)
class Tapering(Method, name="tests_tapering"):
    """Bounds that narrow along the response."""

    formula = ("1 - {width} / s", "1 + {width} / s", "s >= 1")
    symbols = "s the token's position, its root to the power {power}"

    width: float = parameter(0.3, number(at_least=0, at_most=1), "of the first token")
    power: float = parameter(0.5, number(at_least=0, at_most=1), "how fast the bounds narrow")

    def bounds(self, t, decision):
        width = self.width / t.mask.cumsum(-1).clamp(min=1).to(t.ratio.dtype).pow(self.power)
        return Bounds(1 - width, 1 + width)

    def gradient_weight(self, t, bounds):
        return torch.where(bounds.clipped(t.ratio, t.advantages), 0.0, t.ratio)


@register_loss("tests_gate", formula=("", "2 tau"), symbols="tau the limit {limit}")
def gate(ratio, *, limit: float = 1.5):
    """Falls to 0 at twice its limit, without bounds of the plugin's."""
    return (ratio * (2 - ratio / limit)).clamp(min=0)


@register_loss("tests_smooth")
def smooth(ratio, advantages):
    """Falls on both sides of ratio 1, without bounds."""
    return torch.exp(-((ratio - 1) ** 2))


@dataclass(frozen=True, kw_only=True)
class Slowing(Method, name="tests_slowing"):
    """Falls on both sides of ratio 1, as a class without bounds."""

    def gradient_weight(self, t, bounds):
        return torch.exp(-((t.ratio - 1) ** 2))


@dataclass(frozen=True, kw_only=True)
class ToSampler(Method, name="tests_to_sampler"):
    """Drops tokens whose ratio to the policy that sampled is above 1.5."""

    asks_for = ("rollout_log_prob",)
    ratio_to_sampler = True

    def gradient_weight(self, t, bounds):
        ratio = torch.exp(t.log_prob - t.rollout_log_prob)
        return torch.where(ratio > 1.5, 0.0, ratio)


@dataclass(frozen=True, kw_only=True)
class ByEntropy(WithinSpread, name="tests_by_entropy"):
    """As its base, with statistics over the tokens whose entropy is above 1."""

    asks_for = ("entropy",)

    def statistics(self, t):
        counted = t.mask & (t.entropy > 1)
        squares = torch.where(counted, t.log_ratio**2, 0.0)
        return torch.stack([counted.sum(dtype=torch.float64), squares.sum(dtype=torch.float64)])


@register_loss("tests_nan")
def nan(ratio, advantages, bounds):
    """Broken: 0 * inf."""
    return torch.where(ratio > bounds.high, 0.0 * torch.exp(ratio), ratio)


def undecorated(ratio, advantages, bounds):
    """Lacks the decorator."""
    return ratio
