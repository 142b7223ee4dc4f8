"""Packages that the losses do not need but something else does, and the message if one is missing."""

import importlib.util
from collections.abc import Iterable

from verl_clipx.common.verl_version import VERL_RANGE

# What the commands around the losses need: the name that is imported, and the one that is installed. Runs are read with
# the first, the papers' data are built and judged with the second.
OF_RUNS = {name: name for name in ("jinja2", "matplotlib", "pandas", "pyarrow", "scipy")}
OF_PAPERS = {"datasets": "datasets", "math_verify": "math-verify", "pebble": "pebble"}
TOOLS = OF_RUNS | OF_PAPERS

# Those that training imports: pandas in the trainer's process, pyarrow in the worker. verl requires both.
OF_TRAINING = {name: name for name in ("pandas", "pyarrow")}

# What verl imports in its v1 trainer and its rollout servers without requiring it.
FOR_CPU = {name: name for name in ("cachetools", "fastapi", "uvicorn")} | {"transfer_queue": "TransferQueue"}

# What comes with verl, and this package alone doesn't install; these names are both imported and installed.
OF_VERL = ("verl", "numpy", "ray", "tensorboard", "tensordict", "torch", "transformers", "wandb")

# Modules that are installed together.
TOGETHER = (OF_RUNS, OF_PAPERS, FOR_CPU, {"gguf": "gguf"}, {"vllm": "vLLM"})


def pip_command(distributions: Iterable[str]) -> str:
    """Returns pip's command for packages of the index, where this project is not yet."""
    return f"pip install {' '.join(distributions)}"


def needs_tool(user: str, module: str) -> str:
    """Returns a line that says that a user, such as a command, needs a module, and how to install it with its like."""
    if module in OF_VERL:
        name = f"'verl{VERL_RANGE}'" if module == "verl" else module
        return f"{user} needs {module}, which comes with verl: {pip_command([name])}"
    group = next(group for group in TOGETHER if module in group)
    missing = [name for other, name in group.items() if other == module or importlib.util.find_spec(other) is None]
    return f"{user} needs {group[module]}: {pip_command(missing)}"


def missing_tool(user: str, error: ModuleNotFoundError) -> str | None:
    """Returns the same for a failed import; None if the module is none of these: then something else is broken."""
    module = (error.name or "").partition(".")[0]
    return needs_tool(user, module) if module in {*OF_VERL}.union(*TOGETHER) else None
