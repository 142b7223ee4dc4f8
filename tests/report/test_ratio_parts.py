"""Where the traced tokens' ratio comes from: parts of known size by age, without the rollout's log-probabilities, in
bypass mode, with numbers that are not finite. Not covered: how the figure looks; its page (test_summary.py).
"""

import pandas
import pytest

from verl_clipx.report.ratio_parts import parts_of

ENGINES, OLDER, UPDATES = 0.01, 0.3, 0.1


def tokens(rollout, age):
    """Tokens of which every third was sampled by older weights."""
    old = pandas.Series([-1.0] * 240)
    older = pandas.Series([index % 3 == 0 for index in range(240)])
    sign = pandas.Series([(-1) ** (index // 3) for index in range(240)])
    sampled = {"apart": old + sign * older.map({True: OLDER, False: ENGINES}), "old": old, "none": old * float("nan")}
    sampled["broken"] = (old + ENGINES).mask(older, -float("inf"))
    ages = older.astype(int) if age else pandas.Series([None] * 240)
    fields = {"log_prob": old - UPDATES, "old_log_prob": old, "rollout_log_prob": sampled[rollout], "age": ages}
    return pandas.DataFrame(fields)


@pytest.mark.parametrize(
    ("rollout", "age", "sizes"),
    [
        (
            "apart",
            True,
            {
                "old / rollout, age 0": [ENGINES] * 4,
                "old / rollout, older": [OLDER] * 4,
                "current / old": [UPDATES] * 4,
                "current / rollout": [0.11, 0.4, 0.4, 0.4],
            },
        ),
        # Tokens of unknown age are not called fresh, and what is not finite is left out.
        (
            "broken",
            False,
            {"old / rollout, older": [ENGINES] * 4, "current / old": [UPDATES] * 4, "current / rollout": 4},
        ),
        # In bypass mode, and without the rollout's, the parts are not known apart.
        ("old", True, {"current / old": [UPDATES] * 4}),
        ("none", True, {"current / old": [UPDATES] * 4}),
    ],
)
def test_each_part_has_the_size_that_its_tokens_have(rollout, age, sizes):
    found = parts_of(tokens(rollout, age))
    assert list(found.index) == list(sizes)
    for part, expected in sizes.items():
        assert expected == 4 or found.loc[part].tolist() == pytest.approx(expected), part
