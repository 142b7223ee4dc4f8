"""The recipes that no paper has, DAPO's of 32B and the one for two GPUs: what `clipx explain` says of each, that verl's
own loss and another method go by METHOD, and that their words reach verl. Not covered: training.
"""

import json
import sys

import pytest
from typer.testing import CliRunner

from verl_clipx.cli import app

from .shell import RECIPES, ROOT

pytestmark = pytest.mark.slow
DAPO, TWO_GPUS = "dapo/run_qwen2.5_32b_fsdp.sh", "two_gpus/run_qwen2.5_0.5b_fsdp.sh"


@pytest.fixture
def explain(monkeypatch):
    """The answer of `clipx explain` to a recipe, whose Python is the tests' own."""

    def run(recipe, *words, **variables):
        monkeypatch.chdir(ROOT)
        monkeypatch.setenv("PATH", f"{sys.prefix}/bin:/usr/bin:/bin")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        result = CliRunner().invoke(app, ["explain", "--json", "--", "bash", str(RECIPES / recipe), *words])
        assert result.exit_code == 0, result.output
        (answer,) = json.loads(result.stdout)["runs"]
        assert answer["stops"] == []
        return answer

    return run


@pytest.mark.parametrize(
    ("recipe", "shape", "updates"),
    [
        (DAPO, "8 nodes, 64 ranks, fsdp, vllm, 22,528 tokens, cuda", "16 updates of 32 prompts x 16 responses"),
        (TWO_GPUS, "1 node, 2 ranks, fsdp2, vllm, 1,280 tokens, cuda", "4 updates of 32 prompts x 8 responses"),
    ],
)
def test_a_recipe_trains_acpo_and_any_other_method_by_its_variable(explain, recipe, shape, updates):
    answer = explain(recipe)
    assert answer["loss"].startswith("clipx_acpo (+clipx=acpo), scope mini_batch")
    assert shape in answer["has_run_on"] and answer["updates"].startswith(updates)
    assert answer["without_plugin"] == "verl stops at clipx.receipt, before Ray starts"
    other = explain(recipe, "trainer.total_epochs=3", METHOD="bapo")
    assert other["loss_mode"] == "clipx_bapo" and "trainer.total_epochs=3" in other["arguments"]


def test_the_way_back_of_dapo_is_verls_own_loss_with_clip_higher(explain):
    answer = explain(DAPO, METHOD="none")
    assert answer["loss_mode"] == "vanilla" and answer["bounds"] == "ratio 0.8 to 1.28; clip_ratio_c 10"
    assert not any("clipx" in word for word in answer["arguments"])
