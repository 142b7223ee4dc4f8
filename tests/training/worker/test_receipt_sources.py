"""The receipt's other half: what the announced gradient is computed from, against what was not read from there.

A worker trains one rollout batch as verl's does, in two epochs of two updates of two micro-batches. Covers: every
correction that verl's own code makes passes, and what is changed on the way to the loss is found (`FAULTS`), be it
changed in verl's trainer, in the worker or in the engine. Not covered: the gradient itself
(tests/training/worker/test_receipt.py).
"""

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils import tensordict_utils as tu

from tests.jagged import jagged, micro_batch
from tests.training.worker.test_receipt import CRITERIA, rejection_overrides
from tests.training.worker.updates import ROWS, Update, VerlsWorker
from verl_clipx.losses.contract.contract import example
from verl_clipx.run.config import build
from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.training.worker import training_worker
from verl_clipx.training.worker.layout import TokenPass, pad_rows
from verl_clipx.training.worker.policy_loss import current_micro_batch
from verl_clipx.training.worker.receipt import SETTINGS, Receipt
from verl_clipx.training.worker.training_worker import ClipxTraining

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
FOUR_UPDATES = ("data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=1", f"{ACTOR}.ppo_epochs=2")
LOG_PROBS_RETURNED = "actor_rollout_ref.rollout.calculate_log_probs=true"
MEAN_OF_SEQUENCES = f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"


def leave_unchanged(data, update):
    """Leaves the data as they are."""


class EpochWorker(VerlsWorker):
    """As verl's: mini-batches of a rollout batch, each in micro-batches; the policy moves after each update.

    `change_mini_batch` and `change_micro_batch` change the data in the worker and in the engine; they get the data and
    the number of the update.
    """

    change_mini_batch = staticmethod(leave_unchanged)
    change_micro_batch = staticmethod(leave_unchanged)
    mini_batches = ([4, 0, 2], [1, 5, 3])
    update = 0
    model_config = SimpleNamespace(get=lambda key, default=None: default)
    engine_config = SimpleNamespace(
        use_dynamic_bsz=False, max_token_len_per_gpu=None, micro_batch_size_per_gpu=2, use_fused_kernels=False
    )

    def __init__(self, config, batch):
        self.current = {**batch, "log_prob": batch["old_log_prob"].clone()}
        super().__init__(config, None)
        self.engine.eval_mode = lambda **_: contextlib.nullcontext()
        self.engine.forward_backward_batch = self.evaluate

    def micro_batches(self, data):
        """Pairs of a micro-batch and what the model says of it."""
        tokens = int(pad_rows(data["loss_mask"]).sum())
        tu.assign_non_tensor(data, batch_num_tokens=tokens, dp_size=1, global_batch_size=len(data))
        for rows in ([2], [0, 1])[3 - len(data) :]:
            part = tu.index_select_tensor_dict(data, rows)
            output = micro_batch(self.current, part["row"].tolist(), entropy=self.current["entropy"])[1]
            yield part, output

    def evaluate(self, data, loss_function, forward_only):
        for part, output in self.micro_batches(data):
            loss_function(output, part)

    def train_mini_batch(self, data):
        for _ in range(2):
            for rows in self.mini_batches:
                mini_batch = tu.index_select_tensor_dict(data, rows)
                self.change_mini_batch(mini_batch, self.update)
                output = self.train_batch(mini_batch)
        return output

    def train_batch(self, data):
        for part, output in self.micro_batches(data):
            self.change_micro_batch(part, self.update)
            output["log_probs"].requires_grad_(True)
            self.loss_fn(model_output=output, data=part)[0].backward()
        self.update += 1
        moves = torch.linspace(-0.3, 0.3, self.current["log_prob"].numel())
        self.current["log_prob"] = self.current["log_prob"] + moves.view_as(self.current["log_prob"])
        self.engine.optimizer_step()
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": {}})


class Worker(ClipxTraining, EpochWorker):
    """The plugin's part of a worker on top of verl's."""


def pad(data):
    """Pads the data as verl's older trainer hands them on."""
    for name in (
        "response_mask",
        "loss_mask",
        "old_log_probs",
        "rollout_log_probs",
        "advantages",
        "rollout_is_weights",
    ):
        if name in data:
            data[name] = pad_rows(data[name])
    width = data["response_mask"].shape[1]
    for name in ("prompts", "responses"):
        data[name] = data[name].to_padded_tensor(0)
    # A prompt has one or two tokens and is padded on its left, a response on its right.
    prompt_width = data["prompts"].shape[1]
    prompt_lengths = torch.tensor([1 + row % 2 for row in ROWS])[:, None]
    in_prompt = prompt_lengths > prompt_width - 1 - torch.arange(prompt_width)
    in_response = torch.arange(width) < pad_rows(data["present"]).sum(1)[:, None]
    data["attention_mask"] = torch.cat([in_prompt, in_response], 1).long()


def correct(data, both_masks=False, **options):
    """Corrects as verl's own code in decoupled mode, in v1's way or, `both_masks`, in that of the older trainer."""
    width = pad_rows(data["response_mask"]).shape[1]
    fields = ("old_log_probs", "rollout_log_probs", "response_mask")
    old, rollout, mask = (pad_rows(data[name])[:, :width] for name in fields)
    weights, mask, _ = compute_rollout_correction_and_rejection_mask(old, rollout, mask.int(), **options)
    lengths = data["responses"].offsets().diff().tolist()

    def cut_rows(values):
        return jagged([row[:length] for row, length in zip(values, lengths, strict=True)])

    data["response_mask"] = cut_rows(mask.bool())
    if both_masks:
        data["loss_mask"] = data["response_mask"].clone()
    if weights is not None:
        data["rollout_is_weights"] = cut_rows(weights.batch["rollout_is_weights"])


def receipts_of(worker):
    return [observer for observer in worker.observers if isinstance(observer, Receipt)]


def train(actor, monkeypatch, *overrides, change_rollout_batch=None, rollout=None, **worker_attributes):
    """Trains a rollout batch under clipx.receipt=stop.

    Args:
        change_rollout_batch: what verl's trainer does to the data before the worker gets them.
        rollout: log-probabilities in place of the example's.
        worker_attributes: in place of those of `EpochWorker`.
    """
    monkeypatch.setattr(training_worker, "get_device_id", lambda: "cpu")
    batch = example(spread=0.3) | (rollout or {})
    distance = 0.2 * torch.rand(batch["mask"].shape, generator=torch.Generator().manual_seed(1))
    batch["sampler_log_prob"] = batch["rollout_log_prob"] - distance
    if f"{CORRECTION}.bypass_mode=True" in overrides:
        batch["old_log_prob"] = batch["sampler_log_prob"]
    worker = Worker(actor(LOG_PROBS_RETURNED, "clipx.receipt=stop", *FOUR_UPDATES, *overrides), batch)
    for name, value in worker_attributes.items():
        setattr(worker, name, value)
    data, _ = micro_batch(batch, ROWS, sequences=3, reference=batch["old_log_prob"] - 0.1)
    data["loss_mask"] = data["response_mask"].clone()
    data["row"] = torch.tensor(ROWS)
    data["present"] = jagged([torch.ones_like(row) for row in data["responses"].unbind()])
    if change_rollout_batch is not None:
        change_rollout_batch(data)
    worker.train_mini_batch(data)
    assert not receipts_of(worker)


def correction_overrides(**options):
    return [f"{CORRECTION}.{name}='{value}'" for name, value in options.items()]


BYPASS = (f"{CORRECTION}.bypass_mode=True",)
KL_TERM = (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.5")
REJECTED_BY_THE_LOSS = (*BYPASS, *correction_overrides(rollout_rs="token_k1", rollout_rs_threshold="0.5_2"))
TOKEN_WEIGHTS = dict(rollout_is="token", rollout_is_threshold="2.0")
# Options of verl's rollout correction, by what they ask for.
CORRECTIONS = {
    "token": TOKEN_WEIGHTS,
    "sequence": dict(rollout_is="sequence", rollout_is_threshold="1.5"),
    "bounds": dict(rollout_is="token", rollout_is_threshold="0.9_1.2"),
    "normalised": TOKEN_WEIGHTS | dict(rollout_is_batch_normalize=True),
    "rejection": dict(rollout_rs="token_k1", rollout_rs_threshold="0.9_1.2"),
    "both": TOKEN_WEIGHTS | dict(rollout_rs="seq_mean_k3", rollout_rs_threshold="0.01"),
    "two criteria": dict(rollout_rs="token_k1,seq_mean_k3", rollout_rs_threshold="0.9_1.2,0.01"),
}
CORRECTIONS["all"] = CORRECTIONS["sequence"] | CORRECTIONS["rejection"]
CORRECTIONS["sequence and two criteria"] = CORRECTIONS["sequence"] | CORRECTIONS["two criteria"]
CORRECTIONS["sequence, normalised"] = CORRECTIONS["sequence"] | dict(rollout_is_batch_normalize=True)
CORRECTIONS["sequence and sequences"] = CORRECTIONS["sequence, normalised"] | dict(
    rollout_rs="seq_mean_k3", rollout_rs_threshold="0.01"
)


def mask_tool_tokens_and_padding(data, padding_rows=()):
    """Takes each row's second token, as if a tool had written it, and the rows that pad the batch out of both masks."""
    for name in ("response_mask", "loss_mask"):
        rows = []
        for number, row in enumerate(data[name].unbind()):
            is_kept = (torch.arange(len(row)) != 1) & (number not in padding_rows)
            rows.append(row & is_kept)
        data[name] = jagged(rows)


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("both_masks", [False, True], ids=["v1", "v0"])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_what_verls_own_code_corrects_passes(actor, monkeypatch, few_probes, name, both_masks, turns):
    options = CORRECTIONS[name]

    def change_rollout_batch(data):
        if turns == 2:
            mask_tool_tokens_and_padding(data, padding_rows=[3])
        correct(data, both_masks, **options)
        if both_masks:
            pad(data)

    overrides = correction_overrides(**options)
    train(actor, monkeypatch, "+clipx=grpo", *overrides, change_rollout_batch=change_rollout_batch)


@pytest.mark.parametrize("name", ["token", "normalised"])
def test_weights_in_bfloat16_pass(actor, monkeypatch, few_probes, name):
    def correct_in_bfloat16(data):
        correct(data, **CORRECTIONS[name])
        data["rollout_is_weights"] = data["rollout_is_weights"].bfloat16()

    overrides = correction_overrides(**CORRECTIONS[name])
    train(actor, monkeypatch, "+clipx=grpo", *overrides, change_rollout_batch=correct_in_bfloat16)


@pytest.mark.parametrize(
    "overrides",
    [
        ("+clipx=acpo", "clipx.scope=lagged"),
        ("+clipx=m2po",),
        ("+clipx=kl_cov", MEAN_OF_SEQUENCES),
        ("+clipx=gspo", *BYPASS),
        ("+clipx=acpo", *REJECTED_BY_THE_LOSS),
        ("+clipx=acpo", "clipx.scope=lagged", *REJECTED_BY_THE_LOSS),
        ("+clipx=grpo", "+clipx/update=lopti"),
        ("+clipx=bapo", "+clipx/update=lopti"),
        ("+clipx=grpo", "+clipx/select=high_entropy"),
        ("+clipx=grpo", "+clipx/select=high_entropy", "clipx.select.over=mini_batch"),
        ("+clipx=acpo", "clipx.scope=lagged", "+clipx/mask=opsm", "clipx.mask.delta=0.01"),
        ("+clipx=acpo", MEAN_OF_SEQUENCES),
        ("+clipx=acpo", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum"),
        ("+clipx=acpo", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"+{ACTOR}.loss_scale_factor=100"),
        *((f"+clipx={method}", *KL_TERM) for method in ("acpo", "grpo", "cispo")),
        ("+clipx=acpo", "+clipx/shaping=advantage_reweighting"),
        ("+clipx=acpo", "+clipx/pull=k2", "clipx.pull.coefficient=0.3"),
        ("+clipx=acpo", "+clipx/select=low_entropy", "clipx.select.normaliser=selected"),
        pytest.param(("+clipx=acpo", "clipx.compile=true"), marks=pytest.mark.slow),
        *(("+clipx=grpo", *rejection_overrides(criterion)) for criterion in CRITERIA),
        *((f"+clipx={method}", *rejection_overrides("seq_mean_k3")) for method in ("acpo", "gspo")),
    ],
    ids=" ".join,
)
def test_what_a_run_announces_passes(actor, monkeypatch, few_probes, compile_by, overrides):
    # What Inductor makes of the graphs is compared in tests/losses/applying/test_compiled.py.
    compile_by("eager")
    train(actor, monkeypatch, *overrides)


def multiply(name, factor, first_update=0):
    """Return a change that multiplies a field, from an update on."""

    def change(data, update):
        if name in data and update >= first_update:
            data[name] = data[name] * factor

    return change


def set_sizes(**sizes):
    """Return a change that gives the mini-batch other sizes."""

    def change(data, update):
        tu.assign_non_tensor(data, **sizes)

    return change


def count_own_sequences(data, update):
    """Gives a micro-batch its own number of sequences in place of the mini-batch's."""
    tu.assign_non_tensor(data, global_batch_size=len(data))


def recompute_old_log_probs(data, update):
    """Sets old_log_probs as if they were recomputed before each update, by which every ratio is 1."""
    moves = torch.linspace(-0.3, 0.3, example()["log_prob"].numel()).view(len(ROWS), -1) * update
    rows = zip(data["row"].tolist(), data["old_log_probs"].unbind(), strict=True)
    data["old_log_probs"] = jagged([old + moves[row][: len(old)] for row, old in rows])


def reject_every_other_token(data, update=None):
    """Rejects tokens that nothing rejects."""
    data["response_mask"] = jagged([row & (torch.arange(len(row)) % 2 == 0) for row in data["response_mask"].unbind()])


def correct_with_changed_weights(change_row, both_masks=False, **options):
    """Return a change that corrects as verl's own code and then changes each row's weights."""

    def change(data):
        correct(data, both_masks, **options)
        data["rollout_is_weights"] = jagged([change_row(row) for row in data["rollout_is_weights"].unbind()])
        if both_masks:
            pad(data)

    return change


def correct_every_other_row(data, **options):
    """Leaves every other row's mask as before the rejection."""
    before = data["response_mask"].unbind()
    correct(data, **options)
    after = data["response_mask"].unbind()
    data["response_mask"] = jagged([pair[row % 2] for row, pair in enumerate(zip(before, after, strict=True))])


def mask_beyond_responses(data):
    """Makes both masks as long as the longest response."""
    pad(data)
    for name in ("response_mask", "loss_mask"):
        data[name] = torch.ones_like(data[name])


def begin_responses_earlier(data, update):
    """Begins a response a token earlier where its prompt has a second one."""
    data["attention_mask"] = torch.stack([row.roll(int(row[0])) for row in data["attention_mask"]])


def change_steps(monkeypatch, change):
    """Changes each update's step after it is planned."""
    original = training_worker.plan_step

    def plan_step(*arguments, **named):
        step = original(*arguments, **named)
        change(step)
        return step

    monkeypatch.setattr(training_worker, "plan_step", plan_step)


def scale(name, factor):
    """Return a change that multiplies an attribute of a step."""

    def change(step):
        setattr(step, name, getattr(step, name) * factor)

    return change


def add_to_statistics_and_decision(step):
    step.statistics = step.statistics + torch.arange(len(step.statistics))
    step.decision = step.decision + 0.1


NORMALISED_WEIGHTS = CORRECTIONS["normalised"]
SEQUENCE_WEIGHTS = CORRECTIONS["sequence"]
TWO_CRITERIA = CORRECTIONS["two criteria"]
SEQUENCE_WEIGHTS_AND_REJECTION = SEQUENCE_WEIGHTS | dict(rollout_rs="seq_mean_k3", rollout_rs_threshold="0.02")
LAGGED = ("+clipx=acpo", "clipx.scope=lagged")
SELECTED = ("+clipx=grpo", "+clipx/select=low_entropy")

# What the receipt's message says of several faults.
WEIGHT_DIFFERS = "a weight differs by"
REJECTION_DIFFERS = "rejects came as if it did not, or the reverse"
OTHER_ROWS = "receipt: {} of some rows are not those that the worker got"


class Fault(NamedTuple):
    """A fault on the way to the loss.

    Attributes:
        message: what the receipt's message says, a pattern.
        overrides: of the run, beside the method's.
        run: the fault, as for `train`.
    """

    message: str
    overrides: Sequence[str] = ()
    run: Mapping[str, Any] = MappingProxyType({})


FAULTS_OF_TRAINER = {
    "weights that nothing asks for": Fault(
        run=dict(change_rollout_batch=partial(correct, **TOKEN_WEIGHTS)),
        message="came with the weights of .*rollout_is=None",
    ),
    "inverse weights": Fault(
        overrides=correction_overrides(**TOKEN_WEIGHTS),
        run=dict(change_rollout_batch=correct_with_changed_weights(lambda row: 1 / row, **TOKEN_WEIGHTS)),
        message=WEIGHT_DIFFERS,
    ),
    "weights of 1": Fault(
        overrides=correction_overrides(**TOKEN_WEIGHTS),
        run=dict(change_rollout_batch=correct_with_changed_weights(torch.ones_like, **TOKEN_WEIGHTS)),
        message=WEIGHT_DIFFERS,
    ),
    "weights of a sequence": Fault(
        overrides=correction_overrides(**TOKEN_WEIGHTS),
        run=dict(change_rollout_batch=partial(correct, **SEQUENCE_WEIGHTS)),
        message=WEIGHT_DIFFERS,
    ),
    "another threshold of the weights": Fault(
        overrides=correction_overrides(**TOKEN_WEIGHTS),
        run=dict(change_rollout_batch=partial(correct, **TOKEN_WEIGHTS | {"rollout_is_threshold": "1.05"})),
        message=WEIGHT_DIFFERS,
    ),
    "inverse normalised weights": Fault(
        overrides=correction_overrides(**NORMALISED_WEIGHTS),
        run=dict(change_rollout_batch=correct_with_changed_weights(lambda row: 1 / row, **TOKEN_WEIGHTS)),
        message=WEIGHT_DIFFERS,
    ),
    "a factor on normalised weights": Fault(
        overrides=correction_overrides(**NORMALISED_WEIGHTS),
        run=dict(change_rollout_batch=correct_with_changed_weights(lambda row: 1.3 * row, **NORMALISED_WEIGHTS)),
        message="weights are divided by .*, but their mean is",
    ),
    "weights that were not normalised": Fault(
        overrides=correction_overrides(**CORRECTIONS["sequence, normalised"]),
        run=dict(change_rollout_batch=partial(correct, **SEQUENCE_WEIGHTS)),
        message="weights are divided by 1, but their mean is",
    ),
    "other weights beside a rejection in both masks": Fault(
        overrides=correction_overrides(**SEQUENCE_WEIGHTS_AND_REJECTION),
        run=dict(
            change_rollout_batch=correct_with_changed_weights(
                lambda row: 0.7 * row, both_masks=True, **SEQUENCE_WEIGHTS_AND_REJECTION
            )
        ),
        message=WEIGHT_DIFFERS,
    ),
    "other old log-probabilities in bypass mode": Fault(
        overrides=BYPASS,
        run=dict(change_rollout_batch=partial(multiply("old_log_probs", 0.9), update=0)),
        message="old_log_probs: .*bypass_mode=True announces the rollout's own, but one is",
    ),
    "a rejection that nothing asks for": Fault(
        run=dict(change_rollout_batch=reject_every_other_token),
        message=f"tokens that .*rollout_rs=None {REJECTION_DIFFERS}",
    ),
    "no rejection by two criteria": Fault(
        overrides=correction_overrides(**TWO_CRITERIA),
        message=REJECTION_DIFFERS,
    ),
    "no rejection by two criteria, padded": Fault(
        overrides=correction_overrides(**TWO_CRITERIA),
        run=dict(change_rollout_batch=pad),
        message=REJECTION_DIFFERS,
    ),
    "a rejection by two criteria on some rows": Fault(
        overrides=correction_overrides(**TWO_CRITERIA),
        run=dict(change_rollout_batch=partial(correct_every_other_row, **TWO_CRITERIA)),
        message=REJECTION_DIFFERS,
    ),
    "a mask beyond the responses": Fault(
        run=dict(change_rollout_batch=mask_beyond_responses),
        message=REJECTION_DIFFERS,
    ),
    "more rejected than announced": Fault(
        overrides=correction_overrides(**CORRECTIONS["rejection"]),
        run=dict(change_rollout_batch=reject_every_other_token),
        message=f"rollout_rs=token_k1 {REJECTION_DIFFERS}",
    ),
}
FAULTS_OF_WORKER = {
    "current for old log-probabilities in the worker": Fault(
        run=dict(change_mini_batch=recompute_old_log_probs),
        message=OTHER_ROWS.format("old_log_probs"),
    ),
    "other advantages in the second epoch": Fault(
        run=dict(change_mini_batch=multiply("advantages", 2.0, first_update=2)),
        message=OTHER_ROWS.format("advantages"),
    ),
    "weights changed in the worker": Fault(
        overrides=correction_overrides(**TOKEN_WEIGHTS),
        run=dict(
            change_rollout_batch=partial(correct, **TOKEN_WEIGHTS),
            change_mini_batch=multiply("rollout_is_weights", 2.0, first_update=1),
        ),
        message=OTHER_ROWS.format("rollout_is_weights"),
    ),
    "a row that is left out": Fault(
        run=dict(mini_batches=iter(([4, 0, 2], [1, 5, 3], [4, 0, 2], [1, 5]))),
        message="some rows of the rollout batch were trained more often",
    ),
    "each mini-batch twice before the next": Fault(
        run=dict(mini_batches=iter(([4, 0, 2], [4, 0, 2], [1, 5, 3], [1, 5, 3]))),
        message="some rows of the rollout batch were trained again before others",
    ),
}
FAULTS_OF_ENGINE = {
    "each micro-batch's own number of sequences": Fault(
        overrides=[MEAN_OF_SEQUENCES],
        run=dict(change_micro_batch=count_own_sequences),
        message="mini-batch's 1, 2 sequences, which has 3",
    ),
    "the rollout batch's number of sequences": Fault(
        overrides=[MEAN_OF_SEQUENCES],
        run=dict(change_micro_batch=set_sizes(global_batch_size=6)),
        message="6 sequences, which has 3",
    ),
    "a part of a sequence more": Fault(
        overrides=[MEAN_OF_SEQUENCES],
        run=dict(change_micro_batch=set_sizes(global_batch_size=3.45)),
        message="batch's 3.45 sequences, which has 3",
    ),
    "a part of a rank more": Fault(
        run=dict(change_micro_batch=set_sizes(dp_size=1.4)),
        message="1.4 ranks, which has 1",
    ),
    "another number of ranks": Fault(
        run=dict(change_micro_batch=set_sizes(dp_size=2)),
        message="2 ranks, which has 1",
    ),
    "current for old log-probabilities in the engine": Fault(
        run=dict(change_micro_batch=recompute_old_log_probs),
        message=OTHER_ROWS.format("old_log_probs"),
    ),
    "another mask in the engine": Fault(
        run=dict(change_micro_batch=reject_every_other_token),
        message=OTHER_ROWS.format("response_mask"),
    ),
    "another attention mask": Fault(
        overrides=BYPASS,
        run=dict(change_rollout_batch=pad, change_micro_batch=begin_responses_earlier),
        message="attention_mask of",
    ),
}
FAULTS = FAULTS_OF_TRAINER | FAULTS_OF_WORKER | FAULTS_OF_ENGINE


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_changed_on_the_way_to_the_loss_is_found(actor, monkeypatch, few_probes, name):
    fault = FAULTS[name]
    with pytest.raises(RuntimeError, match=fault.message):
        train(actor, monkeypatch, "+clipx=grpo", *fault.overrides, **fault.run)


@pytest.mark.parametrize("row", range(5))
def test_a_row_rounded_to_bfloat16_in_bypass_mode_is_found(actor, monkeypatch, few_probes, row):
    def round_one_row(data):
        rows = list(data["old_log_probs"].unbind())
        rows[row] = rows[row].bfloat16().to(rows[row])
        data["old_log_probs"] = jagged(rows)

    # The sixth row has no token.
    assert example()["mask"].any(1).tolist() == [True] * 5 + [False]
    with pytest.raises(RuntimeError, match="bypass_mode=True announces the rollout's own, but one is"):
        train(actor, monkeypatch, "+clipx=grpo", *BYPASS, change_rollout_batch=round_one_row)


def test_tokens_that_a_trainer_of_the_users_own_leaves_out_are_only_warned_of(actor, monkeypatch, few_probes, caplog):
    auto = ("+clipx=grpo", "clipx.receipt=auto")
    train(actor, monkeypatch, *auto, change_rollout_batch=reject_every_other_token)
    assert REJECTION_DIFFERS in caplog.text
    with pytest.raises(RuntimeError, match=REJECTION_DIFFERS):
        train(actor, monkeypatch, *auto, change_rollout_batch=mask_beyond_responses)


@pytest.mark.parametrize(
    ("overrides", "change", "message"),
    [
        pytest.param(
            LAGGED,
            scale("decision", 0.5),
            "the bounds are not those that the method decides",
            id="half of the decision",
        ),
        pytest.param(
            ("+clipx=acpo",),
            scale("decision", 0.5),
            "the bounds are not those",
            id="the decision of the mini-batch halved",
        ),
        pytest.param(
            SELECTED,
            scale("selected_tokens", 1.2),
            "selected tokens, and 12 were selected",
            id="more selected tokens",
        ),
        pytest.param(
            LAGGED,
            add_to_statistics_and_decision,
            "the bounds are not those that the method decid",
            id="other statistics than the decision's",
        ),
    ],
)
def test_a_decision_that_its_statistics_do_not_give_is_found(
    actor, monkeypatch, few_probes, overrides, change, message
):
    change_steps(monkeypatch, change)
    with pytest.raises(RuntimeError, match=message):
        train(actor, monkeypatch, *overrides)


@pytest.mark.parametrize("decided_from", [DecidedFrom.RATIO_ONE, DecidedFrom.MICRO_BATCH])
def test_statistics_at_ratio_1_are_those_of_the_trained_tokens(actor, monkeypatch, few_probes, decided_from):
    method = actor(*LAGGED).policy_loss.clipx.method

    def decide_from_other_tokens(step):
        step.decided_from = decided_from
        step.statistics = step.statistics.clone()
        # The ratios vary of a bin that the last micro-batch has no token in.
        step.statistics[-2] += 4 * step.statistics[3]
        step.decision = method.decide(step.statistics)

    change_steps(monkeypatch, decide_from_other_tokens)
    with pytest.raises(RuntimeError, match=r"the bounds differ by .* of their size from those of the tokens that were"):
        train(actor, monkeypatch, *LAGGED)


@pytest.mark.parametrize(("eta", "equal"), [(0.6, True), (0.5, False)])
def test_a_pass_of_lopti_ends_where_the_configuration_says(actor, monkeypatch, few_probes, eta, equal):
    def other_passes(policy_loss):
        return [TokenPass(name, eta, equal) for name in ("low", "high")]

    monkeypatch.setattr(training_worker, "token_passes", other_passes)
    message = f"Lopti's pass has eta={eta} and equal={equal}, and the settings have eta=0.5 and equal=True"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        train(actor, monkeypatch, "+clipx=grpo", "+clipx/update=lopti")


@pytest.mark.parametrize("number", range(5))
def test_one_bin_of_acpo_that_is_a_twentieth_wider_is_found(actor, monkeypatch, number):
    original = core_algos.POLICY_LOSS_REGISTRY["clipx_acpo"]

    def loss_with_wider_bin(**arguments):
        step = current_micro_batch().step
        if step.decision is not None:
            step.decision = step.decision.clone()
            step.decision[5 + number] *= 1.05
        return original(**arguments)

    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "clipx_acpo", loss_with_wider_bin)
    # A trained policy is nearly certain of most tokens, by which no bound of the lower bins is near.
    near_zero = {name: example()[name] * 0.02 for name in ("old_log_prob", "log_prob", "rollout_log_prob")}
    with pytest.raises(RuntimeError, match="on copies with made-up ratios the gradient differs"):
        train(actor, monkeypatch, "+clipx=acpo", rollout=near_zero)


def test_tokens_without_advantage_that_get_a_gradient_are_found(actor, monkeypatch, few_probes):
    original = core_algos.POLICY_LOSS_REGISTRY["clipx_grpo"]

    def loss_with_other_advantages(**arguments):
        advantages = arguments["advantages"]
        return original(**arguments | {"advantages": advantages.where(advantages != 0, 0.1)})

    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "clipx_grpo", loss_with_other_advantages)
    with pytest.raises(RuntimeError, match="on copies with made-up ratios the gradient differs"):
        train(actor, monkeypatch, "+clipx=grpo")


def set_dtype(name, dtype):
    """Return a change that hands a field on in another dtype."""

    def change(data, update):
        if name in data:
            data[name] = data[name].to(dtype)

    return change


def drop_field(name):
    """Return a change that drops a field that no loss of this run reads."""

    def change(data, update):
        data.pop(name, None)

    return change


SAME_VALUES = {
    "response_mask as int64": set_dtype("response_mask", torch.int64),
    "response_mask as float32": set_dtype("response_mask", torch.float32),
    "response_mask as uint8": set_dtype("response_mask", torch.uint8),
    "loss_mask as int64": set_dtype("loss_mask", torch.int64),
    "loss_mask as float32": set_dtype("loss_mask", torch.float32),
    "loss_mask as uint8": set_dtype("loss_mask", torch.uint8),
    "old_log_probs in a wider dtype": set_dtype("old_log_probs", torch.float64),
    "advantages in a wider dtype": set_dtype("advantages", torch.float64),
    "advantages in bfloat16": set_dtype("advantages", torch.bfloat16),
    "advantages in float16": set_dtype("advantages", torch.float16),
    "without the rollout's log-probabilities": drop_field("rollout_log_probs"),
    "without the reference's": drop_field("ref_log_prob"),
}


@pytest.mark.parametrize("name", SAME_VALUES)
def test_the_same_values_in_other_bytes_end_no_run(actor, monkeypatch, few_probes, name):
    train(actor, monkeypatch, "+clipx=grpo", change_micro_batch=SAME_VALUES[name])


def test_negative_zeros_in_place_of_zeros_end_no_run(actor, monkeypatch, few_probes):
    def set_some_advantages_to_zero(data):
        rows = data["advantages"].unbind()
        data["advantages"] = jagged([torch.where(torch.arange(len(row)) % 3 == 0, 0.0, row) for row in rows])

    def turn_zeros_negative(data, update):
        data["advantages"] = jagged([torch.where(row == 0, -0.0, row) for row in data["advantages"].unbind()])

    train(
        actor,
        monkeypatch,
        "+clipx=grpo",
        change_rollout_batch=set_some_advantages_to_zero,
        change_micro_batch=turn_zeros_negative,
    )


def test_advantages_that_come_in_bfloat16_end_no_run(actor, monkeypatch, few_probes):
    def round_advantages(data):
        data["advantages"] = data["advantages"].bfloat16()

    train(actor, monkeypatch, "+clipx=grpo", change_rollout_batch=round_advantages)


def test_other_advantages_in_bfloat16_are_found(actor, monkeypatch, few_probes):
    def round_and_negate(data, update):
        data["advantages"] = -data["advantages"].bfloat16()

    with pytest.raises(RuntimeError, match="receipt: advantages of some rows are not those that the worker got"):
        train(actor, monkeypatch, "+clipx=grpo", change_micro_batch=round_and_negate)


def widen_clip(policy_loss):
    """Gives the worker another upper bound than the driver's."""
    settings = policy_loss.clipx
    other = dataclasses.replace(settings, method=dataclasses.replace(settings.method, clip_high=1.5))
    object.__setattr__(policy_loss, "clipx", other)


def remove_modifier(name):
    """Return a change that takes a modifier out of the worker's settings."""

    def change(policy_loss):
        object.__setattr__(policy_loss, "clipx", dataclasses.replace(policy_loss.clipx, **{name: None}))

    return change


def remove_pull(policy_loss):
    """Takes the pull, which is a part of the method, out of the worker's settings."""
    other = build("grpo")
    object.__setattr__(policy_loss, "clipx", dataclasses.replace(other, receipt=policy_loss.clipx.receipt))


def set_drivers_identity(**identity):
    """Return a change after which the driver had other files."""

    def change(policy_loss):
        record = policy_loss.run.record
        other = dataclasses.replace(record, identity={**record.identity, **identity})
        object.__setattr__(policy_loss, "run", dataclasses.replace(policy_loss.run, record=other))

    return change


OTHER_SETTINGS = "the settings of the clipx node are others"
# Overrides of the run, what the worker then has otherwise than the driver, and the receipt's message.
OTHER_WORKERS = {
    "another clip": ((), widen_clip, OTHER_SETTINGS),
    "a lost mask": (("+clipx/mask=icepop",), remove_modifier("mask"), OTHER_SETTINGS),
    "a lost shaping": (
        ("+clipx/shaping=advantage_reweighting",),
        remove_modifier("shaping"),
        OTHER_SETTINGS,
    ),
    "a lost pull": (("+clipx/pull=k2", "clipx.pull.coefficient=0.3"), remove_pull, OTHER_SETTINGS),
    "a stale package": ((), set_drivers_identity(package="0" * 32), "the files of verl_clipx are others"),
    "a stale file of the loss": (
        (),
        set_drivers_identity(function="0" * 32),
        "the source of clipx.function is another",
    ),
}


@pytest.mark.parametrize("name", OTHER_WORKERS)
@pytest.mark.parametrize("receipt", ["stop", "auto"])
def test_a_worker_that_is_not_set_up_as_the_driver_stops(actor, monkeypatch, name, receipt):
    overrides, change, message = OTHER_WORKERS[name]
    config = actor("+clipx=grpo", LOG_PROBS_RETURNED, f"clipx.receipt={receipt}", *overrides)
    assert set(config.policy_loss.run.record.identity) == {"settings", "package", "function"}
    monkeypatch.setattr(training_worker, "get_device_id", lambda: "cpu")
    Worker(config, example())
    change(config.policy_loss)
    with pytest.raises(RuntimeError, match=f"receipt: this worker is not set up as the driver: {message}"):
        Worker(config, example())


def test_where_it_only_warns_another_setting_is_counted(actor, monkeypatch, caplog):
    config = actor("+clipx=grpo", "clipx.receipt=warn")
    widen_clip(config.policy_loss)
    monkeypatch.setattr(training_worker, "get_device_id", lambda: "cpu")
    (receipt,) = receipts_of(Worker(config, example()))
    assert OTHER_SETTINGS in caplog.text and receipt.checks.failures().sum() == 1


def test_settings_whose_numbers_differ_in_the_last_of_32_bits_differ_over_ranks(actor):
    numbers = [2.0**31, 2.0**31 + 1]
    sent_numbers = []

    def all_reduce(vector):
        sent_numbers.append(float(vector[SETTINGS]))
        return vector

    for number in numbers:
        update = Update(actor("+clipx=grpo"))
        update.receipt._identity = number
        update.receipt.all_reduce = all_reduce
        update.run()
    assert sent_numbers == numbers
