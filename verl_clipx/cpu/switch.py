"""The check behind the configuration's ``${clipx_platform:cpu}``."""

import importlib.util
import os

from verl_clipx.common.extras import FOR_CPU, needs_tool


def check_platform(name: str) -> str:
    """Return ``name`` if verl will run on that platform, otherwise raise an error that says how to select it.

    Returns:
        ``name``, so that it can serve as the value of ``trainer.device``.

    Raises:
        ValueError: the environment variable ``VERL_PLATFORM`` is unset or names another platform, or a package is
            missing.
    """
    chosen = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if chosen == name:
        missing = next((module for module in FOR_CPU if importlib.util.find_spec(module) is None), None)
        if missing is not None:
            raise ValueError(needs_tool(f"+hardware={name}", missing))
        return name
    found = f"VERL_PLATFORM={chosen}" if chosen else "no VERL_PLATFORM"
    raise ValueError(
        f"+hardware={name} also needs the environment variable VERL_PLATFORM={name} (found {found}), because verl "
        f"chooses its platform before it reads the configuration: run "
        f"VERL_PLATFORM={name} python -m verl.trainer.main_ppo +hardware={name} …"
    )
