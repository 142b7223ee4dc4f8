"""The versions of the packages that a number depends on."""

from verl_clipx.common.verl_version import version_here

PACKAGES = ("verl-clipx", "verl", "torch", "transformers", "vllm", "ray")


def versions_here() -> dict[str, str | None]:
    """Return the versions of these packages, None for those that are not installed."""
    return {package: version_here(package) for package in PACKAGES}
