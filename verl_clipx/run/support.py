"""Reads what has run where from the files in docs/results/cpu and docs/results/gpu, which the wheel has as results.

docs/support.md lists what is in them (scripts/key_tables.py). An option that no test has run anywhere is named in a
run's line, and its receipt only warns. A file has the device's name, its kind (cpu or cuda) and parts, each with its
outcome, commit and date, and perhaps `options`, each with its outcome, and `runs`, of the form of `shape_of`.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_clipx.common.files import read_json
from verl_clipx.run import keys

PACKAGE = Path(__file__).resolve().parents[1]
# Inside the package in a wheel, in docs in a checkout.
RESULTS = next(
    (
        folder_of_results
        for folder_of_results in (PACKAGE / "results", PACKAGE.parent / "docs/results")
        if folder_of_results.is_dir()
    ),
    PACKAGE,
)
PASSED = "passed"

# From keys of which every run has one value to the names of options by value. Another value has run nowhere.
NAMED: Mapping[str, Mapping[Any, str]] = {
    keys.STRATEGY: {"fsdp2": "FSDP2", "fsdp": "FSDP1", "megatron": "Megatron"},
    keys.ENGINE_NAME: {"vllm": "vLLM", "cpu": "the CPU's rollout", "sglang": "SGLang"},
    keys.ESTIMATOR: {
        "grpo": "GRPO's advantages",
        "rloo": "RLOO",
        "reinforce_plus_plus": "REINFORCE++",
        "gae": "GAE with a critic",
        "optimal_token_baseline": "optimal token baseline",
    },
}


def takes_images(path: str | None) -> bool:
    """Returns whether a model takes more than text; False if its configuration is not on this machine."""
    config = keys.model_config(path)
    return config is not None and config.get_text_config() is not config


# From options to the keys of a run that has them, with the value of each or a test of it.
OPTIONS: Mapping[str, Mapping[str, bool | Callable[[Any], bool]]] = {
    "QAT": {keys.QAT: True},
    "multi-token prediction": {keys.MTP: True},
    "PrefixGrouper": {keys.PREFIX_GROUPER: True},
    "images and videos": {keys.MODEL_PATH: takes_images},
    "bypass mode, v0 trainer": {keys.BYPASS: True, keys.USE_V1: False},
    "distillation alongside task rewards": {keys.DISTILLATION: True},
    "group filtering": {keys.GROUP_FILTERING: True},
    "router replay under VeOmni": {
        keys.STRATEGY: "veomni",
        keys.ROUTER_REPLAY_OF_VEOMNI: {"R2", "R3"}.__contains__,
    },
    "router replay under Megatron": {
        keys.STRATEGY: "megatron",
        keys.ROUTER_REPLAY_OF_MEGATRON: {"R2", "R3"}.__contains__,
    },
    "other devices than cuda and cpu": {keys.DEVICE: lambda device: device not in (None, "cuda", "cpu")},
}


@functools.cache
def read_records(folder: Path) -> list[dict[str, Any]]:
    """Returns the content of every file on a device, the CPUs' first."""
    return [read_json(path) for kind in ("cpu", "gpu") for path in sorted((folder / kind).glob("*.json"))]


def options_of(record: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Returns the options of a device's tests with the outcome of each, which no part may have failed, and its note."""
    every = [item for part in record["parts"].values() for item in part.get("options", {}).items()]
    return dict(sorted(every, key=lambda item: item[1]["outcome"] == "failed")) if every else {}


def passed_options() -> frozenset[str]:
    """Returns the options that a test has run on some device."""
    every = (item for record in read_records(RESULTS) for item in options_of(record).items())
    return frozenset(name for name, option in every if option["outcome"] == PASSED)


def untested(values: keys.Values) -> list[str]:
    """Returns those of a run's options that no test has run: keys with their values, and names of options.

    Args:
        values: the keys of `keys.READ` with their values.
    """
    run = passed_options()
    others = [f"{key}={values.get(key)}" for key, names in NAMED.items() if names.get(values.get(key)) not in run]
    return others + [
        name
        for name, wanted in OPTIONS.items()
        if name not in run
        and all(of(values.get(key)) if callable(of) else values.get(key) == of for key, of in wanted.items())
    ]


def tested_values(option: str) -> list[Any]:
    """Returns the values that tests have run in place of an untested `key=value`."""
    return [value for value, name in NAMED.get(option.partition("=")[0], {}).items() if name in passed_options()]


def read_costs() -> dict[str, Any]:
    """Returns the measured costs, and the page that says how they came about; a test holds them against it."""
    return next(record["costs"] for record in read_records(RESULTS) if "costs" in record)


# What a run's shape says where a key of it has no value.
NOT_SET = {
    "nodes": "an unknown number of nodes",
    "ranks": "an unknown number of ranks",
    "engine": f"no {keys.STRATEGY}",
    "rollout": f"no {keys.ENGINE_NAME}",
    "tokens": "responses of unknown length",
    "device": "no trainer.device",
}


def shape_of(config: DictConfig) -> dict[str, Any]:
    """Return the size of a run on its machines; `tokens` is the most of a sequence, and None is what is not set."""
    value = functools.partial(OmegaConf.select, config)
    # A count is 0 or an empty text where there was nothing to count.
    nodes = value(keys.NODES, default=1) or None
    machine = value(keys.DEVICES_A_NODE, default=1) or None
    lengths = value(keys.LONGEST_PROMPT), value(keys.LONGEST_RESPONSE)
    return {
        "device": value(keys.DEVICE),
        "nodes": nodes,
        "ranks": None if None in (nodes, machine) else nodes * machine,
        "engine": value(keys.STRATEGY),
        "rollout": value(keys.ENGINE_NAME),
        "tokens": None if None in lengths else sum(lengths),
    }


def is_covered(shape: Mapping[str, Any], run: Mapping[str, Any]) -> bool:
    """Returns whether a run was at least as large as a shape, with the same device, engine and rollout."""
    if None in shape.values():
        return False
    same = all(shape[key] == run[key] for key in ("device", "engine", "rollout"))
    return same and all(shape[key] <= run[key] for key in ("nodes", "ranks", "tokens"))


def devices(holds: Callable[[Mapping[str, Any]], bool] = lambda part: part["outcome"] == PASSED) -> list[str]:
    """Returns the names of the devices with a part of which something holds: by default, that it has passed."""
    return [record["device"] for record in read_records(RESULTS) if any(map(holds, record["parts"].values()))]


def has_run_on(config: DictConfig) -> str:
    """Returns on which devices something has run, and on which a run of this shape or a larger one has."""
    shape = shape_of(config)
    tried = devices(lambda part: any(is_covered(shape, run) for run in part.get("runs", ())))
    outcome = f"tried on {', '.join(tried)}" if tried else "not tried"
    return f"{', '.join(devices())}; this run: {shape_in_words(shape)}: {outcome}"


def shape_in_words(shape: Mapping[str, Any]) -> str:
    """Return what `shape_of` returned as a list for a reader, which says what is not set."""
    parts = []
    for key in ("nodes", "ranks", "engine", "rollout", "tokens", "device"):
        value = shape[key]
        if value is None:
            parts.append(NOT_SET[key])
        elif key in ("nodes", "ranks") and value == 1:
            parts.append(f"1 {key.removesuffix('s')}")
        elif key in ("nodes", "ranks", "tokens"):
            parts.append(f"{value:,} {key}")
        else:
            parts.append(value)
    return ", ".join(parts)
