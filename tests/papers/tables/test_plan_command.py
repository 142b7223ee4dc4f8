"""`clipx recipe plan` as a user sees it: textbook numbers by hand, each assumption printed, and no run refused.

Not covered: that its failure stops no launch (tests/recipes/test_launch.py); whether the estimate is right: no GPU
was used.
"""

import re
from dataclasses import fields

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf
from transformers import Qwen2Config
from typer.testing import CliRunner

from verl_clipx.cli import app
from verl_clipx.papers.tables.estimate import PEAK, TRAINING_ROWS, Assumptions, estimate, parameters_of
from verl_clipx.papers.tables.presets import compose_preset, preset_names, values_of

PRESET = "dgpo/dapo17k_7b_dgpo"


def plan(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["recipe", "plan", *arguments])
    return result.exit_code, re.sub(r"\s+", " ", result.output)


def test_the_numbers_are_the_textbooks():
    config = compose_preset(PRESET, ["+hardware=a100x8", "trainer.nnodes=2"])
    found = estimate(config, PEAK["a100"], Assumptions(0.5, 0.25, 0.4, 0.1, 0.0))
    # 16 bytes a parameter in float32, over 16 GPUs; the rollout's copy in bfloat16.
    assert sum(list(found.memory.values())[:3]) == pytest.approx(16 * 7.616e9 / 16)
    assert found.memory["the rollout's weights"] == pytest.approx(2 * 7.616e9)
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    assert found.tokens == rows * (0.5 * config.data.max_prompt_length + 0.25 * config.data.max_response_length)
    # Two operations a parameter and token, at a tenth of the peak; the update with checkpointing takes eight.
    forward = 2 * 7.616e9 * found.tokens / 312e12 / 3600
    assert found.hours["generation"] == pytest.approx(forward / 0.1)
    assert found.hours["update"] == pytest.approx(4 * forward / 0.4)
    assert (found.updates, found.observations, found.hours["statistics"]) == (16, 0, 0.0)
    # Of 17,000 rows 33 whole batches of 512, ten times.
    assert found.steps == 330 and found.gpu_hours == pytest.approx(330 * sum(found.hours.values()))


@pytest.mark.parametrize(
    ("changes", "observed"),
    [([], 2), (["clipx.scope=lagged"], 0), (["actor_rollout_ref.actor.ppo_mini_batch_size=512"], 0)],
)
def test_statistics_take_a_pass_before_each_update_that_needs_them(changes, observed):
    config = compose_preset("acpo/countdown_3b_acpo_near", ["+hardware=a100x8", *changes])
    assert estimate(config, PEAK["a100"]).observations == observed


@pytest.mark.parametrize(("name", "billions"), [("Qwen/Qwen2.5-3B-Instruct", 3.09), ("some/Qwen3-0.6B", 0.6)])
def test_a_models_size_is_known_by_its_name(name, billions):
    assert parameters_of(name) / 1e9 == pytest.approx(billions, abs=0.005)


def test_a_folder_says_its_own_size(tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 10}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    config.save_pretrained(tmp_path)
    # Embedding 80, attention 64 + 8 + 2 x (32 + 4) + 64, feed-forward 3 x 128, three norms of 8.
    assert parameters_of(str(tmp_path)) == 80 + 64 + 8 + 72 + 64 + 384 + 24
    with pytest.raises(ValueError, match="some/model"):
        parameters_of("some/model")


def test_the_rows_of_every_presets_data_set_are_known():
    for name in preset_names():
        values = values_of(name)
        if OmegaConf.select(values, "trainer.total_training_steps") is None:
            assert values.data.train_files.split("/")[-2] in TRAINING_ROWS, name


def test_everything_assumed_is_printed():
    code, output = plan(PRESET, "data.max_response_length=2048", "--hardware", "h100x8", "--nodes", "2")
    assert code == 0 and "7.62B parameters" in output and "16, 8 on each of 2 nodes" in output
    assert "330 steps, 5280 updates, about" in output
    assert all(one.name in output and one.metadata["meaning"][:20] in output for one in fields(Assumptions))
    assert "mean_response_share 0.3" in plan(PRESET, "--mean-response", "0.3")[1]


def test_data_that_the_reward_cannot_use_are_warned_of_and_not_refused(tmp_path):
    path = tmp_path / "train.parquet"
    for truths in (["7", "8"], ["7", ""]):
        rows = [{"style": "rule", "ground_truth": truth} for truth in truths]
        pq.write_table(pa.table({"data_source": ["math500"] * 2, "reward_model": rows}), path)
        code, output = plan(PRESET, f"data.train_files={path}")
        assert code == 0 and ("warning" in output) == ("" in truths)
    assert "train.parquet, row 1: ground_truth=''" in output


@pytest.mark.parametrize(
    "arguments", [["acpo/no_such_run"], [PRESET, "actor_rollout_ref.actor.ppo_mini=3"], [PRESET, "--hardware", "tpu"]]
)
def test_what_is_no_run_is_an_error(arguments):
    assert plan(*arguments)[0] == 1
