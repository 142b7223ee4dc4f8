"""Golden vectors as test cases: inputs and outputs of one call of a method's reference each.

A reference is the authors' released function, verl's own, or a separate implementation of the paper's formula
(`paper_*`), which may share a reading with ours. `manifest.json` says which, its hyperparameters and its known bugs.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

FOLDER = Path(__file__).parent
INPUTS = ("old_log_prob", "log_prob", "advantages", "response_mask")


@dataclass(frozen=True)
class GoldenCase:
    """One golden vector; what lies outside the mask is junk on purpose.

    Attributes:
        inputs: in `dtype`, which the reference computed in; (sequences, length).
        expected: every other array, in float64 (counts in int64); "grad" is the derivative with respect to log_prob.
        hyperparameters: under the reference's own names.
        loss_agg_mode: how the reference aggregated; None where no loss was recorded.
        nonfinite: names of expected arrays that are not finite, since the reference is wrong or divides by zero there.
    """

    name: str
    inputs: dict[str, Tensor]
    expected: dict[str, Tensor]
    hyperparameters: dict[str, Any]
    loss_agg_mode: str | None
    dtype: torch.dtype
    nonfinite: tuple[str, ...]


@cache
def _manifest() -> dict[str, Any]:
    return json.loads((FOLDER / "manifest.json").read_text())


def golden_cases(method: str) -> list[GoldenCase]:
    """All golden vectors of a method, as named in the manifest ("acpo", "paper_bapo", "verl091_vanilla", ...)."""
    cases = [_load(entry) for entry in _manifest()["entries"] if entry["method"] == method]
    # A test over no cases would pass.
    assert cases, f"method={method!r}: no golden vectors; there are some for {golden_methods()}"
    return cases


def parametrize(cases: list[GoldenCase]) -> pytest.MarkDecorator:
    """A test of each vector, as `case`."""
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def golden_methods() -> set[str]:
    """Every method that has golden vectors."""
    return {entry["method"] for entry in _manifest()["entries"]}


def _load(entry: dict[str, Any]) -> GoldenCase:
    with np.load(FOLDER / entry["file"]) as file:
        arrays = {key: torch.from_numpy(np.array(file[key])) for key in file.files}
    dtype = getattr(torch, entry["dtype"])
    inputs = {
        key: arrays[key].bool() if key == "response_mask" else arrays[key].to(dtype) for key in INPUTS if key in arrays
    }
    return GoldenCase(
        name=entry["file"].removesuffix(".npz"),
        inputs=inputs,
        expected={key: value for key, value in arrays.items() if key not in INPUTS},
        hyperparameters=entry["hyper"],
        loss_agg_mode=entry["loss_agg_mode"],
        dtype=dtype,
        nonfinite=tuple(entry["nonfinite"]),
    )
