"""The generator against a plain forward pass; joining, leaving, aborting, new weights. Not covered: the server around
it, against transformers' own generate (test_server.py); models other than Qwen2's.
"""

import pytest
import torch

from tests.training.cpu.policy import VOCABULARY_SIZE, random_policy
from verl_clipx.training.cpu.rollout import cache as kv
from verl_clipx.training.cpu.rollout.generator import Generator, Request
from verl_clipx.training.cpu.rollout.parameters import SamplingParameters

pytestmark = pytest.mark.usefixtures("limit_torch_to_one_thread")

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17], [18, 19, 20, 21]]


@pytest.fixture(scope="module")
def model():
    return random_policy()


def make_generator(model, **options) -> Generator:
    return Generator(model, **{"vocabulary_size": VOCABULARY_SIZE, **options})


def make_request(prompt: list[int], seed: int = 0, name: str = "r", **parameters) -> Request:
    return Request(name, list(prompt), SamplingParameters(**{"max_tokens": 12, **parameters}), seed)


def finish(generator: Generator) -> None:
    while generator.pending:
        generator.step()


def submit(generator: Generator, requests: list[Request], steps: int = 1) -> list[Request]:
    """Submits requests one after the other, with so many steps after each."""
    for request in requests:
        generator.submit(request)
        for _ in range(steps):
            generator.step()
    return requests


def generate_alone(model, prompt: list[int], seed: int = 0, **parameters) -> Request:
    """A request that a generator finished without any other."""
    request = make_request(prompt, seed, **parameters)
    generator = make_generator(model)
    generator.submit(request)
    finish(generator)
    return request


@torch.no_grad()
def full_forward(model, request: Request) -> list[float]:
    """Log-probabilities of the response by one pass over the whole sequence, as the actor computes them."""
    tokens = torch.tensor([request.prompt_ids + request.token_ids])
    temperature = request.parameters.temperature or 1.0
    log_probs = (model(tokens).logits[0, :-1] / temperature).log_softmax(-1)
    return log_probs.gather(-1, tokens[0, 1:, None])[len(request.prompt_ids) - 1 :, 0].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7, 0.0])
def test_log_probs_equal_a_full_forward_pass(model, temperature):
    generator = make_generator(model)
    requests = submit(
        generator, [make_request(prompt, seed, temperature=temperature) for seed, prompt in enumerate(PROMPTS)]
    )
    finish(generator)
    for request in requests:
        assert request.log_probs == pytest.approx(full_forward(model, request), abs=1e-5)


@pytest.mark.parametrize("max_rows", [1, 2, 64])
def test_in_float64_not_even_rounding_tells_of_a_requests_neighbours(max_rows):
    model = random_policy().double()
    lengths = [3, 12, 7, 1, 20]
    generator = make_generator(model, max_rows=max_rows)
    requests = []
    for seed, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True)):
        requests.append(make_request(prompt, seed, max_tokens=length))
    for request in requests:
        submit(generator, [request])
        assert len(generator._running) <= max_rows
    finish(generator)
    for seed, request in enumerate(requests):
        alone = generate_alone(model, request.prompt_ids, seed, max_tokens=lengths[seed])
        assert (request.token_ids, request.log_probs) == (alone.token_ids, alone.log_probs)


def test_samples_of_one_prompt_share_its_prefill_and_still_differ(model):
    generator = make_generator(model)
    shapes = []
    hook = model.register_forward_pre_hook(
        lambda _, __, inputs: shapes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    requests = submit(generator, [make_request(PROMPTS[0], seed) for seed in range(4)], steps=0)
    generator.step()
    hook.remove()
    assert shapes == [(1, 3)]
    finish(generator)
    assert len({tuple(request.token_ids) for request in requests}) > 1
    # An equal seed gives an equal sample.
    assert requests[2].token_ids == generate_alone(model, PROMPTS[0], 2).token_ids


def test_prefill_is_split_by_its_size(model):
    generator = make_generator(model, max_prefill_tokens=8)
    prompts = ([5, 6, 7], [8, 9, 10], [11, 12, 13], [14] * 9)
    submit(generator, [make_request(prompt) for prompt in prompts], steps=0)
    running = []
    for _ in range(3):
        generator.step()
        running.append(len(generator._running))
    # Two of three tokens, then the third alone since the next is too long to join it, then the long one.
    assert running == [2, 3, 4]


def test_stop_token_ends_the_response_and_belongs_to_it(model):
    without_stop = generate_alone(model, PROMPTS[2], 1, max_tokens=12).token_ids
    stop = without_stop[4]
    stopped = generate_alone(model, PROMPTS[2], 1, max_tokens=12, stop_token_ids=frozenset({stop}))
    assert stopped.token_ids == without_stop[: without_stop.index(stop) + 1]
    assert stopped.finished


def test_tokens_outside_the_vocabulary_are_never_generated(model):
    generator = make_generator(model, vocabulary_size=10)
    requests = submit(generator, [make_request(PROMPTS[0], seed, temperature=5.0) for seed in range(20)], steps=0)
    finish(generator)
    assert max(max(request.token_ids) for request in requests) < 10
    # Without the limit there are some.
    unlimited = [generate_alone(model, PROMPTS[0], seed, temperature=5.0) for seed in range(5)]
    assert max(max(request.token_ids) for request in unlimited) >= 10


def test_an_abort_takes_waiting_requests_too_and_what_goes_on_as_verl_does_gives_the_same_tokens(model):
    undisturbed = generate_alone(model, PROMPTS[0], 5)
    generator = make_generator(model, max_rows=1)
    requests = submit(generator, [make_request(PROMPTS[0], 5), *map(make_request, PROMPTS[1:])], steps=0)
    for _ in range(4):
        generator.step()
    assert generator.abort() == requests and generator.pending == 0
    aborted = requests[0]
    assert [len(request.token_ids) for request in requests] == [4, 0, 0, 0, 0] and not aborted.finished
    continued = make_request(PROMPTS[0] + aborted.token_ids, 5, max_tokens=8)
    generator.submit(continued)
    finish(generator)
    assert aborted.token_ids + continued.token_ids == undisturbed.token_ids


def test_new_weights_reach_requests_in_flight():
    model = random_policy(0)
    new_model = random_policy(1)
    generator = make_generator(model)
    requests = submit(generator, [make_request(prompt, seed) for seed, prompt in enumerate(PROMPTS)], steps=0)
    for _ in range(5):
        generator.step()
    log_probs_before = [list(request.log_probs) for request in requests]
    model.load_state_dict(new_model.state_dict())
    generator.forget_cache()
    finish(generator)
    for request, before in zip(requests, log_probs_before, strict=True):
        assert request.log_probs[:5] == before
        # No state of the old model is left: the rest is what the new one gives for the whole sequence.
        assert request.log_probs[5:] == pytest.approx(full_forward(new_model, request)[5:], abs=1e-5)


def test_models_whose_cache_cannot_be_padded_are_refused():
    class Recurrent:
        layers = (object(),)

    with pytest.raises(ValueError, match="SomeModel, which caches object"):
        kv.check_layers(Recurrent(), "SomeModel")
