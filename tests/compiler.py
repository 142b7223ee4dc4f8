"""Imports torch's compiler once for many tests."""


def load_compiler() -> None:
    """Import what torch.compile needs.

    `clipx check-loss` works in a fork of its process. Each fork would import the compiler for itself, which takes three
    to four seconds of CPU time, unless the test's process has done so before.
    """
    import torch._inductor.compile_fx  # noqa: F401
