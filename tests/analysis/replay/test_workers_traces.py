"""`clipx replay` on traces that the worker's own calls wrote: the run's own setting, token by token, under modifiers,
correction, Lopti's passes, each scope, and where the trace has a part of the tokens. Not covered: verl's engine
(tests/end_to_end/test_quickstart.py).
"""

import re
from functools import partial

import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

from tests.analysis.runs.commands import answer, clipx, page_of
from tests.analysis.runs.example_runs import read_columns, write_log
from tests.composition import actor, composed
from tests.jagged import micro_batch, rollout_batch
from tests.messages import assert_names
from verl_clipx.losses.contract.contract import example
from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.run.schedule import Schedule
from verl_clipx.run.trace import Trace
from verl_clipx.run.trace_format import UpdateFacts, read_shards, shards_in, write_shard
from verl_clipx.training.trainer.log import write_record
from verl_clipx.training.worker.layout import TokenPass
from verl_clipx.training.worker.loss_function import with_micro_batch
from verl_clipx.training.worker.observers import RankObservers
from verl_clipx.training.worker.step import OptimizerStep
from verl_clipx.training.worker.tracer import ROW, Tracer

__all__ = ["actor", "composed"]

SAMPLER_LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs=True"
MICRO_BATCH_SCOPE = "clipx.scope=micro_batch"
ICEPOP = ("+clipx/mask=icepop", "clipx.mask.low=0.8", "clipx.mask.high=1.2")


def trace_update(tmp_path, actor, *overrides, row_groups=((0, 1, 2, 3, 4),), step=None, rollout_weight=None):
    """Write a run whose one update was traced by the worker's own calls.

    Args:
        tmp_path: where its folder is made.
        actor: the fixture that composes verl's configuration of an actor.
        overrides: of the configuration.
        row_groups: the rows of each micro-batch.
        step: the optimizer step, with what it decides; by default one without statistics.
        rollout_weight: if given, the importance weight of a token is this times its old log-probability.
    """
    config = actor(*overrides, "+clipx/trace=prompts")
    batch = example(torch.float32)
    noise = torch.randn(batch["mask"].shape, generator=torch.Generator().manual_seed(5))
    batch["sampler_log_prob"] = batch["old_log_prob"] + 0.2 * noise
    entropy = torch.rand(batch["log_prob"].shape, generator=torch.Generator().manual_seed(0))
    folder = tmp_path / "traced"
    tracer = Tracer(Trace(fraction=1, every=1, folder=str(folder / "traces")), rank=0, ranks=1, tokenizer=None)
    settings = config.policy_loss.clipx
    step = step or OptimizerStep()
    function = with_micro_batch(
        partial(ppo_loss, config=config), settings, Schedule(), lambda: step, RankObservers(tracer)
    )
    rows = [row for group in row_groups for row in group]
    rollout_data, _ = micro_batch(batch, rows, entropy=entropy)
    with rollout_batch(tracer, rollout_data):
        for group in row_groups:
            data, output = micro_batch(batch, list(group), entropy=entropy)
            if rollout_weight is not None:
                data["rollout_is_weights"] = data["old_log_probs"] * rollout_weight
            tu.assign_non_tensor_stack(data, ROW, [rows.index(row) for row in group])
            function(model_output=output, data=data)
        tracer.end_update(step)
    assert tracer.writer.flush()
    write_log(folder / "metrics.jsonl", [{"actor/pg_clipfrac": 0.0}])
    write_record(folder / "metrics.jsonl", {"clipx": node_of(settings)})
    return folder


def node_of(settings) -> dict:
    """Return the clipx node as a run's record has it."""
    node = {"method": settings.method.name, "scope": settings.scope, **settings.method.parameters}
    for name in ("shaping", "mask", "select", "update", "pull"):
        modifier = getattr(settings, name)
        if modifier is None:
            continue
        node[name] = dict(vars(modifier))
        if hasattr(modifier, "rule"):
            node[name]["rule"] = modifier.rule
    return node


def read_tokens(run):
    """Return the traced tokens, a row each."""
    return read_shards(run / "traces", shards_in(run / "traces")).to_pandas()


TWO_MICRO_BATCHES = ((0, 1), (2, 3, 4))


@pytest.mark.parametrize(
    ("overrides", "row_groups"),
    [
        pytest.param(["+clipx=acpo", MICRO_BATCH_SCOPE], TWO_MICRO_BATCHES, id="statistics of each micro-batch"),
        pytest.param(
            [
                "+clipx=acpo",
                MICRO_BATCH_SCOPE,
                "+clipx/shaping=advantage_reweighting",
                "+clipx/select=high_entropy",
                "clipx.select.ratio=0.5",
            ],
            ((0, 1, 2, 3, 4),),
            id="shaped, corrected and selected",
        ),
        pytest.param(
            ["+clipx=bapo", MICRO_BATCH_SCOPE, "clipx.weight=rollout"], TWO_MICRO_BATCHES, id="the sampler's weights"
        ),
        pytest.param(["+clipx=m2po", MICRO_BATCH_SCOPE], ((0, 2), (1, 3, 4)), id="groups"),
        pytest.param(
            ["+clipx=acpo", MICRO_BATCH_SCOPE, "+clipx/shaping=fipo", *ICEPOP],
            TWO_MICRO_BATCHES,
            id="masked, with weights of later tokens",
        ),
        pytest.param(
            ["+clipx=dapo", "+clipx/pull=k2", "clipx.pull.coefficient=0.3"],
            TWO_MICRO_BATCHES,
            id="pulled to the old policy",
        ),
        pytest.param(
            ["+clipx=acpo", MICRO_BATCH_SCOPE, "+clipx/pull=k3", "clipx.pull.anchor=rollout"],
            TWO_MICRO_BATCHES,
            id="pulled to the sampler",
        ),
        pytest.param(["+clipx=kpop", "clipx.kl_tau=0.5"], TWO_MICRO_BATCHES, id="by two divergences, with a pull"),
        pytest.param(["+clipx=p3o", MICRO_BATCH_SCOPE], TWO_MICRO_BATCHES, id="by a cap of the update's, with a pull"),
        pytest.param(["+clipx=cppo", "clipx.threshold=0.05"], TWO_MICRO_BATCHES, id="by position and prefix"),
        pytest.param(["+clipx=gspo"], TWO_MICRO_BATCHES, id="a sequence's ratio"),
    ],
)
def test_what_the_worker_traced_is_replayed_token_by_token(tmp_path, actor, overrides, row_groups):
    run = trace_update(tmp_path, actor, *overrides, SAMPLER_LOG_PROBS, row_groups=row_groups, rollout_weight=-0.5)
    (setting,) = answer("replay", run)["settings"]
    assert setting["exact"]
    assert setting["bounds_against_run"] <= 1e-6
    assert setting["regained"] == 0
    assert setting["lost"] == 0
    assert setting["numbers"]["cosine"]["value"] == pytest.approx(1, abs=1e-6)
    assert setting["numbers"]["norm_ratio"]["value"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    "overrides", [("+clipx=dapo", "+clipx/pull=k2", "clipx.pull.coefficient=0.3"), ("+clipx=kpop",)], ids=" ".join
)
def test_page_and_replay_of_a_pulled_run_say_what_is_outside_its_bounds(tmp_path, actor, overrides):
    run = trace_update(tmp_path, actor, *overrides)
    # Clipped tokens are pulled back.
    output = clipx("replay", run)
    assert " outside " in output
    assert_names(output, "outside: beyond the bounds, and kept or pulled back")
    clipx("report", run, "--out", tmp_path / "out")
    assert re.search("○ [1-9][0-9]* tokens outside the bounds have a gradient", page_of(tmp_path / "out"))


@pytest.mark.parametrize(
    "overrides", [("+clipx=dapo", "+clipx/pull=k2", "clipx.pull.coefficient=0.3"), ("+clipx=kpop",)], ids=" ".join
)
def test_a_pulled_run_loses_to_dapo_the_tokens_that_dapo_clips(tmp_path, actor, overrides):
    run = trace_update(tmp_path, actor, *overrides)
    tokens = read_tokens(run)
    (dapo,) = answer("replay", run, "+clipx=dapo")["settings"]
    clipped_high = (tokens.advantage > 0) & (tokens.ratio > 1.28)
    # Above 3 it is the dual clip.
    clipped_low = (tokens.advantage < 0) & ~tokens.ratio.between(0.8, 3)
    assert dapo["lost"] == ((clipped_high | clipped_low) & (tokens.weight != 0)).sum() > 0


def test_another_mask_is_applied_to_the_tokens_before_the_runs_own(tmp_path, actor):
    run = trace_update(tmp_path, actor, "+clipx=grpo", *ICEPOP, SAMPLER_LOG_PROBS)
    tokens = read_tokens(run)
    within_bounds = ((tokens.advantage > 0) & (tokens.ratio <= 1.2)) | (
        (tokens.advantage < 0) & tokens.ratio.between(0.8, 3)
    )
    has_gradient = within_bounds & (tokens.ratio * tokens.advantage != 0)
    (without_mask,) = answer("replay", run, "+clipx=grpo")["settings"]
    assert without_mask["regained"] == (has_gradient & tokens.rejected).sum() > 0
    assert without_mask["lost"] == 0
    (same_mask,) = answer("replay", run, "+clipx=grpo", *ICEPOP)["settings"]
    assert same_mask["regained"] == 0
    assert same_mask["lost"] == 0
    # Opsm takes out whole sequences of negative advantage.
    (other_mask,) = answer("replay", run, "+clipx=grpo", "+clipx/mask=opsm", "clipx.mask.delta=0")["settings"]
    assert other_mask["lost"] > 0


@pytest.mark.parametrize("name", ["low", "high"])
def test_in_a_pass_of_lopti_its_own_tokens_count(tmp_path, actor, name):
    step = OptimizerStep(token_pass=TokenPass(name, 0.5, True), counted_tokens=5.0)
    run = trace_update(tmp_path, actor, "+clipx=acpo", MICRO_BATCH_SCOPE, "+clipx/update=lopti", step=step)
    (setting,) = answer("replay", run, "+clipx=acpo", MICRO_BATCH_SCOPE)["settings"]
    assert setting["bounds_against_run"] <= 1e-6
    tokens = read_tokens(run)
    assert 0 < tokens.counted.sum() < len(tokens)


def test_bounds_at_ratio_1_are_those_of_ratio_1(tmp_path, actor):
    step = OptimizerStep(decided_from=DecidedFrom.RATIO_ONE)
    run = trace_update(tmp_path, actor, "+clipx=acpo", step=step)
    (setting,) = answer("replay", run, "+clipx=acpo", "clipx.alpha=2")["settings"]
    # No spread at ratio 1, whatever these tokens' ratios are.
    assert setting["bounds"]["high"]["greatest"] == pytest.approx(1.2)


def test_a_lagged_runs_decision_is_kept_and_no_other_is_made_up(tmp_path, actor):
    method = actor("+clipx=acpo", "clipx.scope=lagged").policy_loss.clipx.method
    step = OptimizerStep(
        statistics=torch.zeros(method.statistics_size, dtype=torch.float64),
        decision=torch.arange(1, 11, dtype=torch.float64) / 10,
        decided_from=DecidedFrom.LAGGED,
    )
    run = trace_update(tmp_path, actor, "+clipx=acpo", "clipx.scope=lagged", step=step)
    (setting,) = answer("replay", run)["settings"]
    assert setting["bounds_against_run"] <= 1e-6
    assert setting["bounds"]["high"]["greatest"] > 1.5
    refusal = clipx("replay", run, "+clipx=acpo", "clipx.scope=lagged", "clipx.alpha=2", code=1)
    assert_names(refusal, "clipx.scope=lagged", "earlier rollout batch", "mini_batch")


def test_below_fraction_1_the_runs_own_decision_is_kept(tmp_path, actor):
    # The statistics are of more tokens than the trace has.
    statistics = torch.tensor([9.0] * 5 + [0.0] * 5 + [3.0] * 5, dtype=torch.float64)
    decision = actor("+clipx=acpo").policy_loss.clipx.method.decide(statistics)
    step = OptimizerStep(statistics=statistics, decision=decision, decided_from=DecidedFrom.MINI_BATCH)
    run = trace_update(tmp_path, actor, "+clipx=acpo", step=step)
    (shard,) = shards_in(run / "traces")
    facts = UpdateFacts(0.5, 1, DecidedFrom.MINI_BATCH, {0: decision.tolist()})
    write_shard(run / "traces", shard, read_columns(run / "traces", shard), facts)
    own, other = answer("replay", run, "+clipx=acpo", "clipx.alpha=3.0,3.5")["settings"]
    assert not own["exact"]
    assert own["bounds_against_run"] <= 1e-6
    assert other["bounds"]["high"]["greatest"] != pytest.approx(own["bounds"]["high"]["greatest"])
