"""Options of verl's engine, its other trainers and advantages, through the real verl with ACPO: what support.py says of
them. In each, with `-m matrix`, the bounds of every update are recomputed from its tokens, metrics are finite, and the
rollout has the weights that were trained; under other trainers advantages are recomputed from the rewards. Not covered:
learning, resuming; that no option changes bounds or gradients (test_invariance.py), GPUs, LoRA's adapters in a rollout
(the CPU's takes merged ones alone).
"""

import math
import shutil
from dataclasses import replace

import numpy
import pandas
import pytest
from transformers import AutoModelForCausalLM

from verl_clipx.run.trace_format import read_shards, shards_in

from .runs import Run, check_receipt, environment_loading, train

pytestmark = [pytest.mark.end_to_end, pytest.mark.matrix]

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
FSDP = f"{ACTOR}.fsdp_config"
TWO_RANKS = "trainer.n_gpus_per_node=2"
PACKING = f"{MODEL}.use_remove_padding=True"
# Options of the engine that work together.
ENGINE_OPTIONS = (
    PACKING,
    f"{MODEL}.enable_gradient_checkpointing=True",
    f"{ACTOR}.use_dynamic_bsz=True",
    f"{ACTOR}.ppo_max_token_len_per_gpu=200",
    f"{FSDP}.param_offload=True",
    f"{FSDP}.optimizer_offload=True",
    f"{ACTOR}.entropy_from_logits_with_chunking=True",
    f"{ACTOR}.entropy_from_logits_chunk_size=16",
    f"{ACTOR}.calculate_entropy=True",
)
ULYSSES = (
    PACKING,
    f"{ACTOR}.ulysses_sequence_parallel_size=2",
    f"{MODEL}.override_config.attn_implementation=flash_attention_2",
)
CORRECTION = "algorithm.rollout_correction"
# Of a rollout server on a rank of its own.
ROLLOUT_APART = ("actor_rollout_ref.rollout.checkpoint_engine.backend=gloo", "ray_kwargs.ray_init.num_gpus=2")
# Of the two experimental trainers, outside verl's own checkout.
EXPERIMENTAL_TRAINERS = (
    "hydra.searchpath=[pkg://verl.trainer.config]",
    "actor_rollout_ref.hybrid_engine=False",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=1",
    *ROLLOUT_APART,
)
# Any answers differ in it, so that every batch has a gradient however little the policy can do.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(map(ord, solution_str)) % 7 / 6
"""
TOOL = '''
"""A tool, and a parser by which every answer calls it: the tiny policy cannot write a call."""

import json

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool


@function_tool
def length(text: str) -> str:
    """Measures a text.

    Args:
        text: what to measure.
    """
    return str(len(text))


@ToolParser.register("every_answer")
class EveryAnswer(ToolParser):
    async def extract_tool_calls(self, responses_ids, tools=None):
        text = self.tokenizer.decode(responses_ids)
        return text, [FunctionCall(name="length", arguments=json.dumps({"text": text}))]
'''


def train_acpo(task, folder, *overrides: str, **options) -> Run:
    """Two steps of ACPO on one rank, rewarded by `REWARD` and traced whole; arguments as for `train`."""
    folder.mkdir(exist_ok=True)
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    loss_and_reward = ("+clipx=acpo", f"reward.custom_reward_function.path={reward}")
    traces = ("+clipx/trace=prompts", "clipx.trace.fraction=1", "clipx.trace.every=1")
    return train(task, folder / "run", *loss_and_reward, *traces, *overrides, **options)


def traced_tokens(run: Run) -> pandas.DataFrame:
    """Every token that a run was trained on, once an update."""
    return read_shards(run.folder / "traces", shards_in(run.folder / "traces")).to_pandas()


def check_bounds(tokens: pandas.DataFrame, tolerance: float) -> None:
    """The bounds that each token was trained with are those of its update's tokens, on both sides.

    `tolerance` is of epsilon's relative difference.
    """
    largest_epsilon = 0.0
    for (step, update), trained in tokens.groupby(["step", "update"]):
        if not trained.selected.isna().all():
            trained = trained[trained.selected.astype(bool)]
        old = trained.old_log_prob.astype(float)
        ratio = numpy.exp(trained.log_prob.astype(float) - old)
        bins = (numpy.exp(old) * 5).astype(int).clip(0, 4)
        # Eq. 8, of each bin.
        expected = bins.map(3 * ratio.groupby(bins).std(ddof=0) + 0.2)
        for epsilon in (trained.high - 1, 1 - trained.low):
            numpy.testing.assert_allclose(epsilon, expected, rtol=tolerance, err_msg=f"{step=} {update=}")
        largest_epsilon = max(largest_epsilon, float(expected.max()))
    assert largest_epsilon > 0.205, "no update moved a bound, so that any method with fixed ones would do"


def check_adapted(
    run: Run, steps: list[int], updates: int, *, batches_a_step: int = 1, tolerance: float = 1e-3
) -> None:
    """The worker trained by ACPO, with the bounds and the metrics of all its tokens, in the updates that it announced
    for a rollout batch, of which verl logs `batches_a_step` as one of `steps`.
    """
    log = run.log.dropna(subset="actor/clipx/epsilon/bin_0")
    assert list(log.index) == steps
    tokens = traced_tokens(run)
    check_bounds(tokens, tolerance)
    assert (tokens.groupby("step")["update"].nunique() == updates * batches_a_step).all()
    plural = "update" if updates == 1 else "updates"
    assert f"; {updates} {plural} per rollout batch: clipping can act" in run.output


def check_run(run: Run, *, rollout_difference: float = 1e-4, tolerance: float = 1e-3, rounding: float = 1e-4) -> None:
    """What holds of two steps under every option; the rollout has the trained weights, but for the difference."""
    check_adapted(run, [1, 2], updates=2, tolerance=tolerance)
    for metric in check_receipt(run, rounding=rounding).filter(regex="^actor/"):
        assert run.log[metric].map(math.isfinite).all(), metric
    assert run.log["training/rollout_probs_diff_max"].max() < rollout_difference


def test_two_ranks_share_sequences(task, tmp_path):
    check_run(train_acpo(task, tmp_path, TWO_RANKS, *ULYSSES, environment=environment_loading("flash_attention")))


def test_lora_merged_for_the_rollout(task, tmp_path):
    adapter = (f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8", f"{MODEL}.lora.merge=True")
    run = train_acpo(task, tmp_path, *adapter, f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.optim.lr=1e-2")
    # verl rounds merged weights to bfloat16, whatever the rollout's precision is.
    check_run(run, rollout_difference=0.02)
    # The reference is the model without its adapter, from which the first step led away; the rollout went with it.
    assert abs(run.log["rollout_corr/kl"][2]) < 0.1 * run.log["actor/kl_loss"][1]


def test_fused_kernels_under_hybrid_sharding(task, tmp_path):
    policy = tmp_path / "tied"
    shutil.copytree(task.policy, policy)
    model = AutoModelForCausalLM.from_pretrained(policy)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(policy)
    fused = (f"{MODEL}.use_fused_kernels=True", f"{MODEL}.fused_kernel_options.impl_backend=torch", PACKING)
    sharded = ("trainer.n_gpus_per_node=4", f"{FSDP}.fsdp_size=2")
    check_run(train_acpo(replace(task, policy=policy), tmp_path, *sharded, *fused))


def test_bfloat16(task, tmp_path):
    run = train_acpo(task, tmp_path, f"{FSDP}.mixed_precision.param_dtype=bf16")
    # The rollout stays in float32.
    # Both passes round, also where the first update's bounds are those at ratio 1.
    check_run(run, rollout_difference=0.05, tolerance=0.3, rounding=0.01)
    assert run.log["training/rollout_probs_diff_max"].max() > 1e-4


def test_the_older_trainer_with_reinforce_plus_plus(task, tmp_path):
    older = ("trainer.use_v1=False", "trainer.v1.trainer_mode=separate_async")
    run = train_acpo(task, tmp_path, *older, "algorithm.adv_estimator=reinforce_plus_plus")
    check_adapted(run, [1, 2], updates=2)
    for _, batch in traced_tokens(run).groupby("step"):
        # Every token's return is the response's reward, whitened over the rollout batch's tokens.
        expected = (batch.score - batch.score.mean()) / batch.score.std()
        numpy.testing.assert_allclose(batch.advantage, expected, rtol=1e-3, atol=1e-4)
    assert run.log["training/rollout_probs_diff_max"].max() < 1e-4


def test_a_critics_advantages_in_two_epochs(task, tmp_path):
    critic = (f"critic.model.path={task.policy}", "critic.ppo_micro_batch_size_per_gpu=8")
    epochs = ("actor_rollout_ref.actor.ppo_epochs=2", "trainer.save_freq=2")
    run = train_acpo(task, tmp_path, "algorithm.adv_estimator=gae", *critic, *epochs)
    check_adapted(run, [1, 2], updates=4)
    assert (run.log["critic/grad_norm"] > 0).all()
    # Optimizer steps that verl took: two mini-batches in two epochs on each of two rollout batches, each response in
    # one of each epoch's.
    assert run.state(2)["step"] == 2 * 2 * 2
    tokens = traced_tokens(run)
    updates_of_responses = tokens.groupby(["step", "prompt", "sample"])["update"].unique()
    assert len(updates_of_responses) == 2 * 16 * 4
    for updates in updates_of_responses:
        assert len(updates) == 2 and min(updates) < 2 <= max(updates)
    for _, batch in tokens[tokens["update"] < 2].groupby("step"):
        # Whitened over the rollout batch's tokens; the critic's values differ within a response.
        assert batch.advantage.mean() == pytest.approx(0, abs=1e-4) and batch.advantage.std() == pytest.approx(1, 1e-3)
        assert (batch.groupby(["prompt", "sample"]).advantage.nunique() > 1).mean() > 0.9


def test_a_rollout_apart_with_rloo_and_rollout_correction(task, tmp_path):
    run = train_acpo(
        task,
        tmp_path,
        "algorithm.adv_estimator=rloo",
        *ROLLOUT_APART,
        f"{ROLLOUT}.nnodes=1",
        f"{ROLLOUT}.n_gpus_per_node=1",
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=2",
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_rs=seq_mean_k3",
        f"{CORRECTION}.rollout_rs_threshold=0.03",
    )
    # The second of the two updates between two sendings of weights: its old_log_probs are of the weights before both.
    check_adapted(run, [1, 2], updates=1, batches_a_step=2)
    assert run.log["rollout_corr/rollout_rs_masked_fraction"][2] > 0
    for _, batch in traced_tokens(run).groupby("step"):
        scores = batch.groupby(["prompt", "sample"]).score.first()
        expected = (4 * scores - scores.groupby("prompt").transform("sum")) / 3
        advantages = batch.groupby(["prompt", "sample"]).advantage.first()
        # Of prompts without a rejected response, whose rewards are all traced.
        is_complete = scores.groupby("prompt").transform("size") == 4
        assert is_complete.any()
        numpy.testing.assert_allclose(advantages[is_complete], expected[is_complete], rtol=1e-4, atol=1e-5)
    # What was sent is what was trained, then older than that, and weighed for it.
    assert run.log["training/rollout_probs_diff_max"][1] < 1e-4
    assert run.log["training/off_policy/trajectory_staleness/mean"].tolist() == [0, 1]
    assert run.log["rollout_corr/rollout_is_mean"][1] == pytest.approx(1, abs=1e-4)
    assert abs(run.log["rollout_corr/rollout_is_mean"][2] - 1) > 1e-3


def test_several_turns_with_a_tool(task, tmp_path):
    policy = tmp_path / "policy"
    shutil.copytree(task.policy, policy)
    template = policy / "chat_template.jinja"
    template.write_text(template.read_text().replace("'assistant']", "'assistant', 'tool']"))
    tool = tmp_path / "length_tool.py"
    tool.write_text(TOOL)
    run = train_acpo(
        replace(task, policy=policy),
        tmp_path,
        f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
        f"{ROLLOUT}.multi_turn.enable=True",
        f"{ROLLOUT}.multi_turn.format=every_answer",
        f"{ROLLOUT}.multi_turn.function_tool_path={tool}",
        f"{ROLLOUT}.multi_turn.max_assistant_turns=2",
        "data.max_response_length=64",
    )
    check_adapted(run, [1, 2], updates=2)
    # Prompt, answer, tool, answer.
    assert run.log["num_turns/max"].tolist() == [4, 4]
    assert run.log["training/rollout_probs_diff_max"].max() < 1e-4


def test_one_step_off_policy_trains_the_loss_in_its_bypass_mode(task, tmp_path):
    entry = "verl.experimental.one_step_off_policy.main_ppo"
    rejection = (f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0.98_1.02")
    run = train_acpo(task, tmp_path, *EXPERIMENTAL_TRAINERS, *rejection, entry=entry)
    check_adapted(run, [1, 2], updates=2)
    assert "old_log_probs are the rollout's own (bypass_mode)" in run.output
    # What was rejected is what should have been, and trained nothing; by the ratios of the traced tokens.
    tokens = traced_tokens(run)
    kept = tokens.selected.astype(bool)
    # k1 is the negative logarithm of the ratio. But for a token on the very edge, in float32.
    assert (kept == tokens.ratio.between(1 / 1.02, 1 / 0.98)).mean() > 0.999
    assert 0 < kept.mean() < 1 and (tokens.weight[~kept] == 0).all() and (tokens.weight[kept] != 0).any()
    shares = 1 - kept.groupby([tokens.step, tokens["update"]]).mean()
    logged = run.log["actor/clipx/rejected_fraction"]
    assert logged.tolist() == pytest.approx(shares.groupby("step").mean().tolist(), abs=1e-6)


def test_fully_async_policy(task, tmp_path):
    run = train_acpo(
        task,
        tmp_path,
        *EXPERIMENTAL_TRAINERS,
        "data.train_batch_size=0",
        "data.gen_batch_size=1",
        "rollout.total_rollout_steps=32",
        "async_training.trigger_parameter_sync_step=1",
        "async_training.require_batches=2",
        entry="verl.experimental.fully_async_policy.fully_async_main",
    )
    # verl logs the updates of both versions under the second.
    check_adapted(run, [2], updates=2)
