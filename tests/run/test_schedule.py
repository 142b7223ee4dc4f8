"""What the updates on a rollout batch of a run consist of: the schedule against what the planner does, counted, and
against what users read of it. Real passes, engines and ranks are not covered (tests/end_to_end/test_invariance.py).
"""

import itertools
import re
from dataclasses import dataclass
from functools import partial

import pytest
from omegaconf import OmegaConf

from tests.claims.configuration import ACTOR, actor_of, build_by_verl, compose_by_hydra, merge, parse
from tests.jagged import micro_batch
from tests.training.worker.updates import ROWS, WHOLE, run_extra_pass
from verl_clipx.losses.contract.contract import example
from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.run.explaining import answer
from verl_clipx.run.keys import FACTS, flat
from verl_clipx.run.schedule import Schedule, position, recorded_schedule
from verl_clipx.run.start import resolve_into_config
from verl_clipx.training.worker.plan import plan_step, token_passes
from verl_clipx.training.worker.state import ControllerState
from verl_clipx.training.worker.step import RolloutBatch

MINI_BATCH_OF_256 = f"{ACTOR}.ppo_mini_batch_size=256"
ONE_MINI_BATCH = "data.train_batch_size=256"
FOUR_MINI_BATCHES = "data.train_batch_size=1024"
LOPTI = "+clipx/update=lopti"
LOPTI_LOW_ONLY = "+clipx/update=lopti clipx.update.order=low_only"
SELECTED_IN_SEQUENCES = "+clipx/select=high_entropy clipx.select.over=sequence"
SELECTED_IN_MINI_BATCH = "+clipx/select=high_entropy clipx.select.over=mini_batch"
BYPASS = "algorithm.rollout_correction.bypass_mode=true actor_rollout_ref.rollout.calculate_log_probs=true"
TOKEN_REJECTION = (
    "algorithm.rollout_correction.rollout_rs=token_k2 algorithm.rollout_correction.rollout_rs_threshold=0.5"
)
LOG_PROBS_RETURNED = "actor_rollout_ref.rollout.calculate_log_probs=true"
ASKS_FOR_ENTROPY = "clipx.function=tests.example_losses:ByEntropy"


class PlannedRun:
    """What the planner does with the rollout batches of a composed run: a number for each update of each batch."""

    def __init__(self, overrides: str, batches: int = 2):
        groups = [override for override in overrides.split() if re.match(r"\+[\w/]+=", override)]
        values = parse(*(override for override in overrides.split() if override not in groups))
        self.policy_loss = actor_of(merge(groups, values)).policy_loss
        self.schedule = self.policy_loss.run.record.schedule
        self.settings = self.policy_loss.clipx
        self.passes = []
        self.reductions = []
        self.steps = []
        state = ControllerState()
        mini_batch = example()
        data, _ = micro_batch(mini_batch, ROWS, entropy=mini_batch["entropy"])
        observe = partial(run_extra_pass, self.policy_loss, mini_batch, WHOLE)
        for _ in range(batches):
            for token_pass in token_passes(self.policy_loss):
                for update in range(self.schedule.updates):
                    self._plan(state, RolloutBatch(token_pass=token_pass, update=update), data, observe)

    def _plan(self, state, batch, data, observe):
        self.passes.append(0)
        self.reductions.append(0)

        def extra_pass(*arguments):
            self.passes[-1] += 1
            return observe(*arguments)

        def all_reduce(vector):
            self.reductions[-1] += 1
            return vector

        step = plan_step(self.policy_loss, state, batch, data, extra_pass=extra_pass, all_reduce=all_reduce)
        if step.collected is not None:
            step.collected.append(step.statistics)
        state.end_step(step, batch.position)
        self.steps.append(step)

    @property
    def per_batch(self) -> int:
        """How many updates each rollout batch gets."""
        return len(self.steps) // 2


BEFORE_EACH = "one extra forward pass before each update"


@dataclass(frozen=True, kw_only=True)
class CountedByHand:
    """What a run's updates take.

    Args:
        overrides: the run's, beside those of its batches.
        prompts: the override for the rollout batch's size, with mini-batches of 256 prompts.
        updates: on each rollout batch.
        extra_passes: before the updates of the first rollout batch, and before those of the second.
        reductions: all-reduces of each rollout batch's updates.
        cost: how what `clipx explain` says of passes begins.
    """

    overrides: str
    prompts: str
    updates: int
    extra_passes: tuple[int, int]
    reductions: int
    cost: str


RUNS = [
    CountedByHand(
        overrides="+clipx=grpo",
        prompts=FOUR_MINI_BATCHES,
        updates=4,
        extra_passes=(0, 0),
        reductions=0,
        cost="no extra pass",
    ),
    CountedByHand(
        overrides="+clipx=acpo",
        prompts=FOUR_MINI_BATCHES,
        updates=4,
        extra_passes=(4, 4),
        reductions=4,
        cost=f"{BEFORE_EACH}; clipx.scope=lagged needs no extra pass",
    ),
    # One update at ratio 1: its statistics need no pass, but a sum.
    CountedByHand(
        overrides="+clipx=acpo",
        prompts=ONE_MINI_BATCH,
        updates=1,
        extra_passes=(0, 0),
        reductions=1,
        cost="no extra pass",
    ),
    CountedByHand(
        overrides="+clipx=acpo clipx.scope=lagged",
        prompts=FOUR_MINI_BATCHES,
        updates=4,
        extra_passes=(0, 0),
        reductions=4,
        cost="no extra pass",
    ),
    CountedByHand(
        overrides="+clipx=acpo clipx.scope=micro_batch",
        prompts=FOUR_MINI_BATCHES,
        updates=4,
        extra_passes=(0, 0),
        reductions=0,
        cost="no extra pass",
    ),
    # The weights move between Lopti's passes.
    CountedByHand(
        overrides=f"+clipx=acpo {LOPTI}",
        prompts=ONE_MINI_BATCH,
        updates=2,
        extra_passes=(2, 2),
        reductions=2,
        cost=f"{BEFORE_EACH} and a second pass of each update (Lopti)",
    ),
    CountedByHand(
        overrides=f"+clipx=acpo {LOPTI_LOW_ONLY}",
        prompts=ONE_MINI_BATCH,
        updates=1,
        extra_passes=(1, 1),
        reductions=1,
        cost=BEFORE_EACH,
    ),
    CountedByHand(
        overrides=f"+clipx=grpo {LOPTI}",
        prompts=FOUR_MINI_BATCHES,
        updates=8,
        extra_passes=(0, 0),
        reductions=8,
        cost="a second pass of each update (Lopti)",
    ),
    CountedByHand(
        overrides=f"+clipx=grpo {LOPTI_LOW_ONLY}",
        prompts=FOUR_MINI_BATCHES,
        updates=4,
        extra_passes=(0, 0),
        reductions=4,
        cost="no extra pass",
    ),
    CountedByHand(
        overrides=f"+clipx=grpo {SELECTED_IN_SEQUENCES}",
        prompts=FOUR_MINI_BATCHES,
        updates=4,
        extra_passes=(0, 0),
        reductions=4,
        cost="no extra pass",
    ),
    CountedByHand(
        overrides=f"+clipx=grpo {SELECTED_IN_MINI_BATCH}",
        prompts=ONE_MINI_BATCH,
        updates=1,
        extra_passes=(1, 1),
        reductions=1,
        cost=BEFORE_EACH,
    ),
    CountedByHand(
        overrides="+clipx=grpo +clipx/hold=clip_fraction clipx.hold.value=0.02",
        prompts=ONE_MINI_BATCH,
        updates=1,
        extra_passes=(0, 0),
        reductions=1,
        cost="no extra pass",
    ),
    # What the current weights reject is known only from a pass.
    CountedByHand(
        overrides=f"+clipx=grpo {SELECTED_IN_SEQUENCES} {BYPASS} {TOKEN_REJECTION}",
        prompts=FOUR_MINI_BATCHES,
        updates=4,
        extra_passes=(4, 4),
        reductions=4,
        cost=BEFORE_EACH,
    ),
    CountedByHand(
        overrides=f"+clipx=grpo {TOKEN_REJECTION} {LOG_PROBS_RETURNED}",
        prompts=FOUR_MINI_BATCHES,
        updates=4,
        extra_passes=(0, 0),
        reductions=4,
        cost="no extra pass",
    ),
    CountedByHand(
        overrides=f"+clipx=acpo {BYPASS}",
        prompts=ONE_MINI_BATCH,
        updates=1,
        extra_passes=(1, 1),
        reductions=1,
        cost=BEFORE_EACH,
    ),
    # The current policy's entropy is known only from a pass.
    CountedByHand(
        overrides=f"+clipx=custom {ASKS_FOR_ENTROPY}",
        prompts=ONE_MINI_BATCH,
        updates=1,
        extra_passes=(1, 1),
        reductions=1,
        cost=BEFORE_EACH,
    ),
    CountedByHand(
        overrides=f"+clipx=custom {ASKS_FOR_ENTROPY} clipx.scope=lagged",
        prompts=FOUR_MINI_BATCHES,
        updates=4,
        extra_passes=(4, 0),
        reductions=4,
        cost=f"{BEFORE_EACH} of the first rollout batch",
    ),
    # Deviations from a mean are counted once the mean is known.
    CountedByHand(
        overrides="+clipx=clip_cov",
        prompts=FOUR_MINI_BATCHES,
        updates=4,
        extra_passes=(4, 4),
        reductions=8,
        cost=BEFORE_EACH,
    ),
    CountedByHand(
        overrides="+clipx=grpo +clipx/hold=clip_fraction clipx.hold.value=0.02 " + LOPTI_LOW_ONLY,
        prompts=ONE_MINI_BATCH,
        updates=1,
        extra_passes=(1, 1),
        reductions=1,
        cost=BEFORE_EACH,
    ),
]


@pytest.mark.parametrize("expected", RUNS, ids=lambda run: f"{run.overrides} {run.prompts}")
def test_the_planner_does_what_the_schedule_and_explain_say(expected):
    overrides = f"{expected.overrides} {expected.prompts} {MINI_BATCH_OF_256}"
    run = PlannedRun(overrides)
    updates = expected.updates
    assert run.per_batch == run.schedule.updates_on_batch == updates
    assert (sum(run.passes[:updates]), sum(run.passes[updates:])) == expected.extra_passes
    assert sum(run.reductions[:updates]) == sum(run.reductions[updates:]) == expected.reductions
    description = answer(compose_by_hydra(*overrides.split()))
    assert description.cost.startswith(expected.cost)
    names_extra_pass = expected.extra_passes[0] > 0 or "no extra" in expected.cost
    assert ("extra" in description.cost) == names_extra_pass
    assert description.updates.startswith(f"{run.schedule.updates} update")


SCOPES = ("clipx.scope=mini_batch", "clipx.scope=lagged", "clipx.scope=micro_batch")
MODIFIERS = ("", LOPTI, LOPTI_LOW_ONLY, SELECTED_IN_SEQUENCES, SELECTED_IN_MINI_BATCH)
TRAINERS = (
    "trainer.v1.trainer_mode=sync",
    "trainer.use_v1=false",
    "trainer.v1.trainer_mode=colocate_async",
    "trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.parameter_sync_step=2",
    BYPASS,
)


@pytest.mark.parametrize("method", ["grpo", "acpo"])
def test_every_combination_gets_what_its_loss_needs(method):
    # Fixed bounds have no scope.
    scopes = SCOPES if method == "acpo" else SCOPES[:1]
    for combination in itertools.product(scopes, MODIFIERS, (ONE_MINI_BATCH, FOUR_MINI_BATCHES), TRAINERS):
        overrides = " ".join([f"+clipx={method}", *combination, LOG_PROBS_RETURNED, MINI_BATCH_OF_256])
        run = PlannedRun(overrides)
        schedule = run.schedule
        settings = run.settings
        select = settings.select
        places = [position(step, name) for name in schedule.passes or (None,) for step in range(schedule.updates)]
        assert len(places) == run.per_batch == schedule.updates_on_batch, overrides
        lagged = settings.adaptive and settings.scope == "lagged"
        for batch, (number, place) in itertools.product(range(2), enumerate(places)):
            case = (overrides, place)
            index = batch * len(places) + number
            step = run.steps[index]
            past = lagged and batch > 0
            assert run.passes[index] == schedule.makes_extra_pass(place, past=past), case
            assert run.reductions[index] <= 1, case
            # What a loss needs before its update, whatever the schedule says.
            assert (step.decision is not None) == (settings.adaptive and settings.scope != "micro_batch"), case
            assert (step.entropy_bucket is not None) == (select is not None and select.over == "mini_batch"), case
            assert (step.selected_tokens is not None) == (select is not None), case
            assert (step.counted_tokens is not None) == bool(schedule.passes or run.passes[index]), case


def test_it_is_the_same_in_the_record_and_older_records_have_its_counts():
    config = compose_by_hydra("+clipx=acpo", LOPTI, FOUR_MINI_BATCHES, "trainer.critic_warmup=2")
    schedule = resolve_into_config(config).record.schedule
    record = flat(OmegaConf.to_container(config, resolve=True))
    assert recorded_schedule(record) == build_by_verl(config).policy_loss.run.record.schedule == schedule
    older = {key: value for key, value in record.items() if not key.startswith(f"{FACTS}.")}
    counts = recorded_schedule(older)
    assert (counts.updates, counts.passes, counts.updates_a_step) == (4, ("low", "high"), 8)
    assert recorded_schedule(older | {"clipx.update.order": "low_only"}).updates_a_step == 4
    # verl's own log, which has no clipx node, or none of verl's keys.
    log_of_verl = {key: value for key, value in older.items() if not key.startswith("clipx")}
    assert recorded_schedule(log_of_verl).updates_a_step == 4
    assert recorded_schedule({}).updates_a_step is None
    assert recorded_schedule(older | {"data.train_batch_size": None}).updates is None


def test_the_first_update_alone_is_at_ratio_1_where_verl_fills_a_rollout_batch_up():
    schedule = PlannedRun(f"+clipx=acpo {ONE_MINI_BATCH} {MINI_BATCH_OF_256}").schedule
    assert schedule.decided_from(position(0)) == DecidedFrom.RATIO_ONE
    assert schedule.decided_from(position(1)) == DecidedFrom.MINI_BATCH
    assert schedule.may_need_extra_pass and schedule.extra_passes == ""
    assert Schedule(bounds="lagged", passes=["low"]).bounds is DecidedFrom.LAGGED
