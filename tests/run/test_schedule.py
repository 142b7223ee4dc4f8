"""What the updates on a rollout batch of a run consist of: the schedule against what the planner does, counted, and
against what users read of it. Real passes, engines and ranks are not covered (tests/end_to_end/test_invariance.py).
"""

import itertools
import re
from functools import partial

import pytest
from omegaconf import OmegaConf

from tests.claims.configuration import ACTOR, actor_of, built, hydra_s, merged, parsed
from tests.jagged import micro_batch
from tests.training.worker.updates import ROWS, WHOLE, extra_passes
from verl_clipx.losses.contract.contract import example
from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.run.explaining import answer
from verl_clipx.run.keys import FACTS, flat
from verl_clipx.run.schedule import Schedule, position, recorded_schedule
from verl_clipx.run.start import resolve_into_config
from verl_clipx.training.worker.plan import plan_step, token_passes
from verl_clipx.training.worker.state import ControllerState
from verl_clipx.training.worker.step import RolloutBatch

ONE, FOUR = "data.train_batch_size=256", "data.train_batch_size=1024"
LOPTI, LOW_ONLY = "+clipx/update=lopti", "+clipx/update=lopti clipx.update.order=low_only"
WITHIN, OVER = (f"+clipx/select=high_entropy clipx.select.over={over}" for over in ("sequence", "mini_batch"))
BYPASS = "algorithm.rollout_correction.bypass_mode=true actor_rollout_ref.rollout.calculate_log_probs=true"
REJECTING = "algorithm.rollout_correction.rollout_rs=token_k2 algorithm.rollout_correction.rollout_rs_threshold=0.5"
LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs=true"
ASKS = "clipx.function=tests.example_losses:ByEntropy"


class Counted:
    """What the planner does with the rollout batches of a composed run: a number for each update of each batch."""

    def __init__(self, words: str, batches: int = 2):
        groups = [word for word in words.split() if re.match(r"\+[\w/]+=", word)]
        values = parsed(*(word for word in words.split() if word not in groups))
        self.policy_loss = actor_of(merged(groups, values)).policy_loss
        self.schedule, self.settings = self.policy_loss.run.record.schedule, self.policy_loss.clipx
        self.passes, self.reductions, self.steps = [], [], []
        state, mini_batch = ControllerState(), example()
        data, _ = micro_batch(mini_batch, ROWS, entropy=mini_batch["entropy"])
        observe = partial(extra_passes, self.policy_loss, mini_batch, WHOLE)
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
        state.end(step, batch.position)
        self.steps.append(step)

    @property
    def per_batch(self) -> int:
        """How many updates each rollout batch gets."""
        return len(self.steps) // 2


# From a composed run to the updates of a rollout batch, the extra passes before those of the first and of the second
# batch, the all-reduces of a batch's updates, and what `clipx explain` says of passes. Each is counted by hand.
BEFORE_EACH = "one extra forward pass before each update"
RUNS = [
    ("+clipx=grpo", FOUR, 4, 0, 0, 0, "no extra pass"),
    ("+clipx=acpo", FOUR, 4, 4, 4, 4, f"{BEFORE_EACH}; clipx.scope=lagged needs no extra pass"),
    # One update at ratio 1: its statistics need no pass, but a sum.
    ("+clipx=acpo", ONE, 1, 0, 0, 1, "no extra pass"),
    ("+clipx=acpo clipx.scope=lagged", FOUR, 4, 0, 0, 4, "no extra pass"),
    ("+clipx=acpo clipx.scope=micro_batch", FOUR, 4, 0, 0, 0, "no extra pass"),
    # The weights move between Lopti's passes.
    (f"+clipx=acpo {LOPTI}", ONE, 2, 2, 2, 2, f"{BEFORE_EACH} and a second pass of each update (Lopti)"),
    (f"+clipx=acpo {LOW_ONLY}", ONE, 1, 1, 1, 1, BEFORE_EACH),
    (f"+clipx=grpo {LOPTI}", FOUR, 8, 0, 0, 8, "a second pass of each update (Lopti)"),
    (f"+clipx=grpo {LOW_ONLY}", FOUR, 4, 0, 0, 4, "no extra pass"),
    (f"+clipx=grpo {WITHIN}", FOUR, 4, 0, 0, 4, "no extra pass"),
    (f"+clipx=grpo {OVER}", ONE, 1, 1, 1, 1, BEFORE_EACH),
    ("+clipx=grpo +clipx/hold=clip_fraction clipx.hold.value=0.02", ONE, 1, 0, 0, 1, "no extra pass"),
    # What the current weights reject is known only from a pass.
    (f"+clipx=grpo {WITHIN} {BYPASS} {REJECTING}", FOUR, 4, 4, 4, 4, BEFORE_EACH),
    (f"+clipx=grpo {REJECTING} {LOG_PROBS}", FOUR, 4, 0, 0, 4, "no extra pass"),
    (f"+clipx=acpo {BYPASS}", ONE, 1, 1, 1, 1, BEFORE_EACH),
    # The current policy's entropy is known only from a pass.
    (f"+clipx=custom {ASKS}", ONE, 1, 1, 1, 1, BEFORE_EACH),
    (f"+clipx=custom {ASKS} clipx.scope=lagged", FOUR, 4, 4, 0, 4, f"{BEFORE_EACH} of the first rollout batch"),
    # Deviations from a mean are counted once the mean is known.
    ("+clipx=clip_cov", FOUR, 4, 4, 4, 8, BEFORE_EACH),
    ("+clipx=grpo +clipx/hold=clip_fraction clipx.hold.value=0.02 " + LOW_ONLY, ONE, 1, 1, 1, 1, BEFORE_EACH),
]


@pytest.mark.parametrize(("words", "prompts", "updates", "first", "second", "sums", "cost"), RUNS)
def test_the_planner_does_what_the_schedule_and_explain_say(words, prompts, updates, first, second, sums, cost):
    words = f"{words} {prompts} {ACTOR}.ppo_mini_batch_size=256"
    run = Counted(words)
    assert run.per_batch == run.schedule.updates_on_batch == updates
    batches = run.passes[:updates], run.passes[updates:]
    assert [sum(passes) for passes in batches] == [first, second]
    assert sum(run.reductions[:updates]) == sum(run.reductions[updates:]) == sums
    said = answer(hydra_s(*words.split()))
    assert said.cost.startswith(cost) and ("extra" in said.cost) == bool(first or "no extra" in cost)
    assert said.updates.startswith(f"{run.schedule.updates} update")


SCOPES = ("clipx.scope=mini_batch", "clipx.scope=lagged", "clipx.scope=micro_batch")
MODIFIERS = ("", LOPTI, LOW_ONLY, WITHIN, OVER)
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
    for combination in itertools.product(scopes, MODIFIERS, (ONE, FOUR), TRAINERS):
        words = " ".join([f"+clipx={method}", *combination, LOG_PROBS, f"{ACTOR}.ppo_mini_batch_size=256"])
        run = Counted(words)
        schedule, settings, select = run.schedule, run.settings, run.settings.select
        places = [position(step, name) for name in schedule.passes or (None,) for step in range(schedule.updates)]
        assert len(places) == run.per_batch == schedule.updates_on_batch, words
        lagged = settings.adaptive and settings.scope == "lagged"
        for batch, (number, at) in itertools.product(range(2), enumerate(places)):
            index, past = batch * len(places) + number, lagged and batch > 0
            step = run.steps[index]
            assert run.passes[index] == schedule.makes_extra_pass(at, past=past), (words, at)
            assert run.reductions[index] <= 1, (words, at)
            # What a loss needs before its update, whatever the schedule says.
            assert (step.decision is not None) == (settings.adaptive and settings.scope != "micro_batch"), (words, at)
            assert (step.entropy_bucket is not None) == (select is not None and select.over == "mini_batch")
            assert (step.selected_tokens is not None) == (select is not None)
            assert (step.counted_tokens is not None) == bool(schedule.passes or run.passes[index])


def test_it_is_the_same_in_the_record_and_older_records_have_its_counts():
    words = f"+clipx=acpo {LOPTI} {FOUR} trainer.critic_warmup=2"
    config = hydra_s(*words.split())
    schedule = resolve_into_config(config).record.schedule
    record = flat(OmegaConf.to_container(config, resolve=True))
    assert recorded_schedule(record) == built(config).policy_loss.run.record.schedule == schedule
    older = {key: value for key, value in record.items() if not key.startswith(f"{FACTS}.")}
    counts = recorded_schedule(older)
    assert (counts.updates, counts.passes, counts.updates_a_step) == (4, ("low", "high"), 8)
    assert recorded_schedule(older | {"clipx.update.order": "low_only"}).updates_a_step == 4
    # verl's own log, which has no clipx node, or none of verl's keys.
    assert recorded_schedule({k: v for k, v in older.items() if not k.startswith("clipx")}).updates_a_step == 4
    assert (
        recorded_schedule({}).updates_a_step
        is recorded_schedule(older | {"data.train_batch_size": None}).updates
        is None
    )


def test_the_first_update_alone_is_at_ratio_1_where_verl_fills_a_rollout_batch_up():
    schedule = Counted(f"+clipx=acpo {ONE} {ACTOR}.ppo_mini_batch_size=256").schedule
    at = [schedule.decided_from(position(update)) for update in (0, 1)]
    assert at == [DecidedFrom.RATIO_ONE, DecidedFrom.MINI_BATCH]
    assert schedule.may_need_extra_pass and schedule.extra_passes == ""
    assert Schedule(bounds="lagged", passes=["low"]).bounds is DecidedFrom.LAGGED
