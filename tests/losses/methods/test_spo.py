"""SPO by hand at and beyond the edges of PPO's clip, and against autograd of the paper's objective. Not covered: CFPO's
own function, whose pull request no release of verl has.
"""

from verl_clipx.losses.methods.spo import Spo

from .against_verl import assert_gradient_of, ragged
from .hand_rows import HandRow, make_test_of_rows

PUBLISHED = {"spo": dict(epsilon=0.2)}
VARIANTS = ({"epsilon": 12.5, "log_ratio_clamp": None},)
RATIO = (0.6, 0.8, 1.0, 1.2, 1.4)

test_the_gradient_turns_back_where_ppo_clips = make_test_of_rows(
    {
        "A > 0": HandRow(method=Spo(), ratio=RATIO, advantages=2.0, weight=(1.8, 1.6, 1.0, 0.0, -1.4)),
        "A < 0": HandRow(method=Spo(), ratio=RATIO, advantages=-2.0, weight=(-0.6, 0.0, 1.0, 2.4, 4.2)),
        "A = 0": HandRow(method=Spo(), ratio=RATIO, advantages=0.0, weight=RATIO),
        "an epsilon of its own": HandRow(
            method=Spo(epsilon=0.4), ratio=RATIO, advantages=1.0, weight=(1.2, 1.2, 1.0, 0.6, 0.0)
        ),
    }
)


def test_the_gradient_is_that_of_the_papers_objective():
    batch = ragged(3, spread=0.5)

    def objective(log_prob):
        A, r = batch["advantages"], (log_prob - batch["old_log_prob"]).exp()
        return r * A - A.abs() / (2 * 0.2) * (r - 1) ** 2

    assert_gradient_of("spo", batch, objective)
