"""What a micro-batch knows beyond verl's arguments to a loss, and Lopti's pass through verl's own ppo_loss. Not
covered: the split itself (tests/losses/modifiers/test_lopti.py), golden vectors (test_golden.py), what needs an extra
pass (tests/run/test_schedule.py), real rollouts (tests/end_to_end).
"""

import dataclasses

import pytest
import torch

from tests.jagged import micro_batch
from tests.training.worker.updates import loss_function, plan_with_extra_pass, train
from verl_clipx.losses.base.tokens import OPTIONAL
from verl_clipx.losses.contract.contract import example
from verl_clipx.losses.methods import Method
from verl_clipx.run.config import Settings
from verl_clipx.run.schedule import Schedule
from verl_clipx.training.worker.layout import TokenPass, ages, prompt_groups
from verl_clipx.training.worker.loss_function import with_micro_batch
from verl_clipx.training.worker.step import OptimizerStep, current_micro_batch, inputs_of, micro_batch_of

ROWS = [0, 1, 2, 3, 4]
ETA = 0.25
ACTOR = "actor_rollout_ref.actor"


def train_pass(actor, name=None, *overrides, entropy=None):
    """Trains an update by verl's whole loss: Lopti's pass of that name, or one over all tokens."""
    batch = example()
    token_pass = None
    counted = None
    if name is not None:
        token_pass = TokenPass(name, ETA, True)
        counted = float(token_pass.tokens(micro_batch(batch, ROWS)[0]).sum())
    step = OptimizerStep(token_pass, counted_tokens=counted, entropy_wanted=True)
    extra = dict(entropy=entropy, reference=batch["log_prob"] - 0.3)
    return train(loss_function(actor("+clipx=grpo", *overrides), step), batch, [[ROWS]], **extra)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_both_passes_add_up_to_the_plain_update_and_each_counts_its_own_tokens(actor, aggregation):
    batch = example()
    entropy = torch.rand(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    overrides = (
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.kl_loss_coef=0.3",
        f"{ACTOR}.entropy_coeff=0.5",
        f"{ACTOR}.loss_agg_mode={aggregation}",
    )
    plain = train_pass(actor, None, *overrides, entropy=entropy)
    low = train_pass(actor, "low", *overrides, entropy=entropy)
    high = train_pass(actor, "high", *overrides, entropy=entropy)
    torch.testing.assert_close(low.gradient + high.gradient, plain.gradient)
    torch.testing.assert_close(low.loss + high.loss, plain.loss)
    # Entropy outside the pass counts nothing.
    low_entropy, high_entropy, plain_entropy = (update.metrics["actor/entropy_loss"] for update in (low, high, plain))
    assert low_entropy + high_entropy == pytest.approx(plain_entropy)
    assert low_entropy > 0 and high_entropy > 0
    is_low = batch["old_log_prob"].exp() <= ETA
    for update, tokens in ((low, is_low), (high, ~is_low)):
        assert update.gradient.any() and not update.gradient[~tokens].any()
        ratio = (batch["log_prob"] - batch["old_log_prob"]).exp()[batch["mask"] & tokens].mean()
        assert update.metrics["clipx/ratio_mean"] == pytest.approx(float(ratio), rel=1e-6)


@pytest.mark.parametrize("name", ["low", "high"])
def test_a_mask_takes_out_the_same_tokens_of_a_pass_before_the_update_as_in_it(actor, name):
    config = actor("+clipx=acpo", "+clipx/mask=opsm", "clipx.mask.delta=0.1")
    batch = example()
    token_pass = TokenPass(name, ETA, True)
    # The sampler found each sequence more likely, and of a sequence one pass's tokens have A < 0, more so than all.
    batch["sampler_log_prob"] = batch["log_prob"] + 0.5
    in_pass = (batch["old_log_prob"].exp() <= ETA) == (name == "low")
    batch["advantages"] = torch.where(in_pass, -1.0, 5.0).double()
    batch["advantages"][1] *= -1
    step = plan_with_extra_pass(config, batch, token_pass=token_pass)
    metrics = train(loss_function(config, step), batch, entropy=batch["entropy"]).metrics
    remaining = (1 - metrics["clipx/rejected_fraction"]) * step.counted_tokens
    assert sum(metrics[f"clipx/count/bin_{index}"] for index in range(5)) == pytest.approx(remaining)
    assert 0 < remaining < step.counted_tokens


@pytest.mark.parametrize(("method", "size"), [("acpo", 128), ("bapo", 888), ("m2po", 16_424), ("kl_cov", 16_416)])
def test_an_updates_all_reduces_have_as_many_bytes_as_the_page_says(actor, method, size):
    sizes = []

    def all_reduce(vector):
        sizes.append(vector.nbytes)
        return vector

    plan_with_extra_pass(actor(f"+clipx={method}"), example(), all_reduce=all_reduce)
    assert sum(sizes) == size
    # Its deviations from a mean are summed once the mean is known.
    assert len(sizes) == (2 if method == "kl_cov" else 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsksForAll(Method):
    """Its statistics are sums of what it asks for."""

    asks_for = OPTIONAL
    statistics_size = 3

    def statistics(self, t):
        def total(values):
            return torch.where(t.mask, values, 0.0).sum(dtype=torch.float64)

        return torch.stack([total(t.rollout_log_prob), total(t.entropy), total((t.group % 1000)[:, None])])


SETTINGS = Settings(method=AsksForAll())


def test_a_prompt_has_one_number_in_every_micro_batch():
    data, _ = micro_batch(example(), ROWS)
    part, _ = micro_batch(example(), [4, 1])
    groups = prompt_groups(data)
    assert torch.equal(prompt_groups(part), groups[[4, 1]])
    # Two rows a prompt.
    assert len(groups.unique()) == 3 and groups[0] == groups[1]
    assert groups.dtype == torch.int64 and (groups >= 0).all()


def test_age_is_counted_in_weight_versions():
    data = {"extra_fields": [{"max_global_steps": step} for step in (4, 3, 1, 7)]}
    assert ages(data, 5).tolist() == [[1, 1], [2, 2], [4, 4], [0, 0]]
    # Of a generation that was resumed with newer weights, the first token and the last.
    resumed = {"min_global_steps": 2, "max_global_steps": 5}
    whole = {"min_global_steps": None, "max_global_steps": 4}
    assert ages({"extra_fields": [resumed, whole]}, 5).tolist() == [[3, 0], [1, 1]]
    assert ages({}, 5) is ages({"extra_fields": [{"max_global_steps": 1}, {}]}, 5) is None


def test_a_method_gets_what_it_asks_for():
    batch = example()
    data, output = micro_batch(batch, ROWS, entropy=batch["entropy"])
    mask = batch["mask"][ROWS]
    group = prompt_groups(data) % 1000
    sums = [batch[name][ROWS][mask].sum() for name in ("old_log_prob", "entropy")]
    expected = torch.stack([*sums, (group * mask.sum(1)).sum().double()])

    def loss(model_output, data, dp_group):
        tensors = {name: batch[name][ROWS] for name in ("log_prob", "old_log_prob", "advantages", "mask")}
        inputs = inputs_of(SETTINGS, current_micro_batch(), **tensors)
        torch.testing.assert_close(SETTINGS.functions("cpu").statistics(inputs), expected)
        assert "entropy" not in model_output
        return torch.zeros(()), {}

    with_micro_batch(loss, SETTINGS, Schedule(), OptimizerStep)(output, data)
    del output["entropy"]
    padded = micro_batch_of(SETTINGS, OptimizerStep(), data).rollout_log_prob
    assert torch.equal(padded, torch.where(mask, batch["old_log_prob"][ROWS], 0.0))
    without = data.exclude("rollout_log_probs")
    assert micro_batch_of(SETTINGS, OptimizerStep(), without).rollout_log_prob is None
