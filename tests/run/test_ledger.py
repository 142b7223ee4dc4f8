"""The ledger of verl's keys against what verl composes and what the driver does.

Covers: every leaf that verl's trainer composes, under each of its engines, has one row, and no row is without a leaf;
that a key which is new to a node on the loss's path has none; docs/support.md's table. What verl's losses read is found
in tests/worker/test_verl_contract.py; what the rows say is put to the test in tests/worker/test_drawn.py.
"""

from collections import Counter
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner
from verl_clipx.run.clip_keys import ACTOR, MISPLACED
from verl_clipx.run.ledger import ON_THE_PATH, ROWS, row_of

from tests.claims.configuration import hydra_s
from verl_clipx.cli import app
from verl_clipx.run.support import READ

REPOSITORY = Path(__file__).parents[2]
KEYS = REPOSITORY / "tests" / "worker" / "fixtures" / "verl_loss_keys"
ENGINES = ("dp", "megatron", "veomni", "torchtitan")


def leaves(node, prefix=""):
    if not OmegaConf.is_dict(node) or not len(node):
        yield prefix
        return
    for key in node:
        yield from leaves(node._get_node(key), f"{prefix}.{key}".lstrip("."))


def without_a_row(engine):
    return [key for key in leaves(hydra_s(f"model_engine={engine}")) if row_of(key) is None]


def test_every_composed_key_has_a_row():
    assert without_a_row("dp") == [], "give it a row in verl_clipx/run/ledger.py"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES[1:])
def test_every_key_of_another_engine_has_a_row(engine):
    assert without_a_row(engine) == [], "give it a row in verl_clipx/run/ledger.py"


@pytest.mark.slow
def test_no_row_is_without_a_key():
    composed = {key for engine in ENGINES for key in leaves(hydra_s(f"model_engine={engine}"))}
    read = {key for path in KEYS.iterdir() for key in path.read_text().split()}
    # verl's scripts write these, and verl has no such keys.
    written = {f"{ACTOR}.policy_loss.{key}" for key in MISPLACED}
    used = {row_of(key) for key in (*composed, *read, *written, *READ)}
    assert [row.key for row in ROWS if row not in used] == []


def test_a_key_has_one_row():
    assert [key for key, number in Counter(row.key for row in ROWS).items() if number > 1] == []


@pytest.mark.parametrize(
    "node",
    [ACTOR, f"{ACTOR}.policy_loss", "algorithm", "algorithm.rollout_correction", "distillation.distillation_loss"],
)
def test_a_new_key_beside_those_of_the_path_has_none(node):
    assert any(row.key.rpartition(".")[0] == node for row in ON_THE_PATH)
    assert row_of(f"{node}.a_new_key") is None


def test_the_most_special_row_counts():
    assert row_of(f"{ACTOR}.clip_ratio_low").key == f"{ACTOR}.clip_ratio_low"
    assert row_of("critic.optim.lr").key == "critic"
    assert row_of("data_of_mine") is None


def test_the_page_has_the_table_that_doctor_prints():
    page = (REPOSITORY / "docs" / "support.md").read_text()
    table = page.split("<!-- clipx doctor --keys -->\n")[1].split("\n<!-- end -->")[0]
    assert CliRunner().invoke(app, ["doctor", "--keys"]).output == f"{table}\n"
