"""The receipt's other half: what the announced gradient is computed from, against what was not read from there.

A worker trains one rollout batch as verl's does, in two epochs of two updates of two micro-batches. Covers: every
correction that verl's own code makes passes, and what is changed on the way to the loss is found (`FAULTS`), by hands
in verl's trainer, in the worker or in the engine. The gradient itself is in tests/training/worker/test_receipt.py.
"""

import contextlib
import dataclasses
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils import tensordict_utils as tu

from tests.jagged import jagged, micro_batch
from tests.training.worker.test_receipt import CRITERIA, rejecting
from tests.training.worker.updates import ROWS, Update, VerlsWorker
from verl_clipx.losses.contract.contract import example
from verl_clipx.run.config import build
from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.training.worker import training_worker
from verl_clipx.training.worker.layout import TokenPass, pad_rows
from verl_clipx.training.worker.policy_loss import current_micro_batch
from verl_clipx.training.worker.receipt import SETTINGS, Receipt
from verl_clipx.training.worker.training_worker import ClipxTraining

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
FOUR_UPDATES = ("data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=1", f"{ACTOR}.ppo_epochs=2")
CALCULATED = "actor_rollout_ref.rollout.calculate_log_probs=true"
SEQ_MEAN = f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"


def unchanged(data, number):
    """Leaves the data as they are."""


class EpochWorker(VerlsWorker):
    """As verl's: mini-batches of a rollout batch, each in micro-batches; the policy moves after each update.

    What is done to the data by whom: `of_mini_batch` and `of_micro_batch` get the number of the update.
    """

    of_mini_batch = of_micro_batch = staticmethod(unchanged)
    mini_batches, number = ([4, 0, 2], [1, 5, 3]), 0
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
                self.of_mini_batch(mini_batch, self.number)
                output = self.train_batch(mini_batch)
        return output

    def train_batch(self, data):
        for part, output in self.micro_batches(data):
            self.of_micro_batch(part, self.number)
            output["log_probs"].requires_grad_(True)
            self.loss_fn(model_output=output, data=part)[0].backward()
        self.number += 1
        along = torch.linspace(-0.3, 0.3, self.current["log_prob"].numel())
        self.current["log_prob"] = self.current["log_prob"] + along.view_as(self.current["log_prob"])
        self.engine.optimizer_step()
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": {}})


class Worker(ClipxTraining, EpochWorker):
    """Ours on top of it."""


def padded(data):
    """As verl's older trainer hands on responses."""
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
    lengths = (pad_rows(data["present"]).sum(1), data["prompts"].shape[1])
    columns = torch.arange(width)
    prompts = torch.tensor([1 + row % 2 for row in ROWS])[:, None] > lengths[1] - 1 - torch.arange(lengths[1])
    data["attention_mask"] = torch.cat([prompts, columns < lengths[0][:, None]], 1).long()


def corrected(data, both_masks=False, **options):
    """As verl's own code corrects in decoupled mode, in v1's way or, `both_masks`, in that of the older trainer."""
    width = pad_rows(data["response_mask"]).shape[1]
    fields = ("old_log_probs", "rollout_log_probs", "response_mask")
    old, rollout, mask = (pad_rows(data[name])[:, :width] for name in fields)
    weights, mask, _ = compute_rollout_correction_and_rejection_mask(old, rollout, mask.int(), **options)
    lengths = data["responses"].offsets().diff().tolist()
    nested = lambda values: jagged([row[:n] for row, n in zip(values, lengths, strict=True)])  # noqa: E731
    data["response_mask"] = nested(mask.bool())
    if both_masks:
        data["loss_mask"] = data["response_mask"].clone()
    if weights is not None:
        data["rollout_is_weights"] = nested(weights.batch["rollout_is_weights"])


def receipts_of(worker):
    return [observer for observer in worker.observers if isinstance(observer, Receipt)]


def train(actor, monkeypatch, *overrides, of_trainer=None, rollout=None, **hands):
    """Trains a rollout batch under clipx.receipt=stop; returns the worker."""
    monkeypatch.setattr(training_worker, "get_device_id", lambda: "cpu")
    batch = example(spread=0.3) | (rollout or {})
    apart = torch.rand(batch["mask"].shape, generator=torch.Generator().manual_seed(1))
    batch["sampler_log_prob"] = batch["rollout_log_prob"] - 0.2 * apart
    if f"{CORRECTION}.bypass_mode=True" in overrides:
        batch["old_log_prob"] = batch["sampler_log_prob"]
    trains = Worker(actor(CALCULATED, "clipx.receipt=stop", *FOUR_UPDATES, *overrides), batch)
    for name, hand in hands.items():
        setattr(trains, name, hand)
    data, _ = micro_batch(batch, ROWS, sequences=3, reference=batch["old_log_prob"] - 0.1)
    data["loss_mask"], data["row"] = data["response_mask"].clone(), torch.tensor(ROWS)
    data["present"] = jagged([torch.ones_like(row) for row in data["responses"].unbind()])
    if of_trainer is not None:
        of_trainer(data)
    trains.train_mini_batch(data)
    assert not receipts_of(trains)
    return trains


def keys(**options):
    return [f"{CORRECTION}.{name}='{value}'" for name, value in options.items()]


BYPASS = (f"{CORRECTION}.bypass_mode=True",)
KL = (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.5")
REJECTED_BY_THE_LOSS = (*BYPASS, *keys(rollout_rs="token_k1", rollout_rs_threshold="0.5_2"))
IS = dict(rollout_is="token", rollout_is_threshold="2.0")
CORRECTIONS = {
    "token": IS,
    "sequence": dict(rollout_is="sequence", rollout_is_threshold="1.5"),
    "bounds": dict(rollout_is="token", rollout_is_threshold="0.9_1.2"),
    "normalised": IS | dict(rollout_is_batch_normalize=True),
    "rejection": dict(rollout_rs="token_k1", rollout_rs_threshold="0.9_1.2"),
    "both": IS | dict(rollout_rs="seq_mean_k3", rollout_rs_threshold="0.01"),
    "two criteria": dict(rollout_rs="token_k1,seq_mean_k3", rollout_rs_threshold="0.9_1.2,0.01"),
}
CORRECTIONS["all"] = CORRECTIONS["sequence"] | CORRECTIONS["rejection"]
CORRECTIONS["sequence and two criteria"] = CORRECTIONS["sequence"] | CORRECTIONS["two criteria"]
CORRECTIONS["sequence, normalised"] = CORRECTIONS["sequence"] | dict(rollout_is_batch_normalize=True)
CORRECTIONS["sequence and sequences"] = CORRECTIONS["sequence, normalised"] | dict(
    rollout_rs="seq_mean_k3", rollout_rs_threshold="0.01"
)


def with_other_tokens(data, rows=()):
    """Rows with a token of a tool, which is in neither mask; and some as verl pads a batch with, in neither mask."""
    for name in ("response_mask", "loss_mask"):
        columns = [
            (torch.arange(len(row)) != 1) & (number not in rows) for number, row in enumerate(data[name].unbind())
        ]
        data[name] = jagged([row & kept for row, kept in zip(data[name].unbind(), columns, strict=True)])


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("both_masks", [False, True], ids=["v1", "v0"])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_what_verls_own_code_corrects_passes(actor, monkeypatch, few_probes, name, both_masks, turns):
    options = CORRECTIONS[name]

    def of_trainer(data):
        if turns == 2:
            with_other_tokens(data, rows=[3])
        corrected(data, both_masks, **options)
        if both_masks:
            padded(data)

    train(actor, monkeypatch, "+clipx=grpo", *keys(**options), of_trainer=of_trainer)


@pytest.mark.parametrize("name", ["token", "normalised"])
def test_weights_in_bfloat16_pass(actor, monkeypatch, few_probes, name):
    def of_trainer(data):
        corrected(data, **CORRECTIONS[name])
        data["rollout_is_weights"] = data["rollout_is_weights"].bfloat16()

    train(actor, monkeypatch, "+clipx=grpo", *keys(**CORRECTIONS[name]), of_trainer=of_trainer)


@pytest.mark.parametrize(
    "overrides",
    [
        ("+clipx=acpo", "clipx.scope=lagged"),
        ("+clipx=m2po",),
        ("+clipx=kl_cov", SEQ_MEAN),
        ("+clipx=gspo", *BYPASS),
        ("+clipx=acpo", *REJECTED_BY_THE_LOSS),
        ("+clipx=acpo", "clipx.scope=lagged", *REJECTED_BY_THE_LOSS),
        ("+clipx=grpo", "+clipx/update=lopti"),
        ("+clipx=bapo", "+clipx/update=lopti"),
        ("+clipx=grpo", "+clipx/select=high_entropy"),
        ("+clipx=grpo", "+clipx/select=high_entropy", "clipx.select.over=mini_batch"),
        ("+clipx=acpo", "clipx.scope=lagged", "+clipx/mask=opsm", "clipx.mask.delta=0.01"),
        ("+clipx=acpo", SEQ_MEAN),
        ("+clipx=acpo", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum"),
        ("+clipx=acpo", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"+{ACTOR}.loss_scale_factor=100"),
        *((f"+clipx={method}", *KL) for method in ("acpo", "grpo", "cispo")),
        ("+clipx=acpo", "+clipx/shaping=advantage_reweighting"),
        ("+clipx=acpo", "+clipx/pull=k2", "clipx.pull.coefficient=0.3"),
        ("+clipx=acpo", "+clipx/select=low_entropy", "clipx.select.normaliser=selected"),
        pytest.param(("+clipx=acpo", "clipx.compile=true"), marks=pytest.mark.slow),
        *(("+clipx=grpo", *rejecting(criterion)) for criterion in CRITERIA),
        *((f"+clipx={method}", *rejecting("seq_mean_k3")) for method in ("acpo", "gspo")),
    ],
    ids=" ".join,
)
def test_what_a_run_announces_passes(actor, monkeypatch, few_probes, compile_by, overrides):
    # What Inductor makes of the graphs is compared in tests/losses/applying/test_compiled.py.
    compile_by("eager")
    train(actor, monkeypatch, *overrides)


def times(name, factor, number=None):
    """Multiplies a field, in all updates or in those from a number on."""

    def change(data, update):
        if name in data and update >= (number or 0):
            data[name] = data[name] * factor

    return change


def sizes(**given):
    """Other sizes of the mini-batch."""
    return lambda data, update: tu.assign_non_tensor(data, **given)


def current_for_old(data, update):
    """Sets old_log_probs as if they were recomputed before each update, by which every ratio is 1."""
    along = torch.linspace(-0.3, 0.3, example()["log_prob"].numel()).view(len(ROWS), -1) * update
    rows = zip(data["row"].tolist(), data["old_log_probs"].unbind(), strict=True)
    data["old_log_probs"] = jagged([old + along[row][: len(old)] for row, old in rows])


def half_rejected(data):
    """Rejects tokens that nothing rejects."""
    data["response_mask"] = jagged([row & (torch.arange(len(row)) % 2 == 0) for row in data["response_mask"].unbind()])


def weighted(change, both_masks=False, **options):
    """Weights of verl's own code, changed."""

    def of_trainer(data):
        corrected(data, both_masks, **options)
        data["rollout_is_weights"] = jagged([change(row) for row in data["rollout_is_weights"].unbind()])
        if both_masks:
            padded(data)

    return of_trainer


def half_corrected(data, **options):
    """Every other row as before the rejection."""
    before = data["response_mask"].unbind()
    corrected(data, **options)
    after = data["response_mask"].unbind()
    data["response_mask"] = jagged([pair[row % 2] for row, pair in enumerate(zip(before, after, strict=True))])


def beyond_the_rows(data):
    """Masks as long as the longest response."""
    padded(data)
    for name in ("response_mask", "loss_mask"):
        data[name] = torch.ones_like(data[name])


def begins_earlier(data, update):
    """Begins a response a token earlier where its prompt has a second one."""
    data["attention_mask"] = torch.stack([row.roll(int(row[0])) for row in data["attention_mask"]])


def with_decision(change):
    """Plans each update with its decision changed."""

    def planned(original, *given, **named):
        step = original(*given, **named)
        change(step)
        return step

    return planned


def scales(name, factor):
    """Multiplies what a step knows."""
    return lambda step: setattr(step, name, getattr(step, name) * factor)


def adds_statistics(step):
    step.statistics = step.statistics + torch.arange(len(step.statistics))
    step.decision = step.decision + 0.1


IS_KEYS = keys(**IS)
NORMALISED, OF_SEQUENCES, TWO = (CORRECTIONS[name] for name in ("normalised", "sequence", "two criteria"))
SEQUENCES = OF_SEQUENCES | dict(rollout_rs="seq_mean_k3", rollout_rs_threshold="0.02")
DIFFERS, REJECTS = "a weight differs by", "rejects came as if it did not, or the reverse"
LAGGED = ("+clipx=acpo", "clipx.scope=lagged")
SELECTED = ("+clipx=grpo", "+clipx/select=low_entropy")
OTHER_ROWS = "receipt: {} of some rows are not those that the worker got"
OTHER_OLD = OTHER_ROWS.format("old_log_probs")
# Whose hand changes what, beside which overrides, and the receipt's message.
OF_TRAINER = {
    "weights that nothing asks for": ([], partial(corrected, **IS), "came with the weights of .*rollout_is=None"),
    "inverse weights": (IS_KEYS, weighted(lambda row: 1 / row, **IS), DIFFERS),
    "weights of 1": (IS_KEYS, weighted(torch.ones_like, **IS), DIFFERS),
    "weights of a sequence": (IS_KEYS, partial(corrected, **OF_SEQUENCES), DIFFERS),
    "another threshold of the weights": (IS_KEYS, partial(corrected, **IS | {"rollout_is_threshold": "1.05"}), DIFFERS),
    "inverse normalised weights": (keys(**NORMALISED), weighted(lambda row: 1 / row, **IS), DIFFERS),
    "a factor on normalised weights": (
        *(keys(**NORMALISED), weighted(lambda row: 1.3 * row, **NORMALISED)),
        "weights are divided by .*, but their mean is",
    ),
    "weights that were not normalised": (
        *(keys(**CORRECTIONS["sequence, normalised"]), partial(corrected, **OF_SEQUENCES)),
        "weights are divided by 1, but their mean is",
    ),
    "other weights beside a rejection in both masks": (
        *(keys(**SEQUENCES), weighted(lambda row: 0.7 * row, True, **SEQUENCES)),
        DIFFERS,
    ),
    "other old log-probabilities in bypass mode": (
        *(BYPASS, lambda data: times("old_log_probs", 0.9)(data, 0)),
        "old_log_probs: .*bypass_mode=True announces the rollout's own, but one is",
    ),
    "a rejection that nothing asks for": ([], half_rejected, f"tokens that .*rollout_rs=None {REJECTS}"),
    "no rejection by two criteria": (keys(**TWO), None, REJECTS),
    "no rejection by two criteria, padded": (keys(**TWO), padded, REJECTS),
    "a rejection by two criteria on some rows": (keys(**TWO), partial(half_corrected, **TWO), REJECTS),
    "a mask beyond the responses": ([], beyond_the_rows, REJECTS),
    "more rejected than announced": (keys(**CORRECTIONS["rejection"]), half_rejected, f"rollout_rs=token_k1 {REJECTS}"),
}
OF_MINI_BATCH = {
    "current for old log-probabilities in the worker": ([], current_for_old, OTHER_OLD),
    "other advantages in the second epoch": ([], times("advantages", 2.0, 2), OTHER_ROWS.format("advantages")),
}
OF_MICRO_BATCH = {
    "each micro-batch's own number of sequences": (
        *([SEQ_MEAN], lambda data, _: tu.assign_non_tensor(data, global_batch_size=len(data))),
        "mini-batch's 1, 2 sequences, which has 3",
    ),
    "the rollout batch's number of sequences": ([SEQ_MEAN], sizes(global_batch_size=6), "6 sequences, which has 3"),
    "a part of a sequence more": ([SEQ_MEAN], sizes(global_batch_size=3.45), "batch's 3.45 sequences, which has 3"),
    "a part of a rank more": ([], sizes(dp_size=1.4), "1.4 ranks, which has 1"),
    "another number of ranks": ([], sizes(dp_size=2), "2 ranks, which has 1"),
    "current for old log-probabilities in the engine": ([], current_for_old, OTHER_OLD),
    "another mask in the engine": ([], lambda data, _: half_rejected(data), OTHER_ROWS.format("response_mask")),
}
HANDS = {"of_trainer": OF_TRAINER, "of_mini_batch": OF_MINI_BATCH, "of_micro_batch": OF_MICRO_BATCH}
FAULTS = {
    name: (overrides, {by: hand}, said)
    for by, faults in HANDS.items()
    for name, (overrides, hand, said) in faults.items()
} | {
    "weights changed in the worker": (
        *(IS_KEYS, dict(of_trainer=partial(corrected, **IS), of_mini_batch=times("rollout_is_weights", 2.0, 1))),
        OTHER_ROWS.format("rollout_is_weights"),
    ),
    "a row that is left out": (
        *([], dict(mini_batches=iter(([4, 0, 2], [1, 5, 3], [4, 0, 2], [1, 5])))),
        "some rows of the rollout batch were trained more often",
    ),
    "each mini-batch twice before the next": (
        *([], dict(mini_batches=iter(([4, 0, 2], [4, 0, 2], [1, 5, 3], [1, 5, 3])))),
        "some rows of the rollout batch were trained again before others",
    ),
    "another attention mask": (BYPASS, dict(of_trainer=padded, of_micro_batch=begins_earlier), "attention_mask of"),
}
PLANS = {
    "half of the decision": (LAGGED, scales("decision", 0.5), "the bounds are not those that the method decides"),
    "the decision of the mini-batch halved": (("+clipx=acpo",), scales("decision", 0.5), "the bounds are not those"),
    "more selected tokens": (SELECTED, scales("selected_tokens", 1.2), "selected tokens, and 12 were selected"),
    "other statistics than the decision's": (LAGGED, adds_statistics, "the bounds are not those that the method decid"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_changed_on_the_way_to_the_loss_is_found(actor, monkeypatch, few_probes, name):
    overrides, hands, said = FAULTS[name]
    with pytest.raises(RuntimeError, match=said):
        train(actor, monkeypatch, "+clipx=grpo", *overrides, **hands)


@pytest.mark.parametrize("row", range(5))
def test_a_row_rounded_to_bfloat16_in_bypass_mode_is_found(actor, monkeypatch, few_probes, row):
    def of_trainer(data):
        rows = data["old_log_probs"].unbind()
        data["old_log_probs"] = jagged([of.bfloat16().to(of) if n == row else of for n, of in enumerate(rows)])

    assert example()["mask"].any(1).tolist() == [True] * 5 + [False]
    with pytest.raises(RuntimeError, match="bypass_mode=True announces the rollout's own, but one is"):
        train(actor, monkeypatch, "+clipx=grpo", *BYPASS, of_trainer=of_trainer)


def test_tokens_that_a_trainer_of_one_s_own_leaves_out_are_only_warned_of(actor, monkeypatch, few_probes, caplog):
    auto = ("+clipx=grpo", "clipx.receipt=auto")
    train(actor, monkeypatch, *auto, of_trainer=half_rejected)
    assert REJECTS in caplog.text
    with pytest.raises(RuntimeError, match=REJECTS):
        train(actor, monkeypatch, *auto, of_trainer=beyond_the_rows)


@pytest.mark.parametrize("name", PLANS)
def test_a_decision_that_its_statistics_do_not_give_is_found(actor, monkeypatch, few_probes, name):
    overrides, change, said = PLANS[name]
    monkeypatch.setattr(training_worker, "plan_step", partial(with_decision(change), training_worker.plan_step))
    with pytest.raises(RuntimeError, match=said):
        train(actor, monkeypatch, *overrides)


@pytest.mark.parametrize("said", [DecidedFrom.RATIO_ONE, DecidedFrom.MICRO_BATCH])
def test_statistics_at_ratio_1_are_those_of_the_trained_tokens(actor, monkeypatch, few_probes, said):
    def other(step):
        step.statistics, step.decided_from = step.statistics.clone(), said
        # The ratios vary of a bin that the last micro-batch has no token in.
        step.statistics[-2] += 4 * step.statistics[3]
        step.decision = method.decide(step.statistics)

    method = actor(*LAGGED).policy_loss.clipx.method
    monkeypatch.setattr(training_worker, "plan_step", partial(with_decision(other), training_worker.plan_step))
    with pytest.raises(RuntimeError, match=r"the bounds differ by .* of their size from those of the tokens that were"):
        train(actor, monkeypatch, *LAGGED)


@pytest.mark.parametrize(("eta", "equal"), [(0.6, True), (0.5, False)])
def test_a_pass_of_lopti_ends_where_the_configuration_says(actor, monkeypatch, few_probes, eta, equal):
    other = lambda policy_loss: [TokenPass(name, eta, equal) for name in ("low", "high")]  # noqa: E731
    monkeypatch.setattr(training_worker, "token_passes", other)
    message = f"Lopti's pass has eta={eta} and equal={equal}, and the settings have eta=0.5 and equal=True"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        train(actor, monkeypatch, "+clipx=grpo", "+clipx/update=lopti")


@pytest.mark.parametrize("number", range(5))
def test_one_bin_of_acpo_that_is_a_twentieth_wider_is_found(actor, monkeypatch, number):
    original = core_algos.POLICY_LOSS_REGISTRY["clipx_acpo"]

    def wider(**given):
        step = current_micro_batch().step
        if step.decision is not None:
            step.decision = step.decision.clone()
            step.decision[5 + number] *= 1.05
        return original(**given)

    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "clipx_acpo", wider)
    # A trained policy is nearly certain of most tokens, by which no bound of the lower bins is near.
    certain = {name: example()[name] * 0.02 for name in ("old_log_prob", "log_prob", "rollout_log_prob")}
    with pytest.raises(RuntimeError, match="on copies with made-up ratios the gradient differs"):
        train(actor, monkeypatch, "+clipx=acpo", rollout=certain)


def test_tokens_without_advantage_that_get_a_gradient_are_found(actor, monkeypatch, few_probes):
    original = core_algos.POLICY_LOSS_REGISTRY["clipx_grpo"]

    def pushed(**given):
        advantages = given["advantages"]
        return original(**given | {"advantages": advantages.where(advantages != 0, 0.1)})

    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "clipx_grpo", pushed)
    with pytest.raises(RuntimeError, match="on copies with made-up ratios the gradient differs"):
        train(actor, monkeypatch, "+clipx=grpo")


def in_dtype(name, dtype):
    """Hands a field on in another dtype."""
    return lambda data, update: data.set(name, data[name].to(dtype)) if name in data else None


def without_field(name):
    """An engine that drops a field that no loss of this run reads."""
    return lambda data, update: data.pop(name, None)


def negative_zeros(data, update):
    """Turns advantages of 0 into -0.0."""
    data["advantages"] = jagged([torch.where(row == 0, -0.0, row) for row in data["advantages"].unbind()])


def with_zeros(data):
    rows = data["advantages"].unbind()
    data["advantages"] = jagged([torch.where(torch.arange(len(row)) % 3 == 0, 0.0, row) for row in rows])


SAME_VALUES = {
    **{
        f"{name} as {dtype}": (in_dtype(name, dtype), None)
        for name in ("response_mask", "loss_mask")
        for dtype in (torch.int64, torch.float32, torch.uint8)
    },
    "old_log_probs in a wider dtype": (in_dtype("old_log_probs", torch.float64), None),
    "advantages in a wider dtype": (in_dtype("advantages", torch.float64), None),
    "advantages in bfloat16": (in_dtype("advantages", torch.bfloat16), None),
    "advantages in float16": (in_dtype("advantages", torch.float16), None),
    "-0.0 for 0.0": (negative_zeros, with_zeros),
    "without the rollout's log-probabilities": (without_field("rollout_log_probs"), None),
    "without the reference's": (without_field("ref_log_prob"), None),
}


@pytest.mark.parametrize("name", SAME_VALUES)
def test_the_same_values_in_other_bytes_end_no_run(actor, monkeypatch, few_probes, name):
    change, of_trainer = SAME_VALUES[name]
    train(actor, monkeypatch, "+clipx=grpo", of_micro_batch=change, of_trainer=of_trainer)


def test_advantages_that_come_in_bfloat16_end_no_run(actor, monkeypatch, few_probes):
    def of_trainer(data):
        data["advantages"] = data["advantages"].bfloat16()

    train(actor, monkeypatch, "+clipx=grpo", of_trainer=of_trainer)


def test_other_advantages_in_bfloat16_are_found(actor, monkeypatch, few_probes):
    def turned(data, update):
        data["advantages"] = -data["advantages"].bfloat16()

    with pytest.raises(RuntimeError, match="receipt: advantages of some rows are not those that the worker got"):
        train(actor, monkeypatch, "+clipx=grpo", of_micro_batch=turned)


def other_clip(policy_loss):
    settings = policy_loss.clipx
    other = dataclasses.replace(settings, method=dataclasses.replace(settings.method, clip_high=1.5))
    object.__setattr__(policy_loss, "clipx", other)


def without(name):
    """The worker's settings without a part of the driver's."""

    def change(policy_loss):
        object.__setattr__(policy_loss, "clipx", dataclasses.replace(policy_loss.clipx, **{name: None}))

    return change


def without_pull(policy_loss):
    other = build("grpo")
    object.__setattr__(policy_loss, "clipx", dataclasses.replace(other, receipt=policy_loss.clipx.receipt))


def of_driver(**identity):
    """The driver had other files."""

    def change(policy_loss):
        record = policy_loss.run.record
        other = dataclasses.replace(record, identity={**record.identity, **identity})
        object.__setattr__(policy_loss, "run", dataclasses.replace(policy_loss.run, record=other))

    return change


OTHER_SETTINGS, OTHER_FILES = "the settings of the clipx node are others", "the files of verl_clipx are others"
OTHER_WORKERS = {
    "another clip": ((), other_clip, OTHER_SETTINGS),
    "a lost mask": (("+clipx/mask=icepop",), without("mask"), OTHER_SETTINGS),
    "a lost shaping": (("+clipx/shaping=advantage_reweighting",), without("shaping"), OTHER_SETTINGS),
    "a lost pull": (("+clipx/pull=k2", "clipx.pull.coefficient=0.3"), without_pull, OTHER_SETTINGS),
    "a stale package": ((), of_driver(package="0" * 32), OTHER_FILES),
    "a stale file of the loss": ((), of_driver(function="0" * 32), "the source of clipx.function is another"),
}


@pytest.mark.parametrize("name", OTHER_WORKERS)
@pytest.mark.parametrize("asked", ["stop", "auto"])
def test_a_worker_that_is_not_set_up_as_the_driver_stops(actor, monkeypatch, name, asked):
    overrides, change, message = OTHER_WORKERS[name]
    config = actor("+clipx=grpo", CALCULATED, f"clipx.receipt={asked}", *overrides)
    assert set(config.policy_loss.run.record.identity) == {"settings", "package", "function"}
    monkeypatch.setattr(training_worker, "get_device_id", lambda: "cpu")
    Worker(config, example())
    change(config.policy_loss)
    with pytest.raises(RuntimeError, match=f"receipt: this worker is not set up as the driver: {message}"):
        Worker(config, example())


def test_where_it_only_warns_another_setting_is_counted(actor, monkeypatch, caplog):
    config = actor("+clipx=grpo", "clipx.receipt=warn")
    other_clip(config.policy_loss)
    monkeypatch.setattr(training_worker, "get_device_id", lambda: "cpu")
    (receipt,) = receipts_of(Worker(config, example()))
    assert OTHER_SETTINGS in caplog.text and receipt.checks.failures().sum() == 1


def test_settings_whose_numbers_differ_in_the_last_of_32_bits_differ_over_ranks(actor):
    numbers = [2.0**31, 2.0**31 + 1]
    sent = []
    for number in numbers:
        update = Update(actor("+clipx=grpo"))
        update.receipt._identity = number
        update.receipt.all_reduce = lambda vector: sent.append(float(vector[SETTINGS])) or vector
        update.run()
    assert sent == numbers
