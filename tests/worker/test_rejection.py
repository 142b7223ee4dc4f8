"""Rejection in bypass mode, and verl's corrections in decoupled mode, through verl's own ppo_loss.

Covers: our GRPO against verl's own bypass loss with a KL term and
an entropy bonus; every method, with bounds recomputed from the tokens that remain, however the mini-batch is cut into
ranks and micro-batches, from the extra pass on; exact metrics; entropy selection and Lopti; what is not finite; traces;
host syncs; weights and rejection of decoupled mode under every method. Not covered: the criteria
(tests/modifiers/test_rejection.py), real engines (tests/end_to_end).
"""

import contextlib
import copy
import dataclasses
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask
from verl.utils.metric import Metric
from verl.workers.utils.losses import ppo_loss

from tests.host_syncs import counted_host_syncs
from tests.jagged import micro_batch
from tests.matrix import product
from verl_clipx.base.tokens import Inputs
from verl_clipx.check.contract import example
from verl_clipx.common.decided_from import DecidedFrom
from verl_clipx.loss.loss import token_statistics, tokens_in
from verl_clipx.methods import BUILT_IN, METHODS
from verl_clipx.modifiers.rejection import parse_criteria
from verl_clipx.run.announcement import announcement
from verl_clipx.run.config import build
from verl_clipx.worker.extra_pass import extra_pass
from verl_clipx.worker.layout import TokenPass
from verl_clipx.worker.loss_function import over_remaining, with_micro_batch
from verl_clipx.worker.plan import passes_for_selection, plan_step
from verl_clipx.worker.rejection import NOTHING_REJECTED, rejection_of
from verl_clipx.worker.state import ControllerState
from verl_clipx.worker.step import MicroBatch, OptimizerStep, RolloutBatch, in_micro_batch
from verl_clipx.worker.tracer import tokens_of_method

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
CALCULATED = "actor_rollout_ref.rollout.calculate_log_probs=true"
ROWS = [0, 1, 2, 3, 4, 5]
WHOLE = [[ROWS]]
SPLITS = {
    "micro-batches": [[[0], [1, 2], [3, 4, 5]]],
    "ranks": [[[0, 5], [3]], [[1, 2], [4]]],
}
# Each leaves some of the example's tokens, and of all but the first some of its sequences.
REJECTIONS = {
    "tokens by ratio": ("token_k1", "0.6_1.6"),
    "geometric mean": ("seq_mean_k1", "0.9_1.3"),
    "k3": ("seq_mean_k3", 0.1),
    "tokens and sequences": ("token_k2,seq_max_k3", "0.1,0.3"),
}


def bypassed(rejection):
    names, threshold = REJECTIONS[rejection]
    quoted = [f'{CORRECTION}.rollout_rs="{names}"', f'{CORRECTION}.rollout_rs_threshold="{threshold}"']
    return [f"{CORRECTION}.bypass_mode=True", CALCULATED, *quoted]


def switched(config, method="grpo", rejection=None, options=None, **fields):
    """A composed configuration under another method, other keys of the correction and of the actor: faster anew."""
    options = {f"{CORRECTION}.{key}": value for key, value in (options or {}).items()}
    if rejection is not None:
        options |= dict(
            zip((f"{CORRECTION}.rollout_rs", f"{CORRECTION}.rollout_rs_threshold"), REJECTIONS[rejection], strict=True)
        )
    config, policy_loss = copy.copy(config), copy.copy(config.policy_loss)
    run = dataclasses.replace(policy_loss.run, options={**policy_loss.run.options, **options})
    given = dict(run=run, clipx=build(method, metrics="all"), loss_mode=f"clipx_{method}")
    for owner, changed in ((policy_loss, given), (config, fields | {"policy_loss": policy_loss})):
        for name, value in changed.items():
            object.__setattr__(owner, name, value)
    return config


@pytest.fixture
def bypass(actor):
    """`switched` from a configuration in bypass mode."""
    return partial(switched, actor("+clipx=grpo", *bypassed("k3")))


def left(batch, rejection):
    """What verl's own function leaves of a padded batch."""
    log_ratio = batch["log_prob"] - batch["old_log_prob"]
    return compute_rollout_rejection_mask(log_ratio, batch["mask"], *REJECTIONS[rejection])[0]


# A step whose bounds come from its own pass.
DECIDES = OptimizerStep(decided_from=DecidedFrom.MINI_BATCH)


class Engine:
    """Runs a loss function over the parts of one rank's mini-batch, as verl's engines do without gradient."""

    def __init__(self, parts):
        self.parts = parts

    def eval_mode(self, **_):
        return contextlib.nullcontext()

    def forward_backward_batch(self, data, loss_function, forward_only):
        assert forward_only
        for part, output in self.parts:
            loss_function(output, part)


def parts_of(batch, micro_batches, ranks, **further):
    total = int(batch["mask"].sum())
    return [micro_batch(batch, rows, dp_size=ranks, total=total, **further) for rows in micro_batches]


def extra_passes(config, batch, split, step=None):
    """What the extra pass finds, summed over the ranks of a split."""
    found = []
    for micro_batches in split:
        engine = Engine(parts_of(batch, micro_batches, len(split), entropy=batch["entropy"]))
        found.append(extra_pass(config.policy_loss, engine, TensorDict({}, []), step or DECIDES, cut={}, device="cpu"))
    return {name: sum(rank[name] for rank in found) for name in found[0]}


class Trained:
    """One update of a split mini-batch through verl's ppo_loss.

    Args:
        config: verl's ActorConfig.
        batch: padded, of the whole mini-batch.
        split: ranks of micro-batches of rows.
        step: the optimizer step; None: decided from the extra pass, as a worker would.
        fields: further fields of the micro-batches, padded.

    Attributes:
        gradient: on each token's log-probability, over all ranks, (sequences, length).
        metrics: of the update, as verl aggregates them.
        decision: what the method decided.
    """

    def __init__(self, config, batch, split=WHOLE, step=None, **fields):
        settings = config.policy_loss.clipx
        step = step or OptimizerStep()
        if settings.adaptive and step.decision is None:
            step.statistics = extra_passes(
                config, batch, split, dataclasses.replace(step, decided_from=DecidedFrom.MINI_BATCH)
            )["statistics"]
            step.decision = settings.method.decide(step.statistics)
        self.decision, self.gradient = step.decision, torch.zeros_like(batch["log_prob"])
        function = with_micro_batch(partial(ppo_loss, config=config), settings, lambda: step)
        metrics = []
        for micro_batches in split:
            collected = {}
            given = dict(entropy=batch["entropy"], reference=batch["old_log_prob"] - 0.1)
            for rows, (data, output) in zip(
                micro_batches, parts_of(batch, micro_batches, len(split), **given), strict=True
            ):
                for name, values in fields.items():
                    data[name] = values[rows][:, : int(batch["mask"][rows].sum(1).max().clamp(min=1))]
                leaf = output["log_probs"].values().requires_grad_()
                nested = torch.nested.nested_tensor_from_jagged(leaf * 1, offsets=output["log_probs"].offsets())
                loss, found = function(model_output={**output, "log_probs": nested}, data=data)
                loss.backward()
                # verl averages gradients over ranks.
                self._keep(leaf.grad / len(split), output["log_probs"].offsets(), rows, batch["mask"])
                for key, value in found.items():
                    if isinstance(value, Metric):
                        collected.setdefault(key, value.init_list()).append(value)
            metrics.append(collected)
        gathered = {key: [rank[key] for rank in metrics] for key in metrics[0]}
        over_remaining(gathered)
        self.metrics = {key: Metric.aggregate_dp(values) for key, values in gathered.items()}

    def _keep(self, gradient, offsets, rows, mask):
        for row, start, prompt in zip(rows, offsets.tolist(), (1 + row % 2 for row in rows), strict=False):
            length = int(mask[row].sum())
            self.gradient[row, :length] = gradient[start + prompt - 1 :][:length]


def recomputed(config, batch, mask, decision=None, normaliser=None):
    """Decision and gradient under token-mean by the method's formulas, of the tokens in a mask."""
    settings = config.policy_loss.clipx
    further = {name: batch[name] for name in settings.method.asks_for}
    if "group" in further:
        # As tests/jagged.py names prompts.
        further["group"] = torch.arange(6) // 2
    if "rollout_log_prob" in further:
        further["rollout_log_prob"] = batch["old_log_prob"]
    inputs = Inputs(*(batch[name] for name in ("log_prob", "old_log_prob", "advantages")), mask, **further)
    if decision is None:
        decision = settings.method.decide(token_statistics(settings.method, settings.shaping, inputs))
    tokens = tokens_in(settings.method, settings.shaping, inputs)
    weight = settings.method.gradient_weight(tokens, settings.method.bounds(tokens, decision))
    total = batch["mask"].sum() if normaliser is None else normaliser
    return decision, torch.where(mask, -weight * tokens.advantages, 0.0) / total


def test_nothing_is_rejected_in_decoupled_mode_or_without_criteria(actor, bypass):
    assert rejection_of(bypass(options={"bypass_mode": False}).policy_loss) == NOTHING_REJECTED
    assert rejection_of(bypass(options={"rollout_rs": None}).policy_loss) == NOTHING_REJECTED
    assert rejection_of(actor().policy_loss) == NOTHING_REJECTED
    assert rejection_of(actor("+clipx=grpo", *bypassed("k3")).policy_loss) == parse_criteria("seq_mean_k3", "0.1")


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("rejection", REJECTIONS)
def test_grpo_is_verls_own_bypass_loss(bypass, rejection, aggregation):
    fields = dict(loss_agg_mode=aggregation, use_kl_loss=True, entropy_coeff=0.1)
    ours = bypass("grpo", rejection, **fields)
    # As apply_bypass_mode does, from one of verl's presets.
    names, threshold = REJECTIONS[rejection]
    preset = RolloutCorrectionConfig.bypass_ppo_clip_geo_rs(str(threshold))
    theirs = switched(ours, "grpo", rejection, **fields)
    for name, value in (
        ("loss_mode", "bypass_mode"),
        ("rollout_correction", dataclasses.replace(preset, rollout_rs=names)),
    ):
        object.__setattr__(theirs.policy_loss, name, value)
    batch, found = example(), []
    for config in (ours, theirs):
        data, output = micro_batch(batch, ROWS, entropy=batch["entropy"], reference=batch["old_log_prob"] - 0.1)
        step = OptimizerStep(entropy_wanted=True)
        function = partial(ppo_loss, config=config)
        if config is ours:
            function = with_micro_batch(function, config.policy_loss.clipx, lambda step=step: step)
        leaf = output["log_probs"].values().requires_grad_()
        nested = torch.nested.nested_tensor_from_jagged(leaf * 1, offsets=output["log_probs"].offsets())
        loss, _ = function(model_output={**output, "log_probs": nested}, data=data)
        loss.backward()
        found.append((loss.detach(), leaf.grad))
    (loss, gradient), (expected_loss, expected_gradient) = found
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("method", "rejection"),
    product(
        BUILT_IN,
        REJECTIONS,
        # A fixed bound, one that adapts, a sequence's ratio; and every method.
        keep=lambda method, rejection: method in ("grpo", "acpo", "gspo") or rejection == "tokens and sequences",
    ),
)
def test_every_methods_bounds_and_gradient_are_of_the_tokens_that_remain(bypass, method, rejection):
    config, batch = bypass(method, rejection), example()
    mask = left(batch, rejection)
    assert 0 < mask.sum() < batch["mask"].sum()
    decision, gradient = recomputed(config, batch, mask)
    for split in (WHOLE, *SPLITS.values()):
        trained = Trained(config, batch, split)
        if config.policy_loss.clipx.adaptive:
            torch.testing.assert_close(trained.decision, decision, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(trained.gradient, gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("method", [name for name in BUILT_IN if METHODS[name]().statistics_size])
def test_with_the_rejected_tokens_bounds_would_be_others(bypass, method):
    config, batch = bypass(method), example()
    found = [recomputed(config, batch, mask)[0] for mask in (left(batch, "k3"), batch["mask"])]
    assert not torch.allclose(*found, rtol=1e-3)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("method", ["grpo", "acpo", "dgpo"])
def test_metrics_are_exact_over_the_tokens_that_remain(bypass, method, split):
    config, batch = bypass(method, "tokens by ratio"), example()
    mask = left(batch, "tokens by ratio")
    whole, parts = Trained(config, batch).metrics, Trained(config, batch, SPLITS[split]).metrics
    ratio = (batch["log_prob"] - batch["old_log_prob"]).exp()[mask]
    assert whole["clipx/rejected_fraction"] == pytest.approx(1 - int(mask.sum()) / int(batch["mask"].sum()))
    assert whole["clipx/ratio_mean"] == pytest.approx(ratio.mean().item(), rel=1e-6)
    assert whole["clipx_sum/squared_ratio"] == pytest.approx(ratio.square().mean().item(), rel=1e-6)
    for key in whole:
        if key.startswith("clipx/"):
            assert parts[key] == pytest.approx(whole[key], rel=1e-6, abs=1e-9), key


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("over", ["sequence", "mini_batch"])
def test_selection_is_among_the_tokens_that_remain(actor, over, split):
    overrides = ("+clipx/select=high_entropy", f"clipx.select.over={over}", "clipx.select.ratio=0.4")
    config, batch = actor("+clipx=grpo", *overrides, *bypassed("tokens by ratio")), example()
    select, mask = config.policy_loss.clipx.select, left(batch, "tokens by ratio")
    chosen = select.selected(batch["entropy"], mask)
    assert 0 < chosen.sum() < mask.sum()
    assert passes_for_selection(config.policy_loss)
    step = plan_step(
        config.policy_loss,
        ControllerState(),
        RolloutBatch(),
        micro_batch(batch, ROWS)[0],
        extra_pass=lambda data, step: extra_passes(config, batch, SPLITS[split], step),
        all_reduce=lambda vector: vector,
    )
    assert float(step.selected_tokens) == int(chosen.sum())
    _, gradient = recomputed(config, batch, chosen, normaliser=chosen.sum())
    torch.testing.assert_close(Trained(config, batch, SPLITS[split], step).gradient, gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("split", SPLITS)
def test_a_pass_of_lopti_rejects_by_whole_sequences(actor, split):
    config, batch = actor("+clipx=acpo", "+clipx/update=lopti", *bypassed("k3")), example()
    token_pass = TokenPass("low", 0.3, True)
    low = (batch["old_log_prob"].exp() <= 0.3) & batch["mask"]
    mask = left(batch, "k3")
    assert 0 < (mask & low).sum() < low.sum()
    expected, _ = recomputed(config, batch, mask & low)
    _, gradient = recomputed(config, batch, mask, decision=expected)
    trained = Trained(
        config, batch, SPLITS[split], OptimizerStep(token_pass=token_pass, counted_tokens=float(low.sum()))
    )
    torch.testing.assert_close(trained.decision, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(trained.gradient, torch.where(low, gradient, 0.0), rtol=1e-6, atol=1e-9)
    assert trained.metrics["clipx/rejected_fraction"] == pytest.approx(1 - int((mask & low).sum()) / int(low.sum()))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rejection", REJECTIONS)
def test_a_token_that_is_not_finite_is_not_rejected(bypass, rejection, value):
    config, batch = bypass("grpo", rejection), example()
    batch["old_log_prob"][0, 0] = value
    assert not Trained(config, batch).gradient[0, 0].isfinite()


@pytest.mark.parametrize("rejection", REJECTIONS)
def test_rejection_waits_for_no_accelerator(bypass, rejection):
    config, batch = bypass("grpo", rejection), example()
    tensors = [batch[name].to("meta") for name in ("mask", "log_prob", "old_log_prob")]
    assert rejection_of(config.policy_loss).remaining(*tensors).shape == batch["mask"].shape
    with counted_host_syncs() as counter:
        rejection_of(config.policy_loss).remaining(*(batch[name] for name in ("mask", "log_prob", "old_log_prob")))
    assert counter.count == 0, counter.calls


@pytest.mark.parametrize("method", ["grpo", "gspo"])
def test_what_is_rejected_is_traced_as_it_is_with_weight_0(bypass, method):
    config, batch, rows = bypass(method, "tokens by ratio"), example(torch.float32), ROWS[:4]
    with in_micro_batch(MicroBatch()) as known:
        get_policy_loss_fn(f"clipx_{method}")(
            response_mask=batch["mask"],
            loss_agg_mode="token-mean",
            config=config,
            **{name: batch[name] for name in ("old_log_prob", "log_prob", "advantages")},
        )
    traced = tokens_of_method(known.applied, rows)
    found = traced.trace._asdict() | traced.others
    whole, mask = batch["mask"][rows], left(batch, "tokens by ratio")[rows]
    for name in ("log_prob", "old_log_prob"):
        assert torch.equal(found[name][whole], batch[name][rows][whole])
    assert torch.equal(found["selected"][whole] > 0, mask[whole])
    assert (found["weight"][whole & ~mask] == 0).all() and (found["weight"][mask] != 0).any()


@pytest.mark.parametrize(
    ("method", "aggregation"),
    product(
        BUILT_IN,
        ["token-mean", "seq-mean-token-mean"],
        keep=lambda method, aggregation: method in ("grpo", "acpo", "gspo") or aggregation == "token-mean",
    ),
)
def test_weights_and_rejection_of_decoupled_mode_go_with_every_method(bypass, method, aggregation):
    config = bypass(method, options={"bypass_mode": False, "rollout_is": "token"}, loss_agg_mode=aggregation)
    batch = example()
    whole = batch["mask"]
    weights = torch.rand(whole.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # As verl's trainer leaves it: zeros in the middle of response_mask, all tokens in verl's own count.
    keep = torch.arange(whole.shape[1]) % 3 != 1
    mask = whole & keep & (torch.arange(6) != 2)[:, None]
    expected, gradient = recomputed(config, batch, mask, normaliser=1)
    ones = torch.ones_like(gradient, requires_grad=True)
    info = dict(dp_size=1, batch_num_tokens=int(whole.sum()), global_batch_size=6)
    agg_loss(ones, mask, aggregation, **info).backward()
    step = OptimizerStep(decision=expected if config.policy_loss.clipx.adaptive else None)
    step.statistics = None if step.decision is None else torch.zeros(config.policy_loss.clipx.method.statistics_size)
    found = Trained(config, batch, step=step, rollout_is_weights=weights, response_mask=mask.long())
    torch.testing.assert_close(found.gradient, gradient * weights * ones.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rejection", REJECTIONS)
def test_what_is_announced_of_both_modes(bypass, rejection):
    names, threshold = REJECTIONS[rejection]
    line = announcement(bypass("acpo", rejection, {"bypass_mode": True}).policy_loss)
    assert f"; rollout correction rollout_rs={names} by the current weights (threshold {threshold}); " in line
    decoupled = bypass("acpo", rejection, {"bypass_mode": False}).policy_loss
    assert f"; rollout correction rollout_rs={names} (threshold {threshold}); " in announcement(decoupled)
