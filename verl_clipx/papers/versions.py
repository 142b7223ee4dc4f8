"""The versions of the packages that a number depends on."""

from verl_clipx.common.verl_version import installed_version

PACKAGES = ("verl-clipx", "verl", "torch", "transformers", "vllm", "ray")


def versions_here() -> dict[str, str | None]:
    """Return the versions of these packages, None for those that are not installed."""
    return {package: installed_version(package) for package in PACKAGES}
