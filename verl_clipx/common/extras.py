"""What only the tools around the losses need, by extra, and what to say where it is not installed."""

# The name that is imported, and the one that is installed.
TOOLS = {
    "datasets": "datasets",
    "jinja2": "jinja2",
    "math_verify": "math-verify",
    "matplotlib": "matplotlib",
    "pandas": "pandas",
    "pyarrow": "pyarrow",
    "scipy": "scipy",
}

# What comes with verl; the name that is imported is the one that is installed.
OF_VERL = ("tensorboard",)

# What a few commands need: the name that is installed, and the extra that brings it.
FURTHER = {
    "gguf": ("gguf", "pretrained"),
    "reasoning_gym": ("reasoning-gym", "reasoning"),
}


def needs_tool(user: str, module: str) -> str:
    """The line that says what is missing, and how to install it.

    Args:
        user: what needs it, such as a command.
        module: a key of TOOLS or of FURTHER, or one of OF_VERL.
    """
    if module in OF_VERL:
        return f"{user} needs {module}, which comes with verl: pip install {module}"
    name, extra = FURTHER.get(module) or (TOOLS[module], "tools")
    return f"{user} needs {name}: pip install 'verl-clipx[{extra}]'"


def missing_tool(user: str, error: ModuleNotFoundError) -> str | None:
    """The same for a failed import.

    Args:
        user: what needs it, such as a command.

    Returns:
        The line, or None if what is missing belongs to no tool: then something is broken that this cannot mend.
    """
    module = (error.name or "").partition(".")[0]
    return needs_tool(user, module) if module in {*TOOLS, *FURTHER, *OF_VERL} else None
