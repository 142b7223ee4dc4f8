"""`clipx recompute`: which checkpoint sampled traced tokens, of a tiny policy whose samples are the CPU rollout's, with
faults planted between trainer and sampler. Not covered: traces that a worker writes
(tests/training/worker/test_tracer.py), verl's checkpoints (tests/training/worker/test_verl_contract.py), other engines,
GPUs.
"""

import json
import shutil
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.analysis.runs.commands import answer, clipx
from tests.analysis.runs.example_runs import WHOLE_UPDATE, write_log
from tests.messages import assert_names
from tests.training.cpu.policy import VOCABULARY_SIZE, random_policy, save_checkpoint
from verl_clipx.analysis.recompute import recompute
from verl_clipx.analysis.recompute.checkpoints import load_model
from verl_clipx.cli import app
from verl_clipx.run.trace_format import Shard, write_shard
from verl_clipx.training.cpu.rollout.generator import Generator, Request
from verl_clipx.training.cpu.rollout.parameters import SamplingParameters

pytestmark = pytest.mark.usefixtures("limit_torch_to_one_thread")

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12], [16, 17], [18, 19, 20]]
# No two of these begin alike.
TWENTY_FOUR_PROMPTS = [[5 + number, *PROMPTS[number % len(PROMPTS)]] for number in range(24)]
TOOL_TOKENS = [30, 31]
CHECKPOINTS = 3
TRACED_STEP = 3
SIZE_THAT_BFLOAT16_SEES = 0.02
SIZE_THAT_BFLOAT16_ROUNDS_AWAY = 5e-4
# Columns of a trace that nothing here reads.
UNREAD_COLUMNS = (
    "log_prob",
    "old_log_prob",
    "ratio",
    "advantage",
    "bounded",
    "low",
    "high",
    "weight",
    "unshaped_advantage",
)


def train_policy(version: int, step_size: float) -> torch.nn.Module:
    """Return the policy after `version` steps, each of which changes every weight by this share of it.

    Its first weights are exact in bfloat16.
    """
    model = random_policy()
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            sign = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)).sign()
            weight.copy_(weight.bfloat16().float() * (1 + step_size * version * sign))
    return model


@pytest.fixture(
    scope="module",
    params=[SIZE_THAT_BFLOAT16_SEES, SIZE_THAT_BFLOAT16_ROUNDS_AWAY],
    ids=["seen by bfloat16", "not seen by bfloat16"],
)
def step_size(request) -> float:
    """The size of a trainer's steps in float32."""
    return request.param


@pytest.fixture(scope="module")
def bfloat16_sees_steps(step_size) -> bool:
    """Whether the checkpoints differ in bfloat16."""
    return step_size == SIZE_THAT_BFLOAT16_SEES


@pytest.fixture(scope="module")
def checkpoints(step_size, tmp_path_factory) -> list[Path]:
    """The checkpoints of a trainer in float32, by version."""
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = []
    for version in range(CHECKPOINTS):
        checkpoint = save_checkpoint(folder / f"global_step_{version}", train_policy(version, step_size))
        # What a policy's folder says that was trained in float32 from weights in bfloat16.
        config = json.loads((checkpoint / "config.json").read_text())
        config |= {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
        (checkpoint / "config.json").write_text(json.dumps(config))
        paths.append(checkpoint)
    return paths


def load_sampler(checkpoint: Path, precision: torch.dtype = torch.float32) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=precision).eval()


def sample(model, prompts, seed=0, **parameters) -> list[Request]:
    """Return a request with its response for each prompt, sampled with these parameters."""
    generator = Generator(model, vocabulary_size=VOCABULARY_SIZE)
    requests = []
    for number, prompt in enumerate(prompts):
        sampling = SamplingParameters(max_tokens=12, **parameters)
        requests.append(Request(f"r{number}", list(prompt), sampling, seed + number))
    for request in requests:
        generator.submit(request)
    while generator.pending:
        generator.step()
    return requests


def sample_by_versions(checkpoints, responses_by_version, precision=torch.float32, **parameters) -> list[Request]:
    """Return responses to the first of TWENTY_FOUR_PROMPTS, of each version as many as it says, in its order."""
    requests = []
    for version, count in responses_by_version.items():
        prompts = TWENTY_FOUR_PROMPTS[len(requests) : len(requests) + count]
        model = load_sampler(checkpoints[version], precision)
        requests += sample(model, prompts, seed=100 * len(requests), **parameters)
    return requests


def count_tokens(requests) -> int:
    return sum(len(request.token_ids) for request in requests)


def write_run(folder, requests, *, age=0, second_turn=None, **rollout: Any) -> Path:
    """Write a run whose traced step has these responses.

    Args:
        folder: the run's.
        requests: a request for each response.
        age: of the samples, as the trace says it; None if it does not say it.
        second_turn: for each response, a second request, whose tokens follow those of a tool.
        rollout: the configuration of the rollout.
    """
    columns = {name: [] for name in ("prompt", "sample", "position", "token_id", "rollout_log_prob", "context", "turn")}
    for number, request in enumerate(requests):
        turns = [request] if second_turn is None else [request, second_turn[number]]
        position = 0
        for turn, request_of_turn in enumerate(turns):
            # What the policy has read before the first token of a turn, and not sampled.
            context = request_of_turn.prompt_ids
            if turn > 0:
                context = TOOL_TOKENS
                position += len(TOOL_TOKENS)
            for token, log_prob in zip(request_of_turn.token_ids, request_of_turn.log_probs, strict=True):
                columns["prompt"].append(str(number))
                columns["sample"].append(0)
                columns["position"].append(position)
                columns["token_id"].append(token)
                columns["rollout_log_prob"].append(log_prob)
                columns["context"].append(context)
                columns["turn"].append(turn)
                context = None
                position += 1
    length = len(columns["token_id"])
    columns |= {name: [0.5] * length for name in UNREAD_COLUMNS}
    columns |= {
        "micro_batch": [0] * length,
        "age": [age] * length,
        "text": ["x"] * length,
        "region": ["M"] * length,
    }
    # A response that two updates have is scored once.
    for update in range(2):
        write_shard(folder / "traces", Shard(TRACED_STEP, update, 0), columns, WHOLE_UPDATE)
    write_log(folder / "metrics.jsonl", [{"critic/score/mean": 0.5}] * TRACED_STEP)
    configuration = {"actor_rollout_ref": {"rollout": rollout}}
    (folder / "metrics.run.json").write_text(json.dumps({"versions": {}, "configuration": configuration}))
    return folder


class Conclusion(NamedTuple):
    """The command's answer on the one traced step.

    Args:
        verdict: passed, failed or undecided.
        precision: the sampler's.
        nearest: the version of the checkpoint whose log-probabilities are nearest to the sampler's.
    """

    verdict: str
    precision: str
    nearest: int


def read_answer(run, checkpoints, code=0) -> dict[str, Any]:
    """Run the command, which must end with the exit code, and return its answer on the one traced step."""
    (answer_on_step,) = answer("recompute", run, *checkpoints, code=code)["answers"]
    return answer_on_step


def conclude(run, checkpoints, code=0) -> Conclusion:
    """Run the command, which must end with the exit code, and return what its answer comes to."""
    answer_on_step = read_answer(run, checkpoints, code)
    return Conclusion(
        verdict=answer_on_step["verdict"],
        precision=answer_on_step["precision"],
        nearest=int(answer_on_step["distances"][0]["checkpoint"].rpartition("_")[2]),
    )


def count_explained(answer_on_step) -> dict[int | None, int]:
    """Return, by a checkpoint's version, how many responses it explains; under None, those that none explains."""
    explained = {row["version"]: row["responses"] for row in answer_on_step["distances"] if row["responses"]}
    if answer_on_step["unexplained"]:
        explained[None] = answer_on_step["unexplained"]
    return explained


def refuse(*words) -> str:
    """Return what the command prints when it refuses."""
    result = CliRunner(env={"COLUMNS": "999"}).invoke(app, ["recompute", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 1, result.output
    return result.output


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_sampler_in_float32_is_told_from_its_neighbours(tmp_path, checkpoints, temperature):
    requests = sample(load_sampler(checkpoints[2]), PROMPTS, temperature=temperature)
    run = write_run(tmp_path / "run", requests, dtype="float32", temperature=temperature)
    assert conclude(run, checkpoints) == Conclusion("passed", precision="float32", nearest=2)
    assert read_answer(run, checkpoints)["tokens"] == count_tokens(requests)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_skipped_sync_fails(tmp_path, checkpoints, temperature):
    requests = sample(load_sampler(checkpoints[1]), PROMPTS, temperature=temperature)
    run = write_run(tmp_path / "run", requests, dtype="float32", temperature=temperature)
    assert conclude(run, checkpoints, code=1) == Conclusion("failed", precision="float32", nearest=1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_older_weights_pass_if_the_trace_says_their_age(tmp_path, checkpoints, temperature):
    requests = sample(load_sampler(checkpoints[1]), PROMPTS, temperature=temperature)
    run = write_run(tmp_path / "run", requests, age=1, dtype="float32", temperature=temperature)
    assert conclude(run, checkpoints) == Conclusion("passed", precision="float32", nearest=1)
    # Nothing is decided without the checkpoint of that age.
    without_version_1 = [checkpoints[0], checkpoints[2]]
    assert conclude(run, without_version_1, code=3).verdict == "undecided"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_samples_of_unknown_age_leave_the_verdict_open(tmp_path, checkpoints, temperature):
    requests = sample(load_sampler(checkpoints[2]), PROMPTS, temperature=temperature)
    run = write_run(tmp_path / "run", requests, age=None, dtype="float32", temperature=temperature)
    assert conclude(run, checkpoints, code=3) == Conclusion("undecided", precision="float32", nearest=2)


def test_a_sampler_in_bfloat16_that_keeps_the_first_weights_fails_where_it_would_see_the_steps(
    tmp_path, checkpoints, bfloat16_sees_steps
):
    requests = sample(load_sampler(checkpoints[0], torch.bfloat16), PROMPTS)
    run = write_run(tmp_path / "run", requests, dtype="bfloat16")
    output = clipx("recompute", run, *checkpoints, code=1 if bfloat16_sees_steps else 3)
    remaining = output.partition("; the next")[0]
    if bfloat16_sees_steps:
        assert_names(output, "failed")
        assert "in bfloat16 they are one" not in output
        assert "global_step_0 (" in remaining
    else:
        assert "failed" not in output
        assert_names(output, "in bfloat16 they are one", "no step between them")
        assert all(f"global_step_{version} (" in remaining for version in range(CHECKPOINTS))


def test_a_sampler_in_another_precision_than_configured_fails(tmp_path, checkpoints):
    requests = sample(load_sampler(checkpoints[2], torch.bfloat16), PROMPTS)
    run = write_run(tmp_path / "run", requests, dtype="float32")
    output = clipx("recompute", run, *checkpoints, code=1)
    assert_names(output, "sampled in bfloat16", "actor_rollout_ref.rollout.dtype says float32")


def test_kernels_that_round_in_another_order_are_within_bfloat16(tmp_path, checkpoints, bfloat16_sees_steps):
    """Their log-probabilities are as far from ours as ours from those that are not rounded."""
    requests = sample(load_sampler(checkpoints[2]), PROMPTS)
    for request in requests:
        noise = torch.randn(len(request.log_probs), generator=torch.Generator().manual_seed(1)) * 0.01
        request.log_probs = (torch.tensor(request.log_probs) + noise).tolist()
    run = write_run(tmp_path / "run", requests, dtype="bfloat16")
    assert conclude(run, checkpoints, code=0 if bfloat16_sees_steps else 3).precision == "bfloat16"


def test_other_weights_are_none_of_these(tmp_path, checkpoints):
    run = write_run(tmp_path / "run", sample(random_policy(seed=1), PROMPTS))
    output = clipx("recompute", run, *checkpoints, code=1)
    assert_names(output, "none of these weights sampled them", "float32 or bfloat16")


@pytest.mark.parametrize("responses_by_version", [{2: 12, 1: 12}, {2: 1, 1: 23}, {2: 14, 1: 7, 0: 3}], ids=str)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_responses_of_several_checkpoints_have_their_shares(
    tmp_path, checkpoints, bfloat16_sees_steps, responses_by_version, precision
):
    requests = sample_by_versions(checkpoints, responses_by_version, getattr(torch, precision))
    run = write_run(tmp_path / "run", requests, dtype=precision)
    if precision == "bfloat16" and not bfloat16_sees_steps:
        conclusion = conclude(run, checkpoints, code=3)
        assert conclusion.verdict == "undecided"
        assert conclusion.precision == "bfloat16"
        return
    conclusion = conclude(run, checkpoints, code=1)
    assert conclusion.verdict == "failed"
    assert conclusion.precision == precision
    assert count_explained(read_answer(run, checkpoints, code=1)) == responses_by_version
    output = clipx("recompute", run, *checkpoints, code=1)
    for version, count in responses_by_version.items():
        assert_names(output, f"{count} of 24")
        assert f"global_step_{version}" in output
    assert "none of these weights" not in output


@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_shares_are_found_at_the_configured_temperature_too(tmp_path, checkpoints, temperature):
    requests = sample_by_versions(checkpoints, {2: 16, 1: 8}, temperature=temperature)
    run = write_run(tmp_path / "run", requests, dtype="float32", temperature=temperature)
    assert count_explained(read_answer(run, checkpoints, code=1)) == {2: 16, 1: 8}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_share_of_other_weights_is_counted(tmp_path, checkpoints, bfloat16_sees_steps, precision):
    dtype = getattr(torch, precision)
    requests = sample_by_versions(checkpoints, {2: 16}, dtype)
    requests += sample(random_policy(seed=1).to(dtype), TWENTY_FOUR_PROMPTS[16:])
    run = write_run(tmp_path / "run", requests, dtype=precision)
    answer_on_step = read_answer(run, checkpoints, code=1)
    assert answer_on_step["verdict"] == "failed"
    assert answer_on_step["precision"] == precision
    assert answer_on_step["unexplained"] == 8
    if precision == "float32" or bfloat16_sees_steps:
        assert count_explained(answer_on_step) == {2: 16, None: 8}
        output = clipx("recompute", run, *checkpoints, code=1)
        assert_names(output, "16 of 24", "8 of 24", "none of these weights")
        assert "several weights" not in output


def test_without_the_checkpoint_that_the_trace_says_shares_decide_nothing(tmp_path, checkpoints):
    run = write_run(tmp_path / "run", sample_by_versions(checkpoints, {1: 12, 0: 12}), dtype="float32")
    answer_on_step = read_answer(run, checkpoints[:2], code=3)
    assert answer_on_step["verdict"] == "undecided"
    assert count_explained(answer_on_step) == {1: 12, 0: 12}


@pytest.mark.parametrize(
    ("sampled_with", "configured_precision"),
    [
        ({"top_p": 0.999}, "float32"),
        ({"top_p": 0.999}, "bfloat16"),
        ({"top_p": 0.9}, "float32"),
        ({"top_k": 10}, "float32"),
    ],
    ids=str,
)
def test_tokens_left_out_unlike_the_configuration_are_no_rounding(
    tmp_path, checkpoints, sampled_with, configured_precision
):
    requests = sample_by_versions(checkpoints, {2: 24}, **sampled_with)
    run = write_run(tmp_path / "run", requests, dtype=configured_precision)
    answer_on_step = read_answer(run, checkpoints, code=1)
    assert answer_on_step["verdict"] == "failed"
    assert answer_on_step["precision"].startswith("float32")
    # The checkpoint remains; where much is left out, its neighbours may too.
    remains = {row["version"]: row["remains"] for row in answer_on_step["distances"]}
    assert remains[2]
    output = clipx("recompute", run, *checkpoints, code=1)
    assert_names(output, "none of these weights sampled them as configured", "tokens left out")


def test_a_small_top_p_shows_that_the_sampler_is_in_float32(tmp_path, checkpoints):
    requests = sample_by_versions(checkpoints, {2: 24}, top_p=0.999)
    run = write_run(tmp_path / "run", requests, dtype="float32")
    assert conclude(run, checkpoints, code=1) == Conclusion("failed", precision="float32", nearest=2)


def test_a_small_top_k_hides_rounding_so_that_the_precision_stays_open(tmp_path, checkpoints):
    requests = sample_by_versions(checkpoints, {2: 24}, torch.bfloat16, top_k=3)
    run = write_run(tmp_path / "run", requests, dtype="bfloat16")
    assert conclude(run, checkpoints, code=1).precision != "float32"


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("sampling", [{"top_p": 0.999}, {"top_p": 0.9, "top_k": 20, "temperature": 0.8}], ids=str)
def test_tokens_left_out_as_configured_are_scored_so(tmp_path, checkpoints, bfloat16_sees_steps, sampling, precision):
    requests = sample_by_versions(checkpoints, {2: 24}, getattr(torch, precision), **sampling)
    run = write_run(tmp_path / "run", requests, dtype=precision, **sampling)
    is_decided = precision == "float32" or bfloat16_sees_steps
    conclusion = conclude(run, checkpoints, code=0 if is_decided else 3)
    assert conclusion.verdict == ("passed" if is_decided else "undecided")
    assert conclusion.precision == precision


def test_log_probabilities_before_temperature_and_top_p_are_scored_as_such(tmp_path, checkpoints):
    # vLLM's `raw_logprobs` are those at temperature 1, whatever the sampling.
    requests = sample_by_versions(checkpoints, {2: 24})
    rollout = {"logprobs_mode": "raw_logprobs", "temperature": 0.7, "top_p": 0.9}
    run = write_run(tmp_path / "run", requests, dtype="float32", **rollout)
    assert conclude(run, checkpoints) == Conclusion("passed", precision="float32", nearest=2)


def test_vllms_own_argument_says_which_log_probabilities_there_are(tmp_path, checkpoints):
    requests = sample_by_versions(checkpoints, {2: 24})
    rollout = {
        "dtype": "float32",
        "temperature": 0.7,
        "logprobs_mode": "processed_logprobs",
        "engine_kwargs": {"vllm": {"logprobs_mode": "raw_logprobs"}},
    }
    run_of_vllm = write_run(tmp_path / "vllm", requests, name="vllm", **rollout)
    assert conclude(run_of_vllm, checkpoints) == Conclusion("passed", precision="float32", nearest=2)
    # Another engine does not read the argument.
    run_of_cpu = write_run(tmp_path / "cpu", requests, name="cpu", **rollout)
    assert conclude(run_of_cpu, checkpoints, code=1).verdict == "failed"


def test_a_greedy_sampler_is_scored_over_the_whole_vocabulary(tmp_path, checkpoints):
    requests = sample_by_versions(checkpoints, {2: 24}, temperature=0, top_k=3)
    run = write_run(tmp_path / "run", requests, dtype="float32", temperature=0, top_k=3)
    assert conclude(run, checkpoints) == Conclusion("passed", precision="float32", nearest=2)


@pytest.mark.parametrize(
    ("key", "value"),
    [("logprobs_mode", "raw_logits"), ("logprobs_mode", "processed_logits"), ("min_p", 0.1)],
)
def test_settings_that_recompute_cannot_score_are_refused(tmp_path, checkpoints, key, value):
    run = write_run(tmp_path / "run", sample_by_versions(checkpoints, {2: 2}), **{key: value})
    assert f"actor_rollout_ref.rollout.{key}={value}" in refuse(run, checkpoints[2])


def test_a_temperature_unlike_that_of_raw_log_probabilities_is_said_as_such(tmp_path, checkpoints):
    requests = sample_by_versions(checkpoints, {2: 24}, temperature=0.995)
    rollout = {"logprobs_mode": "raw_logprobs", "temperature": 0.995}
    run = write_run(tmp_path / "run", requests, dtype="float32", **rollout)
    output = clipx("recompute", run, *checkpoints, code=1)
    assert_names(output, "log-probabilities", "temperature of about 0.995 instead of 1")


def test_one_checkpoint_is_in_memory_at_a_time(tmp_path, checkpoints, monkeypatch):
    run = write_run(tmp_path / "run", sample_by_versions(checkpoints, {2: 2}))
    weights_of_models = []

    def load_and_remember(checkpoint):
        alive = [weights for weights in weights_of_models if weights() is not None]
        assert not alive
        model = load_model(checkpoint)
        weights_of_models.append(weakref.ref(next(model.parameters())))
        return model

    monkeypatch.setattr(recompute, "load_model", load_and_remember)
    recompute.recompute(run, checkpoints)
    assert len(weights_of_models) == len(checkpoints)


@pytest.mark.parametrize(
    ("temperature", "configured_precision"), [(0.995, "float32"), (0.999, "bfloat16"), (1.01, "float32")]
)
def test_nearly_the_configured_temperature_is_no_rounding(tmp_path, checkpoints, temperature, configured_precision):
    requests = sample_by_versions(checkpoints, {2: 24}, temperature=temperature)
    run = write_run(tmp_path / "run", requests, dtype=configured_precision)
    assert conclude(run, checkpoints, code=1) == Conclusion("failed", precision="float32", nearest=2)
    output = clipx("recompute", run, *checkpoints, code=1)
    assert_names(output, f"temperature of about {temperature:g} instead of 1")


def test_the_tokens_of_a_tool_are_read_before_the_next_turn(tmp_path, checkpoints):
    model = load_sampler(checkpoints[2])
    first_turn = sample(model, PROMPTS)
    contexts = [[*request.prompt_ids, *request.token_ids, *TOOL_TOKENS] for request in first_turn]
    second_turn = sample(model, contexts, seed=9)
    run = write_run(tmp_path / "run", first_turn, second_turn=second_turn, dtype="float32")
    assert conclude(run, checkpoints) == Conclusion("passed", precision="float32", nearest=2)
    assert read_answer(run, checkpoints)["tokens"] == count_tokens([*first_turn, *second_turn])


@pytest.fixture
def request_of_version_2(checkpoints) -> Request:
    """A request with its response."""
    (request,) = sample(load_sampler(checkpoints[2]), PROMPTS[:1])
    return request


def test_a_step_that_was_not_traced_is_refused_with_those_that_were(tmp_path, checkpoints, request_of_version_2):
    run = write_run(tmp_path / "run", [request_of_version_2])
    assert "no traces of the steps [2], only of [3]" in refuse(run, checkpoints[0], "--step", 2)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path, request_of_version_2):
    run = write_run(tmp_path / "run", [request_of_version_2])
    assert_names(refuse(run, tmp_path), str(tmp_path), "Hugging Face's format", "verl's FSDP checkpoints")


def test_traces_of_version_2_which_lack_the_prompts_are_refused(tmp_path, checkpoints, request_of_version_2):
    run = write_run(tmp_path / "run", [request_of_version_2])
    for shard in (run / "traces").glob("*.parquet"):
        table = pyarrow.parquet.read_table(shard)
        metadata = table.schema.metadata | {b"clipx_trace_version": b"2"}
        table = table.drop_columns(["context", "turn"]).replace_schema_metadata(metadata)
        pyarrow.parquet.write_table(table, shard)
    assert_names(refuse(run, checkpoints[0]), "without the prompts' tokens", "Train again")


def test_traces_without_the_sampler_s_log_probabilities_are_refused(tmp_path, checkpoints, request_of_version_2):
    request_of_version_2.log_probs = [None] * len(request_of_version_2.log_probs)
    run = write_run(tmp_path / "run", [request_of_version_2])
    assert "calculate_log_probs=true" in refuse(run, checkpoints[0])


def cut_weights(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def write_list_as_configuration(folder):
    (folder / "config.json").write_text("[]")


def shrink_vocabulary(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(4)
    model.save_pretrained(folder)


@pytest.mark.parametrize("damage", [cut_weights, write_list_as_configuration, shrink_vocabulary])
def test_a_damaged_or_another_checkpoint_is_one_error_with_its_folder(
    tmp_path, checkpoints, request_of_version_2, damage
):
    run = write_run(tmp_path / "run", [request_of_version_2])
    damaged = shutil.copytree(checkpoints[2], tmp_path / "damaged" / "global_step_2")
    damage(damaged)
    assert str(damaged) in refuse(run, damaged)


def test_weights_that_the_tokens_cannot_tell_apart_are_told_from_the_next_ones():
    first = recompute.Distance(checkpoint="first", version=None, mean=0.0, most=0.0, remains=True, responses=5)
    second = recompute.Distance(checkpoint="second", version=None, mean=0.0, most=0.0, remains=True, responses=5)
    third = recompute.Distance(checkpoint="third", version=None, mean=0.1, most=0.2, remains=False, responses=0)
    group_answer = recompute.GroupAnswer(
        step=1,
        version=None,
        tokens=9,
        precision="bfloat16",
        announced=None,
        distances=(first, second, third),
        same=True,
        responses=5,
        unexplained=0,
        shift=None,
    )
    before_next, _, after = recompute.say(group_answer).partition("; the next are third (")
    assert "first (" in before_next
    assert "or second (" in before_next
    assert_names(before_next, "can't tell these weights apart", "in bfloat16 they are one")
    assert after == "0.1 nats away on average, 99 % of the tokens within 0.2)."
