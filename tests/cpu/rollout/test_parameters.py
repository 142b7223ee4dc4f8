"""Reading of an agent loop's sampling parameters. Not covered: what the generator does with them."""

import pytest

from verl_clipx.cpu.rollout.parameters import SamplingParameters, read_sampling_parameters

CONTEXT = dict(default_max_tokens=32, longest=50, end_token_ids=frozenset({1, 2}))


def test_verl_training_parameters():
    given = dict(temperature=0.7, top_p=0.9, top_k=-1, repetition_penalty=1.0, logprobs=True)
    expected = dict(max_tokens=32, temperature=0.7, top_p=0.9, top_k=0, stop_token_ids=frozenset({1, 2}))
    assert read_sampling_parameters(given, **CONTEXT) == SamplingParameters(**expected)


@pytest.mark.parametrize(
    ("given", "max_tokens"),
    [({}, 32), ({"max_tokens": 5}, 5), ({"max_new_tokens": 6}, 6), ({"max_tokens": 99}, 50), ({"max_tokens": 0}, 1)],
)
def test_length_limit(given, max_tokens):
    unknown = {"prompt_logprobs": None}  # without a value it is harmless
    assert read_sampling_parameters(given | unknown, **CONTEXT).max_tokens == max_tokens


@pytest.mark.parametrize(
    ("given", "ignored_by_the_rollout", "stop_token_ids"),
    [
        ({"ignore_eos": True, "stop_token_ids": [7]}, False, {7}),
        ({"stop_token_ids": [7]}, False, {1, 2, 7}),
        # The request decides over the rollout.
        ({}, True, set()),
        ({"ignore_eos": False}, True, {1, 2}),
    ],
)
def test_what_ends_a_response(given, ignored_by_the_rollout, stop_token_ids):
    found = read_sampling_parameters(given, ignore_eos=ignored_by_the_rollout, **CONTEXT)
    assert found.stop_token_ids == stop_token_ids


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("repetition_penalty", 1.1), ("min_p", 0.1), ("stop", "x"), ("temperature", -1)),
        *(("top_p", 0), ("top_p", 1.5), ("top_k", -2)),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name}='?{value}"):
        read_sampling_parameters({name: value}, **CONTEXT)
