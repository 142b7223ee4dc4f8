"""The generator against a plain forward pass; joining, leaving, aborting, new weights. Not covered: the server around
it, against transformers' own generate (test_server.py); models other than Qwen2's.
"""

import pytest
import torch

from tests.training.cpu.policy import VOCABULARY_SIZE, random_policy
from verl_clipx.training.cpu.rollout import cache as kv
from verl_clipx.training.cpu.rollout.generator import Generator, Request
from verl_clipx.training.cpu.rollout.parameters import SamplingParameters

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17], [18, 19, 20, 21]]


@pytest.fixture(scope="module")
def model():
    return random_policy()


def generator(model, **options) -> Generator:
    return Generator(model, **{"vocabulary_size": VOCABULARY_SIZE, **options})


def request(prompt: list[int], seed: int = 0, name: str = "r", **parameters) -> Request:
    return Request(name, list(prompt), SamplingParameters(**{"max_tokens": 12, **parameters}), seed)


def finish(generator: Generator) -> None:
    while generator.pending:
        generator.step()


def started(batch: Generator, requests: list[Request], steps: int = 1) -> list[Request]:
    """Submits requests one after the other, with so many steps after each."""
    for each in requests:
        batch.submit(each)
        for _ in range(steps):
            batch.step()
    return requests


def alone(model, prompt: list[int], seed: int = 0, **parameters) -> Request:
    only = request(prompt, seed, **parameters)
    batch = generator(model)
    batch.submit(only)
    finish(batch)
    return only


@torch.no_grad()
def full_forward(model, done: Request) -> list[float]:
    """Log-probabilities of the response by one pass over the whole sequence, as the actor computes them."""
    tokens = torch.tensor([done.prompt_ids + done.token_ids])
    temperature = done.parameters.temperature or 1.0
    log_probs = (model(tokens).logits[0, :-1] / temperature).log_softmax(-1)
    return log_probs.gather(-1, tokens[0, 1:, None])[len(done.prompt_ids) - 1 :, 0].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7, 0.0])
def test_log_probs_equal_a_full_forward_pass(model, temperature):
    batch = generator(model)
    requests = started(batch, [request(p, seed, temperature=temperature) for seed, p in enumerate(PROMPTS)])
    finish(batch)
    for each in requests:
        assert each.log_probs == pytest.approx(full_forward(model, each), abs=1e-5)


@pytest.mark.parametrize("max_rows", [1, 2, 64])
def test_in_float64_not_even_rounding_tells_of_a_requests_neighbours(max_rows):
    model, lengths = random_policy().double(), [3, 12, 7, 1, 20]
    batch = generator(model, max_rows=max_rows)
    requests = [request(p, s, max_tokens=n) for s, (p, n) in enumerate(zip(PROMPTS, lengths, strict=True))]
    for each in requests:
        started(batch, [each])
        assert len(batch._running) <= max_rows
    finish(batch)
    for seed, each in enumerate(requests):
        reference = alone(model, each.prompt_ids, seed, max_tokens=lengths[seed])
        assert (each.token_ids, each.log_probs) == (reference.token_ids, reference.log_probs)


def test_samples_of_one_prompt_share_its_prefill_and_still_differ(model):
    batch = generator(model)
    sizes = []
    hook = model.register_forward_pre_hook(
        lambda _, __, inputs: sizes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    group = started(batch, [request(PROMPTS[0], seed) for seed in range(4)], steps=0)
    batch.step()
    hook.remove()
    assert sizes == [(1, 3)]
    finish(batch)
    assert len({tuple(each.token_ids) for each in group}) > 1
    # An equal seed gives an equal sample.
    assert group[2].token_ids == alone(model, PROMPTS[0], 2).token_ids


def test_prefill_is_split_by_its_size(model):
    batch = generator(model, max_prefill_tokens=8)
    started(batch, [request(prompt) for prompt in ([5, 6, 7], [8, 9, 10], [11, 12, 13], [14] * 9)], steps=0)
    running = []
    for _ in range(3):
        batch.step()
        running.append(len(batch._running))
    # Two of three tokens, then the third alone since the next is too long to join it, then the long one.
    assert running == [2, 3, 4]


def test_stop_token_ends_the_response_and_belongs_to_it(model):
    free = alone(model, PROMPTS[2], 1, max_tokens=12)
    stop = free.token_ids[4]
    stopped = alone(model, PROMPTS[2], 1, max_tokens=12, stop_token_ids=frozenset({stop}))
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.finished


def test_tokens_outside_the_vocabulary_are_never_generated(model):
    batch = generator(model, vocabulary_size=10)
    requests = started(batch, [request(PROMPTS[0], seed, temperature=5.0) for seed in range(20)], steps=0)
    finish(batch)
    assert max(max(each.token_ids) for each in requests) < 10
    assert max(max(alone(model, PROMPTS[0], seed, temperature=5.0).token_ids) for seed in range(5)) >= 10


def test_an_abort_takes_waiting_requests_too_and_what_goes_on_as_verl_does_gives_the_same_tokens(model):
    whole = alone(model, PROMPTS[0], 5)
    batch = generator(model, max_rows=1)
    requests = started(batch, [request(PROMPTS[0], 5), *map(request, PROMPTS[1:])], steps=0)
    for _ in range(4):
        batch.step()
    assert batch.abort() == requests and batch.pending == 0
    assert [len(each.token_ids) for each in requests] == [4, 0, 0, 0, 0] and not requests[0].finished
    rest = request(PROMPTS[0] + requests[0].token_ids, 5, max_tokens=8)
    batch.submit(rest)
    finish(batch)
    assert requests[0].token_ids + rest.token_ids == whole.token_ids


def test_new_weights_reach_requests_in_flight():
    old, new = random_policy(0), random_policy(1)
    batch = generator(old)
    requests = started(batch, [request(prompt, seed) for seed, prompt in enumerate(PROMPTS)], steps=0)
    for _ in range(5):
        batch.step()
    before = [list(each.log_probs) for each in requests]
    old.load_state_dict(new.state_dict())
    batch.forget_cache()
    finish(batch)
    for each, first in zip(requests, before, strict=True):
        # No state of the old model is left: the rest is what the new one gives for the whole sequence.
        assert each.log_probs == [*first, *(pytest.approx(value, abs=1e-5) for value in full_forward(new, each)[5:])]


def test_models_whose_cache_cannot_be_padded_are_refused():
    class Recurrent:
        layers = (object(),)

    with pytest.raises(ValueError, match="SomeModel, which caches object"):
        kv.check_layers(Recurrent(), "SomeModel")
