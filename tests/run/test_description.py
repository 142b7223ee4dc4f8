"""The line that driver and workers print about a run, by overrides on verl's configuration. Not covered: the line in
verl's entry modules (test_start.py); what a trainer really does with old_log_probs.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from verl.workers.utils.losses import ppo_loss

from tests.claims.configuration import ACTOR, actor_of, merged, parsed
from tests.losses.methods.at import outcome, tokens_at
from tests.messages import assert_names
from verl_clipx.losses.methods import BUILT_IN, METHODS
from verl_clipx.run.description import describe, format_value
from verl_clipx.run.record import RunRecord
from verl_clipx.run.start import resolve_into_config
from verl_clipx.training.worker.training_worker import ClipxTraining

V1 = "trainer.v1.trainer_mode"
BYPASS = "algorithm.rollout_correction.bypass_mode"
BYPASSED, SOFT = f"{BYPASS}=True", "clipx.function=tests.example_losses:soft"
ROLLOUT = "actor_rollout_ref.rollout"
RATIO = "ratio to the policy of old_log_probs"
IDLE = "at ratio 1 but for rounding: clipping has nothing else to act on"
ONE_UPDATE = f"data.train_batch_size=64 {ACTOR}.ppo_mini_batch_size=64"
CORRECTION = "algorithm.rollout_correction"
AGG = f"{ACTOR}.loss_agg_mode"
DISTILLED = "distillation.enabled=True distillation.distillation_loss.distillation_loss_coef=0.5"
DISTILLS = ("distillation loss k3", "coefficient 0.5")
SAMPLED, RETURNED = f"{ROLLOUT}.name=vllm {ROLLOUT}.top_p=0.8", f"{ROLLOUT}.calculate_log_probs=True"
BIASED = ("biased", f"{ROLLOUT}.top_p=0.8", f"{ROLLOUT}.logprobs_mode=processed_logprobs", "vllm's")
CORRECTED = (
    f"{CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_threshold='0.5_5' {CORRECTION}.rollout_rs=seq_mean_k3 "
    f"{CORRECTION}.rollout_is_batch_normalize=True {CORRECTION}.rollout_rs_threshold=0.03 {ROLLOUT}.temperature=0.6"
)
CORRECTS = (
    *("rollout_is=token", "threshold 0.5_5", "normalised over the batch"),
    *("rollout_rs=seq_mean_k3", "threshold 0.03"),
    "temperature 0.6",
)


def line_of(words, group=None):
    """The line of a run with these overrides, its groups first."""
    groups = [word for word in words.split() if word.startswith("+")]
    values = parsed(*words.split()[len(groups) :])
    return resolve_into_config(merged(groups, values), group=group or groups[0].partition("=")[2]).record.line


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        # The loss, its scope, and what differs from its group.
        ("+clipx=acpo", ("clipx_acpo", "+clipx=acpo", "scope mini_batch", "every parameter as in its group")),
        (
            "+clipx=acpo_reference clipx.alpha=2 clipx.epsilon_max=null",
            ("+clipx=acpo_reference", "scope micro_batch", "alpha=2 (group: 3)", "epsilon_max=null (group: 3)"),
        ),
        ("+clipx=gspo", ("clipx_gspo", "+clipx=gspo", "fixed bounds on the sequence's ratio", "every parameter")),
        ("+clipx=kpop", ("fixed bounds on the larger divergence of the token's probability", "every parameter")),
        # A pull to the sampler acts at ratio 1 too.
        (f"+clipx=dapo +clipx/pull=k2 {ONE_UPDATE}", ("1 update per rollout batch", IDLE)),
        (
            f"+clipx=dapo +clipx/pull=k2 {ONE_UPDATE} clipx.pull.anchor=rollout {RETURNED}",
            ("1 update per rollout batch: the penalty can act",),
        ),
        # k1 has the same gradient at every ratio.
        (f"+clipx=dapo +clipx/pull=k1 {ONE_UPDATE}", ("1 update per rollout batch: the penalty can act",)),
        (
            f"+clipx=custom +clipx/pull=k2 {SOFT.replace('soft', 'Slowing')} {ONE_UPDATE}",
            ("1 update per rollout batch", "at ratio 1", "a limit inside the gradient weight has nothing"),
        ),
        (
            "+clipx=grpo +clipx/update=lopti clipx.compile=False",
            ("fixed bounds", "compile=false (group: auto)", "update=Lopti(eta=0.5, equal=true"),
        ),
        (
            "+clipx=grpo clipx.clip_low=0.2 clipx.clip_high=null",
            ("clip_low=0.2 (group: 0.8; unusual, mostly 0.5 to 0.99)", "clip_high=null (group: 1.2)"),
        ),
        ("+clipx=gspo clipx.clip_high=1.28", ("clip_high=1.28 (group: 1.0004; unusual, mostly 1 to 1.01)",)),
        ("+clipx=grpo clipx.clip_high=1.20000001", ("clip_high=1.20000001 (group: 1.2)",)),
        (
            f"+clipx=observe {ACTOR}.policy_loss.loss_mode=gpg",
            ("loss gpg", "observed (+clipx=observe)", "loss_agg_mode token-mean", "if this loss follows it"),
        ),
        # verl's distillation loss beside the policy loss.
        (f"+clipx=acpo {DISTILLED}", ("every parameter as in its group", *DISTILLS)),
        (f"+clipx=observe {DISTILLED}", ("observed (+clipx=observe)", *DISTILLS)),
        # Sampling that biases ratios to the rollout policy.
        (f"+clipx=acpo {SAMPLED}", ("ratios to the rollout policy, which only metrics use", *BIASED)),
        (f"+clipx=observe {SAMPLED} {BYPASSED}", ("ratios to the rollout policy are", *BIASED)),
        # Rollout correction and temperature, and the policy that the ratio is to.
        (f"+clipx=grpo {CORRECTED}", (*CORRECTS, RATIO)),
        (f"+clipx=grpo {BYPASSED} {RETURNED}", ("ratio to the policy that sampled",)),
        (f"+clipx=m2po {RETURNED}", ("ratio to the policy that sampled",)),
    ],
)
def test_the_line_names_the_loss_its_settings_and_its_ratio(words, facts):
    assert_names(line_of(words), *facts)


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        ("+clipx=acpo distillation.enabled=False", "distillation"),
        (f"+clipx=acpo {SAMPLED} {ROLLOUT}.calculate_log_probs=False", "biased"),
        (f"+clipx=acpo {ROLLOUT}.name=vllm {ROLLOUT}.top_p=1.0 {ROLLOUT}.temperature=0.9", "biased"),
        ("+clipx=grpo", "correction temperature trace"),
        ("+clipx=observe", "correction temperature trace ratio"),
    ],
)
def test_it_names_nothing_that_is_not_there(words, absent):
    line = line_of(words)
    assert [word for word in absent.split() if word in line] == []


@pytest.mark.parametrize("group", ["+clipx=acpo", "+clipx=observe"])
def test_what_is_traced(group, monkeypatch, tmp_path):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", f"{tmp_path}/metrics.jsonl")
    line = line_of(f"{group} +clipx/trace=prompts clipx.trace.fraction=0.125")
    assert_names(line.rpartition("; ")[2], "12.5 %", "prompts", "one of 10 rollout batches", f"{tmp_path}/traces")


def test_a_group_of_ones_own_is_named_and_held_against_the_method():
    line = line_of("+clipx=dapo", group="mine")
    assert line.startswith("clipx: clipx_grpo (+clipx=mine), fixed bounds, clip_high=1.28 (group: 1.2);")


UNBOUNDED = "clipx.clip_low=null clipx.clip_high=null"


@pytest.mark.parametrize(
    ("words", "limit", "end"),
    [
        ("grpo", "fixed bounds", "clipping can act"),
        (f"grpo {UNBOUNDED}", "no bounds but dual_clip", "dual_clip can act"),
        ("grpo clipx.clip_low=0 clipx.clip_high=null clipx.dual_clip=null", "no bounds", "nothing clips"),
        (f"cispo_acpo {UNBOUNDED}", "no bounds but mask_low and mask_high", "mask_low and mask_high can act"),
        ("dcpo", "bounds of its own", "clipping can act"),
        ("dppo", "fixed bounds on the divergence (tv) of the token's probability", "clipping can act"),
        ("m2po", "scope mini_batch", "clipping can act"),
        ("sapo", "a soft gate and no bounds", "the soft gate can act"),
        ("topr", "a truncation and no bounds", "the truncation can act"),
        ("topr clipx.negative_low=1", "no bounds", "nothing clips"),
        # A pull leaves the bounds as they are.
        ("dcpo +clipx/pull=k2", "bounds of its own", "clipping can act"),
        ("m2po +clipx/pull=k2", "scope mini_batch", "clipping can act"),
        (
            "dppo +clipx/hold=clip_fraction +clipx/pull=k2 clipx.hold.value=0.02",
            "holds clip_fraction 0.02 (width 0.05 to 1), scope mini_batch",
            "clipping can act",
        ),
        ("spo +clipx/pull=k2", "a penalty and no bounds", "the penalty can act"),
        (f"custom {SOFT}", "fixed bounds", "clipping can act"),
        (f"custom {SOFT.replace('soft', 'Slowing')}", "no bounds", "a limit inside the gradient weight can act"),
    ],
)
def test_what_limits_the_weight_and_can_act(words, limit, end):
    line = line_of(f"+clipx={words}")
    assert f" (+clipx={words.split()[0]}), {limit}, " in line
    assert line.endswith(f"4 updates per rollout batch: {end}")


SEQUENCES = f"(the paper averages each sequence first; set {AGG}=seq-mean-token-mean for that)"


@pytest.mark.parametrize("group", ["sapo", "gspo", "topr", "acpo", "acpo_reference", "grpo", "dapo"])
def test_a_paper_that_averages_otherwise_is_named(group):
    of_paper = "" if group == "dapo" else f" {SEQUENCES}"
    assert f"; loss_agg_mode token-mean{of_paper}; {RATIO}; old_log_probs " in line_of(f"+clipx={group}")
    other = line_of(f"+clipx={group} {AGG}=seq-mean-token-mean")
    assert "loss_agg_mode seq-mean-token-mean" in other and (group == "dapo") == ("averages over all tokens" in other)


STALE = f"{V1}=colocate_async {RETURNED}"
UNCORRECTED = "not corrected for the samples' staleness and for the rollout engine"


# A pull to the sampler leaves the gradient of what is clipped as biased as it was.
TO_SAMPLER = f"+clipx/pull=k2 clipx.pull.anchor=rollout {STALE}"


WEIGHTS = f"{CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_threshold=2"
REJECTION = f"{CORRECTION}.rollout_rs=seq_mean_k3 {CORRECTION}.rollout_rs_threshold=0.03"


@pytest.mark.parametrize(
    ("words", "is_named"),
    [
        *((f"grpo {further}", True) for further in (STALE, TO_SAMPLER)),
        (f"grpo {STALE} {WEIGHTS}", False),
        (f"grpo {STALE} {BYPASSED}", False),
        *((f"grpo {TO_SAMPLER} {correction}", False) for correction in (WEIGHTS, REJECTION, BYPASSED)),
        *(
            (f"{loss} {further}", False)
            for loss in ("m2po", "grpo +clipx/mask=icepop")
            for further in (STALE, TO_SAMPLER)
        ),
        (f"grpo {V1}=sync {RETURNED}", False),
    ],
)
def test_stale_samples_that_nothing_corrects_are_named(words, is_named):
    line = line_of(f"+clipx={words}")
    assert (f"; {UNCORRECTED}; " in line) == (UNCORRECTED in line) == is_named


def test_verls_switch_of_torch_compile_reaches_auto_and_nothing_else():
    for key in (f"{ACTOR}.use_torch_compile", f"{ACTOR}.fsdp_config.use_torch_compile"):
        off = {key: False}
        assert f"compile=false (group: auto; from {key}=False);" in line_of(f"+clipx=grpo {key}=False")
        node = actor_of(merged(["+clipx=grpo"], off)).policy_loss.clipx
        assert node.compile is False and not node.functions("cuda").compiled
        insisting = merged(["+clipx=grpo"], {**off, "clipx.compile": True})
        assert actor_of(insisting).policy_loss.clipx.compile is True
    assert actor_of(merged(["+clipx=grpo"])).policy_loss.clipx.functions("cuda").compiled


FIRST = "recomputed with the weights at the start of a rollout batch's first update;"
LAST = "the weights that the rollout last received;"
# Of one mini-batch.
SMALL = "data.train_batch_size=256"
ASYNC = f"{V1}=separate_async"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", f"{FIRST} 4 updates per rollout batch: clipping can act"),
        (SMALL, f"{FIRST} 1 update per rollout batch, {IDLE}"),
        (f"{SMALL} {ACTOR}.ppo_epochs=2", "2 updates per rollout batch: clipping can act"),
        # The older trainer, and the experimental ones, read nothing of trainer.v1.
        (f"trainer.use_v1=False {ASYNC}", f"{FIRST} 4 updates per rollout batch: clipping can act"),
        (f"rollout.nnodes=1 {ASYNC}", f"{FIRST} 4 updates per rollout batch: clipping can act"),
        (f"async_training.require_batches=2 {ASYNC}", f"{LAST} 2 updates per rollout batch: clipping can act"),
        (f"{V1}=colocate_async {SMALL}", f"{FIRST} 1 update per rollout batch, {IDLE}"),
        (f"{BYPASSED} {SMALL}", "are the rollout's own (bypass_mode); 1 update per rollout batch: clipping can act"),
        # 1024 prompts in four parts of one mini-batch, each a step of the trainer.
        (
            f"{ASYNC} trainer.v1.separate_async.parameter_sync_step=4",
            f"{LAST} 1 update per rollout batch: clipping can act",
        ),
        ("data.train_batch_size=null", f"{FIRST} an unknown number of updates per rollout batch"),
        # Lopti's second pass starts away from ratio 1.
        (f"+clipx/update=lopti {SMALL}", "1 update per rollout batch and pass of Lopti: clipping can act"),
        (
            f"+clipx/update=lopti {SMALL} clipx.update.order=low_only",
            f"1 update per rollout batch, {IDLE}",
        ),
    ],
)
def test_where_old_log_probs_come_from_and_whether_clipping_can_act(words, expected):
    assert expected in line_of(f"+clipx=grpo {words}")


@pytest.mark.parametrize(
    ("words", "end"),
    [
        # Their ratio is to the sampler, whose probabilities differ from those that the trainer recomputes.
        (f"m2po {RETURNED}", "clipping can act"),
        (
            f"custom clipx.function=tests.example_losses:ToSampler {RETURNED}",
            "a limit inside the gradient weight can act",
        ),
        (f"m2po +clipx/pull=k2 {RETURNED}", "clipping can act"),
        ("m2po clipx.behaviour=old", IDLE),
        ("clip_cov", "the draw can act"),
        ("kl_cov", "at ratio 1 but for rounding: the penalty has nothing else to act on"),
    ],
)
def test_what_can_act_at_one_update_a_rollout_batch(words, end):
    of_updates = line_of(f"+clipx={words} {SMALL}").rpartition("; ")[2]
    assert of_updates.partition(" (to make")[0] in (
        f"1 update per rollout batch: {end}",
        f"1 update per rollout batch, {end}",
    )


@pytest.mark.parametrize("method", BUILT_IN)
def test_a_method_that_says_nothing_acts_at_ratio_1_leaves_the_weight_at_1(method):
    old = -3 * torch.rand(16, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # Advantages that go with the log-probabilities, so that covariances are large.
    advantages, sampler = 2 * (old + 1.5), old + 0.3 * old.sin()
    built = METHODS[method]()
    weight = outcome(
        built, tokens_at(torch.ones_like(old), advantages, old_log_prob=old, rollout_log_prob=sampler)
    ).weight
    assert bool((weight - 1).abs().max() > 1e-9) == bool(built.acts_at_ratio_one)


def test_without_a_trainers_name_nothing_is_claimed_of_old_log_probs():
    settings = actor_of(merged(["+clipx=grpo"])).policy_loss.clipx
    assert "old_log_probs are the trainer's; an unknown number" in describe("clipx_grpo", settings, RunRecord()).line


@pytest.mark.parametrize(("rank", "times"), [(0, 1), (1, 0)])
def test_rank_0_of_the_workers_prints_the_drivers_line(capsys, monkeypatch, rank, times):
    monkeypatch.setattr("verl_clipx.training.worker.training_worker.get_device_id", lambda: "cpu")
    config = merged(["+clipx=sapo"], {f"{CORRECTION}.rollout_is": "sequence", f"{ACTOR}.use_torch_compile": False})
    line = resolve_into_config(config, group="sapo").record.line
    given = []
    of_verl = type("Verl", (), {"set_loss_fn": lambda self, loss_fn: given.append(loss_fn)})
    worker = type("Worker", (ClipxTraining, of_verl), {})()
    worker.rank, worker.engine_config = rank, None
    worker.engine = SimpleNamespace(optimizer_step=None, infer_batch=None, module=None)
    worker.engine.get_data_parallel_rank, worker.engine.get_data_parallel_size = lambda: rank, lambda: 2
    worker.set_loss_fn(partial(ppo_loss, config=actor_of(config)))
    assert given and capsys.readouterr().out.splitlines().count(line) == times


def test_a_whole_number_keeps_its_digits_where_a_fraction_is_cut_to_six():
    assert format_value(1234567) == "1234567"
    assert format_value(0.12345678) == "0.123457"
