"""The line that driver and workers print about a run, by overrides on verl's configuration. Not covered: the line in
verl's entry modules (test_start.py); what a trainer really does with old_log_probs.
"""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from verl.workers.utils.losses import ppo_loss

from tests.claims.configuration import ACTOR, actor_of, merge, parse
from tests.losses.methods.hand_rows import apply_method, tokens_at
from tests.messages import assert_names
from verl_clipx.losses.methods import BUILT_IN, METHODS
from verl_clipx.run.description import describe, format_value
from verl_clipx.run.record import RunRecord
from verl_clipx.run.start import resolve_into_config
from verl_clipx.training.worker.training_worker import ClipxTraining

ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
LOSS_AGG_MODE = f"{ACTOR}.loss_agg_mode"
TRAINER_MODE = "trainer.v1.trainer_mode"

# Overrides that several cases have.
BYPASSED = f"{CORRECTION}.bypass_mode=True"
TOKEN_WEIGHTS = f"{CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_threshold=2"
SEQUENCE_REJECTION = f"{CORRECTION}.rollout_rs=seq_mean_k3 {CORRECTION}.rollout_rs_threshold=0.03"
LOG_PROBS_RETURNED = f"{ROLLOUT}.calculate_log_probs=True"
STALE_SAMPLES = f"{TRAINER_MODE}=colocate_async {LOG_PROBS_RETURNED}"
PULLED_TO_SAMPLER = "+clipx/pull=k2 clipx.pull.anchor=rollout"
SEPARATE_ASYNC = f"{TRAINER_MODE}=separate_async"
# verl's mini-batch has 256 prompts.
ONE_MINI_BATCH = "data.train_batch_size=256"
TOP_P_OF_VLLM = f"{ROLLOUT}.name=vllm {ROLLOUT}.top_p=0.8"
DISTILLATION = "distillation.enabled=True distillation.distillation_loss.distillation_loss_coef=0.5"
WEIGHTS_AND_REJECTION = (
    f"{CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_threshold='0.5_5' "
    f"{CORRECTION}.rollout_is_batch_normalize=True {SEQUENCE_REJECTION}"
)

# What the line says of several cases.
ONLY_AT_RATIO_ONE = "at ratio 1 but for rounding: clipping has nothing else to act on"
TO_OLD_POLICY = "ratio to the policy of old_log_probs"
TO_SAMPLER = "ratio to the policy that sampled"
FACTS_OF_DISTILLATION = ("distillation loss k3", "coefficient 0.5")
FACTS_OF_BIAS = ("biased", f"{ROLLOUT}.top_p=0.8", f"{ROLLOUT}.logprobs_mode=processed_logprobs", "vllm's")


def line_of(overrides, group=None):
    """The line of a run with these overrides, the groups first; group: the name of the group, if it is the user's."""
    groups = [override for override in overrides.split() if override.startswith("+")]
    values = parse(*(override for override in overrides.split() if override not in groups))
    return resolve_into_config(merge(groups, values), group=group or groups[0].partition("=")[2]).record.line


def split_line(line):
    """The parts of a line, which semicolons separate; those in brackets are within a part."""
    return re.split(r"; (?![^(]*\))", line)


def find_part(line, text):
    """The one part of a line that has a text in it."""
    (part,) = [part for part in split_line(line) if text in part]
    return part


@pytest.mark.parametrize(
    ("overrides", "facts"),
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
        (f"+clipx=dapo +clipx/pull=k2 {ONE_MINI_BATCH}", ("1 update per rollout batch", ONLY_AT_RATIO_ONE)),
        (
            f"+clipx=dapo {PULLED_TO_SAMPLER} {ONE_MINI_BATCH} {LOG_PROBS_RETURNED}",
            ("1 update per rollout batch: the penalty can act",),
        ),
        # k1 has the same gradient at every ratio.
        (f"+clipx=dapo +clipx/pull=k1 {ONE_MINI_BATCH}", ("1 update per rollout batch: the penalty can act",)),
        (
            f"+clipx=custom +clipx/pull=k2 clipx.function=tests.example_losses:Slowing {ONE_MINI_BATCH}",
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
        (f"+clipx=acpo {DISTILLATION}", ("every parameter as in its group", *FACTS_OF_DISTILLATION)),
        (f"+clipx=observe {DISTILLATION}", ("observed (+clipx=observe)", *FACTS_OF_DISTILLATION)),
        # Sampling that biases ratios to the rollout policy.
        (f"+clipx=acpo {TOP_P_OF_VLLM}", ("ratios to the rollout policy, which only metrics use", *FACTS_OF_BIAS)),
        (f"+clipx=observe {TOP_P_OF_VLLM} {BYPASSED}", ("ratios to the rollout policy are", *FACTS_OF_BIAS)),
        # Rollout correction and temperature, and the policy that the ratio is to.
        (
            f"+clipx=grpo {WEIGHTS_AND_REJECTION} {ROLLOUT}.temperature=0.6",
            (
                "rollout_is=token",
                "threshold 0.5_5",
                "normalised over the batch",
                "rollout_rs=seq_mean_k3",
                "threshold 0.03",
                "temperature 0.6",
                TO_OLD_POLICY,
            ),
        ),
        (f"+clipx=grpo {BYPASSED} {LOG_PROBS_RETURNED}", (TO_SAMPLER,)),
        (f"+clipx=m2po {LOG_PROBS_RETURNED}", (TO_SAMPLER,)),
    ],
)
def test_the_line_names_the_loss_its_settings_and_its_ratio(overrides, facts):
    assert_names(line_of(overrides), *facts)


@pytest.mark.parametrize(
    ("overrides", "absent"),
    [
        ("+clipx=acpo distillation.enabled=False", ["distillation"]),
        (f"+clipx=acpo {TOP_P_OF_VLLM} {ROLLOUT}.calculate_log_probs=False", ["biased"]),
        (f"+clipx=acpo {ROLLOUT}.name=vllm {ROLLOUT}.top_p=1.0 {ROLLOUT}.temperature=0.9", ["biased"]),
        ("+clipx=grpo", ["correction", "temperature", "trace"]),
        ("+clipx=observe", ["correction", "temperature", "trace", "ratio"]),
    ],
)
def test_the_line_leaves_out_what_the_run_does_not_have(overrides, absent):
    line = line_of(overrides)
    assert [word for word in absent if word in line] == []


@pytest.mark.parametrize("group", ["+clipx=acpo", "+clipx=observe"])
def test_the_line_ends_with_what_is_traced(group, monkeypatch, tmp_path):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", f"{tmp_path}/metrics.jsonl")
    trace = split_line(line_of(f"{group} +clipx/trace=prompts clipx.trace.fraction=0.125"))[-1]
    assert_names(trace, "12.5 %", "prompts", "one of 10 rollout batches", f"{tmp_path}/traces")


def test_a_group_of_the_users_own_is_named_and_held_against_the_method():
    line = line_of("+clipx=dapo", group="mine")
    assert line.startswith("clipx: clipx_grpo (+clipx=mine), fixed bounds, clip_high=1.28 (group: 1.2);")


UNBOUNDED = "clipx.clip_low=null clipx.clip_high=null"


@pytest.mark.parametrize(
    ("overrides", "limit", "what_can_act"),
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
        ("custom clipx.function=tests.example_losses:soft", "fixed bounds", "clipping can act"),
        (
            "custom clipx.function=tests.example_losses:Slowing",
            "no bounds",
            "a limit inside the gradient weight can act",
        ),
    ],
)
def test_the_line_names_what_limits_the_weight_and_can_act(overrides, limit, what_can_act):
    line = line_of(f"+clipx={overrides}")
    assert f" (+clipx={overrides.split()[0]}), {limit}, " in line
    assert split_line(line)[-1] == f"4 updates per rollout batch: {what_can_act}"


@pytest.mark.parametrize("group", ["sapo", "gspo", "topr", "acpo", "acpo_reference", "grpo"])
def test_a_paper_that_averages_each_sequence_first_is_named_under_a_mean_over_all_tokens(group):
    line = line_of(f"+clipx={group}")
    averaging = find_part(line, "loss_agg_mode")
    assert averaging.startswith("loss_agg_mode token-mean (")
    assert_names(averaging, "each sequence first", f"{LOSS_AGG_MODE}=seq-mean-token-mean")
    assert TO_OLD_POLICY in split_line(line)
    as_in_the_paper = line_of(f"+clipx={group} {LOSS_AGG_MODE}=seq-mean-token-mean")
    assert "loss_agg_mode seq-mean-token-mean" in split_line(as_in_the_paper)


def test_a_paper_that_averages_over_all_tokens_is_named_under_a_mean_of_sequences():
    as_in_the_paper = split_line(line_of("+clipx=dapo"))
    assert "loss_agg_mode token-mean" in as_in_the_paper and TO_OLD_POLICY in as_in_the_paper
    averaging = find_part(line_of(f"+clipx=dapo {LOSS_AGG_MODE}=seq-mean-token-mean"), "loss_agg_mode")
    assert averaging.startswith("loss_agg_mode seq-mean-token-mean (")
    assert_names(averaging, "over all tokens", f"{LOSS_AGG_MODE}=token-mean")


@pytest.mark.parametrize(
    "overrides",
    [
        f"grpo {STALE_SAMPLES}",
        # A pull to the sampler leaves the gradient of what is clipped as biased as it was.
        f"grpo {PULLED_TO_SAMPLER} {STALE_SAMPLES}",
    ],
)
def test_stale_samples_that_nothing_corrects_are_named(overrides):
    part = find_part(line_of(f"+clipx={overrides}"), "stale samples")
    assert_names(part, "corrected neither", "stale samples", "rollout engine")


@pytest.mark.parametrize(
    "overrides",
    [
        f"grpo {STALE_SAMPLES} {TOKEN_WEIGHTS}",
        f"grpo {STALE_SAMPLES} {BYPASSED}",
        f"grpo {PULLED_TO_SAMPLER} {STALE_SAMPLES} {TOKEN_WEIGHTS}",
        f"grpo {PULLED_TO_SAMPLER} {STALE_SAMPLES} {SEQUENCE_REJECTION}",
        f"grpo {PULLED_TO_SAMPLER} {STALE_SAMPLES} {BYPASSED}",
        f"m2po {STALE_SAMPLES}",
        f"m2po {PULLED_TO_SAMPLER} {STALE_SAMPLES}",
        f"grpo +clipx/mask=icepop {STALE_SAMPLES}",
        f"grpo +clipx/mask=icepop {PULLED_TO_SAMPLER} {STALE_SAMPLES}",
        # In this mode no sample is stale.
        f"grpo {TRAINER_MODE}=sync {LOG_PROBS_RETURNED}",
    ],
)
def test_samples_that_are_corrected_or_not_stale_are_not_named(overrides):
    assert "stale samples" not in line_of(f"+clipx={overrides}")


def test_verls_switch_of_torch_compile_reaches_auto_and_nothing_else():
    for key in (f"{ACTOR}.use_torch_compile", f"{ACTOR}.fsdp_config.use_torch_compile"):
        switched_off = {key: False}
        assert f"compile=false (group: auto; from {key}=False);" in line_of(f"+clipx=grpo {key}=False")
        node = actor_of(merge(["+clipx=grpo"], switched_off)).policy_loss.clipx
        assert node.compile is False and not node.functions("cuda").compiled
        set_by_user = merge(["+clipx=grpo"], {**switched_off, "clipx.compile": True})
        assert actor_of(set_by_user).policy_loss.clipx.compile is True
    assert actor_of(merge(["+clipx=grpo"])).policy_loss.clipx.functions("cuda").compiled


AT_FIRST_UPDATE = "recomputed with the weights at the start of a rollout batch's first update"
AT_LAST_TRANSFER = "recomputed with the weights that the rollout last received"


@pytest.mark.parametrize(
    ("overrides", "source", "updates"),
    [
        ("", AT_FIRST_UPDATE, "4 updates per rollout batch: clipping can act"),
        (ONE_MINI_BATCH, AT_FIRST_UPDATE, f"1 update per rollout batch, {ONLY_AT_RATIO_ONE}"),
        (
            f"{ONE_MINI_BATCH} {ACTOR}.ppo_epochs=2",
            AT_FIRST_UPDATE,
            "2 updates per rollout batch: clipping can act",
        ),
        # The older trainer, and the experimental ones, read nothing of trainer.v1.
        (
            f"trainer.use_v1=False {SEPARATE_ASYNC}",
            AT_FIRST_UPDATE,
            "4 updates per rollout batch: clipping can act",
        ),
        (f"rollout.nnodes=1 {SEPARATE_ASYNC}", AT_FIRST_UPDATE, "4 updates per rollout batch: clipping can act"),
        (
            f"async_training.require_batches=2 {SEPARATE_ASYNC}",
            AT_LAST_TRANSFER,
            "2 updates per rollout batch: clipping can act",
        ),
        (
            f"{TRAINER_MODE}=colocate_async {ONE_MINI_BATCH}",
            AT_FIRST_UPDATE,
            f"1 update per rollout batch, {ONLY_AT_RATIO_ONE}",
        ),
        (
            f"{BYPASSED} {ONE_MINI_BATCH}",
            "are the rollout's own (bypass_mode)",
            "1 update per rollout batch: clipping can act",
        ),
        # 1024 prompts in four parts of one mini-batch, each a step of the trainer.
        (
            f"{SEPARATE_ASYNC} trainer.v1.separate_async.parameter_sync_step=4",
            AT_LAST_TRANSFER,
            "1 update per rollout batch: clipping can act",
        ),
        ("data.train_batch_size=null", AT_FIRST_UPDATE, "an unknown number of updates per rollout batch"),
        # Lopti's second pass starts away from ratio 1.
        (
            f"+clipx/update=lopti {ONE_MINI_BATCH}",
            AT_FIRST_UPDATE,
            "1 update per rollout batch and pass of Lopti: clipping can act",
        ),
        (
            f"+clipx/update=lopti {ONE_MINI_BATCH} clipx.update.order=low_only",
            AT_FIRST_UPDATE,
            f"1 update per rollout batch, {ONLY_AT_RATIO_ONE}",
        ),
    ],
)
def test_where_old_log_probs_come_from_and_whether_clipping_can_act(overrides, source, updates):
    old_log_probs, last = split_line(line_of(f"+clipx=grpo {overrides}"))[-2:]
    assert old_log_probs.startswith("old_log_probs ") and source in old_log_probs
    assert last.startswith(updates)


@pytest.mark.parametrize(
    ("overrides", "what_can_act"),
    [
        # Their ratio is to the sampler, whose probabilities differ from those that the trainer recomputes.
        (f"m2po {LOG_PROBS_RETURNED}", ": clipping can act"),
        (
            f"custom clipx.function=tests.example_losses:ToSampler {LOG_PROBS_RETURNED}",
            ": a limit inside the gradient weight can act",
        ),
        (f"m2po +clipx/pull=k2 {LOG_PROBS_RETURNED}", ": clipping can act"),
        ("m2po clipx.behaviour=old", f", {ONLY_AT_RATIO_ONE}"),
        ("clip_cov", ": the draw can act"),
        ("kl_cov", ", at ratio 1 but for rounding: the penalty has nothing else to act on"),
    ],
)
def test_what_can_act_at_one_update_a_rollout_batch(overrides, what_can_act):
    updates = find_part(line_of(f"+clipx={overrides} {ONE_MINI_BATCH}"), "per rollout batch")
    assert updates.partition(" (to make")[0] == f"1 update per rollout batch{what_can_act}"


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_method_that_says_nothing_acts_at_ratio_1_leaves_the_weight_at_1(name):
    old_log_prob = -3 * torch.rand(16, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # Advantages that go with the log-probabilities, so that covariances are large.
    advantages = 2 * (old_log_prob + 1.5)
    rollout_log_prob = old_log_prob + 0.3 * old_log_prob.sin()
    ratio = torch.ones_like(old_log_prob)
    tokens = tokens_at(ratio, advantages, old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob)
    method = METHODS[name]()
    weight = apply_method(method, tokens).weight
    assert bool((weight - 1).abs().max() > 1e-9) == bool(method.acts_at_ratio_one)


def test_without_a_trainers_name_nothing_is_claimed_of_old_log_probs():
    settings = actor_of(merge(["+clipx=grpo"])).policy_loss.clipx
    assert "old_log_probs are the trainer's; an unknown number" in describe("clipx_grpo", settings, RunRecord()).line


@pytest.mark.parametrize(("rank", "times"), [(0, 1), (1, 0)])
def test_rank_0_of_the_workers_prints_the_drivers_line(capsys, monkeypatch, rank, times):
    monkeypatch.setattr("verl_clipx.training.worker.training_worker.get_device_id", lambda: "cpu")
    config = merge(["+clipx=sapo"], {f"{CORRECTION}.rollout_is": "sequence", f"{ACTOR}.use_torch_compile": False})
    line = resolve_into_config(config, group="sapo").record.line
    losses = []

    class VerlWorker:
        def set_loss_fn(self, loss_fn):
            losses.append(loss_fn)

    class Worker(ClipxTraining, VerlWorker):
        """verl's worker with the plugin's part of it, and an engine on which nothing is trained."""

    worker = Worker()
    worker.rank = rank
    worker.engine_config = None
    worker.engine = SimpleNamespace(
        optimizer_step=None,
        infer_batch=None,
        module=None,
        is_mp_src_rank_with_outputs=lambda: True,
        get_data_parallel_rank=lambda: rank,
        get_data_parallel_size=lambda: 2,
    )
    worker.set_loss_fn(partial(ppo_loss, config=actor_of(config)))
    assert losses and capsys.readouterr().out.splitlines().count(line) == times


def test_a_whole_number_keeps_its_digits_where_a_fraction_is_cut_to_six():
    assert format_value(1234567) == "1234567"
    assert format_value(0.12345678) == "0.123457"
