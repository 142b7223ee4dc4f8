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

pytestmark = pytest.mark.usefixtures("limit_torch_to_one_thread")

PROMPT = [5, 6, 7]
ENDLESS = {"ignore_eos": True, "max_tokens": 100}


@pytest.fixture(scope="module")
def model_config(tmp_path_factory):
    path = save_checkpoint(tmp_path_factory.mktemp("policy"), random_policy())
    return HFModelConfig(path=str(path), override_config={"attn_implementation": "sdpa"})


@pytest.fixture
def build_server(model_config):
    def build(replica_rank: int = 0, **options) -> CPUServer:
        defaults = dict(
            name="cpu",
            dtype="float32",
            load_format="auto",
            tensor_model_parallel_size=1,
            prompt_length=16,
            response_length=8,
            free_cache_engine=True,
        )
        return CPUServer(RolloutConfig(**{**defaults, **options}), model_config, replica_rank)

    return build


def run_in_a_loop(test):
    """Runs a coroutine as a test."""
    return functools.wraps(test)(lambda **fixtures: asyncio.run(test(**fixtures)))


async def launch(server: CPUServer) -> CPUServer:
    await server.launch_server()
    return server


async def ask(server: CPUServer, request_id: str = "r", prompt=PROMPT, **parameters):
    return await server.generate(prompt, {"logprobs": True, **parameters}, request_id)


async def start_request(server: CPUServer, request_id: str = "r", **parameters) -> asyncio.Task:
    """A request that has generated something and is not done."""
    task = asyncio.create_task(ask(server, request_id, **parameters))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    return task


@run_in_a_loop
async def test_an_answer_is_as_long_as_the_configuration_leaves(build_server):
    server = await launch(build_server())
    answer = await ask(server)
    assert 1 <= len(answer.token_ids) <= 8 and len(answer.log_probs) == len(answer.token_ids)
    assert answer.stop_reason == "completed"
    without_log_probs = await server.generate(PROMPT, {}, "r")
    assert without_log_probs.log_probs is None
    server = await launch(build_server(ignore_eos=True))
    short_prompt = await ask(server, prompt=[5] * 3)
    # response_length.
    assert len(short_prompt.token_ids) == 8
    long_prompt = await ask(server, prompt=[5] * 20)
    # prompt_length + response_length - 20.
    assert len(long_prompt.token_ids) == 4


@run_in_a_loop
async def test_what_it_cannot_continue_is_refused(build_server):
    server = await launch(build_server())
    for prompt, images, message in (
        ([], None, "must be between 1 and 127"),
        ([5] * 128, None, "must be between 1 and 127"),
        (PROMPT, ["x"], "only from text"),
    ):
        with pytest.raises(ValueError, match=message):
            await server.generate(prompt, {}, "r", image_data=images)


@run_in_a_loop
async def test_abort_returns_the_partial_answer_and_parks_or_rejects_new_requests_until_resumed(build_server):
    server = await launch(build_server())
    running = await start_request(server, "running", **ENDLESS)
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


@run_in_a_loop
async def test_sleep_suspends_old_and_new_requests_until_the_cache_is_woken(build_server):
    server = await launch(build_server())
    undisturbed = await ask(server, seed=1, ignore_eos=True, max_tokens=20)
    task = await start_request(server, seed=1, ignore_eos=True, max_tokens=20)
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
    server = await launch(build_server(free_cache_engine=False))
    await server.sleep()
    assert (await ask(server)).stop_reason == "completed"


@run_in_a_loop
async def test_a_server_without_weights_says_so_and_learns_them(build_server):
    trained = random_policy(7)
    server = await launch(build_server(load_format="dummy"))
    with pytest.raises(RuntimeError, match="has no weights yet"):
        await ask(server)
    *first, last = pack_weights(trained.named_parameters(), max_bytes=50_000)
    for message in first:
        await server.load_weights(message, last=False, global_steps=4)
    with pytest.raises(RuntimeError, match="has no weights yet"):
        await ask(server)
    await server.load_weights(last, last=True, global_steps=4)
    answer = await ask(server, temperature=0, **ENDLESS)
    expected = trained.generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=100, eos_token_id=None, pad_token_id=0
    )
    assert answer.token_ids == expected[0, len(PROMPT) :].tolist()
    assert answer.extra_fields["global_steps"] == 4
    server = await launch(build_server(load_format="dummy"))
    incomplete = [item for item in trained.named_parameters() if item[0] != "model.norm.weight"]
    (message,) = pack_weights(incomplete, 1 << 30)
    with pytest.raises(RuntimeError, match=r"lacks model\.norm\.weight"):
        await server.load_weights(message, last=True, global_steps=1)


@run_in_a_loop
async def test_no_token_is_generated_from_half_an_update(build_server):
    server = await launch(build_server())
    task = await start_request(server, **ENDLESS)
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


@run_in_a_loop
async def test_a_crash_while_generating_reaches_everyone_who_waits(build_server):
    server = await launch(build_server())
    waiting = [await start_request(server, str(n), **ENDLESS) for n in range(2)]

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
@run_in_a_loop
async def test_a_failed_update_reaches_everyone_who_waits(build_server, is_unknown):
    server = await launch(build_server())
    running = await start_request(server, "running", **ENDLESS)
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


def ask_in_turn(server: CPUServer, names: list[str], **parameters) -> list[list[int]]:
    """The tokens of answers to requests of some names, one after the other."""

    async def ask_all():
        await launch(server)
        return [(await ask(server, name, **parameters)).token_ids for name in names]

    return asyncio.run(ask_all())


def test_a_sample_follows_from_the_order_of_arrival_the_requests_name_or_its_own_seed(build_server):
    first = ask_in_turn(build_server(), ["a", "b", "c"])
    assert ask_in_turn(build_server(), ["x", "y", "z"]) == first and len(set(map(tuple, first))) > 1
    for options in ({"replica_rank": 1}, {"seed": 7}):
        assert ask_in_turn(build_server(**options), ["a", "b", "c"]) != first
    of_a, of_b, of_c = ask_in_turn(build_server(full_determinism=True), ["a", "b", "c"])
    assert ask_in_turn(build_server(1, full_determinism=True), ["c", "a", "b"]) == [of_c, of_a, of_b]
    with_own_seed, with_same_seed = ask_in_turn(build_server(), ["a", "b"], seed=9)
    assert with_own_seed == with_same_seed
    assert ask_in_turn(build_server(1, seed=8), ["a", "b"], seed=9) == [with_own_seed, with_own_seed]


@pytest.mark.parametrize(("key", "value"), [("dtype", "bfloat16"), ("logprobs_mode", "raw_logits")])
def test_settings_that_are_not_implemented_are_refused(key, value):
    with pytest.raises(ValueError, match=rf"rollout\.{key}={value}"):
        check_rollout_config(RolloutConfig(**{"name": "cpu", "dtype": "float32", key: value}))


def test_end_tokens_come_from_the_tokenizer_and_the_generation_configuration(model_config):
    assert end_token_ids(model_config) == {END}
