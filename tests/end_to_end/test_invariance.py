"""Bounds and gradients do not depend on how a mini-batch is cut: ranks, micro-batch size, dynamic batch size. Covers,
by verl's worker and FSDP2 engine in float64 over the same ragged rows: every adaptive method, selection, both passes of
Lopti; what scopes cost; the engine's options against padding on one rank; that each method does what it does; that the
scope micro_batch does depend on the cut. With `-m matrix` ten more cuts, and 4 ranks. Not covered: Ray and rollouts
(test_training.py), flash attention's own kernel, rounding in half precision.
"""

import dataclasses

import pytest
import torch

from verl_clipx.losses.methods import BUILT_IN
from verl_clipx.losses.methods import METHODS as CLASSES

from .method_checks import SETTINGS, check_method
from .training_ranks import Case, cases_on_rank, make_policy, make_rows, on_ranks

pytestmark = pytest.mark.end_to_end

ROWS = 16
# Rows whose responses count nothing.
MASKED_ROWS = (3, 11)
ACTOR = "actor_rollout_ref.actor"

METHODS = {
    "acpo": ("+clipx=acpo",),
    "acpo_reference": ("+clipx=acpo_reference", "clipx.scope=mini_batch"),
    "bapo": ("+clipx=bapo", "clipx.target=0.55"),
    "bapo_gradient": ("+clipx=bapo", "clipx.target=0.6", "clipx.counted=gradient", "clipx.weight=rollout"),
    "bapo_reference": ("+clipx=bapo_reference", "clipx.scope=mini_batch"),
    "m2po": ("+clipx=m2po",),
    "clip_cov": ("+clipx=clip_cov", "clipx.share=0.2", "clipx.covariance_low=0.1"),
    "kl_cov": ("+clipx=kl_cov", "clipx.share=0.2"),
    "acpo_fipo": ("+clipx=acpo", "clipx.alpha=0.5", "+clipx/shaping=fipo", "clipx.shaping.half_life=2"),
    "acpo_masked": ("+clipx=acpo", "clipx.alpha=0.5", "+clipx/mask=opsm", "clipx.mask.delta=0.01"),
    "acpo_reweighted": ("+clipx=acpo", "+clipx/shaping=advantage_reweighting", "clipx.alpha=0.5"),
    "acpo_sequence_mean": ("+clipx=acpo", "clipx.alpha=0.5", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"),
    "grpo_held": ("+clipx=grpo", "+clipx/hold=clip_fraction", "clipx.hold.value=0.1"),
    "two_sided_held": ("+clipx=two_sided", "+clipx/hold=second_moment", "clipx.hold.value=0.05"),
    "selected_over_mini_batch": ("+clipx=grpo", "+clipx/select=high_entropy", "clipx.select.over=mini_batch"),
    "selected_per_sequence": ("+clipx=acpo", "+clipx/select=low_entropy", "clipx.alpha=0.5"),
}
# Their statistics have two stages, the second of them about the first one's means.
TWO_STAGES = [name for name in BUILT_IN if CLASSES[name]().second_statistics_size]
PASSES = {f"lopti_{name}": ("+clipx=acpo", "+clipx/update=lopti", "clipx.alpha=0.5") for name in ("low", "high")}
# ranks, micro-batch size (None: all), tokens of a dynamic micro-batch (None: fixed size)
WHOLE = (1, None, None)
CUTS = [WHOLE, (1, 4, None), (2, None, 40)]
FURTHER_CUTS = [
    (1, 1, None),
    (1, 2, None),
    (1, None, 40),
    (2, None, None),
    (2, 1, None),
    (2, 2, None),
    (2, 4, None),
    (4, None, None),
    (4, 1, None),
    (4, 2, None),
    (4, None, 40),
]
MATRIX = pytest.mark.matrix
EVERY_CUT = [*CUTS, *(pytest.param(cut, marks=MATRIX) for cut in FURTHER_CUTS)]

FSDP = f"{ACTOR}.fsdp_config"
PACKING, PACKED = (("use_remove_padding", True),), {"rows of an input": 1}
WHOLE_AFTER = (f"{FSDP}.reshard_after_forward=False",)
LORA = (("lora_rank", 4), ("lora_alpha", 8), ("target_modules", "all-linear"))
CHUNKED = (f"{FSDP}.entropy_from_logits_with_chunking=True", f"{FSDP}.entropy_from_logits_chunk_size=5")
CHECKPOINTING = (("enable_gradient_checkpointing", True),)
OFFLOAD = (f"{FSDP}.param_offload=True", f"{FSDP}.optimizer_offload=True")
ULYSSES = (f"{ACTOR}.ulysses_sequence_parallel_size=2",)
# Options of the engine: what of a case they change, the cuts under which each runs, and what the engine shows of each.
ENGINES = {
    "packing": (dict(model=PACKING), [(1, 4, None), (2, None, 40)], PACKED),
    "gradient checkpointing": (dict(model=CHECKPOINTING), [(1, 4, None)], {"gradient checkpointing": True}),
    "offload": (dict(engine=OFFLOAD), [(1, 4, None)], {"offload": (True, True)}),
    # verl's padded entropy knows no chunks.
    "chunked entropy": (dict(engine=CHUNKED, model=PACKING), [(1, 4, None)], {"chunked entropy": True} | PACKED),
    # After a pass without gradient each rank then keeps all weights whole, and an update shards them again.
    "whole after a forward pass": (dict(engine=WHOLE_AFTER), [(2, None, 40)], {"layers are whole": True}),
    "hybrid sharding": (dict(engine=(f"{FSDP}.fsdp_size=2",)), [(4, 2, None)], {"mesh": (2, 2)}),
    "LoRA": (dict(model=(*LORA, *PACKING)), [(1, 4, None)], {"adapter": True} | PACKED),
    # verl has it packed alone.
    "Ulysses": (
        dict(engine=ULYSSES, model=PACKING, attention="flash_attention_2"),
        [(2, 4, None), (2, None, 40), (4, None, 40)],
        {"ranks of a sequence": 2} | PACKED,
    ),
}
UNDER_ENGINES = [
    pytest.param(option, cut, marks=[MATRIX] * (cut in FURTHER_CUTS))
    for option, (_, cuts, _) in ENGINES.items()
    for cut in cuts
]
ENGINE_METHODS = ("acpo", "bapo_gradient", "selected_over_mini_batch", "lopti_low")


def cases_of(cut):
    _, size, tokens = cut
    cases = {name: Case(overrides, size, tokens) for name, overrides in METHODS.items()}
    for name, overrides in PASSES.items():
        cases[name] = Case(overrides, size, tokens, token_pass=name.removeprefix("lopti_"))
    for scope in ("micro_batch", "lagged"):
        cases[scope] = Case(("+clipx=acpo", "clipx.alpha=0.5", f"clipx.scope={scope}"), size, tokens)
    cases["plain"] = Case(("+clipx=grpo",), size, tokens, infer=True)
    for option, (changed, cuts, _) in ENGINES.items():
        if cut in cuts:
            for name in (*ENGINE_METHODS, "plain"):
                cases[f"{name}, {option}"] = dataclasses.replace(cases[name], **changed)
    if cut == WHOLE:
        # Its gradients are those of other parameters.
        cases |= {f"{name}, LoRA": dataclasses.replace(cases[name], model=LORA) for name in ENGINE_METHODS}
        cases |= {f"check {method}": Case((f"+clipx={method}", *SETTINGS.get(method, ()))) for method in BUILT_IN}
    return cases


class Outcomes:
    """The result of every case under every cut: a number of ranks is started once for its cuts, when asked for."""

    def __init__(self, folder):
        self.folder = folder
        self.policy = make_policy(folder / "policy")
        self.rows = make_rows(folder, ROWS, masked=MASKED_ROWS, drift=0.5)
        self.results = {}
        self.failed = set()

    def __getitem__(self, key):
        cut, _ = key
        if key not in self.results:
            cuts = CUTS if cut in CUTS else FURTHER_CUTS
            self._run([other for other in cuts if other[0] == cut[0]])
        return self.results[key]

    def _run(self, cuts):
        assert cuts[0] not in self.failed, "its ranks have failed in an earlier test"
        self.failed.add(cuts[0])
        names = [(cut, name, case) for cut in cuts for name, case in cases_of(cut).items()]
        cases = [case for _, _, case in names]
        arguments = (str(self.policy), str(self.rows), cases, self.folder / "configs")
        outcomes = on_ranks(cuts[0][0], cases_on_rank, *arguments)
        for (cut, name, _), outcome in zip(names, outcomes, strict=True):
            self.results[cut, name] = outcome
        self.failed.discard(cuts[0])


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return Outcomes(tmp_path_factory.mktemp("ranks"))


def largest_difference(first, second):
    """Largest difference of two gradients, relative to the largest gradient."""
    scale = max(float(gradient.abs().max()) for gradient in first.values())
    return max(float((first[name] - second[name]).abs().max()) for name in first) / scale


def require_equal(name, whole, part):
    """Asserts that a part of a mini-batch gave the bounds, gradient and metrics of the whole."""
    if whole.decision is not None:
        # BAPO's bounds are grid points: equal, but for the shares, sums of numbers that each micro-batch rounds.
        tolerance = 1e-9 if name.startswith("bapo") else 1e-12
        assert part.decision == pytest.approx(whole.decision, rel=tolerance, abs=tolerance)
        if name.startswith("bapo"):
            assert part.decision[:2] == whole.decision[:2]
    assert largest_difference(whole.gradients, part.gradients) < 1e-6
    assert whole.metrics["clipx/clip_fraction_low"] + whole.metrics["clipx/clip_fraction_high"] > 0
    for key in ("actor/pg_loss", "clipx/clip_fraction_low", "clipx/clip_fraction_high", "clipx/ratio_mean"):
        assert part.metrics[key] == pytest.approx(whole.metrics[key], rel=1e-9, abs=1e-12), key


@pytest.mark.parametrize("cut", EVERY_CUT[1:], ids=str)
@pytest.mark.parametrize("name", [*METHODS, *PASSES])
def test_bounds_and_gradients_are_those_of_the_whole_mini_batch(results, name, cut):
    require_equal(name, results[WHOLE, name], results[cut, name])


@pytest.mark.parametrize(("option", "cut"), UNDER_ENGINES, ids=str)
def test_an_engine_option_is_in_force_and_changes_neither_bounds_nor_gradients_nor_log_probabilities(
    results, option, cut
):
    whole, part = results[WHOLE, "plain"], results[cut, f"plain, {option}"]
    shown = ENGINES[option][2]
    assert {key: part.options[key] for key in shown} == shown
    assert any(whole.options[key] != value for key, value in shown.items())
    assert len(whole.log_probs) == ROWS
    for expected, log_prob in zip(whole.log_probs, part.log_probs, strict=True):
        torch.testing.assert_close(log_prob, expected, rtol=1e-12, atol=1e-12)
    for name in ENGINE_METHODS:
        reference = f"{name}, LoRA" if option == "LoRA" else name
        require_equal(name, results[WHOLE, reference], results[cut, f"{name}, {option}"])


@pytest.mark.parametrize("method", BUILT_IN)
def test_a_methods_metrics_show_what_it_does(results, method):
    check_method(method, results[WHOLE, f"check {method}"])


@pytest.mark.parametrize("cut", CUTS[1:], ids=str)
def test_the_scope_micro_batch_does_depend_on_the_cut(results, cut):
    whole, part = results[WHOLE, "micro_batch"], results[cut, "micro_batch"]
    assert largest_difference(whole.gradients, part.gradients) > 1e-3
    assert part.decision is None


@pytest.mark.parametrize("cut", EVERY_CUT, ids=str)
def test_scopes_cost_what_they_promise(results, cut):
    def cost(name):
        return results[cut, name].collectives, results[cut, name].forwards

    free, micro_batches = cost("plain")
    assert free == 0
    for name in METHODS:
        collectives, forwards = cost(name)
        assert collectives <= (2 if name in TWO_STAGES else 1) and forwards == 2 * micro_batches, name
    assert all(cost(name)[0] <= 1 for name in PASSES)
    assert cost("micro_batch") == (0, micro_batches)
    # The first step has no history, so its statistics at ratio 1 are summed; no forward is spent.
    assert cost("lagged") == (1, micro_batches)
