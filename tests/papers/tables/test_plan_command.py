"""`clipx recipe plan` as a user sees it: textbook numbers by hand, each assumption printed, and no run refused.

Not covered: that its failure stops no launch (tests/recipes/test_launch.py); whether the estimate is right: no GPU
was used.
"""

from dataclasses import fields

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf
from transformers import Qwen2Config

from tests.papers.tables.compositions import on_a_machine, values
from tests.runs.commands import clipx
from verl_clipx.papers.tables.estimate import PEAK, TRAINING_ROWS, Assumptions, estimate, parameters_of
from verl_clipx.papers.tables.presets import preset_names

PRESET = "dgpo/dapo17k_7b_dgpo"


def test_the_numbers_are_the_textbooks():
    config = on_a_machine(PRESET).copy()
    config.trainer.nnodes = 2
    found = estimate(config, PEAK["a100"], Assumptions(0.5, 0.25, 0.4, 0.1, 0.0))
    # 16 bytes a parameter in float32, over 16 GPUs; the rollout's copy in bfloat16.
    assert sum(list(found.memory.values())[:3]) == pytest.approx(16 * 7e9 / 16)
    assert found.memory["the rollout's weights"] == pytest.approx(2 * 7e9)
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    assert found.tokens == rows * (0.5 * config.data.max_prompt_length + 0.25 * config.data.max_response_length)
    # Two operations a parameter and token, at a tenth of the peak; the update with checkpointing takes eight.
    forward = 2 * 7e9 * found.tokens / 312e12 / 3600
    assert found.hours["generation"] == pytest.approx(forward / 0.1)
    assert found.hours["update"] == pytest.approx(4 * forward / 0.4)
    assert (found.updates, found.observations, found.hours["statistics"]) == (16, 0, 0.0)
    # Of 17,000 rows 33 whole batches of 512, ten times.
    assert found.steps == 330


@pytest.mark.parametrize(
    ("key", "value", "observed"),
    [
        ("clipx.scope", "mini_batch", 2),
        ("clipx.scope", "lagged", 0),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", 512, 0),
    ],
)
def test_statistics_take_a_pass_before_each_update_that_needs_them(key, value, observed):
    config = on_a_machine("acpo/countdown_3b_acpo_near").copy()
    OmegaConf.update(config, key, value)
    assert estimate(config, PEAK["a100"], Assumptions()).observations == observed


def test_a_models_size_is_known_by_its_folder_or_its_name(tmp_path):
    assert [parameters_of(name) / 1e9 for name in ("Qwen/Qwen2.5-3B-Instruct", "some/Qwen3-0.6B")] == [3.0, 0.6]
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 10}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    config.save_pretrained(tmp_path)
    # Embedding 80, attention 64 + 8 + 2 x (32 + 4) + 64, feed-forward 3 x 128, three norms of 8.
    assert parameters_of(str(tmp_path)) == 80 + 64 + 8 + 72 + 64 + 384 + 24
    with pytest.raises(ValueError, match="some/model"):
        parameters_of("some/model")


def test_the_size_of_every_presets_model_and_data_set_is_known():
    for name in preset_names():
        config = values(name)
        if OmegaConf.select(config, "trainer.total_training_steps") is None:
            assert config.data.train_files.split("/")[-2] in TRAINING_ROWS, name
            assert parameters_of(config.actor_rollout_ref.model.path) >= 1e9, name


def test_everything_assumed_is_printed_and_unusable_data_are_warned_of(tmp_path):
    path = tmp_path / "train.parquet"
    rows = [{"style": "rule", "ground_truth": truth} for truth in ("7", "")]
    pq.write_table(pa.table({"data_source": ["math500"] * 2, "reward_model": rows}), path)
    words = ("recipe", "plan", PRESET, "--hardware", "h100x8", "--nodes", "2", "--mean-response", "0.3")
    output = clipx(*words, f"data.val_files={path}")
    assert "7.00B parameters" in output and "16, 8 on each of 2 nodes" in output
    assert "330 steps, 5280 updates, about" in output and "0.3, mean response" in output
    assert all(one.name in output and one.metadata["meaning"][:20] in output for one in fields(Assumptions))
    assert "warning" in output and "train.parquet, row 1: ground_truth=''" in output
    pq.write_table(pa.table({"data_source": ["math500"], "reward_model": rows[:1]}), path)
    assert "warning" not in clipx(*words, f"data.val_files={path}")
