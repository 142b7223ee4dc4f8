"""Packages that the losses do not need but something else does, and the message if one is missing."""

import importlib.util
from collections.abc import Iterable

from verl_clipx.common.verl_version import VERL_RANGE

# The packages that the commands around the losses need, from the name of the imported module to that of the package.
# OF_RUNS is for commands that read runs, OF_PAPERS for those that build and judge the papers' data.
OF_RUNS = {name: name for name in ("jinja2", "matplotlib", "pandas", "pyarrow", "scipy")}
OF_PAPERS = {"datasets": "datasets", "math_verify": "math-verify", "pebble": "pebble"}
TOOLS = OF_RUNS | OF_PAPERS

# The packages that training imports: pandas in the trainer's process, pyarrow in the worker. verl requires both.
OF_TRAINING = {name: name for name in ("pandas", "pyarrow")}

# The packages that verl imports in its v1 trainer and its rollout servers without requiring them.
FOR_CPU = {name: name for name in ("cachetools", "fastapi", "uvicorn")} | {"transfer_queue": "TransferQueue"}

# The packages that come with verl, and that this package does not install. The names of their modules are the same.
OF_VERL = ("verl", "numpy", "ray", "tensorboard", "tensordict", "torch", "transformers", "wandb")

# Modules that are installed together.
TOGETHER = (OF_RUNS, OF_PAPERS, FOR_CPU, {"gguf": "gguf"}, {"vllm": "vLLM"})


def pip_command(distributions: Iterable[str]) -> str:
    """Return pip's command that installs packages from the package index."""
    return f"pip install {' '.join(distributions)}"


def needs_tool(user: str, module: str) -> str:
    """Return a line that says who needs a missing module, and how to install it.

    The pip command in it also installs those packages of the module's group that are missing too.

    Args:
        user: who needs it, such as a command.
        module: the module's name, one of OF_VERL or of a group in TOGETHER.
    """
    if module in OF_VERL:
        name = f"'verl{VERL_RANGE}'" if module == "verl" else module
        return f"{user} needs {module}, which comes with verl: {pip_command([name])}"
    group = next(group for group in TOGETHER if module in group)
    missing = [name for other, name in group.items() if other == module or importlib.util.find_spec(other) is None]
    return f"{user} needs {group[module]}: {pip_command(missing)}"


def missing_tool(user: str, error: ModuleNotFoundError) -> str | None:
    """Return the line of `needs_tool` for a failed import; None if the missing module is of no group.

    Then the module is one that this package brings itself, so that something else is broken.

    Args:
        user: who needs it, such as a command.
        error: the error of the import.
    """
    module = (error.name or "").partition(".")[0]
    known_modules = set(OF_VERL).union(*TOGETHER)
    return needs_tool(user, module) if module in known_modules else None
