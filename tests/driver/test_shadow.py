"""The node clipx.shadow: which methods it holds, by their groups, and what it refuses.

Covers: parameters by name, groups that differ from a method's defaults, a loss of one's own, every refusal in the
driver. Not covered: what is computed (tests/worker/test_shadow.py).
"""

import pytest
from hydra.errors import ConfigCompositionException, InstantiationException, MissingConfigException

from verl_clipx.methods import METHODS

SHADOW = ("+clipx=grpo", "+clipx/shadow=[acpo,bapo]")


def test_methods_stand_under_the_names_of_their_groups(actor):
    settings = actor(*SHADOW, "clipx.shadow.acpo.alpha=2", "clipx.clip_high=1.5").policy_loss.clipx
    expected = {"acpo": METHODS["acpo"](alpha=2.0), "bapo": METHODS["bapo"]()}
    assert settings.shadow.methods == expected and settings.method == METHODS["grpo"](clip_high=1.5, dual_clip=3.0)
    assert actor("+clipx=grpo").policy_loss.clipx.shadow is None


def test_a_reference_group_keeps_its_settings_and_one_comes_alone_too(actor):
    shadow = actor("+clipx=grpo", "+clipx/shadow=acpo_reference").policy_loss.clipx.shadow
    assert shadow.methods["acpo_reference"].bin_on == "current" and shadow.methods["acpo_reference"].epsilon_max == 3


def test_a_loss_of_ones_own(actor):
    function = "clipx.shadow.custom.function=tests.example_losses:WithinSpread"
    shadow = actor("+clipx=grpo", "+clipx/shadow=[custom]", function).policy_loss.clipx.shadow
    assert type(shadow.methods["custom"]).__name__ == "WithinSpread"


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ((*SHADOW, "clipx.shadow.acpo.aplha=2"), InstantiationException, "Did you mean clipx.shadow.acpo.alpha"),
        ((*SHADOW, "clipx.shadow.acpo.scope=lagged"), InstantiationException, "clipx.shadow.acpo.scope"),
        ((*SHADOW, "clipx.shadow.acpo.alpha=-2"), InstantiationException, r"clipx\.shadow\.acpo\.alpha=-2: must be"),
        (("+clipx/shadow=acpo",), InstantiationException, r"\+clipx/shadow is added to a method"),
        (
            ("+clipx=grpo", "+clipx/shadow=cispo_minimax"),
            InstantiationException,
            "verl does not average metrics with 'max'",
        ),
        (("+clipx=grpo", "+clipx/shadow=apco"), ConfigCompositionException, r"Did you mean \+clipx/shadow=acpo\?"),
        (("+clipx=grpo", "+clipx/shadow=observe"), MissingConfigException, "Could not find 'clipx/shadow/observe'"),
        (("+clipx=observe", "+clipx/shadow=acpo"), InstantiationException, "clipx.shadow is not a parameter"),
        (
            (
                *SHADOW,
                "clipx.shadow.bapo.weight=rollout",
                "actor_rollout_ref.rollout.calculate_log_probs=False",
            ),
            InstantiationException,
            r"clipx\.shadow\.bapo\.weight=rollout but actor_rollout_ref\.rollout\.calculate_log_probs=False",
        ),
        (
            ("+clipx=grpo", "+clipx/shadow=[custom]", "clipx.shadow.custom.function=tests.example_losses:absent"),
            InstantiationException,
            "tests.example_losses:absent",
        ),
    ],
)
def test_what_is_wrong_stops_in_the_driver(actor, overrides, error, message):
    with pytest.raises(error, match=message):
        actor(*overrides)
