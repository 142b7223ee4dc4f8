"""Tokens, updates, time and steps, by hand."""

import pyarrow
import pyarrow.parquet
import pytest

from tests.papers.tables.runs import ACTOR, BASE, MODELS, PARAMETERS_7B, changed, composed
from verl_clipx.papers.tables.cost.assumptions import A100, Assumptions
from verl_clipx.papers.tables.cost.estimate import estimate
from verl_clipx.papers.tables.cost.work import rows_of, steps_of


@pytest.mark.slow
def test_tokens_updates_and_operations_by_hand():
    result = estimate(BASE, A100, train_prompts=5130)
    work = result.work
    # 4096 responses of 4096 tokens after prompts of 512.
    assert (work.prompt_tokens, work.response_tokens) == (4096 * 512, 4096 * 4096)
    assert (work.updates, work.observations, work.observation_seconds) == (16, 0, 0)
    # Two operations a parameter (without the embedding's lookup), and 2 * layers * heads * head width * length.
    forward = 4096 * (2 * (PARAMETERS_7B - 544_997_376) * 4608 + 2 * 28 * 3584 * 4608**2)
    speed = 8 * 312e12 * 0.35
    assert work.scoring_seconds == pytest.approx(forward / speed)
    # Forward, backward, and forward again for checkpointing.
    assert work.training_seconds == pytest.approx(4 * forward / speed)
    known = work.generation_seconds + work.scoring_seconds + work.training_seconds
    assert work.seconds == pytest.approx(1.15 * known)
    # Ten whole batches of 512, 30 epochs.
    assert result.steps == 10 * 30
    assert result.gpu_hours == pytest.approx(300 * 8 * work.seconds / 3600)


def test_generation_by_hand_without_a_tail_and_with_one():
    result = estimate(BASE, A100)
    rollout = result.rollout
    bandwidth, flops = 2.04e12 * 0.5, 312e12 * 0.35
    places = rollout.concurrent
    cached = 57344 * (512 + 2048)

    def step(concurrent):
        reading = (rollout.weights + concurrent * cached) / bandwidth
        return max(reading, 2 * (PARAMETERS_7B - 544_997_376) * concurrent / flops) + 0.006

    prefill = 512 * (2 * (PARAMETERS_7B - 544_997_376) * 512 + 2 * 28 * 3584 * 512**2) / (8 * flops)
    rounds = -(-512 // places)
    assert rounds > 1
    assert result.work.generation_seconds == pytest.approx(prefill + rounds * 4096 * step(places))

    # On 64 GPUs each has 64 responses: one round of 4096 tokens, and the longest response's other 4096 alone.
    many = estimate(changed({"trainer.nnodes": 8}), A100)
    assert many.rollout.concurrent == 64
    assert many.work.generation_seconds == pytest.approx(prefill / 8 + 4096 * step(64) + 4096 * step(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "updates", "observations"),
    [
        (["+clipx=grpo"], 16, 0),
        # The first update's ratio is 1.
        (["+clipx=acpo"], 16, 15),
        (["+clipx=bapo", f"{ACTOR}.ppo_epochs=2"], 32, 31),
        (["+clipx=acpo", "clipx.scope=lagged"], 16, 0),
        (["+clipx=acpo_reference"], 16, 0),
        (["+clipx=grpo", "+clipx/update=lopti"], 32, 0),
        (["+clipx=acpo", "+clipx/update=lopti"], 32, 31),
        (["+clipx=acpo", "algorithm.rollout_correction.bypass_mode=True"], 16, 16),
        (["+clipx=grpo", "+clipx/select=high_entropy", "clipx.select.over=mini_batch"], 16, 16),
    ],
)
def test_updates_and_passes_for_the_statistics(overrides, updates, observations):
    work = estimate(composed(MODELS["1.5b"], *overrides), A100).work
    assert (work.updates, work.observations) == (updates, observations)
    # A pass for the statistics is a forward pass over one update's share; the update's own take four.
    assert work.observation_seconds / work.training_seconds == pytest.approx(observations / updates / 4)
    forward = work.training_seconds / 4 / (updates / 16)
    assert work.scoring_seconds in (0, pytest.approx(forward))


def test_scoring_counts_the_reference_and_what_is_bypassed():
    plain = estimate(BASE, A100).work.scoring_seconds
    assert estimate(changed({f"{ACTOR}.use_kl_loss": True}), A100).work.scoring_seconds == 2 * plain
    bypass = {"algorithm.rollout_correction.bypass_mode": True}
    assert estimate(changed(bypass), A100).work.scoring_seconds == 0


def test_steps_come_from_the_files_unless_the_run_says(tmp_path):
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for path in paths:
        pyarrow.parquet.write_table(pyarrow.table({"prompt": range(800)}), path)
    files = [str(path) for path in paths]
    assert rows_of(files) == 1600
    assert steps_of(changed({"data.train_files": files, "trainer.total_epochs": 5})) == 15
    assert steps_of(changed({"data.train_files": files, "data.train_max_samples": 600, "trainer.total_epochs": 5})) == 5
    assert steps_of(changed({"data.train_files": files, "trainer.total_training_steps": 7})) == 7
    assert steps_of(BASE) is None
    assert steps_of(BASE, 1024) == 2 * 30


def test_longer_responses_cost_more_through_their_assumption():
    short, long = (estimate(BASE, A100, Assumptions(mean_response_share=share)).work for share in (0.25, 1))
    assert long.response_tokens == 4 * short.response_tokens
    assert long.generation_seconds > 4 * short.generation_seconds
    assert long.training_seconds > 3 * short.training_seconds
