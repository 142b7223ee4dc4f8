"""A user's own loss: class or decorated function, configuration, command line.

Covers: the way from a module that no entry point knows to verl's registry and config; parameters; bounds of other
methods and of statistics of its own; what a class logs; what a mistake's message says, and that it leaves the module's
other losses alone. Not covered: the contract (test_contract.py), a training run (tests/end_to_end).
"""

import importlib
import sys
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner
from verl.trainer.ppo import core_algos

from tests import example_losses
from tests.claims.configuration import built, hydra_s
from tests.worker.test_policy_loss import call
from verl_clipx import METHODS, evaluate
from verl_clipx.check.contract import example
from verl_clipx.cli import app
from verl_clipx.loss import user_method
from verl_clipx.loss.rollout_metrics import with_updates
from verl_clipx.methods.acpo import Acpo
from verl_clipx.methods.grpo import Grpo
from verl_clipx.run.announcement import announcement
from verl_clipx.run.config import build

MODULE = example_losses.__name__


def actor(name, *overrides):
    """verl's ActorConfig with a loss of example_losses.py, through Hydra as a user writes it."""
    return built(hydra_s("+clipx=custom", f"clipx.function={MODULE}:{name}", *overrides))


@pytest.fixture
def tensors():
    """A micro-batch by the names of verl's policy-loss signature."""
    given = example()
    return {
        "response_mask": given["mask"],
        **{name: given[name] for name in ("old_log_prob", "log_prob", "advantages")},
    }


def gradient_of(weight, tensors):
    """The gradient under token-mean of a weight F."""
    mask = tensors["response_mask"]
    return torch.where(mask, -weight * tensors["advantages"] / mask.sum(), 0)


def test_a_function_becomes_a_loss_with_its_own_parameters(tensors):
    config = actor("soft", "+clipx.temperature=3", "+clipx.clip_high=1.4")
    method = config.policy_loss.clipx.method
    assert (method.temperature, method.clip_high) == (3.0, 1.4)
    assert (method.summary(), method.source) == ("A sigmoid gate around the bounds.", f"{MODULE}:soft")
    _, gradient, metrics = call("clipx_custom", config, tensors)
    ratio = (tensors["log_prob"] - tensors["old_log_prob"]).exp()
    weight = ratio * torch.sigmoid((1.4 - ratio) * 3) * torch.sigmoid((ratio - 0.8) * 3)
    torch.testing.assert_close(gradient, gradient_of(weight, tensors), rtol=1e-9, atol=1e-12)
    assert "clipx/gradient_mass/HP" in metrics


def test_its_bounds_can_come_from_another_method(tensors):
    _, _, metrics = call("clipx_custom", actor("gppo_within_acpo", "+clipx.alpha=1"), tensors)
    assert metrics["clipx/epsilon/bin_0"] > 0.2


def test_a_class_becomes_a_loss_with_statistics_of_its_own(tensors):
    config = actor("WithinSpread", "+clipx.width=0.5", "+clipx.scope=lagged")
    assert config.policy_loss.clipx.adaptive
    _, gradient, metrics = call("clipx_custom", config, tensors)
    mask, advantages = tensors["response_mask"], tensors["advantages"]
    log_ratio = tensors["log_prob"] - tensors["old_log_prob"]
    spread = log_ratio[mask].square().mean().sqrt()
    clipped = log_ratio * advantages.sign() > 0.5 * spread
    assert 5 < (clipped & mask).sum() < 20
    torch.testing.assert_close(gradient, gradient_of(torch.where(clipped, 0, log_ratio.exp()), tensors))
    assert metrics["clipx/spread"] == pytest.approx(spread.item())
    assert metrics["actor/pg_clipfrac"] == pytest.approx((clipped & mask).sum().item() / mask.sum().item())


@pytest.mark.parametrize("name", ["soft", "within_spread"])
def test_it_is_in_verls_registry_under_its_own_name(name, tensors):
    call(f"clipx_tests_{name}", actor({"within_spread": "WithinSpread"}.get(name, name)), tensors)


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    """Writes a module of a user and imports it; afterwards all is as before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text):
        (tmp_path / "users_losses.py").write_text(text)
        return importlib.import_module("users_losses")

    registries = (METHODS, user_method.DECORATED, core_algos.POLICY_LOSS_REGISTRY)
    with mock.patch.dict(registries[0]), mock.patch.dict(registries[1]), mock.patch.dict(registries[2]):
        yield write
    sys.modules.pop("users_losses", None)


HEAD = """
from dataclasses import dataclass
import torch
from verl_clipx import FixedBounds, Method, parameter, register_loss
from verl_clipx.methods.grpo import Grpo
from verl_clipx.base.parameters import number
"""


TOLD = f"""
from dataclasses import dataclass
from {MODULE} import WithinSpread
from verl_clipx import of_decision, of_rollout_batch

@dataclass(frozen=True, kw_only=True)
class Told(WithinSpread, name="tests_told"):
    logs = (
        *WithinSpread.logs,
        of_decision("sum/tokens", "tokens", "tokens", detailed=True, adds_up=True),
        of_rollout_batch("spread_last", "of the last update", "nats"),
        of_rollout_batch("sum/tokens_last", "of the last update", "tokens"),
    )

    def metrics(self, statistics, decision):
        return {{"spread": decision[0], "sum/tokens": statistics[0]}}

    def over_updates(self, metrics):
        return {{f"{{name}}_last": values[-1] for name, values in metrics.items()}}
"""


@pytest.mark.parametrize(("metrics", "own"), [("default", ["spread"]), ("all", ["spread", "sum/tokens"])])
def test_what_a_class_logs_of_each_update_and_of_all(users_module, tensors, metrics, own):
    users_module(TOLD)
    config = built(
        hydra_s("+clipx=custom", "clipx.function=users_losses:Told", "+clipx.scope=lagged", f"clipx.metrics={metrics}")
    )
    settings = config.policy_loss.clipx
    _, _, found = call("clipx_custom", config, tensors)
    names = [f"clipx/{name}" for name in own]
    assert [name for name in found if name in ("clipx/spread", "clipx/sum/tokens")] == names
    two_updates = {name: [found[name], 9.0] for name in names}
    of_both = {f"{name}_last": [9.0] for name in names}
    if metrics == "all":
        for number in (0, 1):
            of_both |= {f"clipx/update_{number}/{name}": [(found[f"clipx/{name}"], 9.0)[number]] for name in own}
    assert with_updates(two_updates, settings.method, each=settings.detailed) == two_updates | of_both


# What a user may get wrong, and the message that says it. Each is called `wrong`.
FUNCTION = "@register_loss('wrong'{})\ndef wrong({}):\n    return ratio\n"
CLASS = "class wrong({}):\n    {}\n"
DATACLASS = "@dataclass(frozen=True, kw_only=True)\n" + CLASS
MISTAKES = {
    "no decorator": ("def wrong(ratio):\n    return ratio\n", "is not decorated with @verl_clipx.register_loss"),
    "bounds of nothing": (FUNCTION.format(", bounds='gspo'", "ratio"), r"bounds='gspo'\): must be one of fixed, acpo"),
    "bounds that it does not take": (
        FUNCTION.format(", bounds='acpo'", "ratio"),
        r"bounds='acpo'\): users_losses:wrong has no argument bounds, so the bounds of acpo would be ignored",
    ),
    "no default": (
        FUNCTION.format("", "ratio, strength"),
        "'strength' of users_losses:wrong must be keyword-only with",
    ),
    "a default of no use": (FUNCTION.format("", "ratio, *, of=()"), "default of type tuple cannot be a configuration"),
    "an enum": (
        "import enum\nKind = enum.Enum('Kind', 'soft hard')\n" + FUNCTION.format("", "ratio, *, kind=Kind.soft"),
        r"type Kind cannot be a configuration value: .* annotation Literal\['word', 'other'\]",
    ),
    "an enum of words": (
        "import enum\nKind = enum.StrEnum('Kind', 'soft hard')\n" + FUNCTION.format("", "ratio, *, kind=Kind.soft"),
        "type Kind cannot be a configuration value",
    ),
    "a function's taken name": (
        FUNCTION.replace("'wrong'", "'grpo'").format("", "ratio"),
        r"users_losses:wrong: the name 'grpo' already belongs to verl_clipx\.methods\.grpo:Grpo",
    ),
    "a function's word of a method": (
        FUNCTION.format("", "ratio, *, statistics=1.0"),
        "statistics is a name that every",
    ),
    "a function's key of the node": (
        FUNCTION.format("", "ratio, *, scope=1.0"),
        "its parameter scope has the name of a key of every clipx node",
    ),
    "a class's taken name": (
        DATACLASS.format("FixedBounds, name='acpo'", "pass"),
        r"users_losses:wrong: the name 'acpo' already belongs to verl_clipx\.methods\.acpo:Acpo",
    ),
    "no @dataclass": (CLASS.format("FixedBounds, name='wrong'", "pass"), r"write it as @dataclass\(frozen=True"),
    "no name": (DATACLASS.format("Method", "pass"), 'class wrong.Method, name="…"'),
    "a parent's name": (DATACLASS.format("Grpo", "pass"), 'class wrong.Method, name="…"'),
    "a class's word of a method": (
        DATACLASS.format(
            "FixedBounds, name='wrong'", "bounds: float = parameter(1.0, number(at_least=0, at_most=1), '')"
        ),
        "users_losses:wrong: bounds is a name that every method uses",
    ),
    "a class's key of the node": (
        DATACLASS.format(
            "FixedBounds, name='wrong'", "scope: float = parameter(1.0, number(at_least=0, at_most=1), '')"
        ),
        "its parameter scope has the name of a key of every clipx node",
    ),
    "no parameter()": (
        DATACLASS.format("FixedBounds, name='wrong'", "strength: float = 1.0"),
        r"users_losses:wrong: write strength = verl_clipx\.parameter\(default",
    ),
}

SOUND = """
@register_loss("users_function")
def function(advantages, *, clip_high: float = 1.4, slope: float = 2):
    return slope * clip_high * torch.ones_like(advantages)

@dataclass(frozen=True, kw_only=True)
class Class(FixedBounds, name="users_class"):
    strength: float = parameter(3.0, number(at_least=0, at_most=10), "F")

    def gradient_weight(self, t, bounds):
        return self.strength * torch.ones_like(t.ratio)
"""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_and_leaves_the_modules_others_alone(mistake, users_module):
    text, message = MISTAKES[mistake]
    users_module(HEAD + text + SOUND)
    with pytest.raises(ValueError, match=message):
        build(function="users_losses:wrong")
    inputs = {name: example()[name] for name in ("old_log_prob", "log_prob", "advantages", "mask")}
    for name, weight in (("function", 2.8), ("Class", 3.0)):
        method = build(function=f"users_losses:{name}").method
        assert (evaluate(method, **inputs).weight == weight).all()
        assert f"clipx_users_{name.lower()}" in core_algos.POLICY_LOSS_REGISTRY
    assert (METHODS["grpo"], METHODS["acpo"]) == (Grpo, Acpo)


def test_a_parameter_that_the_bounds_have_too_keeps_its_range(users_module):
    users_module(HEAD + SOUND)
    with pytest.raises(ValueError, match=r"clipx\.clip_high=0\.5: must be a number \(at least 1"):
        build(function="users_losses:function", clip_high=0.5)


def test_a_function_that_names_the_clamp_gets_the_ratio_without_it(users_module):
    function = "@register_loss('users_{0}')\ndef {0}(ratio{1}):\n    return ratio\n"
    users_module(HEAD + function.format("clamped", "") + function.format("free", ", *, log_ratio_clamp=5"))
    inputs = {name: torch.tensor([[value]]) for name, value in (("old_log_prob", -30.0), ("advantages", 1.0))}
    for name, log_ratio in (("clamped", 20.0), ("free", 30.0)):
        method = build(function=f"users_losses:{name}").method
        found = evaluate(method, log_prob=torch.zeros(1, 1), mask=torch.ones(1, 1, dtype=torch.bool), **inputs).weight
        assert found.log().item() == pytest.approx(log_ratio)


def test_a_method_of_a_taken_name_cannot_be_built_at_all(users_module):
    text, message = MISTAKES["a class's taken name"]
    with pytest.raises(ValueError, match=message):
        users_module(HEAD + text).wrong()


def test_a_module_imported_again_takes_the_place_of_the_first(users_module):
    module = users_module(HEAD + SOUND)
    first = module.Class
    assert importlib.reload(module).Class is METHODS["users_class"] is not first
    assert build(function="users_losses:function", slope=5).method.slope == 5.0


@pytest.mark.parametrize(
    ("function", "parameters", "message"),
    [
        (f"{MODULE}.soft", {}, "write it as package.module:name"),
        (3, {}, "clipx.function=3: write it as package.module:name"),
        (f"{MODULE}:missing", {}, "has no attribute 'missing'.*must be importable in the driver and in every Ray"),
        ("no_such_module:soft", {}, "No module named 'no_such_module'.*must be importable"),
        (f"{MODULE}:torch", {}, "not a subclass of verl_clipx.Method"),
        (f"{MODULE}:Method", {}, "write it as @dataclass"),
        (f"{MODULE}:soft", {"warmth": 1}, r"clipx\.warmth=1: is not a parameter of tests_soft"),
        (f"{MODULE}:smooth", {"clip_high": 1.3}, r"clipx\.clip_high=1\.3: is not a parameter of tests_smooth"),
        (f"{MODULE}:soft", {"temperature": "hot"}, r"clipx\.temperature=hot: must be a number"),
        (f"{MODULE}:WithinSpread", {"width": -1}, r"clipx\.width=-1: must be a number \(at least 0 and at most 100\)"),
    ],
)
def test_mistakes_in_the_configuration_are_named(function, parameters, message):
    with pytest.raises(ValueError, match=message):
        build(function=function, **parameters)


def test_a_mistake_stops_the_driver():
    with pytest.raises(Exception, match=r"clipx\.warmth=1: is not a parameter of tests_within_spread"):
        actor("WithinSpread", "+clipx.warmth=1")


@pytest.mark.slow
def test_the_command_line_runs_the_contract(users_module):
    broken = '@register_loss("broken")\ndef broken(ratio):\n    return ratio * ratio.sum()\n'
    users_module(HEAD + broken + MISTAKES["a function's key of the node"][0] + SOUND)
    expected = {"Class": (0, "kept"), "function": (0, "kept"), "broken": (1, "failed"), "wrong": (1, "name of a key")}
    with mock.patch.object(sys, "path", [*sys.path]):
        for name, (code, text) in expected.items():
            result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["check-loss", f"users_losses:{name}"])
            assert result.exit_code == code, result.output
            assert text in result.output


LOSS_FOR_WEIGHT = """
@register_loss("users_loss")
def loss(ratio, advantages, bounds):
    clipped = ratio.clamp(bounds.low, bounds.high)
    return -torch.minimum(ratio * advantages, clipped * advantages)

@register_loss("users_meant", unconstrained_weight=True)
def meant(ratio, advantages):
    return -ratio * advantages.abs()
"""


def test_a_loss_in_the_place_of_the_weight_fails_the_contract_with_what_to_return(users_module):
    users_module(HEAD + LOSS_FOR_WEIGHT)
    with mock.patch.object(sys, "path", [*sys.path]):
        result = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["check-loss", "users_losses:loss"])
    said = " ".join(result.output.split())
    assert result.exit_code == 1
    assert "at ratio 1 for a token with A = " in said and "Return the gradient weight F" in said
    assert "when A is multiplied by" in said
    # Of the decorator's line.
    line = 1 + (HEAD + LOSS_FOR_WEIGHT).splitlines().index('@register_loss("users_loss")')
    assert f"users_losses.py:{line}: F is " in said


@pytest.mark.slow
def test_an_error_in_a_loss_is_named_with_its_line(users_module):
    source = HEAD + LOSS_FOR_WEIGHT.replace("    return -ratio * advantages.abs()\n", "    return ratio * missing\n")
    users_module(source)
    with mock.patch.object(sys, "path", [*sys.path]):
        result = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["check-loss", "users_losses:meant"])
    line = 1 + source.splitlines().index("    return ratio * missing")
    assert result.exit_code == 1
    assert f"users_losses.py:{line}: NameError: name 'missing' is not defined" in " ".join(result.output.split())


FAULTY = """
@register_loss("users_mean")
def mean(ratio):
    return ratio / ratio.mean()

@register_loss("users_many")
def many(ratio):
    return ratio * ratio.shape[0]

@register_loss("users_top")
def top(ratio):
    return torch.where(ratio > ratio.quantile(0.8), 0.0, ratio)

@register_loss("users_backwards")
def backwards(ratio):
    return torch.where((ratio - 1).abs() > 0.01, -ratio, ratio)

@register_loss("users_written")
def written(ratio):
    return ratio.clamp_(0.8, 1.2)

@register_loss("users_index")
def index(ratio):
    return ratio[:, 1.5]

@dataclass(frozen=True, kw_only=True)
class Padded(Method, name="users_padded"):
    statistics_size = 1

    def statistics(self, t):
        return t.ratio.double().sum()[None]

    def gradient_weight(self, t, bounds):
        return t.ratio
"""
FAULTS = {
    "mean": "when other sequences of its micro-batch are taken away",
    "many": "when other sequences of its micro-batch are taken away",
    "top": "when other sequences of its micro-batch are taken away",
    "backwards": "below 0. Return the gradient weight F",
    "written": "ratio was written to by gradient_weight",
    "index": "failed The loss can be computed.",
    "Padded": "the statistics count padding",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_loss_is_refused_for_its_own_fault(users_module, name):
    users_module(HEAD + FAULTY)
    with mock.patch.object(sys, "path", [*sys.path]):
        result = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["check-loss", f"users_losses:{name}"])
    said = " ".join(result.output.split())
    assert result.exit_code == 1 and FAULTS[name] in said, said
    # An error has one finding: what else it keeps from being checked is no fault of the loss.
    assert "failed Nothing waits" not in said and (name != "index" or said.count("failed") == 1)


TYPED = """
from typing import Literal, Optional

@register_loss("users_typed")
def typed(
    ratio,
    *,
    steps: int = 3,
    bare=2,
    slope: float = 2,
    on: bool = True,
    word: str = "a",
    kind: Literal["soft", "hard"] = "soft",
    most: Optional[int] = None,
    limit: float | None = 5,
    nothing=None,
):
    assert [type(of) for of in (steps, bare, slope, on, word, kind)] == [int, int, float, bool, str, str]
    assert type(most) in (int, type(None)) and type(limit) in (float, type(None)) and nothing is None
    for _ in range(steps):
        ratio = ratio.clamp(max=slope)
    return ratio
"""


@pytest.mark.slow
def test_parameters_arrive_in_the_type_that_the_function_says(users_module):
    users_module(HEAD + TYPED)
    with mock.patch.object(sys, "path", [*sys.path]):
        result = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["check-loss", "users_losses:typed"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(steps=4, bare=5, slope=1, most=7, limit=None, kind="hard"), None),
        (dict(bare=2.5, steps=2.0), None),
        (dict(steps=2.5), r"clipx\.steps=2\.5: must be a whole number \(any"),
        (dict(steps=True), r"clipx\.steps=True: must be a whole number"),
        (dict(steps=None), r"clipx\.steps=null: must be a whole number"),
        (dict(most=1.5), r"clipx\.most=1\.5: must be a whole number .*, or null"),
        (dict(kind="firm"), r"clipx\.kind=firm: must be one of soft, hard"),
        (dict(on=1), r"clipx\.on=1: must be true or false"),
        (dict(word=1), r"clipx\.word=1: must be text"),
        (dict(bare="2"), r"clipx\.bare='2': must be a number"),
    ],
)
def test_a_typed_parameter_takes_what_its_annotation_says(users_module, values, message):
    users_module(HEAD + TYPED)
    if message:
        with pytest.raises(ValueError, match=message):
            build(function="users_losses:typed", **values)
        return
    built_method = build(function="users_losses:typed", **values).method
    assert {key: getattr(built_method, key) for key in values} == values
    assert type(built_method.steps) is int and type(built_method.slope) is float


def test_a_weight_that_is_meant_so_is_named_on_the_line(users_module):
    users_module(HEAD + LOSS_FOR_WEIGHT)
    told = "unconstrained_weight: F may be 0 or less at ratio 1, or change with the size of A"
    for name, named in (("meant", True), ("loss", False)):
        config = built(hydra_s("+clipx=custom", f"clipx.function=users_losses:{name}"))
        assert (told in announcement(config.policy_loss)) == named
