"""Reading of an agent loop's sampling parameters. Not covered: what the generator does with them."""

import pytest

from verl_clipx.training.cpu.rollout.parameters import SamplingParameters, read_sampling_parameters

CONTEXT = dict(default_max_tokens=32, room_in_context=50, end_token_ids=frozenset({1, 2}))


def test_verl_training_parameters():
    given = dict(temperature=0.7, top_p=0.9, top_k=-1, repetition_penalty=1.0, logprobs=True)
    expected = dict(max_tokens=32, temperature=0.7, top_p=0.9, top_k=0, stop_token_ids=frozenset({1, 2}))
    assert read_sampling_parameters(given, **CONTEXT) == SamplingParameters(**expected)


@pytest.mark.parametrize(
    ("given", "ignored_by_the_rollout", "expected"),
    [
        *(({"max_tokens": length}, False, {"max_tokens": least}) for length, least in ((5, 5), (99, 50), (0, 1))),
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
def test_the_length_and_what_ends_a_response(given, ignored_by_the_rollout, expected):
    # Without a value an unknown one is harmless.
    given = {"prompt_logprobs": None, **given}
    found = read_sampling_parameters(given, ignore_eos=ignored_by_the_rollout, **CONTEXT)
    assert {name: getattr(found, name) for name in expected} == expected


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
