"""The names and signatures of verl that the plugin relies on, and what a folder of verl has changed about them.

A release of verl on which tests ran is not examined. Any other verl is, in every process that imports it. Therefore no
module of verl is imported: the source is read, and of each definition only the header is parsed. What a signature must
have depends on who calls whom, as `Use` says.
"""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Use(Enum):
    """What the plugin does with a function of verl, and therefore what its parameters have to be."""

    NAMED = "it is there"
    WRAPPED = "it has these parameters; calls are passed on as they come"
    CALLED = "it has these parameters, and each other one has a default"
    OVERRIDDEN = "it has exactly these parameters"


@dataclass(frozen=True)
class Requirement:
    """A name of verl that the plugin relies on.

    Args:
        module: the module in which it is defined or imported.
        name: the name in that module. The name of an attribute or a method begins with its class: `Class.method`.
        use: what the plugin does with it.
        parameters: the parameters that the function must have, in their order, without self.
    """

    module: str
    name: str
    use: Use = Use.NAMED
    parameters: tuple[str, ...] = ()


def names(module: str, *required_names: str) -> list[Requirement]:
    """Return the requirements that a module has some names, whatever they stand for."""
    return [Requirement(module, name) for name in required_names]


CORE_ALGOS = "verl.trainer.ppo.core_algos"
CORRECTION = "verl.trainer.ppo.rollout_corr_helper"
WORKERS = "verl.workers.engine_workers"
ENGINE = "verl.workers.engine.base"
AGENT_LOOP = "verl.experimental.agent_loop.agent_loop"
TRAINER = "verl.trainer.ppo.v1.trainer_base"

REQUIREMENTS = (
    # What verl_clipx/plugin.py hooks.
    Requirement("verl.utils.device", "auto_set_device", Use.WRAPPED, ("config",)),
    Requirement("verl.trainer.main_ppo", "run_ppo", Use.WRAPPED, ("config",)),
    Requirement(AGENT_LOOP, "AgentLoopWorker.__init__", Use.WRAPPED, ("config",)),
    Requirement("verl.utils.metric", "reduce_metrics"),
    Requirement("verl.utils.metric.utils", "reduce_metrics", Use.WRAPPED, ("metrics",)),
    Requirement("verl.utils.tracking", "Tracking.__init__", Use.WRAPPED, ("default_backend", "config")),
    Requirement("verl.trainer.ppo.metric_utils", "compute_data_metrics", Use.WRAPPED, ("batch",)),
    Requirement(TRAINER, "PPOTrainer._compute_metrics", Use.WRAPPED, ("batch", "metrics")),
    # The registry of losses, and what calls a loss.
    Requirement(CORE_ALGOS, "POLICY_LOSS_REGISTRY"),
    Requirement(CORE_ALGOS, "register_policy_loss", Use.CALLED, ("name",)),
    Requirement(
        CORE_ALGOS,
        "agg_loss",
        Use.CALLED,
        (
            "loss_mat",
            "loss_mask",
            "loss_agg_mode",
            "dp_size",
            "batch_num_tokens",
            "global_batch_size",
            "loss_scale_factor",
        ),
    ),
    Requirement("verl.workers.utils.losses", "ppo_loss", Use.CALLED, ("config", "model_output", "data", "dp_group")),
    # The training worker, each of whose methods ours calls.
    *names(WORKERS, "ActorRolloutRefWorker.actor_worker_cls", "ActorRolloutRefWorker.ref_worker_cls"),
    Requirement(WORKERS, "TrainingWorker.set_loss_fn", Use.OVERRIDDEN, ("loss_fn",)),
    Requirement(WORKERS, "TrainingWorker.train_mini_batch", Use.OVERRIDDEN, ("data",)),
    Requirement(WORKERS, "TrainingWorker.train_batch", Use.OVERRIDDEN, ("data",)),
    Requirement(WORKERS, "TrainingWorker._postprocess_output", Use.WRAPPED, ("output", "forward_only")),
    Requirement(
        WORKERS,
        "TrainingWorker.save_checkpoint",
        Use.OVERRIDDEN,
        ("local_path", "hdfs_path", "global_step", "max_ckpt_to_keep"),
    ),
    Requirement(
        WORKERS,
        "TrainingWorker.load_checkpoint",
        Use.OVERRIDDEN,
        ("local_path", "hdfs_path", "del_local_after_load"),
    ),
    Requirement("verl.single_controller.base.decorator", "register", Use.CALLED, ("dispatch_mode", "blocking")),
    *names("verl.single_controller.base.decorator", "Dispatch"),
    Requirement(
        "verl.single_controller.base.decorator",
        "make_nd_compute_dataproto_dispatch_fn",
        Use.CALLED,
        ("mesh_name",),
    ),
    # The engine under it.
    Requirement(
        ENGINE,
        "BaseEngine.forward_backward_batch",
        Use.CALLED,
        ("data", "loss_function", "forward_only"),
    ),
    Requirement(ENGINE, "BaseEngine.optimizer_step", Use.CALLED),
    Requirement(ENGINE, "BaseEngine.get_data_parallel_rank", Use.CALLED),
    Requirement(ENGINE, "BaseEngine.get_data_parallel_size", Use.CALLED),
    Requirement(ENGINE, "BaseEngine.get_data_parallel_group", Use.CALLED),
    Requirement(ENGINE, "BaseEngine.is_mp_src_rank_with_outputs", Use.CALLED),
    Requirement(ENGINE, "BaseEngine.eval_mode", Use.CALLED),
    # What a step and the driver import.
    *names("verl.utils.metric", "AggregationType", "Metric"),
    *names("verl.utils", "tensordict_utils"),
    *names("verl.workers", "engine_workers"),
    Requirement("verl.utils.tensordict_utils", "get", Use.CALLED, ("tensordict", "key", "default")),
    Requirement("verl.utils.tensordict_utils", "get_tensordict", Use.CALLED, ("tensor_dict", "non_tensor_dict")),
    Requirement("verl.utils.tensordict_utils", "assign_non_tensor", Use.CALLED, ("tensor_dict",)),
    Requirement("verl.utils.device", "get_device_id", Use.CALLED),
    Requirement(CORRECTION, "compute_rollout_correction_weights", Use.CALLED, ("log_ratio", "response_mask")),
    Requirement(CORRECTION, "compute_rollout_rejection_mask", Use.CALLED, ("log_ratio", "response_mask")),
    # The terms that verl adds to the policy's, which the receipt computes.
    Requirement("verl.trainer.distillation.losses", "is_distillation_enabled", Use.CALLED, ("config",)),
    Requirement(
        "verl.trainer.distillation.losses",
        "distillation_loss",
        Use.CALLED,
        ("config", "distillation_config", "model_output", "data"),
    ),
    *names(CORE_ALGOS, "kl_penalty"),
    Requirement("verl.workers.utils.padding", "no_padding_2_padding", Use.CALLED, ("tensor", "data")),
    *names("verl.plugin.platform", "get_platform"),
    Requirement("verl.trainer.ppo.utils", "need_critic", Use.CALLED, ("config",)),
    Requirement("verl.trainer.ppo.utils", "need_reference_policy", Use.CALLED, ("config",)),
    Requirement(
        "verl.utils.config",
        "validate_config",
        Use.CALLED,
        ("config", "use_reference_policy", "use_critic"),
    ),
    *names("verl.workers.config.actor", "PolicyLossConfig"),
    # +clipx/rollout=seeded.
    *names(AGENT_LOOP, "AgentLoopOutput", "register"),
    *names("verl.experimental.agent_loop.single_turn_agent_loop", "SingleTurnAgentLoop"),
    *names("verl.trainer.ppo.v1.replay_buffer", "ReplayBuffer"),
)


@functools.cache
def changes_in(folder: Path) -> tuple[str, ...]:
    """Return what a verl has changed about the names in `REQUIREMENTS`: a clause for each name that is not as needed.

    Args:
        folder: that of the package, which holds verl's `__init__.py`.
    """
    clauses = [change_of(requirement, folder) for requirement in REQUIREMENTS]
    # Several names may stand in one module that is missing.
    return tuple(dict.fromkeys(clause for clause in clauses if clause is not None))


def change_of(requirement: Requirement, folder: Path) -> str | None:
    """Return a clause that says how verl differs from a requirement; None if it meets the requirement.

    Args:
        requirement: what the plugin relies on.
        folder: that of the package verl.
    """
    full_name = f"{requirement.module}.{requirement.name}"
    source = source_of(requirement.module, folder)
    if source is None:
        return f"{requirement.module} is not there"
    if requirement.use is Use.NAMED:
        if has_name(source, requirement.name, requirement.module, folder):
            return None
        return f"{full_name} is not there"
    signature = signature_of(source, requirement.name)
    if signature is None:
        if has_name(source, requirement.name, requirement.module, folder):
            return f"{full_name} is not a function whose parameters can be read"
        return f"{full_name} is not there"
    if meets(signature, requirement):
        return None
    return f"{full_name} takes ({', '.join(signature.parameters)}), not ({', '.join(requirement.parameters)})"


@functools.cache
def source_of(module: str, folder: Path) -> str | None:
    """Return the source of a module of the verl in a folder; None if it has no such module."""
    path = folder.joinpath(*module.split(".")[1:])
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file.read_text()
    return None


def has_name(source: str, name: str, module: str, folder: Path) -> bool:
    """Return whether a module defines or imports a name, or has a submodule of that name.

    Args:
        source: the module's.
        name: what is looked for.
        module: the module's full name, which begins with "verl".
        folder: that of the package verl.
    """
    if definition_of(source, name) is not None:
        return True
    # An import statement that has the name on its line, or between the parentheses that open there.
    imported = re.search(rf"^(?:from|import) [^\n(]*(?:\([^)]*)?\b{name}\b", source, re.M)
    return imported is not None or source_of(f"{module}.{name}", folder) is not None


def definition_of(source: str, name: str) -> str | None:
    """Return the source from the definition of a name to the next function or class at its level.

    A method is looked for within its class. None if the source does not define the name.
    """
    indent = ""
    for part in name.split("."):
        # At its level of indentation: "def name(", "class name:", "class name(" or "name =", and "name: type".
        start = re.search(rf"^{indent}(?:(?:async )?def |class )?{part}\b(?=\s*[(:=])", source, re.M)
        if start is None:
            return None
        source = source[start.start() :]
        # A class ends where something else is defined at its own level of indentation.
        end = re.search(rf"^{indent}(?:async def|def|class|@)", source[1:], re.M)
        if end is not None:
            source = source[: end.start() + 1]
        indent += "    "
    return source


@dataclass(frozen=True)
class Signature:
    """A function's parameters in their order, and those of them that a call must give.

    It has neither self nor `*args` and `**kwargs`.
    """

    parameters: tuple[str, ...]
    required: frozenset[str]


def signature_of(source: str, name: str) -> Signature | None:
    """Return the signature of a function or method; None if the source has none of that name."""
    definition = definition_of(source, name)
    if definition is None:
        return None
    for header in possible_headers(definition):
        try:
            statements = ast.parse(header).body
        except SyntaxError:
            # The colon is that of an annotation, say.
            continue
        # Where the name is assigned a value, the text may go on with other statements.
        if isinstance(statements[0], ast.FunctionDef | ast.AsyncFunctionDef):
            return signature_from_arguments(statements[0].args)
    return None


def possible_headers(definition: str) -> Iterator[str]:
    """Yield, for each colon in a definition, the text before it as a function with an empty body.

    One of these texts is the header. The other colons stand in annotations, in defaults or in the body.
    """
    for colon in re.finditer(":", definition):
        yield f"{definition[: colon.start()].lstrip()}: ..."


def signature_from_arguments(arguments: ast.arguments) -> Signature:
    """Return the signature of a function from the arguments in its syntax tree."""
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    keyword_only = [argument.arg for argument in arguments.kwonlyargs]
    # `defaults` belong to the last positional arguments.
    required = positional[: len(positional) - len(arguments.defaults)]
    # `kw_defaults` has an entry for each keyword-only argument, None where it has no default.
    for name, default in zip(keyword_only, arguments.kw_defaults, strict=True):
        if default is None:
            required.append(name)
    parameters = [name for name in (*positional, *keyword_only) if name != "self"]
    return Signature(parameters=tuple(parameters), required=frozenset(required) - {"self"})


def meets(signature: Signature, requirement: Requirement) -> bool:
    """Return whether a function's signature allows what `requirement.use` says that the plugin does with it.

    Args:
        signature: that of the function in verl.
        requirement: what the plugin relies on; its use is not `NAMED`, which needs no signature.
    """
    if requirement.use is Use.OVERRIDDEN:
        # verl calls our method in place of its own.
        return signature.parameters == requirement.parameters
    has_all_parameters = set(requirement.parameters) <= set(signature.parameters)
    if requirement.use is Use.CALLED:
        # The plugin gives no other parameter, so that verl must not demand one.
        return has_all_parameters and signature.required <= set(requirement.parameters)
    return has_all_parameters
