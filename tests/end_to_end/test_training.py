"""The losses through the real verl: Ray, FSDP2 over gloo, v1 trainers, rollouts, rewards.

Covers, on 2 ranks: Lopti on a user's own controller with stale samples under the engine's options; its traces. With `-m
matrix`: its checkpoint, evaluated by its shards and merged; modifiers together, compiled; every method under every pair
of settings. Not covered: one rank, the page of a run (test_quickstart.py), several nodes (test_two_nodes.py), equal
bounds over ranks (test_invariance.py), learning (docs/dev/launching.md), GPUs.
"""

import itertools
import math

import pandas
import pytest

from verl_clipx.run.trace_format import read_shards, shards_in

from .evaluation_round import VALIDATION, check_both_ways
from .method_checks import FRACTIONS, SETTINGS, check_method
from .runs import Run, check_receipt, environment_with, train, write_documented_method
from .test_options import ENGINE_OPTIONS

pytestmark = pytest.mark.end_to_end

# Every pair of settings with every method, in half of the launches.
MATRIX = [
    (method, ranks, mode, (ranks == 2) != (mode == "colocate_async"))
    for method, ranks, mode in itertools.product(SETTINGS, (1, 2), ("sync", "colocate_async"))
]
STEPS = 3

# The mean of half the squared log-ratio of a response's tokens, above which bypass mode rejects the response.
LARGEST_K2 = 1e-3
KL_COEFFICIENT = 0.5

# Bounds so narrow that tokens are outside.
NARROW_CONTROLLER = ("+clipx=custom", "clipx.function=spread_clip:SpreadClip", "+clipx.width=0.5", "+clipx.least=0")
LOPTI_ON_STALE_SAMPLES = (
    *NARROW_CONTROLLER,
    "+clipx/update=lopti",
    "+clipx/shaping=advantage_reweighting",
    "trainer.v1.trainer_mode=colocate_async",
    "trainer.v1.colocate_async.num_warmup_batches=2",
    "algorithm.rollout_correction.bypass_mode=True",
    "algorithm.rollout_correction.rollout_rs=seq_mean_k2",
    f"algorithm.rollout_correction.rollout_rs_threshold={LARGEST_K2}",
    "actor_rollout_ref.actor.use_kl_loss=True",
    f"actor_rollout_ref.actor.kl_loss_coef={KL_COEFFICIENT}",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
)


@pytest.fixture(scope="module")
def lopti(task, tmp_path_factory) -> Run:
    """2 ranks, colocate_async, KL loss, the engine's options together: the documented controller in two passes on
    samples of older weights, with their probabilities as the old. Step 3 is validated and saved.
    """
    folder = write_documented_method(tmp_path_factory.mktemp("lopti"))
    ranks = ("trainer.n_gpus_per_node=2", f"trainer.save_freq={STEPS}", f"trainer.test_freq={STEPS}", *VALIDATION)
    traces = ("+clipx/trace=prompts", "clipx.trace.fraction=0.5", "clipx.trace.every=3")
    return train(
        task,
        folder / "run",
        *LOPTI_ON_STALE_SAMPLES,
        *ENGINE_OPTIONS,
        *ranks,
        *traces,
        environment=environment_with(folder),
        steps=STEPS + 1,
    )


def check_trained(run: Run, mode: str, kl: bool, steps: int = STEPS) -> None:
    """What holds of every run, whatever its loss."""
    assert list(run.log.index) == list(range(1, steps + 1))
    assert ("actor/kl_loss" in run.log) == kl
    fractions = sum(run.log[f"actor/clipx/{name}"] for name in FRACTIONS.values())
    assert fractions.between(0, 1 + 1e-6).all()
    # Ages are logged in the steps that have them.
    late = run.log.filter(regex="^actor/clipx/((low|high)/)?staleness/")
    for metric in check_receipt(run).filter(regex="^actor/"):
        assert run.log[metric].dropna().map(math.isfinite).all(), metric
        assert metric in late or run.log[metric].notna().all(), metric
    assert (run.log["critic/score/standard_error"] >= 0).all()
    if mode == "sync":
        assert run.log["training/rollout_probs_diff_max"].max() < 1e-4


def traces_of(run: Run) -> pandas.DataFrame:
    """Every traced token of a run."""
    folder = run.folder / "traces"
    assert "clipx.trace:" not in run.output
    return read_shards(folder, shards_in(folder)).to_pandas()


def check_traces(tokens: pandas.DataFrame, log: pandas.DataFrame) -> None:
    """Checks that the metrics of a run which traced all its tokens are theirs, averaged over a step's updates."""
    values = pandas.DataFrame({"ratio_mean": tokens.ratio})
    values = values.assign(**{name: (tokens.region == region).astype(float) for region, name in FRACTIONS.items()})
    values = values[[name for name in values if f"actor/clipx/{name}" in log]]
    assert {"ratio_mean", "clip_fraction_low", "clip_fraction_high"} <= {*values}
    means = values.groupby([tokens.step, tokens["update"]]).mean().groupby("step").mean()
    for name in values:
        assert means[name].tolist() == pytest.approx(log[f"actor/clipx/{name}"].tolist(), rel=1e-5), name
    scores = tokens.groupby(["step", "prompt", "sample"]).score.first().groupby("step").mean()
    assert scores.tolist() == pytest.approx(log["critic/score/mean"].tolist(), rel=1e-5)


def test_traces_of_both_passes_on_stale_samples(lopti):
    tokens = traces_of(lopti)
    assert set(tokens.step) == {1, 4} and set(tokens["update"]) == {0, 1, 2, 3}
    # Chosen by their hash: some of the 16 prompts of each batch, with all their responses.
    traced_prompts = tokens.groupby("step").prompt.nunique()
    assert traced_prompts.between(1, 15).all()
    assert (tokens.groupby(["step", "prompt"])["sample"].nunique() == 4).all()
    low = tokens.old_log_prob <= math.log(0.5)
    assert (tokens.advantage[low & (tokens["update"] >= 2)] == 0).all()
    assert (tokens.advantage[~low & (tokens["update"] < 2)] == 0).all()
    assert (tokens.age[tokens.step == 1] == 0).all() and tokens.age.max() >= 1
    # In bypass mode the old policy is the one that sampled.
    assert (tokens.old_log_prob == tokens.rollout_log_prob).all()


def test_responses_far_from_the_sampler_are_rejected_in_both_passes(lopti):
    tokens = traces_of(lopti)
    k2 = (tokens.log_prob.astype(float) - tokens.old_log_prob.astype(float)) ** 2 / 2
    response = [tokens.step, tokens["update"], tokens.prompt, tokens["sample"]]
    kept = tokens.selected.astype(bool)
    # But for a response on the very edge, in float32.
    assert (kept == (k2.groupby(response).transform("mean") <= LARGEST_K2)).mean() > 0.99
    assert 0 < kept.mean() < 1
    assert (tokens.weight[~kept] == 0).all() and (tokens.weight[kept] != 0).any()
    # Of all responses, also of those that are not traced.
    rejected = lopti.log["actor/clipx/rejected_fraction"]
    assert rejected.between(0, 1).all() and rejected[4] > 0
    assert (
        f"; rollout correction rollout_rs=seq_mean_k2 in the loss, by the current policy (threshold {LARGEST_K2:g}); "
        in lopti.output
    )


def test_a_users_own_controller_trains_on_stale_samples_of_asynchronous_ranks(lopti):
    check_trained(lopti, "colocate_async", kl=True, steps=STEPS + 1)
    log = lopti.log
    # In bypass mode it is computed in the updates alone.
    assert (log["actor/entropy" if "actor/entropy" in log else "actor/entropy_loss"] > 0).all()
    # What it clips has no gradient.
    assert (log["actor/clipx/spread"].iloc[1:] > 1e-4).all() and log["actor/pg_clipfrac"].mean() > 0.01
    assert log[["actor/clipx/gradient_mass/HP", "actor/clipx/gradient_mass/LN"]].to_numpy().sum() == 0
    versions = log["actor/clipx/staleness/versions"]
    assert versions.max() > 0.5 and math.isnan(versions[1])
    assert (log["actor/clipx/staleness/versions_first"] >= versions)[1:].all()
    # verl's KL term is part of what is trained.
    kl_term = log["actor/loss"] - log["actor/pg_loss"]
    assert kl_term.tolist() == pytest.approx((KL_COEFFICIENT * log["actor/kl_loss"]).tolist(), rel=0.01, abs=1e-7)
    # The first rollout batch's first update starts at the reference, the last one's is away from it.
    assert (log["actor/kl_loss"] >= 0).all() and log["actor/kl_loss"].iloc[-1] > 1e-5


def test_lopti_takes_twice_the_steps_in_two_passes(lopti):
    # Only bounds over the scope lagged remember statistics.
    state = lopti.state(STEPS)
    assert (state["step"], state["statistics"]) == (2 * 2 * STEPS, {})
    # The learning rate moves once a rollout batch, as without Lopti: by a tenth of 5e-4.
    assert list(lopti.log["actor/lr"].diff())[1:] == pytest.approx([5e-5] * STEPS)
    for group in ("low", "high"):
        assert (lopti.log[f"actor/clipx/{group}/grad_norm"] > 0).all()
        assert lopti.log[f"actor/clipx/{group}/spread"].notna().all()
    # The first pass has moved the policy before the second one starts.
    assert (lopti.log["actor/clipx/high/ratio_mean"] - 1).abs().max() > 1e-4


@pytest.mark.matrix
def test_the_checkpoint_of_two_ranks_is_evaluated_by_its_shards_as_when_merged(task, lopti, tmp_path):
    check_both_ways(task, lopti, "countdown", STEPS, tmp_path, ranks=2)


@pytest.mark.matrix
@pytest.mark.parametrize(("method", "ranks", "mode", "kl"), MATRIX)
def test_every_method_under_every_pair_of_settings(task, tmp_path, method, ranks, mode, kl):
    settings = (f"trainer.n_gpus_per_node={ranks}", f"actor_rollout_ref.actor.use_kl_loss={kl}")
    group = (f"+clipx={method}", *SETTINGS.get(method, ()))
    run = train(task, tmp_path, *group, *settings, f"trainer.v1.trainer_mode={mode}", steps=STEPS)
    check_trained(run, mode, kl)
    check_method(method, run)


@pytest.mark.matrix
def test_a_mask_weights_of_later_tokens_and_a_held_target_train_together_compiled(task, tmp_path):
    run = train(
        task,
        tmp_path,
        "+clipx=grpo",
        "clipx.compile=true",
        "+clipx/shaping=fipo",
        "+clipx/mask=icepop",
        "clipx.mask.low=0.9",
        "clipx.mask.high=1.1",
        "+clipx/hold=clip_fraction",
        "clipx.hold.value=0.02",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "trainer.v1.trainer_mode=colocate_async",
        steps=STEPS,
    )
    check_trained(run, "colocate_async", False)
    assert "compiling the loss and its statistics before the first step" in run.output
    assert "stays uncompiled" not in run.output
    masked = sum(run.log[f"actor/clipx/masked_fraction/{sign}"] for sign in ("negative", "positive"))
    assert masked.between(0, 1).all() and (masked <= run.log["actor/clipx/rejected_fraction"] + 1e-9).all()
    assert run.log["actor/clipx/hold/width"].between(0.05, 1).all()
