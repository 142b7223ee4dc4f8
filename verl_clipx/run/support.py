"""Which of a run's options tests have run, as far as they decide what its receipt does and its line names.

docs/support.md lists all options, and tests/run/test_support.py says which test runs each.
"""

from collections.abc import Callable, Mapping
from typing import Any

from verl_clipx.run.keys import (
    BYPASS,
    DEVICE,
    DISTILLATION,
    ENGINE_NAME,
    ESTIMATOR,
    GROUP_FILTERING,
    MODEL_PATH,
    MTP,
    PREFIX_GROUPER,
    QAT,
    ROUTER_REPLAY,
    ROUTER_REPLAY_OF_MEGATRON,
    STRATEGY,
    USE_V1,
    Values,
    model_config,
)

# From keys of which every run has one value to the values that tests have run.
TESTED = {
    STRATEGY: ("fsdp2",),
    ENGINE_NAME: ("vllm", "cpu"),
    ESTIMATOR: ("grpo", "rloo", "reinforce_plus_plus", "gae"),
}


def takes_images(path: str | None) -> bool:
    """Whether a model takes more than text; False if its configuration is not on this machine."""
    config = model_config(path)
    return config is not None and config.get_text_config() is not config


# From options that no test has run to the keys of a run that has them, with the value of each or a test of it.
UNTESTED: Mapping[str, Mapping[str, bool | Callable[[Any], bool]]] = {
    "QAT": {QAT: True},
    "multi-token prediction": {MTP: True},
    "PrefixGrouper": {PREFIX_GROUPER: True},
    "images and videos": {MODEL_PATH: takes_images},
    "bypass mode, v0 trainer": {BYPASS: True, USE_V1: False},
    "distillation beside task rewards": {DISTILLATION: True},
    "group filtering": {GROUP_FILTERING: True},
    "router replay": {STRATEGY: "veomni", ROUTER_REPLAY: {"R2", "R3"}.__contains__},
    "router replay under Megatron": {STRATEGY: "megatron", ROUTER_REPLAY_OF_MEGATRON: {"R2", "R3"}.__contains__},
    "other devices than cuda and cpu": {DEVICE: lambda device: device not in (None, "cuda", "cpu")},
}


def untested(values: Values) -> list[str]:
    """What no test has run of a run's options: keys with their values, and names of options.

    Args:
        values: the keys of `keys.READ` with their values.
    """
    others = [f"{key}={values.get(key)}" for key, tested in TESTED.items() if values.get(key) not in tested]
    return others + [
        name
        for name, keys in UNTESTED.items()
        if all(of(values.get(key)) if callable(of) else values.get(key) == of for key, of in keys.items())
    ]
