"""Reading of an agent loop's sampling parameters. Not covered: what the generator does with them."""

import pytest

from verl_clipx.training.cpu.rollout.parameters import SamplingParameters, read_sampling_parameters

CONTEXT = dict(default_max_tokens=32, room_in_context=50, end_token_ids=frozenset({1, 2}))


def test_the_parameters_of_verls_training_are_read():
    parameters = dict(temperature=0.7, top_p=0.9, top_k=-1, repetition_penalty=1.0, logprobs=True)
    expected = dict(max_tokens=32, temperature=0.7, top_p=0.9, top_k=0, stop_token_ids=frozenset({1, 2}))
    assert read_sampling_parameters(parameters, **CONTEXT) == SamplingParameters(**expected)


@pytest.mark.parametrize(
    ("parameters", "ignore_eos", "expected"),
    [
        ({"max_tokens": 5}, False, {"max_tokens": 5}),
        # Not longer than the context, and a token at least.
        ({"max_tokens": 99}, False, {"max_tokens": 50}),
        ({"max_tokens": 0}, False, {"max_tokens": 1}),
        ({"max_new_tokens": 6}, False, {"max_tokens": 6}),
        ({"max_tokens": 5, "max_new_tokens": 6}, False, {"max_tokens": 5}),
        # Without a limit.
        *(({"top_k": top_k}, False, {"top_k": 0}) for top_k in (None, 0, -1, "-1")),
        ({"ignore_eos": True, "stop_token_ids": [7]}, False, {"stop_token_ids": {7}}),
        ({"stop_token_ids": [7]}, False, {"stop_token_ids": {1, 2, 7}, "max_tokens": 32}),
        # The request decides over the rollout.
        ({}, True, {"stop_token_ids": set()}),
        ({"ignore_eos": False}, True, {"stop_token_ids": {1, 2}}),
    ],
)
def test_the_length_and_what_ends_a_response(parameters, ignore_eos, expected):
    # Without a value an unknown one is harmless.
    parameters = {"prompt_logprobs": None, **parameters}
    sampling = read_sampling_parameters(parameters, ignore_eos=ignore_eos, **CONTEXT)
    assert {name: getattr(sampling, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 1.1),
        ("min_p", 0.1),
        ("stop", "x"),
        ("temperature", -1),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name}='?{value}"):
        read_sampling_parameters({name: value}, **CONTEXT)
