"""The recipes that no paper has, DAPO's of 32B and the one for two GPUs: what verl's main module would make of the
command that each ends in, that METHOD names verl's own loss or another method, and that further words reach verl.
docs/dapo_32b.md and docs/two_gpus.md show what `clipx explain` says of the recipes themselves, and
tests/claims/test_documented_commands.py runs that. Not covered: training.
"""

import pytest

from tests.hydra_main import MAIN_PPO, explained

from .shell import RECIPES, Machine

pytestmark = pytest.mark.slow
DAPO = "dapo/run_qwen2.5_32b_fsdp.sh"
TWO_GPUS = "two_gpus/run_qwen2.5_0.5b_fsdp.sh"


@pytest.fixture
def explain(tmp_path, monkeypatch):
    """Returns the answer to the command that a recipe ends in, whose Python is a stand-in."""

    def run(recipe, *words, **variables):
        machine = Machine(tmp_path / "machine", python3="", clipx="")
        result = machine.run(RECIPES / recipe, *words, RUN_FOLDER=str(tmp_path / "run"), **variables)
        assert result.returncode == 0, result.stderr
        (command,) = [call for call in machine.calls if call[:3] == ["python3", "-m", MAIN_PPO]]
        machine.record.unlink()
        monkeypatch.chdir(tmp_path)
        answer = explained(tmp_path, *command[3:])
        assert answer["stops"] == []
        return answer

    return run


@pytest.mark.parametrize("recipe", [DAPO, TWO_GPUS])
def test_a_recipe_trains_acpo_and_any_other_method_by_its_variable(explain, recipe):
    assert explain(recipe)["loss_mode"] == "clipx_acpo"
    other = explain(recipe, "trainer.total_epochs=3", METHOD="bapo")
    assert other["loss_mode"] == "clipx_bapo"
    assert "trainer.total_epochs=3" in other["arguments"]


def test_the_way_back_of_dapo_is_verls_own_loss_with_clip_higher(explain):
    answer = explain(DAPO, METHOD="none")
    assert answer["loss_mode"] == "vanilla"
    assert answer["bounds"] == "ratio 0.8 to 1.28; clip_ratio_c 10"
    assert not any("clipx" in word for word in answer["arguments"])
