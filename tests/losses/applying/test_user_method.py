"""A user's own loss, class or decorated function: configuration, parameters, metrics, command line, mistakes. Not
covered: the contract (tests/losses/contract/test_contract.py), a training run (tests/end_to_end).
"""

import importlib
import re
import sys
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from tests import example_losses
from tests.claims.configuration import built, decided, hydra_s
from tests.compiler import load_compiler
from tests.training.worker.test_policy_loss import call
from verl_clipx import METHODS
from verl_clipx.cli import app
from verl_clipx.losses.applying import user_method
from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.losses.contract.contract import evaluate, example
from verl_clipx.losses.methods.acpo import Acpo
from verl_clipx.losses.methods.grpo import Grpo
from verl_clipx.run.config import build

MODULE = example_losses.__name__
NAMES = ("old_log_prob", "log_prob", "advantages", "mask")
# By the names of verl's policy-loss signature.
TENSORS = {"response_mask" if name == "mask" else name: example()[name] for name in NAMES}


def actor(name, *overrides):
    """verl's ActorConfig with a loss of example_losses.py, through Hydra as a user writes it."""
    return built(hydra_s("+clipx=custom", f"clipx.function={MODULE}:{name}", *overrides))


def gradient_of(weight):
    """The gradient under token-mean of a weight F."""
    mask = TENSORS["response_mask"]
    return torch.where(mask, -weight * TENSORS["advantages"] / mask.sum(), 0)


def test_a_function_becomes_a_loss_with_its_own_parameters():
    config = actor("soft", "+clipx.temperature=3", "+clipx.clip_high=1.4")
    method = config.policy_loss.clipx.method
    assert (method.temperature, method.clip_high) == (3.0, 1.4)
    assert (method.summary(), method.source) == ("A sigmoid gate around the bounds.", f"{MODULE}:soft")
    _, gradient, metrics = call("clipx_custom", config, TENSORS)
    ratio = (TENSORS["log_prob"] - TENSORS["old_log_prob"]).exp()
    weight = ratio * torch.sigmoid((1.4 - ratio) * 3) * torch.sigmoid((ratio - 0.8) * 3)
    torch.testing.assert_close(gradient, gradient_of(weight), rtol=1e-9, atol=1e-12)
    assert "clipx/gradient_mass/HP" in metrics


def test_a_function_gets_what_it_asks_for_by_name(users_module):
    users_module(
        f"{HEAD}@register_loss('users_asking', unconstrained_weight=True)\n"
        "def asking(advantages, entropy, log_prob, old_log_prob, bounds):\n"
        "    return entropy + 10 * log_prob + 100 * old_log_prob + 0 * bounds.high\n"
    )
    inputs = {name: example()[name] for name in NAMES}
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
    _, decision = decided("+clipx=custom", f"clipx.function={MODULE}:{name}", *overrides)
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


HEAD = """
from dataclasses import dataclass
import torch
from verl_clipx import FixedBounds, Method, Width, parameter, register_loss
from verl_clipx.losses.methods.clip_cov import ClipCov
from verl_clipx.losses.methods.grpo import Grpo
from verl_clipx.losses.base.parameters import number
"""
# A function's decorator with more, its arguments; a class's parents, its body. Each is called `wrong`.
FUNCTION = "@register_loss('wrong'{})\ndef wrong({}):\n    return ratio\n"
CLASS = "class wrong({}):\n    {}\n"


def dataclass_of(parents, body="pass"):
    return "@dataclass(frozen=True, kw_only=True)\n" + CLASS.format(parents, body)


@pytest.fixture
def checked(users_module):
    """What `clipx check-loss` says of a loss in a module of a user, and its exit code."""
    load_compiler()

    def check(text, name):
        users_module(HEAD + text)
        with mock.patch.object(sys, "path", [*sys.path]):
            result = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["check-loss", f"users_losses:{name}"])
        return result.exit_code, " ".join(result.output.split())

    return check


OF_THE_NODE = "scope: float = parameter(1.0, number(at_least=0, at_most=1), '')"
# What a user may get wrong, and what the message says.
KIND = "import enum\nKind = enum.Enum('Kind', {'soft': 'soft', 'hard': 'hard'}, type=str)\n"
FIXED = "FixedBounds, name='wrong'"
MISTAKES = [
    ("def wrong(ratio):\n    return ratio\n", "is not decorated with @verl_clipx.register_loss"),
    (FUNCTION.format("", "ratio, strength"), "asks for 'strength', but a function may ask only for ratio, "),
    (FUNCTION.format("", "ratio, *, of=()"), "type tuple cannot be a configuration value"),
    (KIND + FUNCTION.format("", "ratio, *, kind=Kind.soft"), "type Kind cannot be a configuration value"),
    (FUNCTION.replace("'wrong'", "'grpo'").format("", "ratio"), "the name 'grpo' already belongs to verl_clipx"),
    (
        dataclass_of("FixedBounds, name='acpo'"),
        "the name 'acpo' already belongs to verl_clipx.losses.methods.acpo:Acpo",
    ),
    (CLASS.format(FIXED, "pass"), "write it as @dataclass(frozen=True"),
    # Without a name, or with a parent's.
    (dataclass_of("Method"), 'class wrong(Method, name="…"'),
    (dataclass_of("Grpo"), 'class wrong(Method, name="…"'),
    (
        dataclass_of(FIXED, OF_THE_NODE.replace("scope", "bounds")),
        "bounds is a name that verl_clipx.losses.base.method:Method uses",
    ),
    (
        dataclass_of("Grpo, name='wrong'", OF_THE_NODE.replace("scope", "loss_value")),
        "loss_value is a name that verl_clipx.losses.base.method:Method uses",
    ),
    (
        dataclass_of("ClipCov, name='wrong'", OF_THE_NODE.replace("scope", "find_drawn")),
        "find_drawn is a name that verl_clipx.losses.methods.clip_cov:ClipCov uses",
    ),
    (dataclass_of(FIXED, OF_THE_NODE), "scope has the name of a key"),
    (dataclass_of(FIXED, "strength: float = 1.0"), "write strength = verl_clipx.parameter(default"),
    (dataclass_of(FIXED, "formula = '1 - w'"), "formula='1 - w' must be a tuple of texts: the lower bound"),
    (dataclass_of(FIXED, "formula = ('1 - w',)"), "formula=('1 - w',) must be a tuple of texts: the lower bound"),
    (dataclass_of(FIXED, "formula = ('', '{w}')"), "'{w}' of its formula or symbols cannot be filled in"),
    (FUNCTION.format(", symbols='{w'", "ratio"), "'{w' of its formula or symbols cannot be filled in"),
    (
        FUNCTION.format(", bounds_width=Width()", "ratio"),
        "bounds_width names clip_low, which is not one of its",
    ),
    (dataclass_of(FIXED, "bounds_width = Width(only_with=(('on', 1),))"), "bounds_width names on, which is no"),
    (
        FUNCTION.format(", bounds_width=Width()", "ratio, bounds, *, clip_high=1.3"),
        "takes clip_high itself, so that it would not follow a held target. Take `bounds` instead",
    ),
]

# As verl's registry calls its losses, with and without each of its decorators.
OF_VERLS = """
def wrong(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, **further):
    return -((log_prob - old_log_prob).exp() * advantages * response_mask).sum(), {}
"""
ALL_BY_NAME = (
    "def wrong(*, log_prob, old_log_prob, advantages, response_mask):\n    return -advantages * response_mask\n"
)
REGISTERED_WITH_VERL = (
    "from verl.trainer.ppo.core_algos import register_policy_loss\n@register_policy_loss('users_wrong')" + OF_VERLS
)


@pytest.mark.parametrize(
    "text",
    [
        OF_VERLS,
        ALL_BY_NAME,
        REGISTERED_WITH_VERL,
        f"@register_loss('wrong'){OF_VERLS}",
        f"@register_loss('wrong', unconstrained_weight=True)\n{ALL_BY_NAME}",
    ],
)
def test_a_function_with_the_signature_of_verls_registry_returns_a_loss(text, checked):
    code, output = checked(text, "wrong")
    assert code == 1 and "such a function returns a loss" in output, output
    # What to do, either way.
    assert "returns F of every token" in output and "register_policy_loss('wrong')" in output
    assert "VERL_USE_EXTERNAL_MODULES=users_losses" in output and "keyword-only" not in output


@pytest.mark.slow
@pytest.mark.parametrize(("formula", "is_named"), [("1 + 0 * ratio", True), ("ratio", False)])
def test_a_weight_that_is_the_same_at_every_ratio_is_named_and_fails_nothing(formula, is_named, checked, monkeypatch):
    monkeypatch.setattr("verl_clipx.losses.contract.contract.COMPILED_CHECKS", ())
    code, output = checked(f"@register_loss('flat')\ndef flat(ratio):\n    return {formula}\n", "flat")
    assert code == 0, output
    assert ("remark The weight follows the ratio" in output) == is_named
    assert ("F is the same at every ratio" in output) == is_named


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


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_a_mistake_is_named_and_leaves_the_modules_others_alone(text, message, users_module):
    module = users_module(HEAD + text + SOUND)
    with pytest.raises(ValueError, match=re.escape(message)):
        build(function="users_losses:wrong")
    if "'acpo' already belongs" in message:
        with pytest.raises(ValueError, match=re.escape(message)):
            module.wrong()
    inputs = {name: example()[name] for name in NAMES}
    for name, weight in (("function", 2.8), ("Class", 3.0)):
        method = build(function=f"users_losses:{name}").method
        assert (evaluate(method, **inputs).weight == weight).all()
        assert f"clipx_users_{name.lower()}" in POLICY_LOSS_REGISTRY
    assert (METHODS["grpo"], METHODS["acpo"]) == (Grpo, Acpo)


DUAL_CLIPPED = """
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
    users_module(HEAD + DUAL_CLIPPED)
    config = built(hydra_s("+clipx=custom", f"clipx.function=users_losses:{name}", "+clipx.dual_clip=1.1"))
    assert config.policy_loss.clipx.method.dual_clip == 1.1
    _, gradient, metrics = call("clipx_custom", config, TENSORS)
    mask, advantages = TENSORS["response_mask"], TENSORS["advantages"]
    ratio = (TENSORS["log_prob"] - TENSORS["old_log_prob"]).exp()
    is_clipped = mask & (advantages < 0) & (ratio > 1.1)
    assert is_clipped.any()
    torch.testing.assert_close(gradient, gradient_of(torch.where(is_clipped, 0.0, ratio)))
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx((is_clipped.sum() / mask.sum()).item())


def test_a_function_that_names_the_clamp_gets_the_ratio_without_it(users_module):
    function = "@register_loss('users_{0}')\ndef {0}(ratio{1}):\n    return ratio\n"
    users_module(HEAD + function.format("clamped", "") + function.format("free", ", *, log_ratio_clamp=5"))
    inputs = {name: torch.tensor([[value]]) for name, value in (("old_log_prob", -30.0), ("advantages", 1.0))}
    for name, log_ratio in (("clamped", 20.0), ("free", 30.0)):
        method = build(function=f"users_losses:{name}").method
        found = evaluate(method, log_prob=torch.zeros(1, 1), mask=torch.ones(1, 1, dtype=torch.bool), **inputs).weight
        assert found.log().item() == pytest.approx(log_ratio)


def test_a_module_imported_again_takes_the_place_of_the_first(users_module):
    module = users_module(HEAD + SOUND)
    first = module.Class
    assert importlib.reload(module).Class is METHODS["users_class"] is not first
    assert build(function="users_losses:function", slope=5).method.slope == 5.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (f"{MODULE}.soft", "write it as package.module:name"),
        ("my losses.py:soft", "For a file my_losses.py write my_losses:name"),
        *((one, "write it as package.module:name") for one in ("/tmp/file.py:f", "..:f", "a-b:f", ".m:f", "a..b:f")),
        (3, "clipx.function=3: write it as package.module:name"),
        (f"{MODULE}:missing", "has no attribute 'missing'.*must be importable in the driver and in every Ray"),
        ("no_such_module:soft", "No module named 'no_such_module'.*must be importable"),
        *((f"{MODULE}:torch", "not a subclass of verl_clipx"), (f"{MODULE}:Method", "write it as @dataclass")),
    ],
)
def test_a_function_that_is_none_is_named(function, message):
    with pytest.raises(ValueError, match=message):
        build(function=function)


LOSS_FOR_WEIGHT = """
@register_loss("users_loss")
def loss(ratio, advantages, bounds):
    clipped = ratio.clamp(bounds.low, bounds.high)
    return -torch.minimum(ratio * advantages, clipped * advantages)

@register_loss("users_meant", unconstrained_weight=True)
def meant(ratio, advantages):
    return -ratio * advantages.abs()
"""


def test_a_loss_in_the_place_of_the_weight_fails_the_contract_with_what_to_return(checked):
    code, said = checked(LOSS_FOR_WEIGHT, "loss")
    assert code == 1 and "at ratio 1 for a token with A = " in said and "Return the gradient weight F" in said
    assert "when A is multiplied by" in said
    # Of the decorator's line.
    line = 1 + (HEAD + LOSS_FOR_WEIGHT).splitlines().index('@register_loss("users_loss")')
    assert f"users_losses.py:{line}: F is " in said


def test_a_weight_that_is_meant_so_is_named_on_the_line(users_module):
    users_module(HEAD + LOSS_FOR_WEIGHT)
    told = "unconstrained_weight: F may be 0 or less at ratio 1, or change with the size of A"
    for name, named in (("meant", True), ("loss", False)):
        config = built(hydra_s("+clipx=custom", f"clipx.function=users_losses:{name}"))
        assert (told in config.policy_loss.run.record.line) == named


WEIGHT = '@register_loss("users_faulty")\ndef faulty(ratio):\n    return {}\n'
PADDED = """
@dataclass(frozen=True, kw_only=True)
class faulty(Method, name="users_padded"):
    statistics_size = 1

    def statistics(self, t):
        return t.ratio.double().sum()[None]

    def gradient_weight(self, t, bounds):
        return t.ratio
"""


@pytest.mark.parametrize(
    ("text", "message", "alone"),
    [
        (WEIGHT.format("ratio / ratio.mean()"), "when other sequences of its micro-batch are taken away", False),
        (PADDED, "the statistics count padding", False),
        # An error has one finding, with its line: what else it keeps from being checked is no fault of the loss.
        (WEIGHT.format("ratio[:, 1.5]"), "failed The loss can be computed.", True),
        (WEIGHT.format("ratio * missing"), "{line}: NameError: name 'missing' is not defined", True),
    ],
)
def test_a_faulty_loss_is_refused_for_its_own_fault(checked, text, message, alone):
    code, said = checked(text, "faulty")
    line = len((HEAD + text).splitlines())
    assert code == 1 and message.format(line=f"users_losses.py:{line}") in said, said
    assert "failed Nothing waits" not in said and (not alone or said.count("failed") == 1)


TYPED = """
@register_loss("users_typed")
def typed(ratio, *, steps: int = 3, bare=2, later: "int" = 4, on=True, word="a", most: int = None, nothing=None):
    assert [type(of) for of in (steps, bare, later, on, word)] == [int, int, int, bool, str]
    assert most is None and nothing is None
    for _ in range(steps):
        ratio = ratio.clamp(max=bare)
    return ratio
"""


@pytest.mark.slow
@pytest.mark.parametrize(("text", "name"), [(SOUND, "Class"), (SOUND, "function"), (TYPED, "typed")])
def test_a_sound_loss_keeps_the_contract_and_gets_its_parameters_in_their_types(checked, text, name):
    code, said = checked(text, name)
    assert code == 0 and "kept" in said, said


def test_a_parameter_takes_what_its_default_and_annotation_say(users_module):
    users_module(HEAD + TYPED)
    for values in (dict(steps=4, bare=5, most=7, nothing=0.5, word="b"), dict(bare=2.5, steps=2.0, most=None)):
        method = build(function="users_losses:typed", **values).method
        assert {key: getattr(method, key) for key in values} == values
        assert type(method.steps) is int


@pytest.mark.parametrize(
    ("function", "key", "value", "reason"),
    [
        *(("typed", "steps", value, "must be a whole number (any") for value in (2.5, True, None)),
        *(("typed", "most", 1.5, "or null"), ("typed", "later", 1.5, "must be a whole number")),
        *(("typed", "on", 1, "must be true or false"), ("typed", "word", 1, "must be text")),
        ("typed", "bare", "2", "must be a number"),
        *((f"{MODULE}:soft", "warmth", 1, ""), (f"{MODULE}:smooth", "clip_high", 1.3, "")),
        # The ranges of the bounds' own parameter, and of a class's.
        *((f"{MODULE}:soft", "clip_high", 0.5, "must be"), (f"{MODULE}:WithinSpread", "width", -1, "must be")),
    ],
)
def test_a_parameter_that_is_none_or_out_of_range_is_refused(users_module, function, key, value, reason):
    users_module(HEAD + TYPED)
    with pytest.raises(Refusal) as raised:
        build(function=function if ":" in function else f"users_losses:{function}", **{key: value})
    assert (raised.value.key, raised.value.value) == (f"clipx.{key}", value) and reason in raised.value.reason


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
    (tmp_path / "ending_losses.py").write_text(HEAD + MODULES_THAT_END_THE_PROCESS[name] + SOUND)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["clipx", "check-loss", "ending_losses:function"])
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["check-loss", "ending_losses:function"])
    message = " ".join(result.output.split())
    assert result.exit_code == 1 and "ending_losses" in message
    assert "if __name__ ==" in message or "before there was a verdict" in message


ENDING_LOSS = """
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
def test_check_loss_fails_where_a_loss_ends_the_process(checked, end, how):
    code, said = checked(ENDING_LOSS.format(end=end), "ending")
    assert code == 1 and f"the process of the check ended {how} before there was a verdict" in said
