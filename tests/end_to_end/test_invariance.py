"""Bounds and gradients do not depend on how a mini-batch is cut: ranks, micro-batch size, dynamic batch size.

Covers: the real training worker and FSDP2 engine on 1, 2 and 4 gloo ranks over the same rows (ragged, two of them fully
masked), every adaptive method, selection over the mini-batch, both passes of Lopti; the collectives and forwards that
scopes cost; packing, gradient checkpointing, offload, chunked entropy, hybrid sharding, LoRA and sequence parallelism
(Ulysses, with a stand-in for flash attention's kernel) against padding on one rank, in log-probabilities too; that each
method does what it does; as a negative control that `micro_batch` does depend on the cut, and that a loss without
statistics does not need any of this. Computed in float64, so that only the order of summation is left, and in BAPO's
sums their last bits. Not covered: Ray and rollouts (test_training.py), flash attention's own kernel, rounding in half
precision.
"""

import dataclasses

import pytest
import torch

from verl_clipx.methods import BUILT_IN

from .method_checks import CHECKS, SETTINGS
from .training_ranks import Case, make_policy, make_rows, run_cases

pytestmark = pytest.mark.end_to_end

ROWS, MASKED = 16, (3, 11)

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
    "acpo_sequence_mean": (
        "+clipx=acpo",
        "clipx.alpha=0.5",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    ),
    "selected_over_mini_batch": ("+clipx=grpo", "+clipx/select=high_entropy", "clipx.select.over=mini_batch"),
    "selected_per_sequence": ("+clipx=acpo", "+clipx/select=low_entropy", "clipx.alpha=0.5"),
}
# Their statistics have two stages, the second of them about the first one's means.
TWO_STAGES = ("clip_cov", "kl_cov")
PASSES = {f"lopti_{name}": ("+clipx=acpo", "+clipx/update=lopti", "clipx.alpha=0.5") for name in ("low", "high")}
# ranks, micro-batch size (None: all), tokens of a dynamic micro-batch (None: fixed size)
CUTS = [
    (1, None, None),
    (1, 2, None),
    (2, None, None),
    (2, 1, None),
    (2, None, 40),
    (4, 2, None),
    (4, None, 40),
]
FURTHER_CUTS = [
    (1, 1, None),
    (1, 4, None),
    (1, None, 40),
    (2, 2, None),
    (2, 4, None),
    (4, None, None),
    (4, 1, None),
]
EVERY_CUT = [*CUTS, *(pytest.param(cut, marks=pytest.mark.matrix) for cut in FURTHER_CUTS)]

FSDP = "actor_rollout_ref.actor.fsdp_config"
PACKING = (("use_remove_padding", True),)
LORA = (("lora_rank", 4), ("lora_alpha", 8), ("target_modules", "all-linear"))
# Options of the engine: what of a case they change, and the cuts under which each runs.
ENGINES = {
    "packing": (dict(model=PACKING), [(1, 2, None), (2, None, 40)]),
    "gradient checkpointing": (dict(model=(("enable_gradient_checkpointing", True),)), [(1, 2, None)]),
    "offload": (dict(engine=(f"{FSDP}.param_offload=True", f"{FSDP}.optimizer_offload=True")), [(1, 2, None)]),
    # verl's padded entropy knows no chunks.
    "chunked entropy": (
        dict(
            engine=(f"{FSDP}.entropy_from_logits_with_chunking=True", f"{FSDP}.entropy_from_logits_chunk_size=5"),
            model=PACKING,
        ),
        [(1, 2, None)],
    ),
    # After a pass without gradient each rank then keeps all weights whole, and an update shards them again.
    "whole after a forward pass": (dict(engine=(f"{FSDP}.reshard_after_forward=False",)), [(2, None, None)]),
    "hybrid sharding": (dict(engine=(f"{FSDP}.fsdp_size=2",)), [(4, 2, None)]),
    "LoRA": (dict(model=(*LORA, *PACKING)), [(1, 2, None)]),
    # verl has it packed alone.
    "Ulysses": (
        dict(
            engine=("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",),
            model=PACKING,
            attention="flash_attention_2",
        ),
        [(2, 1, None), (2, None, 40), (4, None, 40)],
    ),
}
UNDER_ENGINES = [(option, cut) for option, (_, cuts) in ENGINES.items() for cut in cuts]
# What the engine shows of each.
IN_FORCE = {
    "packing": {"rows of an input": 1},
    "gradient checkpointing": {"gradient checkpointing": True},
    "offload": {"offload": (True, True)},
    "chunked entropy": {"chunked entropy": True, "rows of an input": 1},
    "whole after a forward pass": {"layers are whole": True},
    "hybrid sharding": {"mesh": (2, 2)},
    "LoRA": {"adapter": True, "rows of an input": 1},
    "Ulysses": {"ranks of a sequence": 2, "rows of an input": 1},
}
ENGINE_METHODS = ("acpo", "bapo_gradient", "selected_over_mini_batch", "lopti_low")

CONTROL = ("+clipx=acpo", "clipx.alpha=0.5", "clipx.scope=micro_batch")
LAGGED = ("+clipx=acpo", "clipx.alpha=0.5", "clipx.scope=lagged")
PLAIN = ("+clipx=grpo",)


def cases_of(cut):
    _, size, tokens = cut
    found = {name: Case(overrides, size, tokens) for name, overrides in METHODS.items()}
    found |= {
        name: Case(overrides, size, tokens, token_pass=name.removeprefix("lopti_"))
        for name, overrides in PASSES.items()
    }
    found["control"] = Case(CONTROL, size, tokens)
    found["lagged"] = Case(LAGGED, size, tokens)
    found["plain"] = Case(PLAIN, size, tokens, infer=True)
    for option, (changed, cuts) in ENGINES.items():
        if cut in cuts:
            for name in (*ENGINE_METHODS, "plain"):
                found[f"{name}, {option}"] = dataclasses.replace(found[name], **changed)
    if cut == CUTS[0]:
        # Its gradients are those of other parameters.
        found |= {f"{name}, LoRA": dataclasses.replace(found[name], model=LORA) for name in ENGINE_METHODS}
        found |= {f"check {method}": Case((f"+clipx={method}", *SETTINGS.get(method, ()))) for method in CHECKS}
    return found


class Outcomes:
    """The result of every case under every cut: a number of ranks is started once for its cuts, when asked for."""

    def __init__(self, folder):
        self.folder = folder
        self.policy = make_policy(folder / "policy")
        self.rows = make_rows(folder, ROWS, masked=MASKED, drift=0.5)
        self.found = {}
        self.failed = set()

    def __getitem__(self, key):
        cut, _ = key
        if key not in self.found:
            self._run([other for other in (CUTS if cut in CUTS else FURTHER_CUTS) if other[0] == cut[0]])
        return self.found[key]

    def _run(self, cuts):
        assert cuts[0] not in self.failed, "its ranks have failed in an earlier test"
        self.failed.add(cuts[0])
        names = [(cut, name, case) for cut in cuts for name, case in cases_of(cut).items()]
        cases = [case for _, _, case in names]
        outcomes = run_cases(cuts[0][0], self.policy, self.rows, cases, self.folder / "configs")
        self.found |= {(cut, name): outcome for (cut, name, _), outcome in zip(names, outcomes, strict=True)}
        self.failed.discard(cuts[0])


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return Outcomes(tmp_path_factory.mktemp("ranks"))


def largest_difference(first, second):
    """Largest difference of two gradients, relative to the largest gradient."""
    scale = max(float(gradient.abs().max()) for gradient in first.values())
    return max(float((first[name] - second[name]).abs().max()) for name in first) / scale


@pytest.mark.parametrize("cut", EVERY_CUT[1:], ids=str)
@pytest.mark.parametrize("name", [*METHODS, *PASSES])
def test_bounds_and_gradients_are_those_of_the_whole_mini_batch(results, name, cut):
    require_equal(name, results[CUTS[0], name], results[cut, name])


def require_equal(name, whole, part):
    """Asserts that a part of a mini-batch gave the bounds, gradient and metrics of the whole."""
    if whole.decision is not None:
        # BAPO's bounds are grid points: equal, but for the shares, sums of numbers that each micro-batch rounds.
        tolerance = 1e-9 if name.startswith("bapo") else 1e-12
        assert part.decision == pytest.approx(whole.decision, rel=tolerance, abs=tolerance)
        if name.startswith("bapo"):
            assert part.decision[:2] == whole.decision[:2]
    assert largest_difference(whole.gradients, part.gradients) < 1e-6
    assert part.metrics["actor/pg_loss"] == pytest.approx(whole.metrics["actor/pg_loss"], rel=1e-9, abs=1e-12)
    for key in ("clipx/clip_fraction_low", "clipx/clip_fraction_high", "clipx/ratio_mean"):
        assert part.metrics[key] == pytest.approx(whole.metrics[key], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("option", "cut"), UNDER_ENGINES, ids=str)
@pytest.mark.parametrize("name", ENGINE_METHODS)
def test_engine_options_change_neither_bounds_nor_gradients(results, name, option, cut):
    reference = f"{name}, LoRA" if option == "LoRA" else name
    require_equal(name, results[CUTS[0], reference], results[cut, f"{name}, {option}"])


@pytest.mark.parametrize(("option", "cut"), UNDER_ENGINES, ids=str)
def test_an_engine_option_is_in_force(results, option, cut):
    shown = results[cut, f"plain, {option}"].options
    assert {key: shown[key] for key in IN_FORCE[option]} == IN_FORCE[option]
    assert any(results[CUTS[0], "plain"].options[key] != value for key, value in IN_FORCE[option].items())


@pytest.mark.parametrize(("option", "cut"), UNDER_ENGINES, ids=str)
def test_engine_options_change_no_log_probability(results, option, cut):
    whole, part = results[CUTS[0], "plain"].log_probs, results[cut, f"plain, {option}"].log_probs
    assert len(whole) == ROWS
    for expected, found in zip(whole, part, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [*METHODS, *PASSES])
def test_every_case_clips_a_token(results, name):
    metrics = results[CUTS[0], name].metrics
    assert metrics["clipx/clip_fraction_low"] + metrics["clipx/clip_fraction_high"] > 0


@pytest.mark.parametrize("method", BUILT_IN)
def test_method_does_what_it_does(results, method):
    CHECKS[method](results[CUTS[0], f"check {method}"])


@pytest.mark.parametrize("cut", [(1, 2, None), (2, None, None), (4, 2, None), (2, None, 40)], ids=str)
def test_the_scope_micro_batch_does_depend_on_the_cut(results, cut):
    whole, part = results[CUTS[0], "control"], results[cut, "control"]
    assert largest_difference(whole.gradients, part.gradients) > 1e-3
    assert part.decision is None and len(part.decisions) >= 1


@pytest.mark.parametrize("cut", EVERY_CUT, ids=str)
def test_scopes_cost_what_they_promise(results, cut):
    plain = results[cut, "plain"]
    micro_batches = plain.forwards
    assert plain.collectives == 0
    for name in METHODS:
        result = results[cut, name]
        assert result.collectives <= (2 if name in TWO_STAGES else 1), name
        assert result.forwards == 2 * micro_batches, name
    for name in PASSES:
        assert results[cut, name].collectives <= 1
    control, lagged = results[cut, "control"], results[cut, "lagged"]
    assert (control.collectives, control.forwards) == (0, micro_batches)
    # The first step has no history, so its statistics at ratio 1 are summed; no forward is spent.
    assert (lagged.collectives, lagged.forwards) == (1, micro_batches)


def test_observation_leaves_the_gradient_of_other_methods_alone(results):
    # A method without statistics gives the same gradient after all the observed ones before it in the process.
    gradients = [results[cut, "plain"].gradients for cut in CUTS]
    for gradient in gradients[1:]:
        assert largest_difference(gradients[0], gradient) < 1e-6
    assert all(torch.isfinite(value).all() for value in gradients[0].values())
