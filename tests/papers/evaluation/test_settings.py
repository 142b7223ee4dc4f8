"""Sampling settings and seeds.

Not covered: what a back end makes of them (test_run.py, test_vllm_backend.py).
"""

import pytest

from verl_clipx.papers.evaluation.settings import SamplingSettings, sample_seed


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("samples", 0),
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("seed", -1),
        ("template", "alpaca"),
    ],
)
def test_a_value_out_of_range_names_the_option(option, value):
    with pytest.raises(ValueError, match=f"--{option.replace('_', '-')} {value}"):
        SamplingSettings(**{"samples": 2, "max_tokens": 8, option: value})


def test_equal_greedy_samples_are_refused():
    SamplingSettings(samples=1, max_tokens=8, temperature=0)
    with pytest.raises(ValueError, match="--samples 4 --temperature 0"):
        SamplingSettings(samples=4, max_tokens=8, temperature=0)


def test_every_sample_has_a_seed_of_its_own():
    seeds = {
        sample_seed(seed, name, question, sample)
        for seed in range(3)
        for name in ("a", "b")
        for question in range(20)
        for sample in range(20)
    }
    assert len(seeds) == 3 * 2 * 20 * 20
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Numbers are kept apart: question 1, sample 11 is not question 11, sample 1.
    assert sample_seed(0, "a", 1, 11) != sample_seed(0, "a", 11, 1)


def test_a_seed_is_the_same_for_ever():
    # Stored completions are resumed by later versions.
    assert sample_seed(0, "aime24", 3, 7) == 2803260018122205593
