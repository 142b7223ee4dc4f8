"""KPop by hand, both divergences and both signs, and its authors' finding that
IcePop masks ever fewer tokens while the gap widens, on a made trace. tests/training/worker/test_golden.py has the
numbers of prime-rl's own function. Not covered: which policy the divergence is measured from.
"""

import math

import pytest
import torch

from tests.analysis.runs.commands import answer
from tests.analysis.runs.example_runs import LENGTH, PROMPTS, SAMPLES, write_run
from tests.golden.settings import Setup
from verl_clipx.losses.methods.kpop import Kpop
from verl_clipx.run.trace_format import read_shards, shards_in

from .at import HandRow, make_test_of_rows, row, tokens_at, tokens_from_to

PUBLISHED = {"kpop": dict(threshold=0.1, kl_tau=1e-3)}
GOLDEN = {"primerl_kpop": Setup("kpop", dict(threshold="kpop_threshold", kl_tau="kl_tau"))}
# Few probabilities move by its threshold in a few steps.
OVERRIDES_IN_TRAINING = ("clipx.threshold=1e-6",)
VARIANTS = ({"threshold": 0}, {"kl_tau": 0}, {"kl_tau": 100})


def kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


# KL(0.5, 0.2) is 0.223 and KL(0.2, 0.5) 0.193: only the larger one is beyond 0.2.
BETWEEN = 0.2
FREE = {"kl_tau": 0.0}

test_by_hand = make_test_of_rows(
    {
        **{
            f"either divergence and either direction, A = {A}": HandRow(
                method=Kpop(threshold=BETWEEN, **FREE),
                **tokens_from_to((0.2, 0.5), (0.5, 0.2), (0.2, 0.45), (0.5, 0.25), advantages=A),
                weight=(0.0, 0.0, 2.25, 0.5),
            )
            for A in (1.0, -1.0)
        },
        "a ratio of 100 of a rare token stays": HandRow(
            method=Kpop(**FREE), **tokens_from_to((1e-4, 1e-2), advantages=1.0), weight=(100.0,)
        ),
        # KL(0.5, 0.3) is 0.0872, KL(0.5, 0.28) 0.1084.
        "just within the threshold, and just beyond": HandRow(
            method=Kpop(**FREE),
            **tokens_from_to((0.3, 0.5), (0.5, 0.28), (0.28, 0.5), advantages=1.0),
            weight=(5 / 3, 0.0, 0.0),
        ),
        # Both count as 1e-6, and 1 - 1e-9 as 1 - 1e-6.
        "next to 0 and to 1": HandRow(
            method=Kpop(**FREE),
            **tokens_from_to((1e-9, 1e-7), (1 - 1e-9, 0.5), (0.5, 1 - 1e-9), advantages=1.0),
            weight=(100.0, 0.0, 0.0),
        ),
        "pulled back, kept or dropped": HandRow(
            method=Kpop(threshold=BETWEEN, kl_tau=0.5),
            **tokens_from_to((0.2, 0.5), (0.5, 0.25), advantages=2.0),
            weight=(-math.log(2.5) / 2, 0.5 + math.log(2) / 2),
            value=(math.log(2.5) ** 2 / 2, math.log(2) ** 2 / 2 - 1),
        ),
    }
)


def test_the_divergence_is_the_larger_of_the_two():
    for before, now in ((0.2, 0.5), (0.9, 0.99), (0.01, 0.3), (0.999, 0.5)):
        ratio, old = row(now / before), row(before).log()
        found = float(Kpop().bounded(tokens_at(ratio, torch.ones_like(ratio), old_log_prob=old)))
        assert found == pytest.approx(max(kl(now, before), kl(before, now)) * (1 if now > before else -1), rel=1e-6)


# From tokens of 0.4 that lose up to 0.25 to tokens of 0.95 that lose up to 0.45.
GAPS = {2: (0.4, 0.25), 4: (0.65, 0.37), 6: (0.9, 0.45)}
UNCLIPPED = dict(clip_low=None, clip_high=None, dual_clip=None)


def policies(least: float, gap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of a probability from `least` to 0.05 more, which fell by up to `gap`."""
    generator = torch.Generator().manual_seed(0)
    sampled, fell = torch.rand(2, PROMPTS * SAMPLES, LENGTH, generator=generator)
    sampled = least + 0.05 * sampled
    return sampled.log(), (sampled - gap * fell).log()


def test_icepop_masks_ever_fewer_tokens_while_the_gap_widens(tmp_path):
    made = {step: policies(*gap) for step, gap in GAPS.items()}
    run = write_run(tmp_path / "grpo-seed1", "grpo", policies=made, **UNCLIPPED)
    traced = read_shards(run / "traces", shards_in(run / "traces")).to_pandas()
    gaps, shares = [], {"two_sided": [], "kpop": []}
    for step, (sampled, current) in made.items():
        gaps.append(float((sampled.exp() - current.exp()).mean()))
        trained = int(((traced.step == step) & (traced.advantage != 0)).sum())
        # In bypass mode IcePop's mask, 0.5 and 5, is two_sided's rule.
        words = {"two_sided": ("clipx.clip_low=0.5", "clipx.clip_high=5"), "kpop": ("clipx.kl_tau=0",)}
        for name, of_name in shares.items():
            (found,) = answer("replay", run, "--step", step, f"+clipx={name}", *words[name])["settings"]
            of_name.append(round(100 * found["lost"] / trained, 1))
    # docs/dev/methods.md names these numbers.
    assert gaps == pytest.approx([0.124, 0.183, 0.223], abs=1e-3)
    assert shares == {"two_sided": [15.6, 9.2, 0.0], "kpop": [20.4, 40.5, 68.2]}
