"""What each method must be seen to do, whichever path of verl trained it."""

from typing import Protocol

# What makes a method show itself within a few steps.
SETTINGS = {"bapo": ("clipx.target=0.7",)}


# The share of the tokens in each region, under clipx.metrics=all.
FRACTIONS = {
    "LN": "clip_fraction_low",
    "HP": "clip_fraction_high",
    **{region: f"region_fraction/{region}" for region in ("LP", "HN", "M")},
}


class Trained(Protocol):
    """A run or an optimizer step whose metrics can be looked at."""

    def values(self, metric: str) -> list[float]:
        """A metric under the name that verl logs it by, a value a step."""
        ...


def mean(trained: Trained, metric: str) -> float:
    """A metric's mean over steps."""
    values = trained.values(metric)
    return sum(values) / len(values)


def check_grpo(trained: Trained) -> None:
    assert mean(trained, "actor/clipx/gradient_mass/HP") == 0
    assert mean(trained, "actor/clipx/gradient_mass/LN") == 0
    assert mean(trained, "actor/pg_clipfrac") > 0


def check_soft(trained: Trained) -> None:
    outside = mean(trained, "actor/clipx/gradient_mass/HP") + mean(trained, "actor/clipx/gradient_mass/LN")
    assert outside > 0


def check_aspo(trained: Trained) -> None:
    assert mean(trained, "actor/clipx/gradient_mass/HP") == 0
    assert mean(trained, "actor/clipx/gradient_mass/M") > 0


def check_acpo(trained: Trained) -> None:
    epsilons = [mean(trained, f"actor/clipx/epsilon/bin_{index}") for index in range(5)]
    assert min(epsilons) >= 0.2 - 1e-9
    assert max(epsilons) > 0.21


def check_bapo(trained: Trained) -> None:
    assert mean(trained, "actor/clipx/c_high") > 1.2
    assert all(0 <= share <= 1 for share in trained.values("actor/clipx/positive_share_after"))


def check_masked(trained: Trained) -> None:
    assert mean(trained, "actor/clipx/gradient_mass/HP") == 0
    assert mean(trained, "actor/clipx/gradient_mass/LN") == 0
    assert mean(trained, "actor/clipx/gradient_mass/M") > 0


def check_m2po(trained: Trained) -> None:
    check_masked(trained)
    before, after = (trained.values(f"actor/clipx/second_moment_{when}") for when in ("before", "after"))
    assert max(after) <= 0.04 and all(0 <= less <= more for less, more in zip(after, before, strict=True))


def check_sapo(trained: Trained) -> None:
    # Without bounds.
    assert mean(trained, "actor/pg_clipfrac") == 0
    assert mean(trained, "actor/clipx/gradient_mass/LP") == mean(trained, "actor/clipx/gradient_mass/HN") == 0
    assert mean(trained, "actor/clipx/gradient_mass/M") > 0


def check_topr(trained: Trained) -> None:
    # Negative tokens alone have a bound, and weight 1 above it.
    assert mean(trained, "actor/clipx/clip_fraction_high") == mean(trained, "actor/clipx/gradient_mass/LP") == 0
    assert mean(trained, "actor/clipx/gradient_mass/HN") > 0


def check_two_sided(trained: Trained) -> None:
    check_masked(trained)
    assert mean(trained, "actor/clipx/gradient_mass/LP") == mean(trained, "actor/clipx/gradient_mass/HN") == 0


CHECKS = {
    "grpo": check_grpo,
    "cispo": check_soft,
    "gppo": check_soft,
    "ce_gppo": check_soft,
    "aspo": check_aspo,
    "dgpo": check_soft,
    "acpo": check_acpo,
    "bapo": check_bapo,
    "dcpo": check_masked,
    "dppo": check_masked,
    "dro": check_sapo,
    "gmpo": check_grpo,
    "gspo": check_grpo,
    "m2po": check_m2po,
    "sapo": check_sapo,
    "topr": check_topr,
    "two_sided": check_two_sided,
    "ipo": check_two_sided,
    "spo": check_sapo,
    "vespo": check_sapo,
    "ctpo": check_masked,
}
