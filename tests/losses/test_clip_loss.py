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
from verl_clipx import clip_loss
from verl_clipx.losses.clip_loss import NEEDED
from verl_clipx.losses.contract.contract import example
from verl_clipx.losses.groups import read_node
from verl_clipx.losses.methods import BUILT_IN, METHODS
from verl_clipx.run.config import RunSettings

TENSORS = example(torch.float64)
TOKENS = tuple(TENSORS[name] for name in ("log_prob", "old_log_prob", "advantages", "mask"))
PAGE = (ROOT / "docs" / "elsewhere.md").read_text()
ROLLOUT = {"rollout_log_prob": TENSORS["rollout_log_prob"]}
FEW = "ignore:what .* clips follows from statistics"


@pytest.mark.filterwarnings(FEW)
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
    inputs = {**dict(zip(("log_prob", "old_log_prob", "advantages", "response_mask"), TOKENS, strict=True)), **ROLLOUT}
    _, expected, _ = registered_loss(built_once((*overrides.split(), "clipx.scope=micro_batch")), inputs, **ROLLOUT)
    log_prob = TOKENS[0].clone().requires_grad_()
    loss, info = clip_loss(name, **parameters)(log_prob, *TOKENS[1:], **ROLLOUT)
    (loss.sum() / TOKENS[3].sum()).backward()
    torch.testing.assert_close(log_prob.grad, expected, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(info["gradient"] / TOKENS[3].sum(), log_prob.grad)
    assert not any(tensor.requires_grad for tensor in info.values())


def test_it_shows_its_method_and_modifiers_and_nothing_of_a_run():
    shown = repr(clip_loss("acpo", mask="icepop"))
    assert "alpha=3.0" in shown and "IcePop(" in shown and "shaping=None" in shown
    of_a_run = [field.name for field in dataclasses.fields(RunSettings)]
    assert {"scope", "compile", "receipt", "log", "health", "trace"} <= {*of_a_run}
    assert [key for key in of_a_run if f"{key}=" in shown] == []


def test_the_textbooks_grpo_has_no_dual_clip():
    tokens = [torch.tensor([[of]]) for of in (2.0, 0.0, -1.0, True)]
    assert clip_loss("grpo")(*tokens)[1]["weight"] == 0
    assert clip_loss("grpo", dual_clip=None)(*tokens)[1]["weight"] == tokens[0].exp()


@pytest.mark.filterwarnings(FEW)
@pytest.mark.parametrize("name", ["acpo", "bapo", "m2po", "kl_cov"])
def test_the_sum_over_micro_batches_and_the_one_over_ranks_give_the_whole_batch(name):
    loss = clip_loss(name)
    _, whole = loss(*TOKENS, **ROLLOUT)
    parts = [
        ([of[rows] for of in TOKENS], {"rollout_log_prob": ROLLOUT["rollout_log_prob"][rows]})
        for rows in torch.arange(len(TOKENS[0])).tensor_split(3)
    ]
    sums = sum(loss.statistics(*tokens, **more) for tokens, more in parts)
    if name == "kl_cov":
        with pytest.raises(ValueError, match=r"statistics\(…, first=that sum\)"):
            loss.decide(sums)
        sums = sum(loss.statistics(*tokens, **more, first=sums) for tokens, more in parts)
    decision = loss.decide(sums)
    torch.testing.assert_close(decision, whole["decision"], rtol=1e-12, atol=1e-12)
    split = [loss(*tokens, **more, decision=decision)[1]["weight"] for tokens, more in parts]
    torch.testing.assert_close(torch.cat(split), whole["weight"], rtol=1e-9, atol=1e-12)
    # Another rank has the first part's tokens, this one the others.
    asked, (there, more), rest = [], parts[0], slice(len(parts[0][0][0]), None)

    def all_reduce(vector):
        asked.append(vector)
        first = None if len(asked) == 1 else loss.statistics(*TOKENS, **ROLLOUT)
        return vector + loss.statistics(*there, **more, first=first)

    here, sampled = [of[rest] for of in TOKENS], {"rollout_log_prob": ROLLOUT["rollout_log_prob"][rest]}
    _, ranks = loss(*here, **sampled, all_reduce=all_reduce)
    torch.testing.assert_close(ranks["decision"], decision, rtol=1e-12, atol=1e-12)
    assert [vector.dtype for vector in asked] == [torch.float64] * (2 if name == "kl_cov" else 1)


def test_statistics_of_few_tokens_are_warned_of_once():
    loss, enough = clip_loss("acpo"), [of.expand(16_384, 1) for of in (torch.zeros(1, 1),) * 3]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        clip_loss("grpo")(*TOKENS)
        loss(*enough, torch.ones(16_384, 1))
        assert not seen
        for _ in range(2):
            loss(*TOKENS)
    assert [str(one.message).split(",")[0] for one in seen] == [
        f"what acpo clips follows from statistics of {int(TOKENS[3].sum())} tokens"
    ]
    assert seen[0].filename == __file__


@pytest.mark.parametrize(
    ("name", "parameters", "tokens", "message"),
    [
        ("m2po", {}, TOKENS, r"m2po, .* needs rollout_log_prob=: log-probabilities under the policy that sampled"),
        ("dapo", {"mask": "icepop"}, TOKENS, "needs rollout_log_prob=: "),
        ("dapo", {}, [of[0] for of in TOKENS], r"log_prob is \(\d+,\): give \(sequences, length\), for one sequence"),
        ("dapo", {}, [*TOKENS[:2], TOKENS[2][:, 0], TOKENS[3]], r"advantages is \(\d+,\), but .* or \(\d+, 1\)"),
        ("dapo", {}, [*TOKENS[:3], TOKENS[3][:, 1:]], r"mask is \(\d+, \d+\), but log_prob is "),
        ("acpi", {}, TOKENS, r"clipx.method=acpi: there is no such method. Did you mean \+clipx=acpo"),
        ("acpo", {"alhpa": 3}, TOKENS, "clipx.alhpa=3: is not a parameter of acpo. Did you mean clipx.alpha"),
        ("ppo", {}, TOKENS, r"clipx.method=ppo: there is no such method. Did you mean \+clipx=grpo"),
        ("vanilla", {}, TOKENS, r"Did you mean \+clipx=grpo"),
        ("acpo", {"scope": "lagged"}, TOKENS, r"clipx.scope=lagged: is not a parameter of acpo. Sum `statistics`"),
        ("grpo", {"pull": "k2"}, TOKENS, r"clipx.pull=k2: .*\(log_prob - old_log_prob\) \*\* 2 / 2.* mask=, shaping="),
        ("dapo", {"pull": {"estimator": "k3"}}, TOKENS, "is not a parameter of dapo. Add it to the loss"),
        ("grpo", {"update": "lopti"}, TOKENS, "clipx.update=lopti: is not a parameter of grpo. .* clip_loss takes"),
        ("grpo", {"clip_high": 0.28}, TOKENS, "clipx.clip_high=0.28: must be .* write 1.28"),
        ("grpo", {"hold": "clip_fraction"}, TOKENS, r"write \+clipx/hold=clip_fraction or .*as a dictionary\.$"),
        ("dapo", {"mask": "opsm"}, TOKENS, "clipx.mask.delta=null: opsm has no value that suits every run"),
    ],
)
def test_what_is_missing_or_wrong_is_named(name, parameters, tokens, message):
    with pytest.raises(ValueError, match=message):
        clip_loss(name, **parameters)(*tokens)


def test_a_call_takes_one_advantage_a_sequence_and_a_mask_of_numbers():
    tokens = (*TOKENS[:2], TOKENS[2][:, :1].expand_as(TOKENS[0]), TOKENS[3])
    expected = clip_loss("dapo")(*tokens)[0]
    assert torch.equal(clip_loss("dapo")(*TOKENS[:2], tokens[2][:, :1], TOKENS[3].long())[0], expected)
    with pytest.raises(ValueError, match=r"clip_loss\.entropi"):
        clip_loss("dapo")(*tokens, entropi=TOKENS[0])


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
    tensors = {"log_prob", "old_log_prob", "advantages", "mask", *NEEDED}
    returned = clip_loss("grpo")(*TOKENS)[1]
    assert all(name in text for name in tensors) and all(f'"{name}"' in text for name in returned)
    # By the shapes and dtypes that the text says.
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        tokens = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in TOKENS]
        per_token, info = clip_loss("grpo")(*tokens)
        shape = TOKENS[0].shape
        assert (per_token.shape, per_token.dtype) == (shape, expected)
        assert {info[name].shape for name in ("gradient", "weight", "kept")} == {shape}
        assert info["kept"].dtype == torch.bool and info["clip_fraction"].ndim == 0
        assert info["decision"].dtype == torch.float64


def snippet(function, **modules):
    """A function of docs/elsewhere.md, with stand-ins for the modules that it imports from."""
    (text,) = [block.text for block in blocks_of(PAGE) if f"def {function}" in block.text]
    names = {}
    with mock.patch.dict(sys.modules, {module.__name__: module for module in modules.values()}):
        exec(text, names)
    return names[function]


def test_the_snippets_for_prime_rl_and_slime_fit_their_signatures():
    """As prime-rl 559b447 and slime 624b824 call them."""
    rows = [[of[row] for of in TOKENS] for row in range(2)]
    expected = [clip_loss("ipo")(*(of[None] for of in row))[0].sum() for row in rows]
    prime_rl = ModuleType("prime_rl.trainer.rl.loss")
    fields = ("trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages", "loss_mask", "loss_weights")
    prime_rl.LossInputs = dataclasses.make_dataclass("LossInputs", fields)
    prime_rl.LossOutputs = dataclasses.make_dataclass("LossOutputs", ("loss", "metrics"))
    log_prob, old, advantages, mask = rows[0]
    given = prime_rl.LossInputs(log_prob, old, None, advantages, mask, 2 * torch.ones_like(old))
    found = snippet("prime_rl_loss", loss=prime_rl)(given, name="ipo")
    assert torch.equal(found.loss, 2 * expected[0]) and found.metrics["clip_fraction"].ndim == 0

    def get_log_probs_and_entropy(
        logits, *, args, unconcat_tokens, total_lengths, response_lengths, with_entropy=False, non_loss_data=True
    ):
        return torch.empty(0), {"log_probs": [row[0] for row in rows]}

    slime = ModuleType("slime.backends.megatron_utils.loss")
    slime.get_log_probs_and_entropy = get_log_probs_and_entropy
    batch = {key: [] for key in ("unconcat_tokens", "total_lengths", "response_lengths")}
    batch |= {name: [row[at] for row in rows] for at, name in enumerate(("log_probs", "advantages", "loss_masks"), 1)}
    loss, log = snippet("slime_loss", loss=slime)(None, batch, torch.empty(1, 0, 9), torch.sum)
    torch.testing.assert_close(loss, sum(clip_loss("dapo")(*(of[None] for of in row))[0].sum() for row in rows))
    assert torch.equal(log["loss"], loss)


def test_the_pages_table_says_what_each_method_needs():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| ")]
    said = {name: tuple(cells) for names, *cells in rows for name in names.split(", ") if name in BUILT_IN}
    for name in BUILT_IN:
        method = METHODS[name]()
        holds = "whole sequences" if method.by_sequence else "any tokens"
        if method.statistics_size:
            holds = "the update's tokens"
        if method.second_statistics_size:
            holds += "; their statistics need two rounds, see below"
        assert said[name] == (", ".join(method.asks_for) or "–", holds), name
