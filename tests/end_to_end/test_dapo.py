"""What a DAPO run is made of, together, through the real verl on two ranks of FSDP1, verl's default strategy: group
filtering, overlong shaping, clip-higher, the mean over tokens, and 16 updates a rollout batch. Covers that a filtered
group counts nowhere: every update's numbers are those of its tokens, and so are ACPO's bounds in such a run. Both take
more than a minute, so that they run with `bash scripts/test.sh --all` alone. Not covered: learning, GPUs, filtering in
asynchronous trainers.
"""

import numpy
import pandas
import pytest

from .runs import Run, check_receipt, train
from .test_options import check_bounds, traced_tokens

pytestmark = [pytest.mark.end_to_end, pytest.mark.matrix]

# Prompts of a rollout batch, responses to each, and updates on the batch.
PROMPTS = 16
RESPONSES = 4
UPDATES = 16
STEPS = 2
# Of overlong shaping: the longest response, the tokens before its end in which it is punished, and the most it costs.
LONGEST = 24
BUFFER = 16
PENALTY = 0.5
# The clip's bounds.
LOW = 0.8
HIGH = 1.28
# Of about half of the prompts all answers score alike. Other scores are multiples of a sixth.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    alike = sum(map(ord, str(ground_truth))) % 2
    score = 1.0 if alike else sum(map(ord, solution_str)) % 7 / 6
    return {"score": score, "acc": score}
"""
ACTOR = "actor_rollout_ref.actor"
OVERLONG = "+reward.reward_kwargs.overlong_buffer_cfg"
DAPO = (
    "trainer.n_gpus_per_node=2",
    f"{ACTOR}.strategy=fsdp",
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=acc",
    "reward.reward_manager.name=dapo",
    f"+reward.reward_kwargs.max_resp_len={LONGEST}",
    f"{OVERLONG}.enable=True",
    f"{OVERLONG}.len={BUFFER}",
    f"{OVERLONG}.penalty_factor={PENALTY}",
    f"{OVERLONG}.log=False",
    f"{ACTOR}.clip_ratio_low={1 - LOW:g}",
    f"{ACTOR}.clip_ratio_high={HIGH - 1:g}",
    f"{ACTOR}.loss_agg_mode=token-mean",
    f"data.train_batch_size={PROMPTS}",
    f"{ACTOR}.ppo_mini_batch_size={PROMPTS // UPDATES}",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
    f"data.max_response_length={LONGEST}",
)
TRACE = ("+clipx/trace=prompts", "clipx.trace.fraction=1", "clipx.trace.every=1")


def train_dapo(task, folder, group: str) -> Run:
    """Two steps of a group under all of `DAPO`, traced whole."""
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    reward_function = f"reward.custom_reward_function.path={reward}"
    return train(task, folder / "run", f"+clipx={group}", *TRACE, *DAPO, reward_function, steps=STEPS)


def check_batches(run: Run, tokens: pandas.DataFrame) -> None:
    """Prompts without a signal were dropped and replaced, too long answers were punished, and the rollout had the
    weights that were trained.
    """
    assert run.log["training/rollout_probs_diff_max"].max() < 1e-4
    assert (run.log["training/filter_groups/evicted_samples"] > 0).any()
    assert (tokens.groupby("step")["update"].nunique() == UPDATES).all()
    responses = tokens.groupby(["step", "prompt", "sample"]).agg(score=("score", "first"), length=("position", "size"))
    assert (responses.groupby("step").size() == PROMPTS * RESPONSES).all()
    tokens_in_buffer = (responses.length - (LONGEST - BUFFER)).clip(lower=0)
    assert tokens_in_buffer.max() > 0
    sixths = 6 * (responses.score + tokens_in_buffer / BUFFER * PENALTY)
    numpy.testing.assert_allclose(sixths, sixths.round(), atol=1e-4)
    # The filter compares what the answer is worth, without the punishment.
    assert (sixths.round().groupby(["step", "prompt"]).nunique() > 1).all()


def check_metrics(run: Run, tokens: pandas.DataFrame) -> None:
    """What was logged of a step is the mean over its updates of what their tokens say."""
    values_of_tokens = {
        "actor/clipx/clip_fraction_low": (tokens.advantage < 0) & (tokens.ratio < tokens.low),
        "actor/clipx/clip_fraction_high": (tokens.advantage > 0) & (tokens.ratio > tokens.high),
        "actor/clipx/ratio_mean": tokens.ratio,
    }
    for metric, values in values_of_tokens.items():
        means_of_updates = values.astype(float).groupby([tokens.step, tokens["update"]]).mean()
        expected = means_of_updates.groupby("step").mean()
        assert run.log[metric].tolist() == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-7), metric


def test_a_filtered_group_counts_nowhere(task, tmp_path):
    run = train_dapo(task, tmp_path, "dapo")
    check_receipt(run)
    tokens = traced_tokens(run)
    check_batches(run, tokens)
    check_metrics(run, tokens)
    assert set(tokens.low.astype(float).round(6)) == {LOW} and set(tokens.high.astype(float).round(6)) == {HIGH}
    # Clip-higher acts in a later update.
    assert run.log["actor/clipx/clip_fraction_high"].max() > 0


def test_bounds_are_those_of_the_groups_that_are_left(task, tmp_path):
    run = train_dapo(task, tmp_path, "acpo")
    check_receipt(run)
    tokens = traced_tokens(run)
    check_batches(run, tokens)
    check_metrics(run, tokens)
    check_bounds(tokens, 1e-3)
