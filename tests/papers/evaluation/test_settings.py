"""Sampling settings.

Not covered: what verl is told of them (test_validation_run.py).
"""

import pytest

from verl_clipx.papers.evaluation.settings import SamplingSettings


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("samples", 0),
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("seeds", (-1,)),
        ("seeds", (2**31,)),
        ("seeds", (1, 1)),
        ("template", "alpaca"),
    ],
)
def test_a_value_out_of_range_names_the_option(option, value):
    with pytest.raises(ValueError, match=f"--{option.replace('_', '-').removesuffix('s')}"):
        SamplingSettings(**{"samples": 2, "max_tokens": 8, option: value})


def test_equal_greedy_samples_are_refused():
    SamplingSettings(samples=1, max_tokens=8, temperature=0)
    for samples, seeds in ((4, (0,)), (1, (0, 1))):
        with pytest.raises(ValueError, match=f"--samples {samples} --temperature 0"):
            SamplingSettings(samples=samples, max_tokens=8, temperature=0, seeds=seeds)


def test_each_seed_adds_its_samples_to_a_question():
    assert SamplingSettings(samples=8, max_tokens=8, seeds=(0, 5)).samples_per_question == 16
