"""`clipx recompute`: which checkpoint sampled traced tokens, of a tiny policy whose samples are the CPU rollout's, with
faults planted between trainer and sampler. Not covered: traces that a worker writes (tests/worker/test_tracer.py),
verl's checkpoints (tests/worker/test_verl_contract.py), other engines, GPUs.
"""

import json

import pyarrow.parquet
import pytest
import torch
from typer.testing import CliRunner

from tests.cpu.policy import VOCABULARY_SIZE, random_policy, save_checkpoint
from tests.runs.commands import answer, clipx
from tests.runs.example_runs import WHOLE, write_log
from verl_clipx.cli import app
from verl_clipx.common.traces import Shard, write_shard
from verl_clipx.cpu.rollout.generator import Generator, Request
from verl_clipx.cpu.rollout.parameters import SamplingParameters

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12], [16, 17], [18, 19, 20]]
TOOL = [30, 31]
STEPS = 3
# Numbers that no test here reads.
MADE_UP = ("log_prob", "old_log_prob", "ratio", "advantage", "bounded", "low", "high", "weight", "unshaped_advantage")


def policy(version, size):
    """The policy after steps that change every weight by a share of itself; its first weights are bfloat16's."""
    model = random_policy()
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            sign = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)).sign()
            weight.copy_(weight.bfloat16().float() * (1 + size * version * sign))
    return model


@pytest.fixture(scope="module", params=[0.02, 5e-4], ids=["seen by bfloat16", "not seen by bfloat16"])
def trained(request, tmp_path_factory):
    """The size of a trainer's steps in float32, and its checkpoints; the smaller rounds to the same weights."""
    folder = tmp_path_factory.mktemp("checkpoints")
    checkpoints = [
        save_checkpoint(folder / f"global_step_{version}", policy(version, request.param)) for version in range(STEPS)
    ]
    for checkpoint in checkpoints:
        # What a policy's folder says that was trained in float32 from weights in bfloat16.
        config = json.loads((checkpoint / "config.json").read_text())
        (checkpoint / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}))
    return request.param, checkpoints


def sample(model, prompts, seed=0, **parameters):
    generator = Generator(model, vocabulary_size=VOCABULARY_SIZE)
    requests = [
        Request(f"r{number}", list(prompt), SamplingParameters(max_tokens=12, **parameters), seed + number)
        for number, prompt in enumerate(prompts)
    ]
    for request in requests:
        generator.submit(request)
    while generator.pending:
        generator.step()
    return requests


def write_run(folder, requests, *, age=0, second=None, step=3, **rollout):
    """A run whose traced step has these responses, of a second turn too, after a tool's tokens."""
    columns = {name: [] for name in ("prompt", "sample", "position", "token_id", "rollout_log_prob", "context", "turn")}
    for number, request in enumerate(requests):
        turns = [request] if second is None else [request, second[number]]
        position = 0
        for turn, one in enumerate(turns):
            for place, (token, log_prob) in enumerate(zip(one.token_ids, one.log_probs, strict=True)):
                context = None if place else TOOL if turn else one.prompt_ids
                position += 0 if context is None or not turn else len(TOOL)
                row = (str(number), 0, position, token, log_prob, context, turn)
                for name, value in zip(columns, row, strict=True):
                    columns[name].append(value)
                position += 1
    length = len(columns["token_id"])
    columns |= {name: [0.5] * length for name in MADE_UP} | {"micro_batch": [0] * length, "age": [age] * length}
    columns |= {"text": ["x"] * length, "region": ["M"] * length}
    # A response that two updates have is scored once.
    for update in range(2):
        write_shard(folder / "traces", Shard(step, update, 0), columns, WHOLE)
    write_log(folder / "metrics.jsonl", [{"critic/score/mean": 0.5}] * step)
    configuration = {"actor_rollout_ref": {"rollout": rollout}}
    (folder / "metrics.run.json").write_text(json.dumps({"versions": {}, "configuration": configuration}))
    return folder, length


def of_sampler(checkpoints, version, precision=torch.float32):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoints[version], dtype=precision).eval()


def names(said):
    (only,) = said["answers"]
    return only["verdict"], only["precision"], only["distances"][0]["checkpoint"].rpartition("_")[2]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_sampler_in_float32_is_told_from_its_neighbours_and_a_skipped_sync_fails(tmp_path, trained, temperature):
    _, checkpoints = trained
    requests = sample(of_sampler(checkpoints, 2), PROMPTS, temperature=temperature)
    rollout = {"dtype": "float32", "temperature": temperature}
    run, tokens = write_run(tmp_path / "right", requests, **rollout)
    said = answer("recompute", run, *checkpoints)
    assert names(said) == ("passed", "float32", "2") and said["answers"][0]["tokens"] == tokens
    skipped, _ = write_run(
        tmp_path / "skipped", sample(of_sampler(checkpoints, 1), PROMPTS, temperature=temperature), **rollout
    )
    assert names(answer("recompute", skipped, *checkpoints, code=1)) == ("failed", "float32", "1")
    # The trace may say that they are older, and without the checkpoint that it says nothing is decided.
    older, _ = write_run(
        tmp_path / "older", sample(of_sampler(checkpoints, 1), PROMPTS, temperature=temperature), age=1, **rollout
    )
    assert names(answer("recompute", older, *checkpoints)) == ("passed", "float32", "1")
    assert names(answer("recompute", older, checkpoints[0], checkpoints[2], code=3))[0] == "undecided"
    unknown, _ = write_run(tmp_path / "unknown", requests, age=None, **rollout)
    assert names(answer("recompute", unknown, *checkpoints, code=3)) == ("undecided", "float32", "2")


def test_a_sampler_in_bfloat16_sees_the_steps_or_they_are_one_for_it(tmp_path, trained):
    size, checkpoints = trained
    # It never got any but the first weights.
    run, _ = write_run(tmp_path / "run", sample(of_sampler(checkpoints, 0, torch.bfloat16), PROMPTS), dtype="bfloat16")
    seen = size > 1e-3
    said = clipx("recompute", run, *checkpoints, code=1 if seen else 3)
    assert ("failed:" in said) == seen and ("in bfloat16 they are one, so that no step" in said) != seen
    assert all(f"global_step_{version} (" in said.partition("; the next")[0] for version in range(1 if seen else 3))
    # In another precision than the configuration says.
    run, _ = write_run(tmp_path / "other", sample(of_sampler(checkpoints, 2, torch.bfloat16), PROMPTS), dtype="float32")
    said = clipx("recompute", run, *checkpoints, code=1)
    assert "sampled in bfloat16 from" in said and "actor_rollout_ref.rollout.dtype says float32." in said
    # Kernels that round in another order are as far from ours as theirs from what is not rounded.
    requests = sample(of_sampler(checkpoints, 2), PROMPTS)
    for request in requests:
        noise = torch.randn(len(request.log_probs), generator=torch.Generator().manual_seed(1)) * 0.01
        request.log_probs = (torch.tensor(request.log_probs) + noise).tolist()
    run, _ = write_run(tmp_path / "kernels", requests, dtype="bfloat16")
    assert names(answer("recompute", run, *checkpoints, code=0 if seen else 3))[1] == "bfloat16"


def test_other_weights_and_a_sampler_that_leaves_tokens_out_are_none_of_these(tmp_path, trained):
    _, checkpoints = trained
    others, _ = write_run(tmp_path / "others", sample(random_policy(seed=1), PROMPTS))
    said = clipx("recompute", others, *checkpoints, code=1)
    assert "none of these weights sampled them" in said
    cut, _ = write_run(tmp_path / "cut", sample(of_sampler(checkpoints, 2), PROMPTS, top_p=0.7))
    assert "none of these weights sampled them" in clipx("recompute", cut, *checkpoints, code=1)


def test_the_tokens_of_a_tool_are_read_before_the_next_turn(tmp_path, trained):
    _, checkpoints = trained
    model = of_sampler(checkpoints, 2)
    first = sample(model, PROMPTS)
    second = sample(model, [[*one.prompt_ids, *one.token_ids, *TOOL] for one in first], seed=9)
    run, tokens = write_run(tmp_path / "run", first, second=second, dtype="float32")
    said = answer("recompute", run, *checkpoints)
    assert names(said) == ("passed", "float32", "2")
    assert tokens == sum(len(one.token_ids) for one in (*first, *second)) == said["answers"][0]["tokens"]


def test_what_cannot_be_scored_is_said(tmp_path, trained):
    _, checkpoints = trained
    requests = sample(of_sampler(checkpoints, 2), PROMPTS[:1])
    run, _ = write_run(tmp_path / "run", requests)

    def refusal(*words):
        done = CliRunner(env={"COLUMNS": "999"}).invoke(app, ["recompute", *map(str, words)])
        assert done.exit_code == 1
        return done.output

    assert "has traces of these steps: [3]" in refusal(run, checkpoints[0], "--step", 2)
    assert "no model in Hugging Face's form and no FSDP checkpoint" in refusal(run, tmp_path)
    # The traces of the version before have no prompts.
    old, _ = write_run(tmp_path / "old", requests)
    for shard in (old / "traces").glob("*.parquet"):
        table = pyarrow.parquet.read_table(shard)
        metadata = {**table.schema.metadata, b"clipx_trace_version": b"2"}
        pyarrow.parquet.write_table(table.drop_columns(["context", "turn"]).replace_schema_metadata(metadata), shard)
    assert "traced without the prompts' tokens" in refusal(old, checkpoints[0])
    for request in requests:
        request.log_probs = [None] * len(request.log_probs)
    silent, _ = write_run(tmp_path / "silent", requests)
    assert "calculate_log_probs=true" in refusal(silent, checkpoints[0])
