"""What each method must be seen to do, whichever path of verl trained it.

It follows from the method's own weight: where that is 0, a region has no gradient mass; without bounds, no tokens are
outside. What else a method shows stands in its test, as `check_training`.
"""

from typing import Any

from tests.losses.methods.facts import fact
from verl_clipx.losses.applying.metrics import token_metrics, token_sums
from verl_clipx.losses.base.shared_metrics import REGIONS
from verl_clipx.losses.contract.contract import evaluate, every_ratio, example, select_inputs
from verl_clipx.losses.methods import BUILT_IN, METHODS

# What makes a method show itself within a few steps.
SETTINGS = {method: fact(method, "OVERRIDES_IN_TRAINING", ()) for method in BUILT_IN}


# The shares of tokens that a run logs, by their regions.
FRACTIONS = {"LN": "clip_fraction_low", "HP": "clip_fraction_high"}


def mean(trained: Any, metric: str) -> float:
    """A metric's mean over steps."""
    values = trained.values(metric)
    return sum(values) / len(values)


def regions_of(method: str) -> tuple[set[str], set[str]]:
    """Those of `FRACTIONS` that tokens of any ratio and either sign are in, and all where the weight is not 0."""
    instance = METHODS[method](**fact(method, "PARAMETERS_IN_TRAINING", {}))
    usual = evaluate(instance, **select_inputs(instance, example()))
    # A second stage is about the tokens' own means.
    statistics = None if instance.second_statistics_size else usual.statistics
    evaluation = evaluate(instance, statistics=statistics, **select_inputs(instance, every_ratio()))
    tokens = evaluation.tokens
    gradient = instance.gradient(tokens, evaluation.bounds, evaluation.weight)
    sums = token_metrics(token_sums(tokens, instance.bounded(tokens), evaluation.bounds, gradient, None, None))
    reached = {region for region, name in FRACTIONS.items() if sums[f"clipx/{name}"] > 0}
    return reached, {region for region in REGIONS if sums[f"clipx/gradient_mass/{region}"] > 0}


def check_method(method: str, trained: Any) -> None:
    """The metrics of a run or an optimizer step, which its `values` gives by their names, are those of the method."""
    reached, with_gradient = regions_of(method)
    for region in {*REGIONS} - with_gradient:
        assert mean(trained, f"actor/clipx/gradient_mass/{region}") == 0, region
    for region in FRACTIONS.keys() - reached:
        assert mean(trained, f"actor/clipx/{FRACTIONS[region]}") == 0, region
    for regions in (with_gradient, with_gradient & {"HP", "LN"}):
        if regions:
            assert sum(mean(trained, f"actor/clipx/gradient_mass/{region}") for region in regions) > 0, regions
    fact(method, "check_training", lambda values: None)(trained.values)
