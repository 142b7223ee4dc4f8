"""The settings of benchmarks/known_faults.py and certify_faults.py are within the ranges of their methods. Not covered:
the runs, whose kept logs tests/diagnose reads.
"""

import certify_faults
import known_faults
import pytest

from tests.claims.configuration import parsed
from verl_clipx.papers.tables.presets import values_of
from verl_clipx.run.config import build


@pytest.mark.parametrize("benchmark", [known_faults, certify_faults], ids=lambda module: module.__name__)
def test_no_setting_is_refused(benchmark):
    given = {name: (setting.preset, parsed(*setting.overrides)) for name, setting in benchmark.SETTINGS.items()}
    assert any(key.startswith("clipx.") for _, values in given.values() for key in values)
    for preset, values in given.values():
        method = values_of(f"reversal/{preset}").clipx.method
        build(method, **{key.removeprefix("clipx."): values[key] for key in values if key.startswith("clipx.")})
