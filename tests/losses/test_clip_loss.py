"""`clip_loss` as a trainer other than verl's calls it: against verl's call of the same loss, over micro-batches and
ranks, what it asks for and warns of. Not covered: the methods' formulas (tests/losses/methods), TRL itself and an
environment without verl (tests/end_to_end/test_wheel.py).
"""

import dataclasses
import inspect
import sys
import warnings
from types import ModuleType
from unittest import mock

import pytest
import torch

from tests.claims.documents import ROOT, blocks_of
from tests.composition import built_once
from tests.golden.runs import registered_loss
from tests.messages import assert_names
from verl_clipx import clip_loss
from verl_clipx.losses.clip_loss import NEEDED
from verl_clipx.losses.contract.contract import example
from verl_clipx.losses.groups import read_node
from verl_clipx.losses.methods import BUILT_IN, METHODS
from verl_clipx.run.config import RunSettings

TENSORS = example(torch.float64)
TOKENS = tuple(TENSORS[name] for name in ("log_prob", "old_log_prob", "advantages", "mask"))
PAGE = (ROOT / "docs" / "elsewhere.md").read_text()
ROLLOUT_LOG_PROB = TENSORS["rollout_log_prob"]
allow_few_tokens = pytest.mark.filterwarnings("ignore:what .* clips follows from statistics")


@allow_few_tokens
@pytest.mark.parametrize(
    ("overrides", "name", "parameters"),
    [
        ("+clipx=acpo clipx.alpha=1", "acpo", {"alpha": 1.0}),
        ("+clipx=dapo", "dapo", {}),
        ("+clipx=m2po_reference", "m2po_reference", {}),
        ("+clipx=kl_cov", "kl_cov", {"share": 2e-4}),
        ("+clipx=dro", "dro", {}),
        ("+clipx=grpo +clipx/mask=icepop +clipx/shaping=fipo", "grpo", {"mask": "icepop", "shaping": "fipo"}),
        (
            "+clipx=grpo +clipx/hold=clip_fraction clipx.hold.value=0.02",
            "grpo",
            {"hold": {"target": "clip_fraction", "value": 0.02}},
        ),
    ],
)
def test_its_gradient_is_that_of_verls_call_of_the_same_loss(overrides, name, parameters):
    log_prob, old_log_prob, advantages, mask = TOKENS
    inputs = {
        "log_prob": log_prob,
        "old_log_prob": old_log_prob,
        "advantages": advantages,
        "response_mask": mask,
        "rollout_log_prob": ROLLOUT_LOG_PROB,
    }
    config = built_once((*overrides.split(), "clipx.scope=micro_batch"))
    _, expected_gradient, _ = registered_loss(config, inputs, rollout_log_prob=ROLLOUT_LOG_PROB)
    leaf = log_prob.clone().requires_grad_()
    loss, info = clip_loss(name, **parameters)(leaf, old_log_prob, advantages, mask, rollout_log_prob=ROLLOUT_LOG_PROB)
    (loss.sum() / mask.sum()).backward()
    torch.testing.assert_close(leaf.grad, expected_gradient, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(info["gradient"] / mask.sum(), leaf.grad)
    assert not any(tensor.requires_grad for tensor in info.values())


def test_it_shows_its_method_and_modifiers_and_nothing_of_a_run():
    text = repr(clip_loss("acpo", mask="icepop"))
    assert "alpha=3.0" in text and "IcePop(" in text and "shaping=None" in text
    run_settings = [field.name for field in dataclasses.fields(RunSettings)]
    assert {"scope", "compile", "receipt", "log", "health", "trace"} <= {*run_settings}
    assert [key for key in run_settings if f"{key}=" in text] == []


def test_the_textbooks_grpo_has_no_dual_clip():
    # A token with A < 0 and a ratio of e^2 = 7.4, beyond the dual clip's 3.
    log_prob = torch.tensor([[2.0]])
    old_log_prob = torch.tensor([[0.0]])
    advantages = torch.tensor([[-1.0]])
    mask = torch.tensor([[True]])
    _, verls = clip_loss("grpo")(log_prob, old_log_prob, advantages, mask)
    _, textbooks = clip_loss("grpo", dual_clip=None)(log_prob, old_log_prob, advantages, mask)
    assert verls["weight"] == 0
    assert textbooks["weight"] == log_prob.exp()


def select_sequences(rows):
    """Return some sequences of `TENSORS` as a call's arguments, by name."""
    names = ("log_prob", "old_log_prob", "advantages", "mask", "rollout_log_prob")
    return {name: TENSORS[name][rows] for name in names}


@allow_few_tokens
@pytest.mark.parametrize("name", ["acpo", "bapo", "m2po", "kl_cov"])
def test_the_sum_over_micro_batches_gives_the_whole_batch(name):
    loss = clip_loss(name)
    _, whole_batch = loss(**select_sequences(slice(None)))
    micro_batches = [select_sequences(rows) for rows in torch.arange(len(TOKENS[0])).tensor_split(3)]
    statistics = sum(loss.statistics(**micro_batch) for micro_batch in micro_batches)
    if name == "kl_cov":
        with pytest.raises(ValueError, match=r"statistics\(…, first=that sum\)"):
            loss.decide(statistics)
        statistics = sum(loss.statistics(**micro_batch, first=statistics) for micro_batch in micro_batches)
    decision = loss.decide(statistics)
    torch.testing.assert_close(decision, whole_batch["decision"], rtol=1e-12, atol=1e-12)
    weights = [loss(**micro_batch, decision=decision)[1]["weight"] for micro_batch in micro_batches]
    torch.testing.assert_close(torch.cat(weights), whole_batch["weight"], rtol=1e-9, atol=1e-12)


@allow_few_tokens
@pytest.mark.parametrize("name", ["acpo", "bapo", "m2po", "kl_cov"])
def test_the_sum_over_ranks_gives_the_whole_batch(name):
    loss = clip_loss(name)
    whole_batch = select_sequences(slice(None))
    this_rank = select_sequences(slice(2, None))
    other_rank = select_sequences(slice(None, 2))
    reduced = []

    def all_reduce(vector):
        reduced.append(vector)
        first = loss.statistics(**whole_batch) if len(reduced) == 2 else None
        return vector + loss.statistics(**other_rank, first=first)

    _, info = loss(**this_rank, all_reduce=all_reduce)
    expected_decision = loss(**whole_batch)[1]["decision"]
    torch.testing.assert_close(info["decision"], expected_decision, rtol=1e-12, atol=1e-12)
    # The covariances of kl_cov are about means, which are a sum of their own.
    collectives = 2 if name == "kl_cov" else 1
    assert [vector.dtype for vector in reduced] == [torch.float64] * collectives


def test_statistics_of_few_tokens_are_warned_of_once():
    loss = clip_loss("acpo")
    zeros = torch.zeros(16_384, 1)
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        clip_loss("grpo")(*TOKENS)
        loss(zeros, zeros, zeros, torch.ones(16_384, 1))
        assert not issued
        for _ in range(2):
            loss(*TOKENS)
    (warning,) = issued
    tokens = int(TENSORS["mask"].sum())
    assert_names(str(warning.message), "acpo", "statistics", f"{tokens} tokens")
    assert warning.filename == __file__


SEQUENCES, LENGTH = TENSORS["log_prob"].shape


@pytest.mark.parametrize(
    ("settings", "changed_tensors", "facts"),
    [
        pytest.param(
            {"name": "m2po"}, {}, ["m2po", "rollout_log_prob=", "the policy that sampled"], id="a tensor of a method"
        ),
        pytest.param({"name": "dapo", "mask": "icepop"}, {}, ["rollout_log_prob="], id="a tensor of a modifier"),
        pytest.param(
            {"name": "dapo"},
            {name: TENSORS[name][0] for name in ("log_prob", "old_log_prob", "advantages", "mask")},
            ["log_prob", f"({LENGTH},)", "(sequences, length)"],
            id="one sequence without its dimension",
        ),
        pytest.param(
            {"name": "dapo"},
            {"advantages": TENSORS["advantages"][:, 0]},
            ["advantages", f"({SEQUENCES},)", f"({SEQUENCES}, 1)"],
            id="an advantage a sequence without its dimension",
        ),
        pytest.param(
            {"name": "dapo"},
            {"mask": TENSORS["mask"][:, 1:]},
            ["mask", f"({SEQUENCES}, {LENGTH - 1})", "log_prob", f"({SEQUENCES}, {LENGTH})"],
            id="a mask of another length",
        ),
    ],
)
def test_a_tensor_that_is_missing_or_wrong_is_named(settings, changed_tensors, facts):
    tensors = {name: TENSORS[name] for name in ("log_prob", "old_log_prob", "advantages", "mask")}
    with pytest.raises(ValueError) as raised:
        clip_loss(**settings)(**tensors | changed_tensors)
    assert_names(str(raised.value), *facts)


@pytest.mark.parametrize(
    ("name", "parameters", "facts"),
    [
        ("acpi", {}, ["clipx.method=acpi", "+clipx=acpo"]),
        ("ppo", {}, ["clipx.method=ppo", "+clipx=grpo"]),
        ("vanilla", {}, ["+clipx=grpo"]),
        ("acpo", {"alhpa": 3}, ["clipx.alhpa=3", "not a parameter of acpo", "clipx.alpha"]),
        ("acpo", {"scope": "lagged"}, ["clipx.scope=lagged", "not a parameter of acpo", "`statistics`"]),
        ("grpo", {"pull": "k2"}, ["clipx.pull=k2", "(log_prob - old_log_prob) ** 2 / 2", "mask=", "shaping="]),
        ("dapo", {"pull": {"estimator": "k3"}}, ["not a parameter of dapo", "Add it to the loss"]),
        ("grpo", {"update": "lopti"}, ["clipx.update=lopti", "not a parameter of grpo", "clip_loss"]),
        ("grpo", {"clip_high": 0.28}, ["clipx.clip_high=0.28", "must be", "1.28"]),
        ("grpo", {"hold": "clip_fraction"}, ["+clipx/hold=clip_fraction", "as a dictionary"]),
        ("dapo", {"mask": "opsm"}, ["clipx.mask.delta=null", "opsm"]),
        ("dapo", {"mask": {"rule": ["opsm"]}}, ["clipx.mask.rule=['opsm']", "must be one of opsm, icepop"]),
    ],
)
def test_a_setting_that_is_unknown_or_wrong_is_named_with_the_remedy(name, parameters, facts):
    with pytest.raises(ValueError) as raised:
        clip_loss(name, **parameters)(*TOKENS)
    assert_names(str(raised.value), *facts)


def test_a_call_takes_one_advantage_a_sequence_and_a_mask_of_numbers():
    log_prob, old_log_prob, advantages, mask = TOKENS
    advantage_of_sequence = advantages[:, :1]
    expected, _ = clip_loss("dapo")(log_prob, old_log_prob, advantage_of_sequence.expand_as(log_prob), mask)
    per_token, _ = clip_loss("dapo")(log_prob, old_log_prob, advantage_of_sequence, mask.long())
    assert torch.equal(per_token, expected)


def test_an_unknown_argument_of_a_call_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"clip_loss\.entropi"):
        clip_loss("dapo")(*TOKENS, entropi=TENSORS["log_prob"])


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_methods_name_means_the_same_where_no_group_can_be_read(name, monkeypatch):
    with_groups = built_once((f"+clipx={name}",)).policy_loss.clipx.method
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    assert clip_loss(name).settings.method == with_groups


def test_a_group_where_no_group_can_be_read_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    read_node.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"dapo is a group .* pip install omegaconf.* grpo, .*dapo\.yaml"):
        clip_loss("dapo")


def test_help_says_what_a_call_takes_and_returns():
    text = inspect.getdoc(clip_loss)
    arguments = {"log_prob", "old_log_prob", "advantages", "mask", *NEEDED}
    _, info = clip_loss("grpo")(*TOKENS)
    assert [name for name in arguments if name not in text] == []
    assert [name for name in info if f'"{name}"' not in text] == []
    # By the shapes and dtypes that the text says.
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        tokens = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in TOKENS]
        per_token, info = clip_loss("grpo")(*tokens)
        shape = TOKENS[0].shape
        assert (per_token.shape, per_token.dtype) == (shape, expected)
        assert {info[name].shape for name in ("gradient", "weight", "kept")} == {shape}
        assert info["kept"].dtype == torch.bool and info["clip_fraction"].ndim == 0
        assert info["decision"].dtype == torch.float64


def function_of_page(name, imported):
    """Return a function of docs/elsewhere.md, with a stand-in for the module that it imports from."""
    (text,) = [block.text for block in blocks_of(PAGE) if f"def {name}" in block.text]
    namespace = {}
    with mock.patch.dict(sys.modules, {imported.__name__: imported}):
        exec(text, namespace)
    return namespace[name]


def loss_of_sequence(name, row):
    """Return the sum over one sequence of `TOKENS` of a loss without parameters."""
    per_token, _ = clip_loss(name)(*(tensor[row : row + 1] for tensor in TOKENS))
    return per_token.sum()


def test_the_snippet_for_prime_rl_fits_the_signature_of_prime_rl_559b447():
    log_prob, old_log_prob, advantages, mask = (tensor[0] for tensor in TOKENS)
    module = ModuleType("prime_rl.trainer.rl.loss")
    fields = ("trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages", "loss_mask", "loss_weights")
    module.LossInputs = dataclasses.make_dataclass("LossInputs", fields)
    module.LossOutputs = dataclasses.make_dataclass("LossOutputs", ("loss", "metrics"))
    inputs = module.LossInputs(
        trainer_logprobs=log_prob,
        inference_logprobs=old_log_prob,
        ref_logprobs=None,
        advantages=advantages,
        loss_mask=mask,
        loss_weights=torch.full_like(log_prob, 2.0),
    )
    outputs = function_of_page("prime_rl_loss", imported=module)(inputs, name="ipo")
    assert torch.equal(outputs.loss, 2 * loss_of_sequence("ipo", 0))
    assert outputs.metrics["clip_fraction"].ndim == 0


def test_the_snippet_for_slime_fits_the_signature_of_slime_624b824():
    sequences = range(2)

    def get_log_probs_and_entropy(
        logits, *, args, unconcat_tokens, total_lengths, response_lengths, with_entropy=False, non_loss_data=True
    ):
        return torch.empty(0), {"log_probs": [TENSORS["log_prob"][row] for row in sequences]}

    module = ModuleType("slime.backends.megatron_utils.loss")
    module.get_log_probs_and_entropy = get_log_probs_and_entropy
    batch = {
        "unconcat_tokens": [],
        "total_lengths": [],
        "response_lengths": [],
        "log_probs": [TENSORS["old_log_prob"][row] for row in sequences],
        "advantages": [TENSORS["advantages"][row] for row in sequences],
        "loss_masks": [TENSORS["mask"][row] for row in sequences],
    }
    loss, log = function_of_page("slime_loss", imported=module)(None, batch, torch.empty(1, 0, 9), torch.sum)
    torch.testing.assert_close(loss, sum(loss_of_sequence("dapo", row) for row in sequences))
    assert torch.equal(log["loss"], loss)


def test_the_pages_table_says_what_each_method_needs():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| ")]
    cells_of_methods = {name: cells for names, *cells in rows for name in names.split(", ") if name in BUILT_IN}
    for name in BUILT_IN:
        method = METHODS[name]()
        tensors = ", ".join(method.asks_for) or "–"
        call_holds = "whole sequences" if method.by_sequence else "any tokens"
        if method.statistics_size:
            call_holds = "the update's tokens"
        if method.second_statistics_size:
            call_holds += "; their statistics need two rounds, see below"
        assert cells_of_methods[name] == [tensors, call_holds], name
