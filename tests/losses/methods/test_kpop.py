"""KPop by hand, both divergences and both signs, and its authors' finding that IcePop masks ever fewer tokens while the
gap widens, on a made trace. tests/training/worker/test_golden.py has the numbers of prime-rl's own function. Not
covered: which policy the divergence is measured from.
"""

import math

import pytest
import torch

from tests.analysis.runs.commands import answer
from tests.analysis.runs.example_runs import LENGTH, PROMPTS, SAMPLES, write_run
from tests.golden.settings import Setup
from verl_clipx.losses.methods.kpop import Kpop
from verl_clipx.run.trace_format import read_shards, shards_in

from .hand_rows import HandRow, make_test_of_rows, row, tokens_at, tokens_from_to

PUBLISHED = {"kpop": dict(threshold=0.1, kl_tau=1e-3)}
GOLDEN = {"primerl_kpop": Setup("kpop", dict(threshold="kpop_threshold", kl_tau="kl_tau"))}
# Few probabilities move by its threshold in a few steps.
OVERRIDES_IN_TRAINING = ("clipx.threshold=1e-6",)
VARIANTS = ({"threshold": 0}, {"kl_tau": 0}, {"kl_tau": 100})


test_by_hand = make_test_of_rows(
    {
        **{
            f"either divergence and either direction, A = {A}": HandRow(
                # KL(0.5, 0.2) is 0.223 and KL(0.2, 0.5) 0.193: only the larger one is beyond the threshold.
                method=Kpop(threshold=0.2, kl_tau=0.0),
                **tokens_from_to((0.2, 0.5), (0.5, 0.2), (0.2, 0.45), (0.5, 0.25), advantages=A),
                weight=(0.0, 0.0, 2.25, 0.5),
            )
            for A in (1.0, -1.0)
        },
        "a ratio of 100 of a rare token stays": HandRow(
            method=Kpop(kl_tau=0.0), **tokens_from_to((1e-4, 1e-2), advantages=1.0), weight=(100.0,)
        ),
        # KL(0.5, 0.3) is 0.0872, KL(0.5, 0.28) 0.1084.
        "just within the threshold, and just beyond": HandRow(
            method=Kpop(kl_tau=0.0),
            **tokens_from_to((0.3, 0.5), (0.5, 0.28), (0.28, 0.5), advantages=1.0),
            weight=(5 / 3, 0.0, 0.0),
        ),
        # Both count as 1e-6, and 1 - 1e-9 as 1 - 1e-6.
        "next to 0 and to 1": HandRow(
            method=Kpop(kl_tau=0.0),
            **tokens_from_to((1e-9, 1e-7), (1 - 1e-9, 0.5), (0.5, 1 - 1e-9), advantages=1.0),
            weight=(100.0, 0.0, 0.0),
        ),
        "pulled back, kept or dropped": HandRow(
            method=Kpop(threshold=0.2, kl_tau=0.5),
            **tokens_from_to((0.2, 0.5), (0.5, 0.25), advantages=2.0),
            weight=(-math.log(2.5) / 2, 0.5 + math.log(2) / 2),
            value=(math.log(2.5) ** 2 / 2, math.log(2) ** 2 / 2 - 1),
        ),
    }
)


def kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


@pytest.mark.parametrize(("old", "current"), [(0.2, 0.5), (0.9, 0.99), (0.01, 0.3), (0.999, 0.5)])
def test_the_divergence_is_the_larger_of_the_two_with_the_sign_of_the_move(old, current):
    t = tokens_at(row(current / old), row(1.0), old_log_prob=row(old).log())
    larger = max(kl(current, old), kl(old, current))
    sign = 1 if current > old else -1
    assert float(Kpop().bounded(t)) == pytest.approx(sign * larger, rel=1e-6)


def make_policies(lowest: float, largest_fall: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sampler's and the current log-probabilities of tokens whose probabilities fell.

    Args:
        lowest: the sampler's lowest probability; the highest is 0.05 more.
        largest_fall: of a probability.
    """
    generator = torch.Generator().manual_seed(0)
    above_lowest, fall = torch.rand(2, PROMPTS * SAMPLES, LENGTH, generator=generator)
    sampled = lowest + 0.05 * above_lowest
    return sampled.log(), (sampled - largest_fall * fall).log()


def test_icepop_masks_ever_fewer_tokens_while_the_gap_widens(tmp_path):
    # By step, from tokens of 0.4 that lose up to 0.25 to tokens of 0.95 that lose up to 0.45.
    policies = {2: make_policies(0.4, 0.25), 4: make_policies(0.65, 0.37), 6: make_policies(0.9, 0.45)}
    without_clip = {"clip_low": None, "clip_high": None, "dual_clip": None}
    run = write_run(tmp_path / "grpo-seed1", "grpo", policies=policies, **without_clip)
    traced = read_shards(run / "traces", shards_in(run / "traces")).to_pandas()

    def masked_percentage(step: int, *overrides: str) -> float:
        """Return how many of a step's tokens with an advantage a method would mask, by `clipx replay`."""
        (setting,) = answer("replay", run, "--step", step, *overrides)["settings"]
        tokens = int(((traced.step == step) & (traced.advantage != 0)).sum())
        return round(100 * setting["lost"] / tokens, 1)

    # docs/dev/methods.md names these numbers.
    gaps = [float((sampled.exp() - current.exp()).mean()) for sampled, current in policies.values()]
    assert gaps == pytest.approx([0.124, 0.183, 0.223], abs=1e-3)
    # In bypass mode IcePop's mask, 0.5 and 5, is two_sided's rule.
    icepop = ("+clipx=two_sided", "clipx.clip_low=0.5", "clipx.clip_high=5")
    assert [masked_percentage(step, *icepop) for step in policies] == [15.6, 9.2, 0.0]
    kpop = ("+clipx=kpop", "clipx.kl_tau=0")
    assert [masked_percentage(step, *kpop) for step in policies] == [20.4, 40.5, 68.2]
