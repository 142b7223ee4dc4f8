"""The losses through the real verl: Ray, FSDP2 over gloo, v1 trainers, rollouts, rewards.

Covers, with ranks, trainer mode and KL loss so assigned that every pair of their values occurs in these runs and those
of test_tasks.py and test_two_nodes.py: a user's own loss under ACPO's bounds with entropy selection, BAPO on stale
samples in bypass mode, Lopti with advantage reweighting. With `-m matrix`: every method under every setting.
Not covered: equal bounds over ranks and what the other methods do (test_invariance.py, without Ray), learning
(docs/quickstart.md has measured runs), GPUs.
"""

import itertools
import json
import math

import pytest

from .method_checks import CHECKS, SETTINGS, check_soft
from .runs import Run, train

pytestmark = pytest.mark.end_to_end

MATRIX = list(itertools.product(CHECKS, (1, 2), ("sync", "colocate_async"), (False, True)))
STEPS = 3
REGIONS = ("LN", "HP", "LP", "HN", "M")

BAPO = (
    "+clipx=bapo",
    *SETTINGS["bapo"],
    "trainer.v1.trainer_mode=colocate_async",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
)
STALE = (
    "clipx.weight=rollout",
    "algorithm.rollout_correction.bypass_mode=True",
    "trainer.v1.colocate_async.num_warmup_batches=2",
    "actor_rollout_ref.actor.use_kl_loss=True",
)


@pytest.fixture(scope="module")
def custom(task, tmp_path_factory) -> Run:
    """2 ranks, sync, no KL loss: a user's own loss, ACPO's bounds of the mini-batch, selected tokens."""
    folder = tmp_path_factory.mktemp("custom")
    (folder / "my_losses.py").write_text(
        "import torch\n"
        "from verl_clipx import register_loss\n\n\n"
        "@register_loss('half', bounds='acpo')\n"
        "def half(ratio, advantages, bounds, *, factor: float = 1.0):\n"
        "    inside = (ratio >= bounds.low) & (ratio <= bounds.high)\n"
        "    return torch.where(inside, ratio, ratio * factor)\n"
    )
    return train(
        task,
        folder / "run",
        # Bounds so narrow that tokens are outside.
        *("+clipx=custom", "clipx.function=my_losses:half", "+clipx.factor=0.5", "+clipx.alpha=0.3"),
        *("+clipx/select=high_entropy", "clipx.select.over=mini_batch"),
        "trainer.n_gpus_per_node=2",
        environment={"PYTHONPATH": str(folder)},
        steps=STEPS,
    )


@pytest.fixture(scope="module")
def stale(task, tmp_path_factory) -> Run:
    """1 rank, colocate_async, KL loss: BAPO on samples of older weights, with their probabilities as the old ones."""
    return train(task, tmp_path_factory.mktemp("stale"), *BAPO, *STALE, "trainer.save_freq=3", steps=STEPS + 1)


@pytest.fixture(scope="module")
def lopti(task, tmp_path_factory) -> Run:
    """2 ranks, colocate_async, no KL loss: BAPO with Lopti's two passes and advantage reweighting."""
    modifiers = ("+clipx/update=lopti", "+clipx/shaping=advantage_reweighting")
    ranks = ("trainer.n_gpus_per_node=2", "trainer.save_freq=3")
    return train(task, tmp_path_factory.mktemp("lopti"), *BAPO, *modifiers, *ranks, steps=STEPS)


def check_trained(run: Run, mode: str, kl: bool, steps: int = STEPS) -> None:
    """What holds of every run, whatever its loss."""
    assert list(run.log.index) == list(range(1, steps + 1))
    assert ("actor/kl_loss" in run.log) == kl
    fractions = [run.log[f"actor/clipx/region_fraction/{name}"].mean() for name in REGIONS]
    assert sum(fractions) == pytest.approx(1, abs=1e-6)
    for metric in run.log.filter(regex="^actor/"):
        assert run.log[metric].map(math.isfinite).all(), metric
    if mode == "sync":
        assert run.log["training/rollout_probs_diff_max"].max() < 1e-4


def state_of(run: Run) -> dict:
    """The state of the bounds in the checkpoint of step 3."""
    return json.loads((run.folder / f"checkpoints/global_step_{STEPS}/actor/clipx_state.json").read_text())


def test_a_user_s_own_loss_reaches_the_ray_workers(custom):
    check_trained(custom, "sync", kl=False)
    check_soft(custom)


def test_its_bounds_are_acpo_s(custom):
    CHECKS["acpo"](custom)


def test_selection_over_the_mini_batch_keeps_its_share(custom):
    # Whole buckets of the histogram: at least the share, and little more.
    assert custom.log["actor/clipx/selected_fraction"].between(0.2, 0.25).all()


def test_fresh_samples_are_seen_as_such(custom):
    assert (custom.log["actor/clipx/staleness/versions"] == 0).all()
    # Updates 1 and 2 of each rollout batch: half an update on average.
    assert custom.log["actor/clipx/staleness/updates"].tolist() == pytest.approx([0.5] * STEPS)


def test_bapo_on_an_asynchronous_rank(stale):
    check_trained(stale, "colocate_async", kl=True, steps=STEPS + 1)
    CHECKS["bapo"](stale)


def test_stale_samples_are_seen_as_such(stale):
    versions = stale.log["actor/clipx/staleness/versions"]
    assert versions.max() > 0.5 and versions[1] == 0
    spread = stale.log["actor/clipx/staleness/spread/age_1"]
    assert spread.max() > 1e-3
    # With the rollout's probabilities as the old ones nothing starts at ratio 1: no closed form was used.
    assert "actor/clipx/closed_form_difference" not in stale.log


def test_lopti_takes_twice_the_steps_in_two_passes(stale, lopti):
    assert state_of(stale)["step"] == 6
    state = state_of(lopti)
    assert state["step"] == 12
    assert sorted(state["statistics"]) == ["high/update_0", "high/update_1", "low/update_0", "low/update_1"]
    assert list(lopti.log["actor/lr"]) == pytest.approx(list(stale.log["actor/lr"])[:STEPS])
    assert lopti.log["actor/lr"].nunique() == STEPS
    for group in ("low", "high"):
        assert (lopti.log[f"actor/clipx/{group}/grad_norm"] > 0).all()
        assert lopti.log[f"actor/clipx/{group}/c_high"].notna().all()
    # The first pass has moved the policy before the second one starts.
    assert (lopti.log["actor/clipx/high/ratio_mean"] - 1).abs().max() > 1e-4


@pytest.mark.matrix
@pytest.mark.parametrize(("method", "ranks", "mode", "kl"), MATRIX)
def test_every_method_under_every_setting(task, tmp_path, method, ranks, mode, kl):
    run = train(
        task,
        tmp_path,
        f"+clipx={method}",
        f"trainer.n_gpus_per_node={ranks}",
        f"trainer.v1.trainer_mode={mode}",
        f"actor_rollout_ref.actor.use_kl_loss={kl}",
        *SETTINGS.get(method, ()),
        steps=STEPS,
    )
    check_trained(run, mode, kl)
    CHECKS[method](run)
