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

LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs=True"
ICEPOP = ("+clipx/mask=icepop", "clipx.mask.low=0.8", "clipx.mask.high=1.2")


def traced_run(tmp_path, actor, *overrides, parts=((0, 1, 2, 3, 4),), step=None, weights=None):
    """A run whose one update the worker's own calls traced, in these micro-batches."""
    config, batch = actor(*overrides, "+clipx/trace=prompts"), example(torch.float32)
    noise = torch.randn(batch["mask"].shape, generator=torch.Generator().manual_seed(5))
    batch["sampler_log_prob"] = batch["old_log_prob"] + 0.2 * noise
    folder = tmp_path / "traced"
    tracer = Tracer(Trace(fraction=1, every=1, folder=str(folder / "traces")), rank=0, ranks=1, tokenizer=None)
    entropy = torch.rand(batch["log_prob"].shape, generator=torch.Generator().manual_seed(0))
    rows = [row for part in parts for row in part]
    whole, _ = micro_batch(batch, rows, entropy=entropy)
    settings, step = config.policy_loss.clipx, step or OptimizerStep()
    observers = RankObservers(tracer)
    function = with_micro_batch(partial(ppo_loss, config=config), settings, Schedule(), lambda: step, observers)
    with rollout_batch(tracer, whole):
        for part in parts:
            data, output = micro_batch(batch, list(part), entropy=entropy)
            if weights is not None:
                data["rollout_is_weights"] = data["old_log_probs"] * weights
            tu.assign_non_tensor_stack(data, ROW, [rows.index(row) for row in part])
            function(model_output=output, data=data)
        tracer.end_update(step)
    assert tracer.writer.flush()
    write_log(folder / "metrics.jsonl", [{"actor/pg_clipfrac": 0.0}])
    write_record(folder / "metrics.jsonl", {"clipx": recorded(settings)})
    return folder


def recorded(settings) -> dict:
    """The clipx node as a run's record has it."""
    node = {"method": settings.method.name, "scope": settings.scope, **settings.method.parameters}
    for name in ("shaping", "mask", "select", "update", "pull"):
        if (modifier := getattr(settings, name)) is not None:
            node[name] = vars(modifier) | ({"rule": modifier.rule} if hasattr(modifier, "rule") else {})
    return node


OWN = "clipx.scope=micro_batch"
WRITTEN = {
    "each micro-batch's own": ("+clipx=acpo", OWN),
    "shaped, corrected and selected": (
        *("+clipx=acpo", OWN, "+clipx/shaping=advantage_reweighting"),
        *("+clipx/select=high_entropy", "clipx.select.ratio=0.5"),
    ),
    "the sampler's weights": ("+clipx=bapo", OWN, "clipx.weight=rollout"),
    "groups": ("+clipx=m2po", OWN),
    "masked, with weights of later tokens": ("+clipx=acpo", OWN, "+clipx/shaping=fipo", *ICEPOP),
    "pulled to the old policy": ("+clipx=dapo", "+clipx/pull=k2", "clipx.pull.coefficient=0.3"),
    "pulled to the sampler": ("+clipx=acpo", OWN, "+clipx/pull=k3", "clipx.pull.anchor=rollout"),
    "by two divergences, with a pull": ("+clipx=kpop", "clipx.kl_tau=0.5"),
    "by a cap of the update's, with a pull": ("+clipx=p3o", OWN),
    "by position and prefix": ("+clipx=cppo", "clipx.threshold=0.05"),
    "a sequence's ratio": ("+clipx=gspo",),
}
# In these micro-batches; the others in two.
PARTS = {"shaped, corrected and selected": ((0, 1, 2, 3, 4),), "groups": ((0, 2), (1, 3, 4))}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_the_worker_traced_is_replayed_token_by_token(tmp_path, actor, name):
    overrides, parts = (*WRITTEN[name], LOG_PROBS), PARTS.get(name, ((0, 1), (2, 3, 4)))
    run = traced_run(tmp_path, actor, *overrides, parts=parts, weights=-0.5)
    (own,) = answer("replay", run)["settings"]
    assert own["exact"] and own["bounds_against_run"] <= 1e-6 and own["regained"] == own["lost"] == 0
    assert own["numbers"]["cosine"]["value"] == pytest.approx(1, abs=1e-6)
    assert own["numbers"]["norm_ratio"]["value"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("words", [("+clipx=dapo", "+clipx/pull=k2", "clipx.pull.coefficient=0.3"), ("+clipx=kpop",)])
def test_page_and_replay_of_a_pulled_run_say_what_is_outside_its_bounds(tmp_path, actor, words):
    run = traced_run(tmp_path, actor, *words)
    said = clipx("replay", run)
    # Clipped tokens are pulled back.
    assert " outside " in said and "outside: beyond the bounds, and kept or pulled back" in said
    clipx("report", run, "--out", tmp_path / "out")
    assert re.search("○ [1-9][0-9]* tokens outside the bounds have a gradient", page_of(tmp_path / "out"))
    traced = read_shards(run / "traces", shards_in(run / "traces")).to_pandas()
    (dapo,) = answer("replay", run, "+clipx=dapo")["settings"]
    without = (traced.advantage > 0) & (traced.ratio > 1.28) | (traced.advantage < 0) & ~traced.ratio.between(0.8, 3)
    assert dapo["lost"] == (without & traced.weight.ne(0)).sum() > 0


def test_another_mask_is_applied_to_the_tokens_before_the_runs_own(tmp_path, actor):
    run = traced_run(tmp_path, actor, "+clipx=grpo", *ICEPOP, LOG_PROBS)
    tokens = read_shards(run / "traces", shards_in(run / "traces")).to_pandas()
    (without,) = answer("replay", run, "+clipx=grpo")["settings"]
    has_gradient = (tokens.ratio * tokens.advantage != 0) & (
        ((tokens.advantage > 0) & (tokens.ratio <= 1.2)) | ((tokens.advantage < 0) & tokens.ratio.between(0.8, 3))
    )
    assert without["regained"] == (has_gradient & tokens.rejected).sum() > 0 and without["lost"] == 0
    (same,) = answer("replay", run, "+clipx=grpo", *ICEPOP)["settings"]
    assert same["regained"] == same["lost"] == 0
    # With A < 0 a sequence of opsm is gone as a whole.
    (other,) = answer("replay", run, "+clipx=grpo", "+clipx/mask=opsm", "clipx.mask.delta=0")["settings"]
    assert other["lost"] > 0


@pytest.mark.parametrize("name", ["low", "high"])
def test_in_loptis_pass_its_own_tokens_count(tmp_path, actor, name):
    step = OptimizerStep(token_pass=TokenPass(name, 0.5, True), counted_tokens=5.0)
    run = traced_run(tmp_path, actor, "+clipx=acpo", "clipx.scope=micro_batch", "+clipx/update=lopti", step=step)
    (own,) = answer("replay", run, "+clipx=acpo", "clipx.scope=micro_batch")["settings"]
    tokens = read_shards(run / "traces", shards_in(run / "traces")).to_pandas()
    assert own["bounds_against_run"] <= 1e-6 and 0 < tokens.counted.sum() < len(tokens)


def test_bounds_at_ratio_1_are_those_of_ratio_1(tmp_path, actor):
    step = OptimizerStep(decided_from=DecidedFrom.RATIO_ONE)
    run = traced_run(tmp_path, actor, "+clipx=acpo", step=step)
    found = answer("replay", run, "+clipx=acpo", "clipx.alpha=2")
    # No spread at ratio 1, whatever these tokens' ratios are.
    assert found["settings"][0]["bounds"]["high"]["greatest"] == pytest.approx(1.2)


def test_a_lagged_runs_decision_is_kept_and_no_other_is_made_up(tmp_path, actor):
    config = actor("+clipx=acpo", "clipx.scope=lagged")
    method = config.policy_loss.clipx.method
    decision = torch.arange(1, 11, dtype=torch.float64) / 10
    step = OptimizerStep(
        statistics=torch.zeros(method.statistics_size, dtype=torch.float64),
        decision=decision,
        decided_from=DecidedFrom.LAGGED,
    )
    run = traced_run(tmp_path, actor, "+clipx=acpo", "clipx.scope=lagged", step=step)
    (own,) = answer("replay", run)["settings"]
    assert own["bounds_against_run"] <= 1e-6 and own["bounds"]["high"]["greatest"] > 1.5
    other = clipx("replay", run, "+clipx=acpo", "clipx.scope=lagged", "clipx.alpha=2", code=1)
    assert "clipx.scope=lagged decides from an earlier rollout batch" in other and "mini_batch" in other


def test_below_fraction_1_the_runs_own_decision_is_kept(tmp_path, actor):
    # From more tokens than the trace has.
    statistics = torch.tensor([9.0] * 5 + [0.0] * 5 + [3.0] * 5, dtype=torch.float64)
    decision = actor("+clipx=acpo").policy_loss.clipx.method.decide(statistics)
    step = OptimizerStep(statistics=statistics, decision=decision, decided_from=DecidedFrom.MINI_BATCH)
    run = traced_run(tmp_path, actor, "+clipx=acpo", step=step)
    (shard,) = shards_in(run / "traces")
    facts = UpdateFacts(0.5, 1, DecidedFrom.MINI_BATCH, {0: decision.tolist()})
    write_shard(run / "traces", shard, read_columns(run / "traces", shard), facts)
    own, other = answer("replay", run, "+clipx=acpo", "clipx.alpha=3.0,3.5")["settings"]
    assert not own["exact"] and own["bounds_against_run"] <= 1e-6
    assert other["bounds"]["high"]["greatest"] != pytest.approx(own["bounds"]["high"]["greatest"])
