"""The server without Ray: requests, pausing, aborting, sleeping, weights, failures, reproducibility. Not covered: Ray's
transport and verl's calls in their real order (end-to-end runs).
"""

import asyncio
import functools

import pytest
import torch
from verl.workers.config import HFModelConfig, RolloutConfig

from tests.training.cpu.policy import END, random_policy, save_checkpoint
from verl_clipx.training.cpu.rollout.server import CPUServer, check_rollout_config, end_token_ids
from verl_clipx.training.cpu.rollout.weights import pack_weights

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [5, 6, 7]
ENDLESS = {"ignore_eos": True, "max_tokens": 100}


@pytest.fixture(scope="module")
def model_config(tmp_path_factory):
    path = save_checkpoint(tmp_path_factory.mktemp("policy"), random_policy())
    return HFModelConfig(path=str(path), override_config={"attn_implementation": "sdpa"})


@pytest.fixture
def configured(model_config):
    def build(replica_rank: int = 0, **options) -> CPUServer:
        defaults = dict(name="cpu", dtype="float32", load_format="auto", tensor_model_parallel_size=1)
        defaults |= dict(prompt_length=16, response_length=8, free_cache_engine=True)
        return CPUServer(RolloutConfig(**{**defaults, **options}), model_config, replica_rank)

    return build


def in_a_loop(test):
    """Runs a coroutine as a test."""
    return functools.wraps(test)(lambda **fixtures: asyncio.run(test(**fixtures)))


async def started(server: CPUServer) -> CPUServer:
    await server.launch_server()
    return server


async def ask(server: CPUServer, request_id: str = "r", prompt=PROMPT, **parameters):
    return await server.generate(prompt, {"logprobs": True, **parameters}, request_id)


async def underway(server: CPUServer, request_id: str = "r", **parameters) -> asyncio.Task:
    """A request that has generated something and is not done."""
    task = asyncio.create_task(ask(server, request_id, **parameters))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    return task


@in_a_loop
async def test_an_answer_is_as_long_as_the_configuration_leaves(configured):
    server = await started(configured())
    answer, silent = await ask(server), await server.generate(PROMPT, {}, "r")
    assert 1 <= len(answer.token_ids) <= 8 and len(answer.log_probs) == len(answer.token_ids)
    assert answer.stop_reason == "completed" and silent.log_probs is None
    server = await started(configured(ignore_eos=True))
    # response_length; and prompt_length + response_length - 20.
    assert [len((await ask(server, prompt=[5] * length)).token_ids) for length in (3, 20)] == [8, 4]


@in_a_loop
async def test_what_it_cannot_continue_is_refused(configured):
    server, length = await started(configured()), "must be between 1 and 127"
    for prompt, images, message in (([], None, length), ([5] * 128, None, length), (PROMPT, ["x"], "only from text")):
        with pytest.raises(ValueError, match=message):
            await server.generate(prompt, {}, "r", image_data=images)


@in_a_loop
async def test_abort_returns_the_partial_answer_and_parks_or_rejects_new_requests_until_resumed(configured):
    server = await started(configured())
    running = await underway(server, "running", **ENDLESS)
    assert await server.abort_all_requests() == {"aborted_count": 1, "request_ids": ["running"]}
    partial = await running
    assert partial.stop_reason == "aborted"
    assert 1 <= len(partial.token_ids) < 100 and len(partial.log_probs) == len(partial.token_ids)
    parked = asyncio.create_task(ask(server, "parked", max_tokens=2))
    await asyncio.sleep(0.05)
    assert not parked.done()
    await server.resume_generation()
    assert (await parked).stop_reason == "completed"
    await server.abort_all_requests(reject_request=True)
    rejected = await ask(server)
    assert (rejected.stop_reason, rejected.token_ids) == ("aborted", [])
    await server.resume_generation()
    assert (await ask(server)).stop_reason == "completed"


@in_a_loop
async def test_sleep_suspends_old_and_new_requests_until_the_cache_is_woken(configured):
    server = await started(configured())
    undisturbed = await ask(server, seed=1, ignore_eos=True, max_tokens=20)
    task = await underway(server, seed=1, ignore_eos=True, max_tokens=20)
    await server.sleep()
    late = asyncio.create_task(ask(server, "late"))
    await server.wake_up(tags=["weights"])
    await asyncio.sleep(0.05)
    assert not task.done() and list(server._completions)[1].token_ids == []
    await server.wake_up(tags=["kv_cache"])
    assert (await task).token_ids == undisturbed.token_ids and (await late).stop_reason == "completed"
    await server.sleep()
    late = asyncio.create_task(ask(server, "late"))
    await asyncio.sleep(0.05)
    assert not late.done()
    await server.wake_up()
    assert (await late).stop_reason == "completed"
    # Whoever keeps the cache does not sleep.
    server = await started(configured(free_cache_engine=False))
    await server.sleep()
    assert (await ask(server)).stop_reason == "completed"


@in_a_loop
async def test_a_server_without_weights_says_so_and_learns_them(configured):
    trained, server = random_policy(7), await started(configured(load_format="dummy"))
    with pytest.raises(RuntimeError, match="has no weights yet"):
        await ask(server)
    *first, last = pack_weights(trained.named_parameters(), max_bytes=50_000)
    for message in first:
        await server.load_weights(message, last=False, global_steps=4)
    with pytest.raises(RuntimeError, match="has no weights yet"):
        await ask(server)
    await server.load_weights(last, last=True, global_steps=4)
    answer = await ask(server, temperature=0, **ENDLESS)
    given = dict(do_sample=False, max_new_tokens=100, eos_token_id=None, pad_token_id=0)
    assert answer.token_ids == trained.generate(torch.tensor([PROMPT]), **given)[0, len(PROMPT) :].tolist()
    assert answer.extra_fields["global_steps"] == 4
    server = await started(configured(load_format="dummy"))
    (lacking,) = pack_weights((item for item in trained.named_parameters() if item[0] != "model.norm.weight"), 1 << 30)
    with pytest.raises(RuntimeError, match=r"lacks model\.norm\.weight"):
        await server.load_weights(lacking, last=True, global_steps=1)


@in_a_loop
async def test_no_token_is_generated_from_half_an_update(configured):
    server = await started(configured())
    task = await underway(server, **ENDLESS)
    request = next(iter(server._completions))
    *first, last = pack_weights(random_policy(1).named_parameters(), max_bytes=50_000)
    for message in first:
        await server.load_weights(message, last=False, global_steps=1)
    count = len(request.token_ids)
    late = asyncio.create_task(ask(server, "late"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(request.token_ids) == count
    await server.load_weights(last, last=True, global_steps=1)
    assert (await late).stop_reason == "completed"
    assert len((await task).token_ids) == 100


@in_a_loop
async def test_a_crash_while_generating_reaches_everyone_who_waits(configured):
    server = await started(configured())
    waiting = [await underway(server, str(n), **ENDLESS) for n in range(2)]

    def explode(*args, **kwargs):
        raise ArithmeticError("out of numbers")

    server._generator._forward = explode
    failures = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(failure) for failure in failures] == [RuntimeError, RuntimeError]
    assert "ArithmeticError: out of numbers" in str(failures[0]) and "explode" in str(failures[0])
    with pytest.raises(RuntimeError, match="out of numbers"):
        await ask(server)
    # Those requests have ended already.
    assert await server.abort_all_requests() == {"aborted_count": 0, "request_ids": []}


@pytest.mark.parametrize("is_unknown", [True, False])
@in_a_loop
async def test_a_failed_update_reaches_everyone_who_waits(configured, is_unknown):
    server = await started(configured())
    running = await underway(server, "running", **ENDLESS)
    (message,) = pack_weights(random_policy(1).named_parameters(), max_bytes=1 << 30)
    norm = message.pop("model.norm.weight")
    if is_unknown:
        message["no.such.weight"] = norm
    server._admits_requests.clear()
    parked = asyncio.create_task(ask(server, "parked"))
    await asyncio.sleep(0)
    with pytest.raises(KeyError if is_unknown else RuntimeError):
        await server.load_weights(message, last=True, global_steps=1)
    for task in (running, parked, asyncio.create_task(ask(server, "late"))):
        with pytest.raises(RuntimeError, match=r"no\.such\.weight" if is_unknown else r"lacks model\.norm\.weight"):
            await asyncio.wait_for(task, 10)


def answers(server: CPUServer, names: list[str], **parameters) -> list[list[int]]:
    async def scenario():
        await started(server)
        return [(await ask(server, name, **parameters)).token_ids for name in names]

    return asyncio.run(scenario())


def test_a_sample_follows_from_the_order_of_arrival_the_requests_name_or_its_own_seed(configured):
    first = answers(configured(), ["a", "b", "c"])
    assert answers(configured(), ["x", "y", "z"]) == first and len(set(map(tuple, first))) > 1
    for options in ({"replica_rank": 1}, {"seed": 7}):
        assert answers(configured(**options), ["a", "b", "c"]) != first
    named = answers(configured(full_determinism=True), ["a", "b", "c"])
    assert answers(configured(1, full_determinism=True), ["c", "a", "b"]) == [named[2], named[0], named[1]]
    own, again = answers(configured(), ["a", "b"], seed=9)
    assert own == again
    assert answers(configured(1, seed=8), ["a", "b"], seed=9) == [own, own]


@pytest.mark.parametrize(("key", "value"), [("dtype", "bfloat16"), ("logprobs_mode", "raw_logits")])
def test_settings_that_are_not_implemented_are_refused(key, value):
    with pytest.raises(ValueError, match=rf"rollout\.{key}={value}"):
        check_rollout_config(RolloutConfig(**{"name": "cpu", "dtype": "float32", key: value}))


def test_end_tokens_come_from_the_tokenizer_and_the_generation_configuration(model_config):
    assert end_token_ids(model_config) == {END}
