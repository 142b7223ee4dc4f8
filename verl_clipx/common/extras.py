"""Packages that the losses do not need but something else does, by extra, and the message if one is missing."""

# What the commands around the losses need: the name that is imported, and the one that is installed.
TOOLS = {name: name for name in ("datasets", "jinja2", "matplotlib", "pandas", "pyarrow", "scipy")}
TOOLS |= {"math_verify": "math-verify", "pebble": "pebble"}

# What verl imports in its v1 trainer and its rollout servers without requiring it.
FOR_CPU = {name: name for name in ("cachetools", "fastapi", "uvicorn")} | {"transfer_queue": "TransferQueue"}

# What comes with verl; these names are both imported and installed.
OF_VERL = ("tensorboard", "wandb")

# verl and what it brings with it, which this package alone doesn't install: the same.
VERL = ("verl", "numpy", "ray", "tensordict", "torch", "transformers")

# Module to the name that is installed, by extra.
EXTRAS = {
    "tools": TOOLS,
    "pretrained": {"gguf": "gguf"},
    "cpu": FOR_CPU,
    "gpu": {"vllm": "vLLM"},
}


def needs_tool(user: str, module: str) -> str:
    """A line that says that a user, such as a command, misses a module and how to install it."""
    if module in OF_VERL:
        return f"{user} needs {module}, which comes with verl: pip install {module}"
    if module in VERL:
        return f"{user} needs {module}, of verl's: pip install 'verl-clipx[gpu]', or 'verl-clipx[cpu]' without a GPU"
    extra = next(extra for extra, modules in EXTRAS.items() if module in modules)
    return f"{user} needs {EXTRAS[extra][module]}: pip install 'verl-clipx[{extra}]'"


def missing_tool(user: str, error: ModuleNotFoundError) -> str | None:
    """The same for a failed import; None if the missing module belongs to no extra: then something else is broken."""
    module = (error.name or "").partition(".")[0]
    return needs_tool(user, module) if module in {*OF_VERL, *VERL}.union(*EXTRAS.values()) else None
