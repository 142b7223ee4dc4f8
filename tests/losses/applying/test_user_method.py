"""A user's own loss, class or decorated function: configuration, parameters, metrics, command line, mistakes. Not
covered: the contract (tests/losses/contract/test_contract.py), a training run (tests/end_to_end).
"""

import importlib
import sys
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from tests import example_losses
from tests.claims.configuration import build_by_verl, compose_by_hydra, decide
from tests.compiler import load_compiler
from tests.messages import assert_names
from tests.training.worker.test_policy_loss import call
from verl_clipx import METHODS
from verl_clipx.cli import app
from verl_clipx.losses.applying import user_method
from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.losses.contract.contract import evaluate, example
from verl_clipx.losses.methods.acpo import Acpo
from verl_clipx.losses.methods.grpo import Grpo
from verl_clipx.run.config import build

EXAMPLES = example_losses.__name__
TENSOR_NAMES = ("old_log_prob", "log_prob", "advantages", "mask")
# By the names of verl's policy-loss signature.
TENSORS = {"response_mask" if name == "mask" else name: example()[name] for name in TENSOR_NAMES}


def actor(name, *overrides):
    """verl's ActorConfig with a loss of example_losses.py, through Hydra as a user writes it."""
    return build_by_verl(compose_by_hydra("+clipx=custom", f"clipx.function={EXAMPLES}:{name}", *overrides))


def gradient_of(weight):
    """The gradient under token-mean of a weight F."""
    mask = TENSORS["response_mask"]
    return torch.where(mask, -weight * TENSORS["advantages"] / mask.sum(), 0)


def test_a_function_becomes_a_loss_with_its_own_parameters():
    config = actor("soft", "+clipx.temperature=3", "+clipx.clip_high=1.4")
    method = config.policy_loss.clipx.method
    assert (method.temperature, method.clip_high) == (3.0, 1.4)
    assert (method.summary(), method.source) == ("A sigmoid gate around the bounds.", f"{EXAMPLES}:soft")
    _, gradient, metrics = call("clipx_custom", config, TENSORS)
    ratio = (TENSORS["log_prob"] - TENSORS["old_log_prob"]).exp()
    weight = ratio * torch.sigmoid((1.4 - ratio) * 3) * torch.sigmoid((ratio - 0.8) * 3)
    torch.testing.assert_close(gradient, gradient_of(weight), rtol=1e-9, atol=1e-12)
    assert "clipx/gradient_mass/HP" in metrics


def test_a_function_gets_what_it_asks_for_by_name(users_module):
    users_module(
        f"{IMPORTS}@register_loss('users_asking', unconstrained_weight=True)\n"
        "def asking(advantages, entropy, log_prob, old_log_prob, bounds):\n"
        "    return entropy + 10 * log_prob + 100 * old_log_prob + 0 * bounds.high\n"
    )
    inputs = {name: example()[name] for name in TENSOR_NAMES}
    settings = build(function="users_losses:asking")
    assert list(settings.asks_for) == ["entropy"] and settings.needs_entropy
    assert settings.method.summary() == "A gradient weight of your own."
    weights = evaluate(settings.method, **inputs, entropy=example()["entropy"]).weight
    expected = example()["entropy"] + 10 * inputs["log_prob"] + 100 * inputs["old_log_prob"]
    torch.testing.assert_close(weights[inputs["mask"]], expected[inputs["mask"]])


def test_a_class_becomes_a_loss_with_statistics_of_its_own():
    config = actor("WithinSpread", "+clipx.width=0.5", "+clipx.scope=lagged")
    assert config.policy_loss.clipx.adaptive
    _, gradient, metrics = call("clipx_custom", config, TENSORS)
    mask, advantages = TENSORS["response_mask"], TENSORS["advantages"]
    log_ratio = TENSORS["log_prob"] - TENSORS["old_log_prob"]
    spread = log_ratio[mask].square().mean().sqrt()
    clipped = log_ratio * advantages.sign() > 0.5 * spread
    assert 5 < (clipped & mask).sum() < 20
    torch.testing.assert_close(gradient, gradient_of(torch.where(clipped, 0, log_ratio.exp())))
    assert metrics["clipx/spread"] == pytest.approx(spread.item())
    assert metrics["actor/pg_clipfrac"] == pytest.approx((clipped & mask).sum().item() / mask.sum().item())


@pytest.mark.parametrize(
    ("name", "overrides", "bounds"),
    [
        (
            "Tapering",
            ("+clipx.width=0.4",),
            "ratio 1 - 0.4 / s to 1 + 0.4 / s, s >= 1, s the token's position, its root to the power 0.5",
        ),
        ("gate", ("+clipx.limit=2",), "ratio up to 2 tau, tau the limit 2"),
        ("soft", (), "ratio 0.8 to 1.2"),
    ],
)
def test_a_run_is_described_by_the_formula_of_the_loss_and_its_symbols(name, overrides, bounds):
    _, decision = decide("+clipx=custom", f"clipx.function={EXAMPLES}:{name}", *overrides)
    assert decision.description.bounds == bounds
    assert f"  bounds: {bounds}" in decision.description.text


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    """Writes a module of a user and imports it; afterwards all is as before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text):
        (tmp_path / "users_losses.py").write_text(text)
        return importlib.import_module("users_losses")

    with mock.patch.dict(METHODS), mock.patch.dict(user_method.DECORATED), mock.patch.dict(POLICY_LOSS_REGISTRY):
        yield write
    sys.modules.pop("users_losses", None)


IMPORTS = """
from dataclasses import dataclass
import torch
from verl_clipx import FixedBounds, Method, Width, parameter, register_loss
from verl_clipx.losses.methods.clip_cov import ClipCov
from verl_clipx.losses.methods.grpo import Grpo
from verl_clipx.losses.base.parameters import number
"""


@pytest.fixture
def check_loss(users_module):
    """Runs `clipx check-loss` on a loss in a module of a user; returns its exit code and its output in one line."""
    load_compiler()

    def check(text, name):
        users_module(IMPORTS + text)
        with mock.patch.object(sys, "path", [*sys.path]):
            result = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["check-loss", f"users_losses:{name}"])
        return result.exit_code, " ".join(result.output.split())

    return check


def write_function(arguments, *, name="wrong", more=""):
    """Return the text of a decorated function called `wrong`; more: further arguments of its decorator."""
    return f"@register_loss({name!r}{more})\ndef wrong({arguments}):\n    return ratio\n"


def write_class(parents, body="pass"):
    """Return the text of a class called `wrong`."""
    return f"class wrong({parents}):\n    {body}\n"


def write_dataclass(parents, body="pass"):
    return f"@dataclass(frozen=True, kw_only=True)\n{write_class(parents, body)}"


def write_method(body):
    """Return the text of a method called `wrong` with fixed bounds, of which the body alone is wrong."""
    return write_dataclass("FixedBounds, name='wrong'", body)


DEFAULT_OF_AN_ENUM = """import enum
Kind = enum.Enum('Kind', {'soft': 'soft', 'hard': 'hard'}, type=str)
""" + write_function("ratio, *, kind=Kind.soft")
NAME_OF_GRPO = write_function("ratio", name="grpo")
NAME_OF_ACPO = write_dataclass("FixedBounds, name='acpo'")


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        pytest.param(
            "def wrong(ratio):\n    return ratio\n",
            ["not decorated with @verl_clipx.register_loss"],
            id="a function without a decorator",
        ),
        pytest.param(
            write_function("ratio, strength"),
            ["'strength'", "a function may ask only for ratio", "keyword-only"],
            id="an argument that is not offered",
        ),
        pytest.param(
            write_function("ratio, *, shares=()"),
            ["type tuple cannot be a configuration value"],
            id="a default that is a tuple",
        ),
        pytest.param(
            DEFAULT_OF_AN_ENUM,
            ["type Kind cannot be a configuration value"],
            id="a default that is a text and of another type",
        ),
        pytest.param(
            NAME_OF_GRPO, ["the name 'grpo' already belongs to verl_clipx"], id="a function with a built-in name"
        ),
        pytest.param(
            NAME_OF_ACPO,
            ["the name 'acpo' already belongs to verl_clipx.losses.methods.acpo:Acpo"],
            id="a class with a built-in name",
        ),
        pytest.param(
            write_class("FixedBounds, name='wrong'"), ["@dataclass(frozen=True, kw_only=True)"], id="not a dataclass"
        ),
        pytest.param(write_dataclass("Method"), ['class wrong(Method, name="…")'], id="a class without a name"),
        pytest.param(write_dataclass("Grpo"), ['class wrong(Method, name="…")'], id="a class with its parent's name"),
        pytest.param(
            write_method("bounds: float = parameter(1.0, number(at_least=0, at_most=1), '')"),
            ["bounds is a name that verl_clipx.losses.base.method:Method uses", "Give the parameter another name"],
            id="a parameter with the name of a method's method",
        ),
        pytest.param(
            write_dataclass(
                "Grpo, name='wrong'", "loss_value: float = parameter(1.0, number(at_least=0, at_most=1), '')"
            ),
            ["loss_value is a name that verl_clipx.losses.base.method:Method uses"],
            id="a parameter with the name of a method's method, of a class derived from grpo",
        ),
        pytest.param(
            write_dataclass(
                "ClipCov, name='wrong'", "find_drawn: float = parameter(1.0, number(at_least=0, at_most=1), '')"
            ),
            ["find_drawn is a name that verl_clipx.losses.methods.clip_cov:ClipCov uses"],
            id="a parameter with the name of a method of its parent",
        ),
        pytest.param(
            write_method("scope: float = parameter(1.0, number(at_least=0, at_most=1), '')"),
            ["scope has the name of a key"],
            id="a parameter with the name of a key of the clipx node",
        ),
        pytest.param(
            write_method("strength: float = 1.0"),
            ["write strength = verl_clipx.parameter(default, allowed, meaning)"],
            id="a field that is no parameter",
        ),
        pytest.param(
            write_method("formula = '1 - w'"),
            ["formula='1 - w'", "must be a tuple of texts"],
            id="a formula that is a text",
        ),
        pytest.param(
            write_method("formula = ('1 - w',)"),
            ["formula=('1 - w',)", "must be a tuple of texts", "the lower bound"],
            id="a formula of one bound",
        ),
        pytest.param(
            write_method("formula = ('', '{w}')"),
            ["'{w}'", "cannot be filled in", "Braces must contain the name of a parameter"],
            id="a formula with an unknown parameter",
        ),
        pytest.param(
            write_function("ratio", more=", symbols='{w'"),
            ["'{w'", "cannot be filled in", "Braces must contain the name of a parameter"],
            id="symbols with half a brace",
        ),
        pytest.param(
            write_function("ratio", more=", bounds_width=Width()"),
            ["bounds_width names clip_low", "which is not one of its"],
            id="a width without the bounds that it sets",
        ),
        pytest.param(
            write_method("bounds_width = Width(only_with=(('on', 1),))"),
            ["bounds_width names on", "which is not one of its"],
            id="a width under a condition on an unknown parameter",
        ),
        pytest.param(
            write_function("ratio, bounds, *, clip_high=1.3", more=", bounds_width=Width()"),
            ["takes clip_high itself", "would not follow a held target", "Take `bounds` instead"],
            id="a width that a parameter of the function would not follow",
        ),
    ],
)
def test_a_mistake_is_named_and_leaves_the_modules_others_alone(text, facts, users_module):
    users_module(IMPORTS + text + SOUND_LOSSES)
    with pytest.raises(ValueError) as raised:
        build(function="users_losses:wrong")
    assert_names(str(raised.value), *facts)
    tensors = {name: example()[name] for name in TENSOR_NAMES}
    for name, expected_weight in (("function", 2.8), ("Class", 3.0)):
        method = build(function=f"users_losses:{name}").method
        assert (evaluate(method, **tensors).weight == expected_weight).all()
        assert f"clipx_users_{name.lower()}" in POLICY_LOSS_REGISTRY
    assert METHODS["grpo"] is Grpo
    assert METHODS["acpo"] is Acpo


def test_a_class_with_a_built_in_name_is_refused_where_it_is_instantiated_too(users_module):
    module = users_module(IMPORTS + NAME_OF_ACPO)
    with pytest.raises(ValueError, match="the name 'acpo' already belongs to"):
        module.wrong()


# As verl's registry calls its losses, with and without each of its decorators.
LOSS_FOR_VERL = """
def wrong(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, **further):
    return -((log_prob - old_log_prob).exp() * advantages * response_mask).sum(), {}
"""
LOSS_BY_KEYWORDS = (
    "def wrong(*, log_prob, old_log_prob, advantages, response_mask):\n    return -advantages * response_mask\n"
)
LOSS_REGISTERED_WITH_VERL = (
    "from verl.trainer.ppo.core_algos import register_policy_loss\n@register_policy_loss('users_wrong')" + LOSS_FOR_VERL
)


@pytest.mark.parametrize(
    "text",
    [
        LOSS_FOR_VERL,
        LOSS_BY_KEYWORDS,
        LOSS_REGISTERED_WITH_VERL,
        f"@register_loss('wrong'){LOSS_FOR_VERL}",
        f"@register_loss('wrong', unconstrained_weight=True)\n{LOSS_BY_KEYWORDS}",
    ],
)
def test_a_function_with_the_signature_of_verls_registry_returns_a_loss(text, check_loss):
    code, output = check_loss(text, "wrong")
    assert code == 1, output
    assert_names(output, "such a function returns a loss")
    # What to do, for a weight and for a loss.
    assert_names(output, "returns F of every token", "@verl_clipx.register_loss")
    assert "register_policy_loss('wrong')" in output
    assert_names(output, "VERL_USE_EXTERNAL_MODULES=users_losses")
    assert "keyword-only" not in output


@pytest.mark.slow
@pytest.mark.parametrize(("formula", "is_named"), [("1 + 0 * ratio", True), ("ratio", False)])
def test_a_weight_that_is_the_same_at_every_ratio_is_named_and_fails_nothing(
    formula, is_named, check_loss, monkeypatch
):
    monkeypatch.setattr("verl_clipx.losses.contract.contract.COMPILED_CHECKS", ())
    code, output = check_loss(f"@register_loss('flat')\ndef flat(ratio):\n    return {formula}\n", "flat")
    assert code == 0, output
    assert ("remark The weight follows the ratio" in output) == is_named
    assert ("F is the same at every ratio" in output) == is_named


SOUND_LOSSES = """
@register_loss("users_function")
def function(advantages, *, clip_high: float = 1.4, slope: float = 2):
    return slope * clip_high * torch.ones_like(advantages)

@dataclass(frozen=True, kw_only=True)
class Class(FixedBounds, name="users_class"):
    strength: float = parameter(3.0, number(at_least=0, at_most=10), "F")

    def gradient_weight(self, t, bounds):
        return self.strength * torch.ones_like(t.ratio)
"""


LOSSES_WITH_A_DUAL_CLIP = """
def clip(t_ratio, advantages, dual_clip):
    return torch.where((advantages < 0) & (t_ratio > dual_clip), 0.0, t_ratio)

@register_loss("users_function")
def function(ratio, advantages, *, dual_clip=2.0):
    return clip(ratio, advantages, dual_clip)

@dataclass(frozen=True, kw_only=True)
class Class(Method, name="users_class"):
    dual_clip: float = parameter(2.0, number(above=1, at_most=10), "tokens with A < 0 above it have no gradient")

    def gradient_weight(self, t, bounds):
        return clip(t.ratio, t.advantages, self.dual_clip)
"""


@pytest.mark.parametrize("name", ["function", "Class"])
def test_a_method_may_have_a_dual_clip_and_logs_what_it_clips(name, users_module):
    users_module(IMPORTS + LOSSES_WITH_A_DUAL_CLIP)
    config = build_by_verl(
        compose_by_hydra("+clipx=custom", f"clipx.function=users_losses:{name}", "+clipx.dual_clip=1.1")
    )
    assert config.policy_loss.clipx.method.dual_clip == 1.1
    _, gradient, metrics = call("clipx_custom", config, TENSORS)
    mask, advantages = TENSORS["response_mask"], TENSORS["advantages"]
    ratio = (TENSORS["log_prob"] - TENSORS["old_log_prob"]).exp()
    is_clipped = mask & (advantages < 0) & (ratio > 1.1)
    assert is_clipped.any()
    torch.testing.assert_close(gradient, gradient_of(torch.where(is_clipped, 0.0, ratio)))
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx((is_clipped.sum() / mask.sum()).item())


def test_a_function_that_names_the_clamp_gets_the_ratio_without_it(users_module):
    users_module(f"""{IMPORTS}
@register_loss("users_clamped")
def clamped(ratio):
    return ratio

@register_loss("users_free")
def free(ratio, *, log_ratio_clamp=5):
    return ratio
""")
    tokens = {
        "log_prob": torch.tensor([[0.0]]),
        "old_log_prob": torch.tensor([[-30.0]]),
        "advantages": torch.tensor([[1.0]]),
        "mask": torch.tensor([[True]]),
    }
    for name, expected_log_ratio in (("clamped", 20.0), ("free", 30.0)):
        method = build(function=f"users_losses:{name}").method
        weight = evaluate(method, **tokens).weight
        assert weight.log().item() == pytest.approx(expected_log_ratio)


def test_a_module_imported_again_takes_the_place_of_the_first(users_module):
    module = users_module(IMPORTS + SOUND_LOSSES)
    first = module.Class
    assert importlib.reload(module).Class is METHODS["users_class"] is not first
    assert build(function="users_losses:function", slope=5).method.slope == 5.0


@pytest.mark.parametrize(
    "function",
    [f"{EXAMPLES}.soft", "my losses.py:soft", "/tmp/file.py:f", "..:f", "a-b:f", ".m:f", "a..b:f", 3],
)
def test_what_is_not_a_modules_name_and_an_attributes_is_told_how_to_be_written(function):
    with pytest.raises(ValueError) as raised:
        build(function=function)
    assert_names(str(raised.value), f"clipx.function={function!r}", "package.module:name", "my_losses:name")


@pytest.mark.parametrize(
    ("function", "facts"),
    [
        (f"{EXAMPLES}:missing", ["no attribute 'missing'", "must be importable in the driver and in every Ray worker"]),
        ("no_such_module:soft", ["No module named 'no_such_module'", "must be importable"]),
        (f"{EXAMPLES}:torch", ["not a subclass of verl_clipx.Method"]),
        (f"{EXAMPLES}:Method", ["@dataclass"]),
    ],
)
def test_what_cannot_be_imported_or_is_no_loss_is_named(function, facts):
    with pytest.raises(ValueError) as raised:
        build(function=function)
    assert_names(str(raised.value), *facts)


LOSSES_IN_THE_PLACE_OF_WEIGHTS = """
@register_loss("users_loss")
def loss(ratio, advantages, bounds):
    clipped = ratio.clamp(bounds.low, bounds.high)
    return -torch.minimum(ratio * advantages, clipped * advantages)

@register_loss("users_meant", unconstrained_weight=True)
def meant(ratio, advantages):
    return -ratio * advantages.abs()
"""


def test_a_loss_in_the_place_of_the_weight_fails_the_contract_with_what_to_return(check_loss):
    code, output = check_loss(LOSSES_IN_THE_PLACE_OF_WEIGHTS, "loss")
    assert code == 1, output
    assert_names(output, "at ratio 1 for a token with A =", "when A is multiplied by", "Return the gradient weight F")
    lines = (IMPORTS + LOSSES_IN_THE_PLACE_OF_WEIGHTS).splitlines()
    line_of_decorator = 1 + lines.index('@register_loss("users_loss")')
    assert f"users_losses.py:{line_of_decorator}: F is " in output


def test_a_weight_that_is_meant_so_is_named_on_the_line(users_module):
    users_module(IMPORTS + LOSSES_IN_THE_PLACE_OF_WEIGHTS)
    for name, is_named in (("meant", True), ("loss", False)):
        config = build_by_verl(compose_by_hydra("+clipx=custom", f"clipx.function=users_losses:{name}"))
        line = config.policy_loss.run.record.line
        assert ("unconstrained_weight: F may be 0 or less at ratio 1" in line) == is_named


def write_faulty_function(weight):
    return f'@register_loss("users_faulty")\ndef faulty(ratio):\n    return {weight}\n'


METHOD_THAT_COUNTS_PADDING = """
@dataclass(frozen=True, kw_only=True)
class faulty(Method, name="users_padded"):
    statistics_size = 1

    def statistics(self, t):
        return t.ratio.double().sum()[None]

    def gradient_weight(self, t, bounds):
        return t.ratio
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (write_faulty_function("ratio / ratio.mean()"), "when other sequences of its micro-batch are taken away"),
        (METHOD_THAT_COUNTS_PADDING, "the statistics count padding"),
    ],
)
def test_a_faulty_loss_is_refused_for_its_own_fault(check_loss, text, message):
    code, output = check_loss(text, "faulty")
    assert code == 1 and message in output, output
    assert "failed Nothing waits" not in output


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("ratio[:, 1.5]", "failed The loss can be computed."),
        ("ratio * missing", "users_losses.py:{last_line}: NameError: name 'missing' is not defined"),
    ],
)
def test_an_error_in_a_loss_is_its_only_finding(check_loss, weight, message):
    # What else it keeps from being checked is no fault of the loss.
    text = write_faulty_function(weight)
    code, output = check_loss(text, "faulty")
    last_line = len((IMPORTS + text).splitlines())
    assert code == 1 and message.format(last_line=last_line) in output, output
    assert output.count("failed") == 1, output


FUNCTION_WITH_TYPES = """
@register_loss("users_typed")
def typed(ratio, *, steps: int = 3, bare=2, later: "int" = 4, on=True, word="a", most: int = None, nothing=None):
    assert [type(value) for value in (steps, bare, later, on, word)] == [int, int, int, bool, str]
    assert most is None and nothing is None
    for _ in range(steps):
        ratio = ratio.clamp(max=bare)
    return ratio
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "name"), [(SOUND_LOSSES, "Class"), (SOUND_LOSSES, "function"), (FUNCTION_WITH_TYPES, "typed")]
)
def test_a_sound_loss_keeps_the_contract_and_gets_its_parameters_in_their_types(check_loss, text, name):
    code, output = check_loss(text, name)
    assert code == 0 and "kept" in output, output


def test_a_parameter_takes_what_its_default_and_annotation_say(users_module):
    users_module(IMPORTS + FUNCTION_WITH_TYPES)
    for values in (dict(steps=4, bare=5, most=7, nothing=0.5, word="b"), dict(bare=2.5, steps=2.0, most=None)):
        method = build(function="users_losses:typed", **values).method
        assert {key: getattr(method, key) for key in values} == values
        assert type(method.steps) is int


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("steps", 2.5, "must be a whole number (any"),
        ("steps", True, "must be a whole number (any"),
        ("steps", None, "must be a whole number (any"),
        ("later", 1.5, "must be a whole number"),
        ("most", 1.5, "or null"),
        ("bare", "2", "must be a number"),
        ("on", 1, "must be true or false"),
        ("word", 1, "must be text"),
    ],
)
def test_a_value_of_another_type_than_the_parameters_is_refused(users_module, key, value, reason):
    users_module(IMPORTS + FUNCTION_WITH_TYPES)
    with pytest.raises(Refusal) as raised:
        build(function="users_losses:typed", **{key: value})
    assert raised.value.key == f"clipx.{key}"
    assert raised.value.value == value
    assert reason in raised.value.reason


@pytest.mark.parametrize(
    "annotation", ["int", "int | None", "Optional[int]", "'int'", "'int | None'", "'Optional[int]'"]
)
def test_an_annotation_of_integers_that_may_be_null_allows_whole_numbers_only(users_module, annotation):
    text = f"""
from typing import Optional

@register_loss("users_optional")
def loss(ratio, *, most: {annotation} = None):
    return ratio
"""
    users_module(IMPORTS + text)
    for value in (None, 7):
        assert build(function="users_losses:loss", most=value).method.most == value
    with pytest.raises(Refusal, match="must be a whole number"):
        build(function="users_losses:loss", most=2.5)


@pytest.mark.parametrize(
    ("function", "parameter", "reason"),
    [
        pytest.param("soft", {"warmth": 1}, "is not a parameter of", id="unknown"),
        pytest.param("smooth", {"clip_high": 1.3}, "is not a parameter of", id="a bound where there are none"),
        pytest.param("soft", {"clip_high": 0.5}, "must be", id="out of a bound's range"),
        pytest.param("WithinSpread", {"width": -1}, "must be", id="out of the range that a class states"),
    ],
)
def test_a_parameter_that_is_unknown_or_out_of_range_is_refused(function, parameter, reason):
    with pytest.raises(Refusal) as raised:
        build(function=f"{EXAMPLES}:{function}", **parameter)
    ((key, value),) = parameter.items()
    assert raised.value.key == f"clipx.{key}"
    assert raised.value.value == value
    assert reason in raised.value.reason


MODULES_THAT_END_THE_PROCESS = {
    "exits": "import sys\nsys.exit(0)\n",
    "raises SystemExit": "raise SystemExit\n",
    "exits with a message": "exit('done')\n",
    "parses arguments": "import argparse\nargparse.ArgumentParser().parse_args()\n",
    "ends without Python's exit": "import os\nos._exit(0)\n",
    "parses its version": (
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('-v', action='version', version='1', default=None)\nparser.parse_args(['-v'])\n"
    ),
}


@pytest.mark.parametrize("name", MODULES_THAT_END_THE_PROCESS)
def test_check_loss_fails_where_a_module_ends_the_process(name, tmp_path, monkeypatch):
    (tmp_path / "ending_losses.py").write_text(IMPORTS + MODULES_THAT_END_THE_PROCESS[name] + SOUND_LOSSES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["clipx", "check-loss", "ending_losses:function"])
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["check-loss", "ending_losses:function"])
    message = " ".join(result.output.split())
    assert result.exit_code == 1 and "ending_losses" in message
    assert "if __name__ ==" in message or "before there was a verdict" in message


LOSS_THAT_ENDS_THE_PROCESS = """
import os

calls = []

@register_loss("ending")
def ending(ratio):
    calls.append(1)
    if len(calls) > 3:
        {end}
    return ratio
"""


@pytest.mark.parametrize(
    ("end", "how"), [("os._exit(0)", "with exit code 0"), ("os.kill(os.getpid(), 9)", "by SIGKILL")]
)
def test_check_loss_fails_where_a_loss_ends_the_process(check_loss, end, how):
    code, output = check_loss(LOSS_THAT_ENDS_THE_PROCESS.format(end=end), "ending")
    assert code == 1 and f"the process of the check ended {how} before there was a verdict" in output
