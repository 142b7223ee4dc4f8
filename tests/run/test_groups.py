"""The Hydra groups: their values, and how mistakes in them are reported.

Covers: every group composes on verl's own ppo_trainer and builds in verl's ActorConfig; the published settings; errors
for unknown keys, wrong types, wrong ranges, missing requirements. Not covered: a launch (see tests/end_to_end), the
groups inside a wheel (tests/test_wheel.py).
"""

import math
import re

import pytest
from hydra.errors import InstantiationException
from omegaconf import MissingMandatoryValue, OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from verl_clipx.common.configs_folder import configs_folder
from verl_clipx.methods import METHODS
from verl_clipx.modifiers import AdvantageReweighting, EntropySelection, Lopti
from verl_clipx.run.config import parameters_of
from verl_clipx.run.listing import content_of, group_settings, groups_of, listed, node_of, parameter_row

# Their numbers come from a run.
MEASURED = {
    "grpo_clip_high_acpo": ("clipx.clip_high=1.9",),
    "grpo_clip_acpo_average": ("clipx.clip_low=0.5", "clipx.clip_high=1.5"),
}
# They choose no method of the plugin's; tests/worker/test_observe.py has the last one.
NO_METHOD = ("base", "custom", "observe")
GROUPS = sorted(
    path.stem for path in (configs_folder() / "clipx").glob("*.yaml") if path.stem not in (*NO_METHOD, *MEASURED)
)

PUBLISHED = {
    "grpo": dict(clip_low=0.8, clip_high=1.2, dual_clip=3.0, log_ratio_clamp=20.0),
    "dapo": dict(clip_low=0.8, clip_high=1.28, dual_clip=3.0),
    "cispo": dict(clip_low=0.8, clip_high=1.2, mask_low=None, mask_high=None),
    "cispo_minimax": dict(clip_low=None, mask_low=None, mask_high=None),
    "cispo_acpo": dict(clip_low=None, clip_high=1.45, mask_low=0.8, mask_high=1.3),
    "gppo": dict(clip_low=0.8, clip_high=1.2),
    "ce_gppo": dict(clip_low=0.8, clip_high=1.2, beta_low=0.75, beta_high=1.0, dual_clip=None),
    "ce_gppo_reference": dict(beta_low=0.75, beta_high=1.0, dual_clip=3.0),
    "aspo": dict(flip="positive", weight_low=None, weight_high=3.0, negative_weight_high=3.0),
    "aspo_dgpo": dict(flip="both", weight_low=0.67, weight_high=4.0, negative_weight_high=None),
    "dgpo": dict(clip_low=0.8, clip_high=1.2, n=1.0, m=2.0, log_ratio_clamp=None),
    "dgpo_reference": dict(clip_low=0.8, clip_high=1.2, n=1.0, m=2.0, log_ratio_clamp=20.0),
    "dro": dict(beta=0.05, log_ratio_clamp=None),
    "gmpo": dict(clip_low=pytest.approx(math.exp(-0.4)), clip_high=pytest.approx(math.exp(0.4)), log_ratio_clamp=None),
    "gspo": dict(clip_low=0.9997, clip_high=1.0004, log_ratio_clamp=10.0),
    "sapo": dict(tau_positive=1.0, tau_negative=1.05, log_ratio_clamp=20.0),
    "dppo": dict(divergence="tv", threshold_low=0.2, threshold_high=0.2, weight_high=5.0),
    "dppo_kl": dict(divergence="kl", threshold_low=0.05, threshold_high=0.05, weight_high=5.0),
    "dppo_reference": dict(divergence="tv", threshold_low=0.15, threshold_high=0.15, weight_high=10000.0),
    "acpo": dict(
        alpha=3.0,
        epsilon_base=0.2,
        epsilon_min=None,
        epsilon_max=None,
        bins=5,
        bin_on="old",
        variance_epsilon=0.0,
        dual_clip=None,
        scope="mini_batch",
    ),
    "acpo_reference": dict(
        alpha=3.0,
        epsilon_base=0.2,
        epsilon_min=0.0,
        epsilon_max=3.0,
        bins=5,
        bin_on="current",
        variance_epsilon=1e-8,
        dual_clip=3.0,
        scope="micro_batch",
    ),
    "bapo": dict(
        target=0.4,
        contribution="share",
        counted="surrogate",
        weight="old",
        first="upper",
        last_step="full",
        lower_start=0.6,
        lower_stop=0.9,
        lower_step=0.02,
        upper_start=1.2,
        upper_stop=3.0,
        upper_step=0.05,
        dual_clip=None,
        scope="mini_batch",
    ),
    "bapo_reference": dict(
        target=0.5,
        contribution="ratio",
        weight="none",
        first="lower",
        last_step="clipped",
        lower_start=0.8,
        lower_stop=0.95,
        lower_step=0.05,
        upper_start=1.2,
        upper_stop=2.0,
        upper_step=0.1,
        dual_clip=3.0,
        scope="micro_batch",
    ),
    "dcpo": dict(epsilon_low=0.16, epsilon_high=0.2, largest_ratio=10.0, dual_clip=10.0),
    "dcpo_reference": dict(epsilon_low=0.2, epsilon_high=0.28, largest_ratio=10.0, dual_clip=10.0),
    "m2po": dict(threshold=0.04, moment="kept", behaviour="rollout", scope="mini_batch"),
    "m2po_reference": dict(threshold=0.04, moment="capped", behaviour="old", scope="micro_batch"),
    "topr": dict(level="sequence", positive_low=1.0, positive_high=1.0, negative_low=0.0, negative_high=1.0),
}

# Groups under configs/clipx that are not modifiers of the loss: rollouts that are seeded or of old weights, the traces.
OTHER_GROUPS = 3


def test_every_group_has_its_published_settings_here():
    assert sorted(PUBLISHED) == GROUPS


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_group_reaches_the_actor_with_its_published_settings(actor, group):
    policy_loss = actor(f"+clipx={group}").policy_loss
    built = {**policy_loss.clipx.method.parameters, **vars(policy_loss.clipx)}
    assert {key: built[key] for key in PUBLISHED[group]} == PUBLISHED[group]
    assert policy_loss.loss_mode == f"clipx_{policy_loss.clipx.method.name}"


@pytest.mark.parametrize("group", [*GROUPS, *MEASURED])
def test_group_states_only_its_method_and_what_deviates_from_the_class_or_its_parent(group):
    content = content_of(group)
    (parent, _), above = content.defaults, (configs_folder() / "clipx" / f"{group}.yaml").read_text()
    parameters = parameters_of(METHODS[group_settings(group)["method"]])
    for name in content.clipx.keys() - {"method"}:
        before = node_of(parent).get(name, parameters[name].default)
        assert OmegaConf.is_missing(content.clipx, name) or content.clipx[name] != before, name
        assert re.search(rf"\n  # .+\n  {name}:", above), f"{name} needs its reason above it"


@pytest.mark.slow
@pytest.mark.parametrize("group", MEASURED)
def test_a_group_with_measured_bounds_needs_its_numbers(actor, group):
    with pytest.raises((MissingMandatoryValue, InstantiationException), match=r"clip_(low|high)"):
        actor(f"+clipx={group}")
    built = actor(f"+clipx={group}", *MEASURED[group]).policy_loss.clipx.method
    assert built.name == "grpo" and built.dual_clip == 3.0
    assert [f"clipx.clip_low={built.clip_low:g}", f"clipx.clip_high={built.clip_high:g}"][-len(MEASURED[group]) :] == [
        *MEASURED[group]
    ]


MODIFIER_GROUPS = {
    "shaping=advantage_reweighting": AdvantageReweighting(alpha=0.3, probability="old"),
    "shaping=advantage_reweighting_literal": AdvantageReweighting(alpha=0.3, probability="current"),
    "select=high_entropy": EntropySelection(keep="highest", ratio=0.2, over="sequence", normaliser="selected"),
    "select=low_entropy": EntropySelection(keep="lowest", ratio=0.8, over="sequence", normaliser="selected"),
    "update=lopti": Lopti(eta=0.5, equal=True, order="low_first", quantile=None),
    "update=lopti_reference": Lopti(eta=0.5, equal=False),
    "update=lopti_quantile": Lopti(eta=0.5, quantile=0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("group", MODIFIER_GROUPS)
def test_a_modifier_goes_on_top_of_a_method_in_any_order(actor, group):
    expected = MODIFIER_GROUPS[group]
    for overrides in (["+clipx=acpo", f"+clipx/{group}"], [f"+clipx/{group}", "+clipx=acpo"]):
        built = actor(*overrides).policy_loss.clipx
        assert getattr(built, group.split("=")[0]) == expected


def test_modifiers_combine_and_are_overridden(actor):
    built = actor(
        "+clipx/update=lopti",
        "+clipx=dapo",
        "+clipx/select=high_entropy",
        "+clipx/shaping=advantage_reweighting",
        "clipx.shaping.alpha=0.1",
        "clipx.update.eta=0.4",
        "clipx.select.over=mini_batch",
    ).policy_loss.clipx
    assert (built.shaping.alpha, built.update.eta, built.select.over) == (0.1, 0.4, "mini_batch")
    assert built.method.clip_high == 1.28


@pytest.mark.parametrize("group", MODIFIER_GROUPS)
def test_every_modifier_group_is_listed_here(group):
    folder, name = group.split("=")
    assert (configs_folder() / "clipx" / folder / f"{name}.yaml").exists()
    assert sum(1 for _ in (configs_folder() / "clipx").glob("*/*.yaml")) == len(MODIFIER_GROUPS) + OTHER_GROUPS


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_group_leaves_verls_aggregation_alone(composed, group):
    assert composed(f"+clipx={group}").actor_rollout_ref.actor.loss_agg_mode == "token-mean"


def test_a_parameter_is_overridden_by_its_name(actor):
    assert actor("+clipx=acpo", "clipx.alpha=2").policy_loss.clipx.method.alpha == 2.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+clipx=acpo", "clipx.aplha=2"], r"clipx\.aplha is not a parameter of acpo\. Did you mean clipx\.alpha\?"),
        (["+clipx=acpo", "+clipx.aplha=2"], r"clipx\.aplha is not a parameter of acpo\. Did you mean clipx\.alpha\?"),
        (["+clipx=acpo", "clipx.alpha=high"], r"clipx\.alpha='high': must be a number"),
        (["+clipx=acpo", "clipx.alpha=-1"], r"clipx\.alpha=-1: must be a number \(at least 0 and at most 20\)"),
        (["+clipx=acpo", "clipx.bins=2.5"], r"clipx\.bins=2\.5: must be a whole number"),
        (["+clipx=acpo", "clipx.bins=true"], r"clipx\.bins=True: must be a whole number"),
        (["+clipx=acpo", "clipx.scope=batch"], r"clipx\.scope='batch': must be one of"),
        (["+clipx=grpo", "clipx.compile=fast"], r"clipx\.compile='fast': must be auto, true or false"),
        (["+clipx=acpo", "clipx.epsilon_min=1", "clipx.epsilon_max=0.5"], r"clipx\.epsilon_min=1: must not be above"),
        (["+clipx=bapo", "clipx.contribution=most"], r"clipx\.contribution='most': must be one of share, net, ratio"),
        (["+clipx=bapo", "clipx.upper_start=5"], r"clipx\.upper_start=5: must not be above clipx\.upper_stop=3"),
        (["+clipx=bapo", "clipx.upper_step=0.0000001"], r"clipx\.upper_step=1e-07: must be a number \(at least 0\.001"),
        (
            ["+clipx=bapo", "clipx.upper_stop=20", "clipx.upper_step=0.001"],
            r"clipx\.upper_step=0\.001: more than 10000 candidates",
        ),
        (
            ["+clipx=bapo", "clipx.target=1.5"],
            r"clipx\.target=1\.5 with clipx\.contribution=share: a share is at most 1",
        ),
        (["+clipx=bapo", "clipx.contribution=ratio", "clipx.target=11"], r"at least 0\.01 and at most 10"),
        (
            ["+clipx=acpo", "clipx.epsilon_base=1", "clipx.epsilon_max=0.5"],
            r"epsilon_base=1: must not be above clipx\.epsi",
        ),
        (
            ["+clipx=topr", "clipx.negative_low=0.9", "clipx.negative_high=0.8"],
            r"clipx\.negative_low=0\.9: must not be above clipx\.negative_high=0\.8\.",
        ),
        (
            ["+clipx=acpo", "clipx.lagged_average=0.5"],
            r"clipx\.lagged_average=0\.5 with clipx\.scope=mini_batch: only scope=lagged averages",
        ),
        (["+clipx=grpo", "clipx.log_ratio_clamp=89"], r"clipx\.log_ratio_clamp=89: must be .*at most 40\), or null"),
        (
            ["+clipx=grpo", "clipx.clip_high=1e39"],
            r"clipx\.clip_high=1e\+39: must be a number \(at least 1 and at most 20",
        ),
        (
            ["+clipx=grpo", "clipx.dual_clip=1"],
            r"clipx\.dual_clip=1: must be a number \(above 1 and at most 1e6\), or null",
        ),
        (
            ["+clipx=acpo", "clipx.bins=1000000000"],
            r"clipx\.bins=1000000000: must be .*\(at least 1 and at most 100\)",
        ),
        (["+clipx=acpo", "clipx.bins=.inf"], r"clipx\.bins='?\.?inf'?: must be a whole number"),
        (["+clipx=acpo", "clipx.alpha=nan"], r"clipx\.alpha=nan: must be a number"),
        (["+clipx=acpo", "clipx.alpha=[1,2]"], r"clipx\.alpha=\[1, 2\]: must be a number"),
        (["+clipx=grpo", "clipx.clip_low=1.2"], r"clipx\.clip_low=1\.2: must be a number \(at least 0 and at most 1\)"),
        (["+clipx=grpo", "clipx.clip_high=0.28"], r"clipx\.clip_high=0\.28: must be a number \(at least 1 and at"),
        (["+clipx=dgpo", "clipx.clip_low=null"], r"clipx\.clip_low=None: DGPO scales its decay"),
        (["+clipx=acpo", "clipx.method=acop"], r"clipx\.method='acop': must be one of"),
        (["+clipx=base"], r"no method is chosen \(\+clipx=base is not a method.*for example \+clipx=acpo"),
        (["+clipx=acpo", "clipx.method=null"], r"clipx\.method=None and clipx\.function=None: no method is chosen"),
        (["+clipx=acpo", "clipx.method=3"], r"clipx\.method=3: must be one of grpo, acpo"),
        (["+clipx=acpo", "clipx.method=''"], r"clipx\.method='': must be one of grpo, acpo"),
        (["+clipx=acpo", "clipx.method=[acpo,bapo]"], r"clipx\.method=\['acpo', 'bapo'\]: must be one of grpo, acpo"),
        (["+clipx=acpo", "clipx.method={name:acpo}"], r"clipx\.method=\{'name': 'acpo'\}: must be one of grpo, acpo"),
        (["+clipx=acpo", "+clipx.function=a:b"], r"clipx\.method='acpo' and clipx\.function='a:b': choose one"),
        (
            ["+clipx=gppo", "clipx.method=aspo"],
            r"loss_mode=clipx_gppo but clipx\.method=aspo: .* Choose the method only by",
        ),
        (
            ["+clipx=acpo", "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"],
            r"policy_loss\.loss_mode=vanilla but clipx\.method=acpo: .* Choose the method only by its group",
        ),
        (["+clipx=custom", "clipx.function=null"], r"clipx\.function=None: no method is chosen"),
        (["+clipx=custom", "clipx.function=''"], r"clipx\.function='': write it as package\.module:name"),
        (["+clipx=custom", "clipx.function=5"], r"clipx\.function=5: write it as package\.module:name"),
        (["+clipx=custom", "clipx.function=[a,b]"], r"clipx\.function=\['a', 'b'\]: write it as package\.module:name"),
        (["+clipx=custom", "clipx.function={a:b}"], r"clipx\.function=\{'a': 'b'\}: write it as package\.module:name"),
        (["+clipx/update=lopti"], r"\+clipx/update is added to a method, and none is chosen\. Choose one as well"),
        (["+clipx=grpo", "+clipx/update=lopti", "clipx.update.eta=2"], r"clipx\.update\.eta=2: must be a number"),
        (
            ["+clipx=grpo", "+clipx/shaping=advantage_reweighting", "+clipx.shaping.beta=2"],
            r"clipx\.shaping\.beta is not a parameter of AdvantageReweighting\.",
        ),
        (["+clipx=grpo", "+clipx.select=high"], r"clipx\.select='high': choose a group"),
        (["+clipx=acpo", "clipx.lagged_average=1"], r"clipx\.lagged_average=1: must be a number"),
        (["+clipx=custom", "clipx.function=nowhere:loss"], r"clipx\.function='nowhere:loss': No module named"),
        (["+clipx=custom", "clipx.function=nowhere"], r"write it as package\.module:name"),
        (
            ["+clipx=bapo", "clipx.weight=rollout", "actor_rollout_ref.rollout.calculate_log_probs=false"],
            r"clipx\.weight=rollout but actor_rollout_ref\.rollout\.calculate_log_probs=False",
        ),
        (
            ["+clipx=grpo", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"],
            r"loss_agg_mode=seq-mean-token-sum-norm with .*loss_scale_factor=null: verl would divide",
        ),
    ],
)
def test_a_bad_value_stops_in_the_driver(actor, overrides, message):
    with pytest.raises(Exception, match=message) as raised:
        actor(*overrides)
    assert isinstance(raised.value, InstantiationException) or "clipx" in str(raised.value)


def test_every_parameter_of_a_method_is_overridden_and_swept_without_a_plus(composed):
    for name in ("alpha", "scope", "dual_clip", "log_ratio_clamp", "lagged_average"):
        assert composed("+clipx=acpo", f"clipx.{name}=null").clipx[name] is None


def test_listing_shows_each_parameter_with_its_value_in_each_group():
    rows = {row[0]: row for row in map(parameter_row, listed("acpo")[0]["parameters"])}
    assert groups_of("acpo") == ["acpo", "acpo_reference"]
    assert rows["bin_on"][1:4] == ("old", "current", "one of old, current")
    assert rows["epsilon_max"][1:3] == ("null", "3.0")


def test_a_configuration_recorded_before_the_folder_driver_existed_still_builds(composed):
    config = composed("+clipx=acpo", "clipx.alpha=2")
    recorded = OmegaConf.to_yaml(config).replace("verl_clipx.run.", "verl_clipx.training.")
    assert recorded.count("_target_: verl_clipx.training.hydra_nodes.") >= 2
    now, then = (
        omega_conf_to_dataclass(of.actor_rollout_ref.actor).policy_loss.clipx
        for of in (config, OmegaConf.create(recorded))
    )
    assert then == now and then.method.alpha == 2
