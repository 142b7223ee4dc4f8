"""`clipx recompute`: which checkpoint sampled traced tokens, of a tiny policy whose samples are the CPU rollout's, with
faults planted between trainer and sampler. Not covered: traces that a worker writes
(tests/training/worker/test_tracer.py), verl's checkpoints (tests/training/worker/test_verl_contract.py), other engines,
GPUs.
"""

import json
import shutil
import weakref

import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.analysis.runs.commands import answer, clipx
from tests.analysis.runs.example_runs import WHOLE, write_log
from tests.training.cpu.policy import VOCABULARY_SIZE, random_policy, save_checkpoint
from verl_clipx.analysis.recompute import recompute
from verl_clipx.analysis.recompute.checkpoints import load_model
from verl_clipx.cli import app
from verl_clipx.run.trace_format import Shard, write_shard
from verl_clipx.training.cpu.rollout.generator import Generator, Request
from verl_clipx.training.cpu.rollout.parameters import SamplingParameters

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


def test_other_weights_are_none_of_these(tmp_path, trained):
    _, checkpoints = trained
    others, _ = write_run(tmp_path / "others", sample(random_policy(seed=1), PROMPTS))
    said = clipx("recompute", others, *checkpoints, code=1)
    assert "none of these weights sampled them, in float32 or bfloat16" in said


MANY = [[5 + number, *PROMPTS[number % len(PROMPTS)]] for number in range(24)]


def sample_parts(checkpoints, parts, precision=torch.float32, **parameters):
    """Responses of several versions: of each as many as `parts` says, in its order."""
    requests = []
    for version, count in parts.items():
        prompts = MANY[len(requests) : len(requests) + count]
        model = of_sampler(checkpoints, version, precision)
        requests += sample(model, prompts, seed=100 * len(requests), **parameters)
    return requests


def shares(said):
    """By checkpoint's version, how many responses it explains; under None those that none explains."""
    (only,) = said["answers"]
    explained = {row["version"]: row["responses"] for row in only["distances"] if row["responses"]}
    return explained | ({None: only["unexplained"]} if only["unexplained"] else {})


PARTS = [{2: 12, 1: 12}, {2: 1, 1: 23}, {2: 14, 1: 7, 0: 3}]


@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_responses_of_several_checkpoints_have_their_shares(tmp_path, trained, parts, precision):
    size, checkpoints = trained
    run, _ = write_run(tmp_path / "run", sample_parts(checkpoints, parts, getattr(torch, precision)), dtype=precision)
    if precision == "bfloat16" and size < 1e-3:
        # All three round to the same weights.
        assert names(answer("recompute", run, *checkpoints, code=3))[:2] == ("undecided", "bfloat16")
        return
    said = answer("recompute", run, *checkpoints, code=1)
    assert names(said)[:2] == ("failed", precision)
    assert shares(said) == parts
    printed = clipx("recompute", run, *checkpoints, code=1)
    for version, count in parts.items():
        assert f"({count} of 24) from" in printed and f"global_step_{version}" in printed
    assert "none of these weights" not in printed


@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_shares_are_found_at_the_configured_temperature_too(tmp_path, trained, temperature):
    _, checkpoints = trained
    requests = sample_parts(checkpoints, {2: 16, 1: 8}, temperature=temperature)
    run, _ = write_run(tmp_path / "run", requests, dtype="float32", temperature=temperature)
    assert shares(answer("recompute", run, *checkpoints, code=1)) == {2: 16, 1: 8}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_share_of_other_weights_is_counted(tmp_path, trained, precision):
    size, checkpoints = trained
    dtype = getattr(torch, precision)
    requests = sample_parts(checkpoints, {2: 16}, dtype) + sample(random_policy(seed=1).to(dtype), MANY[16:])
    run, _ = write_run(tmp_path / "run", requests, dtype=precision)
    said = answer("recompute", run, *checkpoints, code=1)
    assert names(said)[:2] == ("failed", precision) and said["answers"][0]["unexplained"] == 8
    if precision == "float32" or size > 1e-3:
        assert shares(said) == {2: 16, None: 8}
        printed = clipx("recompute", run, *checkpoints, code=1)
        assert "several weights" not in printed
        assert "(16 of 24) from" in printed and "(8 of 24) from none of these weights." in printed


def test_without_the_checkpoint_that_the_trace_says_shares_decide_nothing(tmp_path, trained):
    _, checkpoints = trained
    run, _ = write_run(tmp_path / "run", sample_parts(checkpoints, {1: 12, 0: 12}), dtype="float32")
    said = answer("recompute", run, *checkpoints[:2], code=3)
    assert shares(said) == {1: 12, 0: 12} and names(said)[0] == "undecided"


# With the precision that the configuration states.
LEFT_OUT = [
    ({"top_p": 0.999}, "float32"),
    ({"top_p": 0.999}, "bfloat16"),
    ({"top_p": 0.9}, "float32"),
    ({"top_k": 10}, "float32"),
]


@pytest.mark.parametrize(("given", "announced"), LEFT_OUT, ids=str)
def test_tokens_left_out_unlike_the_configuration_are_no_rounding(tmp_path, trained, given, announced):
    _, checkpoints = trained
    run, _ = write_run(tmp_path / "run", sample_parts(checkpoints, {2: 24}, **given), dtype=announced)
    said = answer("recompute", run, *checkpoints, code=1)
    verdict, precision, _ = names(said)
    assert verdict == "failed" and precision.startswith("float32")
    # The checkpoint remains; where much is left out, its neighbours may too.
    assert {row["version"]: row["remains"] for row in said["answers"][0]["distances"]}[2]
    printed = clipx("recompute", run, *checkpoints, code=1)
    assert "none of these weights sampled them as configured" in printed and "tokens left out" in printed


def test_a_small_top_p_shows_that_the_sampler_is_in_float32(tmp_path, trained):
    _, checkpoints = trained
    run, _ = write_run(tmp_path / "run", sample_parts(checkpoints, {2: 24}, top_p=0.999), dtype="float32")
    assert names(answer("recompute", run, *checkpoints, code=1)) == ("failed", "float32", "2")
    # A large rise hides rounding, so that the precision stays open.
    hidden = sample_parts(checkpoints, {2: 24}, torch.bfloat16, top_k=3)
    run, _ = write_run(tmp_path / "hidden", hidden, dtype="bfloat16")
    assert names(answer("recompute", run, *checkpoints, code=1))[1] != "float32"


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("given", [{"top_p": 0.999}, {"top_p": 0.9, "top_k": 20, "temperature": 0.8}], ids=str)
def test_tokens_left_out_as_configured_are_scored_so(tmp_path, trained, given, precision):
    size, checkpoints = trained
    requests = sample_parts(checkpoints, {2: 24}, getattr(torch, precision), **given)
    run, _ = write_run(tmp_path / "run", requests, dtype=precision, **given)
    decided = precision == "float32" or size > 1e-3
    verdict, said_precision, _ = names(answer("recompute", run, *checkpoints, code=0 if decided else 3))
    assert (verdict, said_precision) == ("passed" if decided else "undecided", precision)


def test_log_probabilities_before_temperature_and_top_p_are_scored_as_such(tmp_path, trained):
    _, checkpoints = trained
    requests = sample_parts(checkpoints, {2: 24})
    # vLLM's `raw_logprobs`, whatever the sampling.
    raw = {"logprobs_mode": "raw_logprobs", "temperature": 0.7, "top_p": 0.9}
    run, _ = write_run(tmp_path / "run", requests, dtype="float32", **raw)
    assert names(answer("recompute", run, *checkpoints)) == ("passed", "float32", "2")


def test_vllms_own_argument_says_which_log_probabilities_there_are(tmp_path, trained):
    _, checkpoints = trained
    requests = sample_parts(checkpoints, {2: 24})
    settings = {"dtype": "float32", "temperature": 0.7, "logprobs_mode": "processed_logprobs"}
    settings["engine_kwargs"] = {"vllm": {"logprobs_mode": "raw_logprobs"}}
    run, _ = write_run(tmp_path / "vllm", requests, name="vllm", **settings)
    assert names(answer("recompute", run, *checkpoints)) == ("passed", "float32", "2")
    # Another engine does not read the argument.
    run, _ = write_run(tmp_path / "cpu", requests, name="cpu", **settings)
    assert names(answer("recompute", run, *checkpoints, code=1))[0] == "failed"


def test_a_greedy_sampler_is_scored_over_the_whole_vocabulary(tmp_path, trained):
    _, checkpoints = trained
    requests = sample_parts(checkpoints, {2: 24}, temperature=0, top_k=3)
    run, _ = write_run(tmp_path / "run", requests, dtype="float32", temperature=0, top_k=3)
    assert names(answer("recompute", run, *checkpoints)) == ("passed", "float32", "2")


@pytest.mark.parametrize(
    "setting", [{"logprobs_mode": "raw_logits"}, {"logprobs_mode": "processed_logits"}, {"min_p": 0.1}], ids=str
)
def test_settings_that_recompute_cannot_score_are_refused(tmp_path, trained, setting):
    _, checkpoints = trained
    run, _ = write_run(tmp_path / "run", sample_parts(checkpoints, {2: 2}), **setting)
    result = CliRunner(env={"COLUMNS": "999"}).invoke(app, ["recompute", str(run), str(checkpoints[2])])
    ((key, value),) = setting.items()
    assert result.exit_code == 1
    assert f"actor_rollout_ref.rollout.{key}={value}" in result.output


def test_a_temperature_unlike_that_of_raw_log_probabilities_is_said_as_such(tmp_path, trained):
    _, checkpoints = trained
    requests = sample_parts(checkpoints, {2: 24}, temperature=0.995)
    raw = {"logprobs_mode": "raw_logprobs", "temperature": 0.995}
    run, _ = write_run(tmp_path / "run", requests, dtype="float32", **raw)
    printed = clipx("recompute", run, *checkpoints, code=1)
    assert "with log-probabilities at a temperature of about 0.995 instead of 1" in printed


def test_one_checkpoint_is_in_memory_at_a_time(tmp_path, trained, monkeypatch):
    _, checkpoints = trained
    run, _ = write_run(tmp_path / "run", sample_parts(checkpoints, {2: 2}))
    models = []

    def load(checkpoint):
        alive = [reference for reference in models if reference() is not None]
        assert not alive
        model = load_model(checkpoint)
        models.append(weakref.ref(next(model.parameters())))
        return model

    monkeypatch.setattr(recompute, "load_model", load)
    recompute.recompute(run, checkpoints)
    assert len(models) == len(checkpoints)


@pytest.mark.parametrize(("temperature", "announced"), [(0.995, "float32"), (0.999, "bfloat16"), (1.01, "float32")])
def test_nearly_the_configured_temperature_is_no_rounding(tmp_path, trained, temperature, announced):
    _, checkpoints = trained
    requests = sample_parts(checkpoints, {2: 24}, temperature=temperature)
    run, _ = write_run(tmp_path / "run", requests, dtype=announced)
    assert names(answer("recompute", run, *checkpoints, code=1)) == ("failed", "float32", "2")
    printed = clipx("recompute", run, *checkpoints, code=1)
    assert f"at a temperature of about {temperature:g} instead of 1" in printed


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

    assert "has no traces of the steps [2], only of [3]." in refusal(run, checkpoints[0], "--step", 2)
    assert "neither a model in Hugging Face's format nor one of verl's FSDP checkpoints" in refusal(run, tmp_path)
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


def cut_weights(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def list_configuration(folder):
    (folder / "config.json").write_text("[]")


def shrink_vocabulary(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(4)
    model.save_pretrained(folder)


@pytest.mark.parametrize("damage", [cut_weights, list_configuration, shrink_vocabulary])
def test_a_damaged_or_another_checkpoint_is_one_error_with_its_folder(tmp_path, trained, damage):
    _, checkpoints = trained
    run, _ = write_run(tmp_path / "run", sample(of_sampler(checkpoints, 2), PROMPTS[:1]))
    damaged = shutil.copytree(checkpoints[2], tmp_path / "damaged" / "global_step_2")
    damage(damaged)
    done = CliRunner(env={"COLUMNS": "999"}).invoke(app, ["recompute", str(run), str(damaged)], catch_exceptions=False)
    assert done.exit_code == 1 and str(damaged) in done.output


def test_weights_that_the_tokens_cannot_tell_apart_are_told_from_the_next_ones():
    remaining = [
        recompute.Distance(checkpoint=name, version=None, mean=0.0, most=0.0, remains=True, responses=5)
        for name in ("first", "second")
    ]
    next_one = recompute.Distance(checkpoint="third", version=None, mean=0.1, most=0.2, remains=False, responses=0)
    group_answer = recompute.GroupAnswer(
        step=1,
        version=None,
        tokens=9,
        precision="bfloat16",
        announced=None,
        distances=(*remaining, next_one),
        same=True,
        responses=5,
        unexplained=0,
        shift=None,
    )
    before_next, _, after = recompute.say(group_answer).partition("; the next are third (")
    assert "first (" in before_next and "or second (" in before_next
    assert "can't tell these weights apart: in bfloat16 they are one, so that no step" in before_next
    assert after == "0.1 nats away on average, 99 % of the tokens within 0.2)."
