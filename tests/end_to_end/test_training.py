"""The losses through the real verl: Ray, FSDP2 over gloo, v1 trainers, rollouts, rewards.

Covers, on 2 ranks: a user's own controller, compiled, seeded, with entropy selection and the engine's options of
test_options.py, in sync; Lopti and advantage reweighting on BAPO with stale samples in bypass mode, with rejection and
a KL loss, in colocate_async; the traces of both; the checkpoint of the second merged and evaluated. With `-m matrix`:
the same checkpoint evaluated by its shards too; every method under every pair of settings.
Not covered: one rank (test_quickstart.py), several nodes (test_two_nodes.py), equal bounds over ranks and what the
other methods do (test_invariance.py, without Ray), learning (docs/dev/launching.md has measured runs), GPUs.
"""

import itertools
import math

import pandas
import pytest
from typer.testing import CliRunner

from verl_clipx.cli import app
from verl_clipx.common.traces import read_shards, shards_in

from .evaluation_round import VALIDATION, check_both_ways, check_evaluation
from .method_checks import CHECKS, FRACTIONS, SETTINGS
from .runs import Run, check_receipt, finding, train, write_documented_method
from .test_options import SHOWN, TOGETHER, check_together

pytestmark = pytest.mark.end_to_end

# Every pair of settings with every method, in half of the launches.
MATRIX = [
    (method, ranks, mode, (ranks == 2) != (mode == "colocate_async"))
    for method, ranks, mode in itertools.product(CHECKS, (1, 2), ("sync", "colocate_async"))
]
STEPS = 3

# Of a response's tokens the mean of half the squared log-ratio, above which bypass mode rejects it.
K2 = 1e-3
KL_COEFFICIENT = 0.5

LOPTI_ON_STALE_BAPO = (
    *("+clipx=bapo", "clipx.metrics=all"),
    *SETTINGS["bapo"],
    *("+clipx/update=lopti", "+clipx/shaping=advantage_reweighting", "clipx.weight=rollout"),
    *("trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=2"),
    *("algorithm.rollout_correction.bypass_mode=True", "algorithm.rollout_correction.rollout_rs=seq_mean_k2"),
    f"algorithm.rollout_correction.rollout_rs_threshold={K2}",
    *("actor_rollout_ref.actor.use_kl_loss=True", f"actor_rollout_ref.actor.kl_loss_coef={KL_COEFFICIENT}"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
)


@pytest.fixture(scope="module")
def own(task, tmp_path_factory) -> Run:
    """2 ranks, sync, seeded, no KL loss, the engine's options together: the documented controller over the mini-batch,
    compiled, on selected tokens."""
    folder = write_documented_method(tmp_path_factory.mktemp("own"))
    return train(
        task,
        folder / "run",
        "trainer.n_gpus_per_node=2",
        # Bounds so narrow that tokens are outside.
        *("+clipx=custom", "clipx.function=spread_clip:SpreadClip", "+clipx.width=0.5", "+clipx.least=0"),
        *("clipx.compile=true", "clipx.metrics=all"),
        *("+clipx/select=high_entropy", "clipx.select.over=mini_batch"),
        *("+clipx/trace=prompts", "clipx.trace.fraction=1", "clipx.trace.every=1"),
        # So that the same responses come up in every run of the tests.
        "+clipx/rollout=seeded",
        *TOGETHER,
        # A module that only this path leads to, in all of verl's processes.
        environment=SHOWN | finding(folder),
        steps=STEPS,
    )


@pytest.fixture(scope="module")
def lopti(task, tmp_path_factory) -> Run:
    """2 ranks, colocate_async, KL loss: two passes on samples of older weights, with their probabilities as the old.

    Step 3 is validated and saved.
    """
    ranks = ("trainer.n_gpus_per_node=2", f"trainer.save_freq={STEPS}", f"trainer.test_freq={STEPS}", *VALIDATION)
    traces = ("+clipx/trace=prompts", "clipx.trace.fraction=0.5", "clipx.trace.every=3")
    return train(task, tmp_path_factory.mktemp("lopti"), *LOPTI_ON_STALE_BAPO, *ranks, *traces, steps=STEPS + 1)


def check_trained(run: Run, mode: str, kl: bool, steps: int = STEPS) -> None:
    """What holds of every run, whatever its loss."""
    assert list(run.log.index) == list(range(1, steps + 1))
    assert ("actor/kl_loss" in run.log) == kl
    fractions = sum(run.log[f"actor/clipx/{name}"] for name in FRACTIONS.values())
    rejected = run.log.get("actor/clipx/rejected_fraction", 0 * fractions)
    # A rejection may take every token of an update, which then has no regions; one of four updates is a quarter.
    assert (fractions[rejected < 0.2] - 1).abs().max() < 1e-6 and fractions.between(0, 1 + 1e-6).all()
    # Ages and their parts are logged in the steps that have them.
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


def test_traces_agree_with_the_metrics(own):
    tokens = traces_of(own)
    assert set(tokens["rank"]) == {0, 1} and set(tokens.step) == {1, 2, 3} and set(tokens["update"]) == {0, 1}
    responses = tokens.groupby(["step", "prompt", "sample"])
    assert responses.ngroups == STEPS * 16 * 4 and (responses["rank"].nunique() == 1).all()
    # The last response's tokens are all there: it reached the disk before Ray ended the workers.
    assert (responses.position.max() + 1 == responses.size()).all()
    for step, updates in tokens.groupby("step"):

        def logged(metric, step=step):
            return pytest.approx(own.log[f"actor/clipx/{metric}"][step], rel=1e-5)

        # verl averages over the updates of a step.
        each = updates.groupby("update")
        assert each.ratio.mean().mean() == logged("ratio_mean")
        assert each.selected.apply(lambda kept: kept.astype(float).mean()).mean() == logged("selected_fraction")
        for region, name in FRACTIONS.items():
            share = each.region.apply(lambda found, region=region: (found == region).mean()).mean()
            assert share == logged(name), region
        score = responses.score.first()[step].mean()
        assert score == pytest.approx(own.log["critic/score/mean"][step], rel=1e-5)
    assert (tokens.weight[~tokens.selected.astype(bool)] == 0).all() and (tokens.entropy >= 0).all()
    assert (tokens.age == 0).all() and tokens.prompt_text.str.contains("=").all()


def test_the_report_reads_them(own):
    result = CliRunner().invoke(app, ["report", str(own.folder), "--out", str(own.folder / "report")])
    assert result.exit_code == 0, result.output
    assert len(pandas.read_csv(own.folder / "report" / "tokens.csv"))


def test_traces_of_both_passes_on_stale_samples(lopti):
    tokens = traces_of(lopti)
    assert set(tokens.step) == {1, 4} and set(tokens["update"]) == {0, 1, 2, 3}
    # Chosen by their hash: some of the 16 prompts of each batch, with all their responses.
    found = tokens.groupby("step").prompt.nunique()
    assert found.between(1, 15).all()
    assert (tokens.groupby(["step", "prompt"])["sample"].nunique() == 4).all()
    low = tokens.old_log_prob <= math.log(0.5)
    assert (tokens.advantage[low & (tokens["update"] >= 2)] == 0).all()
    assert (tokens.advantage[~low & (tokens["update"] < 2)] == 0).all()
    assert (tokens.age[tokens.step == 1] == 0).all() and tokens.age.max() >= 1
    # In bypass mode the old policy is the one that sampled.
    assert (tokens.old_log_prob == tokens.rollout_log_prob).all()


def test_responses_far_from_the_sampler_are_rejected_in_both_passes(lopti):
    tokens = traces_of(lopti)
    moved = (tokens.log_prob.astype(float) - tokens.old_log_prob.astype(float)) ** 2 / 2
    response = [tokens.step, tokens["update"], tokens.prompt, tokens["sample"]]
    kept = tokens.selected.astype(bool)
    expected = moved.groupby(response).transform("mean") <= K2
    # But for a response on the very edge, in float32.
    assert (kept == expected).mean() > 0.99
    assert 0 < kept.mean() < 1
    assert (tokens.weight[~kept] == 0).all() and (tokens.weight[kept] != 0).any()
    # Of all responses, also of those that are not traced.
    rejected = lopti.log["actor/clipx/rejected_fraction"]
    assert rejected.between(0, 1).all() and rejected[4] > 0
    assert f"; rollout correction rollout_rs=seq_mean_k2 by the current weights (threshold {K2:g}); " in lopti.output


def test_verls_kl_term_is_part_of_what_is_trained(lopti):
    log = lopti.log
    term = log["actor/loss"] - log["actor/pg_loss"]
    assert term.tolist() == pytest.approx((KL_COEFFICIENT * log["actor/kl_loss"]).tolist(), rel=0.01, abs=1e-7)
    # The first rollout batch's first update starts at the reference, the last one's is away from it.
    assert (log["actor/kl_loss"] >= 0).all() and log["actor/kl_loss"].iloc[-1] > 1e-5


def test_a_users_own_controller_trains_on_two_ranks(own):
    check_trained(own, "sync", kl=False)
    spread = own.log["actor/clipx/spread"]
    assert (spread > 1e-4).all() and spread.nunique() == STEPS
    # What it clips has no gradient.
    assert own.log["actor/pg_clipfrac"].mean() > 0.01
    assert own.log[["actor/clipx/gradient_mass/HP", "actor/clipx/gradient_mass/LN"]].to_numpy().sum() == 0


def test_the_engines_options_are_in_force(own):
    check_together(own)


def test_it_was_compiled(own):
    assert "compiling the loss and its statistics before the first step" in own.output
    assert "stays uncompiled" not in own.output


def test_selection_over_the_mini_batch_keeps_its_share(own):
    # Whole buckets of the histogram: at least the share, and little more.
    assert own.log["actor/clipx/selected_fraction"].between(0.2, 0.25).all()


def test_of_fresh_samples_no_age_is_logged(own):
    assert own.log.filter(like="clipx/staleness").empty


def test_bapo_on_asynchronous_ranks(lopti):
    check_trained(lopti, "colocate_async", kl=True, steps=STEPS + 1)
    CHECKS["bapo"](lopti)


def test_stale_samples_are_seen_as_such(lopti):
    versions = lopti.log["actor/clipx/staleness/versions"]
    assert versions.max() > 0.5 and math.isnan(versions[1])
    spread = lopti.log["actor/clipx/staleness/spread/age_1"]
    assert spread.max() > 1e-3


def test_lopti_takes_twice_the_steps_in_two_passes(lopti):
    state = lopti.state(STEPS)
    assert state["step"] == 2 * 2 * STEPS
    # Only bounds over the scope lagged remember statistics.
    assert state["statistics"] == {}
    # The learning rate moves once a rollout batch, as without Lopti: by a tenth of 5e-4.
    assert list(lopti.log["actor/lr"].diff())[1:] == pytest.approx([5e-5] * STEPS)
    for group in ("low", "high"):
        assert (lopti.log[f"actor/clipx/{group}/grad_norm"] > 0).all()
        assert lopti.log[f"actor/clipx/{group}/c_high"].notna().all()
    # The first pass has moved the policy before the second one starts.
    assert (lopti.log["actor/clipx/high/ratio_mean"] - 1).abs().max() > 1e-4


def test_the_checkpoint_of_two_ranks_is_evaluated_as_verl_validated_it(task, lopti, tmp_path):
    check_evaluation(task, lopti, "countdown", STEPS, tmp_path)


@pytest.mark.matrix
def test_the_checkpoint_of_two_ranks_is_evaluated_by_its_shards_as_when_merged(task, lopti, tmp_path):
    check_both_ways(task, lopti, "countdown", STEPS, tmp_path, ranks=2)


@pytest.mark.matrix
@pytest.mark.parametrize(("method", "ranks", "mode", "kl"), MATRIX)
def test_every_method_under_every_pair_of_settings(task, tmp_path, method, ranks, mode, kl):
    run = train(
        task,
        tmp_path,
        *(f"+clipx={method}", "clipx.metrics=all"),
        f"trainer.n_gpus_per_node={ranks}",
        f"trainer.v1.trainer_mode={mode}",
        f"actor_rollout_ref.actor.use_kl_loss={kl}",
        *SETTINGS.get(method, ()),
        steps=STEPS,
    )
    check_trained(run, mode, kl)
    CHECKS[method](run)


@pytest.mark.matrix
def test_a_mask_weights_of_later_tokens_and_a_held_target_train_together(task, tmp_path):
    run = train(
        task,
        tmp_path,
        *("+clipx=grpo", "clipx.metrics=all", "+clipx/shaping=fipo"),
        *("+clipx/mask=icepop", "clipx.mask.low=0.9", "clipx.mask.high=1.1"),
        *("+clipx/hold=clip_fraction", "clipx.hold.value=0.02"),
        *("actor_rollout_ref.rollout.calculate_log_probs=True", "trainer.v1.trainer_mode=colocate_async"),
        steps=STEPS,
    )
    check_trained(run, "colocate_async", False)
    masked = sum(run.log[f"actor/clipx/masked_fraction/{sign}"] for sign in ("negative", "positive"))
    assert masked.between(0, 1).all() and (masked <= run.log["actor/clipx/rejected_fraction"] + 1e-9).all()
    assert run.log["actor/clipx/hold/width"].between(0.05, 1).all()
    assert "clipx: receipt: at ratios of its own choosing" in run.output
