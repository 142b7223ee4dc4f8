"""The presets of the table reversal: it names all of them, its outcomes are in the order that was fixed, verl accepts
each with the updates of its row's name, and rows of one baseline differ in the method only.

Not covered: that they learn.
"""

import pytest
from verl.utils.config import validate_config

from tests.papers.tables.test_presets_cpu import composed
from verl_clipx.papers.tables.against_preset import differences
from verl_clipx.papers.tables.definition import load_table
from verl_clipx.papers.tables.origins import read_origins
from verl_clipx.papers.tables.presets import preset_names, updates_per_rollout
from verl_clipx.runs.sameness import significant_values

TABLE = load_table("reversal")
NAMES = [name for name in preset_names() if name.startswith("reversal/")]
METHODS = ("grpo", "dapo", "acpo", "bapo", "dgpo", "cispo", "m2po", "ar")
REGIMES = {"1": 1, "4": 4, "16": 16, "64": 64, "stale": 4}
OF_A_METHOD = ("clipx.", "actor_rollout_ref.actor.policy_loss.")


def test_the_table_names_every_preset_and_its_outcomes_are_in_order():
    controls = {f"reversal/{name}" for name in ("dppo_stale", "dppo_narrow_stale", "grpo_narrow_16", "grpo_wide_stale")}
    axis = {f"reversal/{method}_{regime}" for method in METHODS for regime in REGIMES}
    assert set(NAMES) == {row.preset for row in TABLE.rows} == controls | axis
    assert [column.name for column in TABLE.columns] == ["collapsed", "entropy", "KL a batch", "reward"]


def test_every_row_but_the_baselines_has_one_of_its_own_regime():
    for row in TABLE.rows:
        baseline = TABLE.baseline_of(row)
        if baseline is None:
            assert row.preset.startswith(("reversal/grpo_", "reversal/dppo_stale"))
        else:
            assert row.preset.rsplit("_", 1)[1] == TABLE.row(baseline).preset.rsplit("_", 1)[1]
            assert row.name.split(", ", 1)[1] == baseline.split(", ", 1)[1]


@pytest.mark.parametrize("name", NAMES)
def test_every_value_has_an_origin(name):
    origins = read_origins(name).values()
    assert origins and not [one.key for one in origins if one.kind is None or not one.comment]


OF_OTHER_METHODS = tuple(f"reversal/{method}_" for method in METHODS if method not in ("grpo", "acpo"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.matrix if name.startswith(OF_OTHER_METHODS) else ()) for name in NAMES],
)
def test_verl_accepts_it_and_only_the_method_differs_from_the_baseline(name):
    config, regime = composed(name), name.rsplit("_", 1)[1]
    validate_config(config, use_reference_policy=False, use_critic=False)
    assert updates_per_rollout(config) == REGIMES[regime]
    assert config.clipx_rollout.versions_old == (3 if regime == "stale" else 0)
    baseline = significant_values(composed(f"reversal/grpo_{regime}"))
    changed = [line for line in differences(baseline, significant_values(config)) if not line.startswith(OF_A_METHOD)]
    assert changed == []
