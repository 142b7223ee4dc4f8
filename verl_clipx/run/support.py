"""Reads what has run where, from the files in docs/results/cpu and docs/results/gpu, which a wheel has in `results`.

docs/support.md lists what is in these files (scripts/key_tables.py). If a run has an option that no test has passed
anywhere, its line names the option, and its receipt only warns.

There is a file for each device, with the device's name, its kind (cpu or cuda) and parts. A part has an outcome, a
commit and a date. It may have `options`, each with an outcome, and `runs`, each of the form of `shape_of`.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_clipx.common.files import read_json
from verl_clipx.run import keys
from verl_clipx.run.sampling import is_number

PACKAGE = Path(__file__).resolve().parents[1]
PASSED = "passed"


def find_results() -> Path:
    """Return the folder of the results: `results` in the package in a wheel, docs/results in a checkout.

    If there is neither, the package's folder is returned, in which no results are found.
    """
    for folder in (PACKAGE / "results", PACKAGE.parent / "docs/results"):
        if folder.is_dir():
            return folder
    return PACKAGE


RESULTS = find_results()

# Keys that have a value in every run. By key and value, the name of the option. A value without a name has run nowhere.
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
    """Return whether a model takes more than text; False if the model's configuration is not on this machine."""
    config = keys.read_model_config(path)
    return config is not None and config.get_text_config() is not config


# By the name of an option, the keys of a run that has it, each with its value or with a test of its value.
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
    """Return the content of every device's file, beginning with the CPUs'."""
    return [read_json(path) for kind in ("cpu", "gpu") for path in sorted((folder / kind).glob("*.json"))]


def options_of(record: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the options that a device's tests have run, by name, each with its outcome and perhaps a note.

    Several parts may have run an option. If it failed in one of them, its outcome is that it failed.

    Args:
        record: the content of the device's file.
    """
    options: dict[str, dict[str, str]] = {}
    for part in record["parts"].values():
        for name, option in part.get("options", {}).items():
            if name not in options or options[name]["outcome"] != "failed":
                options[name] = option
    return options


def passed_options() -> frozenset[str]:
    """Return the names of the options that have passed on some device."""
    names = set()
    for record in read_records(RESULTS):
        for name, option in options_of(record).items():
            if option["outcome"] == PASSED:
                names.add(name)
    return frozenset(names)


def untested(values: keys.Values) -> list[str]:
    """Return those of a run's options that no test has passed on any device.

    Args:
        values: the keys of `keys.READ` with their values.

    Returns:
        The options of `NAMED` as key=value, then those of `OPTIONS` by name.
    """
    passed = passed_options()
    not_passed = []
    for key, name_by_value in NAMED.items():
        value = values.get(key)
        if name_by_value.get(value) not in passed:
            not_passed.append(f"{key}={value}")
    for name, wanted in OPTIONS.items():
        if name not in passed and has_option(values, wanted):
            not_passed.append(name)
    return not_passed


def has_option(values: keys.Values, wanted: Mapping[str, Any]) -> bool:
    """Return whether a run has an option of `OPTIONS`.

    Args:
        values: the keys of `keys.READ` with their values.
        wanted: by key of the option, the value that the run must have, or a function that says whether a value fits.
    """
    for key, value_or_test in wanted.items():
        value = values.get(key)
        holds = value_or_test(value) if callable(value_or_test) else value == value_or_test
        if not holds:
            return False
    return True


def tested_values(option: str) -> list[Any]:
    """Return the values of a key with which tests have passed.

    Args:
        option: an option that `untested` returns. For the name of an option, which is no `key=value`, the result is
            empty.
    """
    key = option.partition("=")[0]
    passed = passed_options()
    return [value for value, name in NAMED.get(key, {}).items() if name in passed]


def read_costs() -> dict[str, Any]:
    """Return the measured costs of the plugin by name; `source` is the page that says how they were measured.

    A test compares the costs with that page.
    """
    return next(record["costs"] for record in read_records(RESULTS) if "costs" in record)


# By part of a run's shape, the words for a part that is None.
NOT_SET = {
    "nodes": "an unknown number of nodes",
    "ranks": "an unknown number of ranks",
    "engine": f"no {keys.STRATEGY}",
    "rollout": f"no {keys.ENGINE_NAME}",
    "tokens": "responses of unknown length",
    "device": "no trainer.device",
}


def shape_of(config: DictConfig) -> dict[str, Any]:
    """Return the shape of a run: device, number of nodes and ranks, engine, rollout, and most tokens of a sequence.

    A part that the configuration does not say is None, and so is a number that is not above 0: a script that finds no
    node or GPU to count writes 0 or an empty text.
    """
    value_of = functools.partial(OmegaConf.select, config)
    nodes = number_or_none(value_of(keys.NODES, default=1))
    ranks_of_node = number_or_none(value_of(keys.DEVICES_A_NODE, default=1))
    ranks = None
    if nodes is not None and ranks_of_node is not None:
        ranks = nodes * ranks_of_node
    longest_prompt = number_or_none(value_of(keys.LONGEST_PROMPT))
    longest_response = number_or_none(value_of(keys.LONGEST_RESPONSE))
    tokens = None
    if longest_prompt is not None and longest_response is not None:
        tokens = longest_prompt + longest_response
    return {
        "device": value_of(keys.DEVICE),
        "nodes": nodes,
        "ranks": ranks,
        "engine": value_of(keys.STRATEGY),
        "rollout": value_of(keys.ENGINE_NAME),
        "tokens": tokens,
    }


def number_or_none(value: Any) -> int | float | None:
    """Return a value if it is a number above 0; None otherwise."""
    return value if is_number(value) and value > 0 else None


def is_covered(shape: Mapping[str, Any], run: Mapping[str, Any]) -> bool:
    """Return whether a run was at least as large as a shape, with the same device, engine and rollout."""
    if None in shape.values():
        return False
    if any(shape[key] != run[key] for key in ("device", "engine", "rollout")):
        return False
    return all(shape[key] <= run[key] for key in ("nodes", "ranks", "tokens"))


def passed_devices() -> list[str]:
    """Return the names of the devices on which a part of the tests has passed."""
    return [record["device"] for record in read_records(RESULTS) if has_passed_part(record)]


def has_passed_part(record: Mapping[str, Any]) -> bool:
    """Return whether a part of a device's tests has passed."""
    return any(part["outcome"] == PASSED for part in record["parts"].values())


def devices_with_run(shape: Mapping[str, Any]) -> list[str]:
    """Return the names of the devices on which a run of a shape, or a larger one, was tried.

    A run counts even if the part of the tests that it belongs to has failed.
    """
    names = []
    for record in read_records(RESULTS):
        runs = [run for part in record["parts"].values() for run in part.get("runs", ())]
        if any(is_covered(shape, run) for run in runs):
            names.append(record["device"])
    return names


def describe_support(config: DictConfig) -> str:
    """Return the text of `clipx explain` on where runs have run, for a run with this configuration.

    It names the devices on which tests have passed, then this run's shape, then the devices on which a run of this
    shape or a larger one was tried.
    """
    shape = shape_of(config)
    tried_on = devices_with_run(shape)
    outcome = f"tried on {', '.join(tried_on)}" if tried_on else "not tried"
    passed_on = passed_devices()
    shape_and_outcome = f"this run: {shape_in_words(shape)}: {outcome}"
    if not passed_on:
        return f"no device; {shape_and_outcome}"
    return f"{', '.join(passed_on)}; {shape_and_outcome}"


def shape_in_words(shape: Mapping[str, Any]) -> str:
    """Return a shape as a list for a reader, which says what is not set."""
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
