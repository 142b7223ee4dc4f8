"""`clipx methods NAME --plot FILE`: the weights that it draws, by hand, and wrong input. Not covered: how the figure
looks; the methods' weights (tests/methods).
"""

import pytest

from tests.runs.commands import clipx
from verl_clipx.methods import BUILT_IN, METHODS, method_named
from verl_clipx.report.weight_figure import weights


def at(method, advantage, ratio):
    ratios, found = weights(method, advantage, 0.1)
    return float(found[(ratios - ratio).abs().argmin()])


def test_weights_by_hand():
    grpo = method_named("grpo")(clip_high=1.4)
    assert at(grpo, 1.0, 1.3) == pytest.approx(1.3, abs=2e-3) and at(grpo, 1.0, 1.5) == 0
    assert at(grpo, -1.0, 0.7) == 0 and at(grpo, -1.0, 1.5) == pytest.approx(1.5, abs=2e-3)
    # Without statistics ACPO's epsilon is epsilon_base.
    acpo = method_named("acpo")(epsilon_base=0.5)
    assert at(acpo, 1.0, 1.45) > 0 and at(acpo, 1.0, 1.55) == 0
    for name in BUILT_IN:
        assert weights(METHODS[name](), -1.0, 0.4)[1].isfinite().all(), name


def test_the_command_draws_a_group_with_parameters(tmp_path):
    clipx("methods", "acpo_reference", "clipx.alpha=2", "--plot", tmp_path / "weights.svg")
    text = (tmp_path / "weights.svg").read_text()
    assert "alpha 2.0," in text and "epsilon_max 3.0" in text and "old probability" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["acpo", "clipx.alpha=-1"], "clipx.alpha=-1: must be"),
        (["acpo", "alpha=1"], "alpha=1: is no setting of the plugin's"),
        (["observe"], "+clipx=observe: observes verl's own loss"),
        (["nonsense"], "nonsense: there is no such method"),
    ],
)
def test_wrong_input_is_named(tmp_path, words, message):
    assert message in clipx("methods", *words, "--plot", tmp_path / "a.svg", code=1)
