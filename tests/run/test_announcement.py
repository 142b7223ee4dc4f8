"""The line that driver and workers print about a run.

Covers: by overrides on verl's configuration: scope or what limits the weight, what differs from which group, averages
and the paper's, rollout correction and its lack on stale samples, the policy that the ratio is to, temperature, verl's
distillation loss, sampling that biases ratios to the rollout policy, what no test has run, where old_log_probs come
from in each trainer, updates per rollout batch, whether clipping can act, what is traced; a worker's rank 0 prints the
line.
Not covered: the line in verl's entry modules (test_start.py); what a trainer really does with old_log_probs.
"""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import verl.trainer
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.utils.losses import ppo_loss

from tests.claims.configuration import ACTOR, actor_of, merged
from verl_clipx.base.refusal import Refusal
from verl_clipx.run.announcement import announcement
from verl_clipx.run.facts import RunFacts
from verl_clipx.run.start import decide
from verl_clipx.worker.training_worker import ClipxTraining

V1 = "trainer.v1.trainer_mode"
BYPASS = "algorithm.rollout_correction.bypass_mode"
ROLLOUT = "actor_rollout_ref.rollout"


RATIO = "ratio to the policy of old_log_probs"
# Of verl's default engine.
NO_TEST = f"no test has run {ACTOR}.strategy=fsdp"


def line_of(*groups, group=None, **values):
    return decide(merged(list(groups), values), group=group or groups[0].partition("=")[2]).line


@pytest.mark.parametrize(
    ("groups", "values", "expected"),
    [
        (["+clipx=acpo"], {}, "clipx: clipx_acpo (+clipx=acpo), scope mini_batch, every parameter as in its group;"),
        (
            ["+clipx=acpo_reference"],
            {"clipx.alpha": 2, "clipx.epsilon_max": None},
            "clipx: clipx_acpo (+clipx=acpo_reference), scope micro_batch, alpha=2 (group: 3), "
            "epsilon_max=null (group: 3);",
        ),
        (["+clipx=bapo"], {"clipx.scope": "lagged"}, "scope lagged, scope=lagged (group: mini_batch);"),
        (["+clipx=gspo"], {}, "clipx: clipx_gspo (+clipx=gspo), fixed bounds on the sequence's ratio, every parameter"),
        (
            ["+clipx=grpo", "+clipx/update=lopti"],
            {"clipx.compile": False},
            "fixed bounds, compile=false (group: auto), update=Lopti(eta=0.5, equal=true,",
        ),
        (
            ["+clipx=grpo"],
            {"clipx.clip_low": 0.2, "clipx.clip_high": None},
            "clip_low=0.2 (group: 0.8; unusual, mostly 0.5 to 0.99), clip_high=null (group: 1.2);",
        ),
        (["+clipx=gspo"], {"clipx.clip_high": 1.28}, "clip_high=1.28 (group: 1.0004; unusual, mostly 1 to 1.01);"),
        (
            ["+clipx=dppo"],
            {f"{ACTOR}.clip_ratio_low": 0.1},
            f"threshold_low=0.1 (group: 0.2; from {ACTOR}.clip_ratio_low=0.1);",
        ),
        (
            ["+clipx=custom"],
            {"clipx.function": "tests.example_losses:soft", "clipx.log_ratio_clamp": 5},
            "clipx: clipx_tests_soft (+clipx=custom), fixed bounds, log_ratio_clamp=5 (group: 20);",
        ),
        (
            ["+clipx=observe"],
            {f"{ACTOR}.policy_loss.loss_mode": "gpg"},
            f"loss gpg, observed (+clipx=observe); loss_agg_mode token-mean, if this loss follows it; {NO_TEST}; old",
        ),
    ],
)
def test_the_loss_its_scope_and_what_differs_from_its_group(groups, values, expected):
    assert expected in line_of(*groups, **values)


@pytest.mark.parametrize("group", ["+clipx=acpo", "+clipx=observe"])
def test_what_is_traced(group, monkeypatch, tmp_path):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", f"{tmp_path}/metrics.jsonl")
    line = line_of(group, "+clipx/trace=prompts", **{"clipx.trace.fraction": 0.125})
    assert line.endswith(f"; 12.5 % of the prompts traced in one of 10 rollout batches, to {tmp_path}/traces")
    assert "trace" not in line_of(group)


DISTILLED = {"distillation.enabled": True, "distillation.distillation_loss.distillation_loss_coef": 0.5}


@pytest.mark.parametrize(
    ("group", "loss"), [("+clipx=acpo", "as in its group"), ("+clipx=observe", "observed (+clipx=observe)")]
)
def test_verls_distillation_loss_beside_the_policy_loss_is_named(group, loss):
    expected = f"{loss}; verl's distillation loss k3 is added to it with coefficient 0.5; loss_agg_mode"
    assert expected in line_of(group, **DISTILLED)
    assert "distillation" not in line_of(group, **{"distillation.enabled": False})


SAMPLED = {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.top_p": 0.8}
BIASED = (
    f"are biased by {ROLLOUT}.top_p=0.8, {ROLLOUT}.logprobs_mode=processed_logprobs: vllm's log-probabilities are over"
)


@pytest.mark.parametrize(
    ("group", "values", "expected"),
    [
        ("+clipx=acpo", SAMPLED, f"; ratios to the rollout policy, which only metrics use, {BIASED}"),
        ("+clipx=observe", {**SAMPLED, BYPASS: True}, f"; ratios to the rollout policy {BIASED}"),
        ("+clipx=acpo", {**SAMPLED, f"{ROLLOUT}.calculate_log_probs": False}, None),
        ("+clipx=acpo", {**SAMPLED, f"{ROLLOUT}.top_p": 1.0, f"{ROLLOUT}.temperature": 0.9}, None),
    ],
)
def test_sampling_that_biases_ratios_to_the_rollout_policy_is_named(group, values, expected):
    line = line_of(group, **values)
    assert expected in line if expected else "biased" not in line


def test_a_group_of_ones_own_is_named_and_held_against_the_method():
    line = line_of("+clipx=dapo", group="mine")
    assert line.startswith("clipx: clipx_grpo (+clipx=mine), fixed bounds, clip_high=1.28 (group: 1.2);")


UNBOUNDED = {"clipx.clip_low": None, "clipx.clip_high": None}


@pytest.mark.parametrize(
    ("group", "values", "limit", "end"),
    [
        ("grpo", {}, "fixed bounds", "clipping can act"),
        ("grpo", UNBOUNDED, "no bounds but dual_clip", "dual_clip can act"),
        ("grpo", {"clipx.clip_low": 0, "clipx.clip_high": None, "clipx.dual_clip": None}, "no bounds", "nothing clips"),
        ("cispo_acpo", UNBOUNDED, "no bounds but mask_low and mask_high", "mask_low and mask_high can act"),
        ("dcpo", {}, "bounds by each token's old probability", "clipping can act"),
        ("dppo", {}, "fixed thresholds on the divergence", "clipping can act"),
        ("m2po", {}, "scope mini_batch", "clipping can act"),
        ("sapo", {}, "a soft gate and no bounds", "the gate can act"),
        ("topr", {}, "truncated weights and no bounds", "the truncation can act"),
        ("topr", {"clipx.negative_low": 1}, "constant weights and no bounds", "nothing clips"),
        ("custom", {"clipx.function": "tests.example_losses:soft"}, "fixed bounds", "clipping can act"),
        (
            "custom",
            {"clipx.function": "tests.example_losses:Slowing"},
            "no bounds",
            "a limit inside the gradient weight can act",
        ),
    ],
)
def test_what_limits_the_weight_and_can_act(group, values, limit, end):
    line = line_of(f"+clipx={group}", **values)
    assert f" (+clipx={group}), {limit}, " in line
    assert line.endswith(f"4 updates per rollout batch: {end}")


AGG = f"{ACTOR}.loss_agg_mode"
SEQUENCES = f"(the paper averages each sequence first; set {AGG}=seq-mean-token-mean for that)"


@pytest.mark.parametrize(
    ("group", "of_paper"),
    [*((group, SEQUENCES) for group in ("sapo", "gspo", "topr", "acpo", "acpo_reference", "grpo")), ("dapo", "")],
)
def test_a_paper_that_averages_otherwise_is_named(group, of_paper):
    said = f"; loss_agg_mode token-mean {of_paper}; {NO_TEST}; {RATIO}; old_log_probs ".replace(" ;", ";")
    assert said in line_of(f"+clipx={group}")
    other = line_of(f"+clipx={group}", **{AGG: "seq-mean-token-mean"})
    assert "loss_agg_mode seq-mean-token-mean" in other and (group == "dapo") == ("averages over all tokens" in other)


CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize("group", ["grpo", "observe"])
def test_rollout_correction_and_temperature(group):
    line = line_of(
        f"+clipx={group}",
        **{
            f"{CORRECTION}.rollout_is": "token",
            f"{CORRECTION}.rollout_is_threshold": "0.5_5",
            f"{CORRECTION}.rollout_is_batch_normalize": True,
            f"{CORRECTION}.rollout_rs": "seq_mean_k3",
            f"{CORRECTION}.rollout_rs_threshold": 0.03,
            "actor_rollout_ref.rollout.temperature": 0.6,
        },
    )
    ratio = f" {RATIO};" if group == "grpo" else ""
    assert (
        "; rollout correction rollout_is=token (threshold 0.5_5, normalised over the batch), rollout_rs=seq_mean_k3 "
        f"(threshold 0.03); log-probabilities at temperature 0.6; {NO_TEST};{ratio} old_log_probs "
    ) in line
    assert not {"correction", "temperature"} & set(line_of(f"+clipx={group}").split())


STALE = {V1: "colocate_async", f"{ROLLOUT}.calculate_log_probs": True}
UNCORRECTED = "not corrected for the samples' staleness and for the rollout engine"


@pytest.mark.parametrize(
    ("groups", "values"),
    [
        (["+clipx=grpo"], {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": 2}),
        (["+clipx=grpo"], {BYPASS: True}),
        (["+clipx=grpo", "+clipx/mask=icepop"], {}),
        (["+clipx=m2po"], {}),
        (["+clipx=grpo"], {V1: "sync"}),
    ],
)
def test_stale_samples_that_nothing_corrects_are_named_and_refused_where_a_correction_is_required(groups, values):
    corrected = line_of(*groups, **STALE | values, **{"clipx.correction": "required"})
    assert UNCORRECTED not in corrected
    assert f"; {UNCORRECTED}; " in line_of("+clipx=grpo", **STALE)
    with pytest.raises(Refusal) as raised:
        line_of("+clipx=grpo", **STALE, **{"clipx.correction": "required"})
    assert (raised.value.key, raised.value.value) == ("clipx.correction", "required")
    assert all(f"{key}=" in raised.value.advice for key in (f"{CORRECTION}.rollout_is", BYPASS))


@pytest.mark.parametrize(
    ("group", "values", "policy"),
    [
        ("grpo", {}, "of old_log_probs"),
        ("grpo", {BYPASS: True, f"{ROLLOUT}.calculate_log_probs": True}, "that sampled"),
        ("m2po", {f"{ROLLOUT}.calculate_log_probs": True}, "that sampled"),
        ("observe", {}, None),
    ],
)
def test_the_policy_that_the_ratio_is_to(group, values, policy):
    line = line_of(f"+clipx={group}", **values)
    assert f"; ratio to the policy {policy}; " in line if policy else "ratio to" not in line


def test_verls_log_probabilities_are_of_the_tempered_policy():
    logits, temperature = torch.tensor([[1.0, 3.0]]), torch.tensor([[0.5]])
    scaled = transformer_impl._scale_logits_by_temperature(logits, temperature, is_unit_temperature=False)
    assert scaled.tolist() == [[2.0, 6.0]]
    # As text: importing the v1 trainers takes seconds.
    for trainer in ("ppo/ray_trainer.py", "ppo/v1/trainer_base.py"):
        source = (Path(verl.trainer.__path__[0]) / trainer).read_text()
        assert "self.config.actor_rollout_ref.rollout.temperature" in source


def test_verls_switch_of_torch_compile_reaches_auto_and_nothing_else():
    for key in (f"{ACTOR}.use_torch_compile", f"{ACTOR}.fsdp_config.use_torch_compile"):
        off = {key: False}
        assert f"compile=false (group: auto; from {key}=False);" in line_of("+clipx=grpo", **off)
        for group in ("grpo", "observe"):
            node = actor_of(merged([f"+clipx={group}"], off)).policy_loss.clipx
            assert node.compile is False and not node.functions("cuda").compiled
            insisting = merged([f"+clipx={group}"], {**off, "clipx.compile": True})
            assert actor_of(insisting).policy_loss.clipx.compile is True
    assert actor_of(merged(["+clipx=grpo"])).policy_loss.clipx.functions("cuda").compiled


FIRST = "recomputed with the weights at the start of a rollout batch's first update;"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, f"{FIRST} 4 updates per rollout batch: clipping can act"),
        ({"data.train_batch_size": 256}, f"{FIRST} 1 update per rollout batch, at ratio 1: clipping cannot act"),
        ({"data.train_batch_size": 256, f"{ACTOR}.ppo_epochs": 2}, "2 updates per rollout batch: clipping can act"),
        # The older trainer, and the experimental ones, read nothing of trainer.v1.
        ({"trainer.use_v1": False, V1: "separate_async"}, f"{FIRST} 4 updates per rollout batch: clipping can act"),
        ({"rollout": {"nnodes": 1}, V1: "separate_async"}, f"{FIRST} 4 updates per rollout batch: clipping can act"),
        (
            {"async_training": {"require_batches": 2}, V1: "separate_async"},
            "the weights that the rollout last received; 2 updates per rollout batch: clipping can act",
        ),
        ({V1: "colocate_async", "data.train_batch_size": 256}, f"{FIRST} 1 update per rollout batch, at ratio 1: clip"),
        (
            {BYPASS: True, "data.train_batch_size": 256},
            "are the rollout's own (bypass_mode); 1 update per rollout batch: clipping can act",
        ),
        # 1024 prompts in four parts of one mini-batch, each a step of the trainer.
        (
            {V1: "separate_async", "trainer.v1.separate_async.parameter_sync_step": 4},
            "the weights that the rollout last received; 1 update per rollout batch: clipping can act",
        ),
        ({"data.train_batch_size": None}, f"{FIRST} an unknown number of updates per rollout batch"),
    ],
)
def test_where_old_log_probs_come_from_and_whether_clipping_can_act(values, expected):
    assert expected in line_of("+clipx=grpo", **values)


def test_loptis_second_pass_starts_away_from_ratio_1():
    batch = {"data.train_batch_size": 256}
    line = line_of("+clipx=grpo", "+clipx/update=lopti", **batch)
    assert line.endswith("1 update per rollout batch and pass of Lopti: clipping can act")
    line = line_of("+clipx=grpo", "+clipx/update=lopti", **batch, **{"clipx.update.order": "low_only"})
    assert "1 update per rollout batch, at ratio 1: clipping cannot act" in line


def test_without_a_trainers_name_nothing_is_claimed_of_old_log_probs():
    policy_loss = actor_of(merged(["+clipx=grpo"])).policy_loss
    unknown = SimpleNamespace(clipx=policy_loss.clipx, run=RunFacts())
    assert "old_log_probs are the trainer's; an unknown number" in announcement(unknown)


@pytest.mark.parametrize(("rank", "times"), [(0, 1), (1, 0)])
def test_rank_0_of_the_workers_prints_the_drivers_line(capsys, monkeypatch, rank, times):
    monkeypatch.setattr("verl_clipx.worker.training_worker.get_device_id", lambda: "cpu")
    config = merged(["+clipx=sapo"], {f"{CORRECTION}.rollout_is": "sequence", f"{ACTOR}.use_torch_compile": False})
    line = decide(config, group="sapo").line
    given = []
    of_verl = type("Verl", (), {"set_loss_fn": lambda self, loss_fn: given.append(loss_fn)})
    worker = type("Worker", (ClipxTraining, of_verl), {})()
    worker.rank, worker.engine_config = rank, None
    worker.engine = SimpleNamespace(
        optimizer_step=None,
        infer_batch=None,
        module=None,
        get_data_parallel_rank=lambda: rank,
        get_data_parallel_size=lambda: 2,
    )
    worker.set_loss_fn(partial(ppo_loss, config=actor_of(config)))
    assert given and capsys.readouterr().out.splitlines().count(line) == times
