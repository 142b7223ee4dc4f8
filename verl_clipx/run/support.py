"""Which of verl's options tests have run. A run's line names those of its options that none has."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_clipx.run.verl_keys import (
    BYPASS,
    DISTILLATION,
    ENGINE_NAME,
    ESTIMATOR,
    GROUP_FILTERING,
    MODEL_PATH,
    MTP,
    PREFIX_GROUPER,
    QAT,
    STRATEGY,
    USE_V1,
    Values,
    model_config,
)


def takes_images(path: str | None) -> bool:
    """Whether a model takes more than text; False if its configuration is not on this machine."""
    config = model_config(path)
    return config is not None and config.get_text_config() is not config


@dataclass(frozen=True)
class Option:
    """One of verl's options.

    Args:
        name: as the page calls it.
        tested: whether a test runs it on the CPU.
        remark: how the test runs it, or why none does.
        on: how to recognise a run that has it: from keys of `verl_keys.READ` to the value that they have, or to a
            function that tells whether a value fits.
    """

    name: str
    tested: bool
    remark: str = ""
    on: Mapping[str, Any | Callable[[Any], bool]] = field(default_factory=dict)

    def is_on(self, values: Values) -> bool:
        """Whether a run has this option; False if `on` is empty."""
        pairs = [(values.get(key), value) for key, value in self.on.items()]
        return bool(pairs) and all(value(of) if callable(value) else of == value for of, value in pairs)


OPTIONS = (
    Option("FSDP2", True, "on 1, 2 and 4 ranks over gloo", {STRATEGY: "fsdp2"}),
    Option("vLLM", True, "a build for CPUs", {ENGINE_NAME: "vllm"}),
    Option("the CPU's rollout", True, "of +hardware=cpu", {ENGINE_NAME: "cpu"}),
    Option("packing", True),
    Option("dynamic batch sizes", True),
    Option("Ulysses with flash attention", True, "the kernel's formula in torch"),
    Option("gradient checkpointing", True),
    Option("offload", True),
    Option("hybrid sharding", True),
    Option("chunked entropy", True, "with packing"),
    Option("LoRA", True, "merged weights are rounded to bfloat16 by verl"),
    Option("fused kernels", True, "torch's back end, tied embeddings"),
    Option("bfloat16", True),
    Option("KL loss", True),
    Option("several epochs", True),
    Option("rollout correction", True, "weights and rejection"),
    Option("bypass mode", True, "v1, colocate_async"),
    Option("rejection in bypass mode", True),
    Option("v1 trainer", True, "sync, colocate_async, separate_async"),
    Option("v0 trainer", True),
    Option("one_step_off_policy", True),
    Option("fully_async_policy", True),
    Option("verl's Tinker worker", True, "fixed bounds; what needs the mini-batch stops at the first loss"),
    Option("GRPO's advantages", True, on={ESTIMATOR: "grpo"}),
    Option(
        "RLOO, REINFORCE++, GAE with a critic",
        True,
        on={ESTIMATOR: ("rloo", "reinforce_plus_plus", "gae").__contains__},
    ),
    Option("several turns with tools", True),
    Option("FSDP1", False, "verl's default; cannot start on a CPU"),
    Option("Megatron", False),
    Option("MindSpeed", False),
    Option("VeOmni", False),
    Option("TorchTitan", False),
    Option("FSDP-Turbo", False),
    Option("Automodel", False),
    Option("router replay", False, "R3, and R2 under Megatron"),
    Option("SGLang", False),
    Option("QAT", False, on={QAT: True}),
    Option("multi-token prediction", False, "the engine adds a loss of its own", {MTP: True}),
    Option("PrefixGrouper", False, on={PREFIX_GROUPER: True}),
    Option("images and videos", False, on={MODEL_PATH: takes_images}),
    Option("bypass mode, v0 trainer", False, on={BYPASS: True, USE_V1: False}),
    Option("distillation beside task rewards", False, on={DISTILLATION: True}),
    Option("optimal token baseline", False),
    Option("group filtering", False, "batches are filled up again", {GROUP_FILTERING: True}),
)

# For each of these keys, every run has one value, which a test has run or not.
ONE_OF = (STRATEGY, ENGINE_NAME, ESTIMATOR)


def untested(values: Values) -> list[str]:
    """What no test has run of a run's options: names of options, and keys with values that no tested option has.

    Args:
        values: the keys of `verl_keys.READ` with their values.
    """
    tested = [option for option in OPTIONS if option.tested]
    others = [
        f"{key}={values.get(key)}"
        for key in ONE_OF
        if not any(option.is_on(values) for option in tested if key in option.on)
    ]
    return others + [option.name for option in OPTIONS if not option.tested and option.is_on(values)]


def support_list() -> str:
    """The lists of options in docs/support.md."""
    lists = {True: "Run by tests on CPUs", False: "Run by no test, most because they need GPUs or an NPU"}
    return "\n\n".join(
        f"**{head}:** {'; '.join(_shown(option) for option in OPTIONS if option.tested == tested)}."
        for tested, head in lists.items()
    )


def _shown(option: Option) -> str:
    return f"{option.name} ({option.remark})" if option.remark else option.name
