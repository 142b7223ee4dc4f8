"""The receipt in the trainer's process, through verl's Tracking: the logged steps must have one.

Covers: another worker stops the run at the first step where tests ran its options, and elsewhere is a warning at the
first and stops at the second; steps without actor; runs in which none is due. The receipt itself is in
tests/training/worker/test_receipt.py.
"""

import types
from contextlib import nullcontext

import pytest
from omegaconf import OmegaConf
from verl.utils.tracking import Tracking

from tests.composition import composition
from verl_clipx.run.support import untested

OF_RUN = {"actor_rollout_ref.actor.strategy": "fsdp2", "actor_rollout_ref.rollout.name": "vllm"}
OF_RUN |= {"algorithm.adv_estimator": "grpo"}
NO_RECEIPT = "the first logged training step has no clipx/receipt"
NEVER_A_RECEIPT = r"the first 2 logged training steps have no clipx/receipt.*clipx\.receipt=off"


def logged(*, metrics, node, options=OF_RUN, critic_warmup=0):
    """What a trainer's Tracking does with the metrics of each of its logs under a clipx node."""
    run = {"record": {"untested": untested(options)}}
    actor = {"actor": {"policy_loss": {"loss_mode": "clipx_acpo", "clipx": node, "run": run}}}
    return logged_under(
        {"actor_rollout_ref": actor, "trainer": {"critic_warmup": critic_warmup}, "clipx": node}, metrics
    )


def logged_under(config, metrics):
    """What a trainer's Tracking does with the metrics of each of its logs under a configuration."""
    tracking, seen = Tracking("p", "e", [], config=config), []
    of_verl = types.SimpleNamespace(log=lambda data, step: seen.append(step))
    tracking.logger = {"of verl": of_verl, **tracking.logger}
    for number, data in enumerate(metrics, 1):
        tracking.log(data=data, step=number)
    return seen


VALIDATED, OF_SYNC, ACPO = {"val/score": 1.0}, {"timing_s/param_sync": 0.1}, {"method": "acpo"}


def trained(step, **of_worker):
    """What a trainer logs of a step, with what a worker gave it."""
    return {"training/global_step": step, "training/epoch": 0} | of_worker


@pytest.mark.parametrize("of_worker", [{}, {"actor/pg_loss": 0.1}], ids=str)
def test_the_trainer_stops_at_the_first_step_without_a_receipt(of_worker):
    with pytest.raises(RuntimeError, match=r"clipx/receipt.*clipx\.receipt=off"):
        logged(metrics=[VALIDATED, OF_SYNC, trained(1, **of_worker)], node=ACPO)
    with_receipt = trained(1, **{"actor/clipx/receipt": 1e-7})
    assert logged(metrics=[VALIDATED, with_receipt, trained(2, **of_worker)], node=ACPO) == [1, 2, 3]


def test_the_trainer_expects_none_of_steps_that_train_the_critic_alone():
    before = [trained(1), trained(2)]
    assert logged(metrics=before, node=ACPO, critic_warmup=3) == [1, 2]
    with pytest.raises(RuntimeError, match="clipx/receipt"):
        logged(metrics=[*before, trained(3)], node=ACPO, critic_warmup=3)


@pytest.mark.parametrize(
    ("receipt", "strategy", "stops"),
    [
        ("auto", "fsdp2", True),
        ("auto", "fsdp", True),
        ("auto", "megatron", False),
        ("stop", "megatron", True),
        ("warn", "fsdp2", False),
    ],
)
def test_where_no_test_covers_the_run_the_trainer_warns(caplog, receipt, strategy, stops):
    options = OF_RUN | {"actor_rollout_ref.actor.strategy": strategy}
    with pytest.raises(RuntimeError, match=NO_RECEIPT) if stops else nullcontext():
        assert logged(metrics=[trained(1)], node=ACPO | {"receipt": receipt}, options=options) == [1]
    assert stops or NO_RECEIPT in caplog.text


@pytest.mark.parametrize(("rollout", "stops"), [("cpu", True), ("sglang", False)])
def test_a_run_s_own_configuration_says_whether_tests_ran_its_options(caplog, rollout, stops):
    strategy = "actor_rollout_ref.actor.strategy=fsdp2"
    config = composition(
        *("+clipx=acpo", "clipx.log=False", "algorithm.adv_estimator=grpo", strategy),
        f"actor_rollout_ref.rollout.name={rollout}",
    )
    with pytest.raises(RuntimeError, match=NO_RECEIPT) if stops else nullcontext():
        assert logged_under(OmegaConf.to_container(config, resolve=True), [trained(1)]) == [1]
    assert stops or NO_RECEIPT in caplog.text


# The loss runs elsewhere, as in a hosted backend.
UNTESTED = OF_RUN | {"actor_rollout_ref.rollout.name": "hosted"}


@pytest.mark.parametrize(("receipt", "options"), [("auto", UNTESTED), ("warn", UNTESTED), ("warn", OF_RUN)])
@pytest.mark.parametrize("critic_warmup", [0, 3])
def test_a_receipt_that_never_comes_stops_the_run_after_the_second_step_that_trains_the_actor(
    caplog, receipt, options, critic_warmup
):
    node, first = ACPO | {"receipt": receipt}, max(critic_warmup, 1)
    of_critic = [trained(step) for step in range(1, first)]
    given = {"node": node, "options": options, "critic_warmup": critic_warmup}
    one_step = [VALIDATED, *of_critic, trained(first), OF_SYNC, VALIDATED]
    assert len(logged(metrics=one_step, **given)) == len(one_step)
    assert caplog.text.count(NO_RECEIPT) == 1
    with pytest.raises(RuntimeError, match=NEVER_A_RECEIPT):
        logged(metrics=[*one_step, trained(first + 1)], **given)


def test_a_receipt_that_comes_with_the_second_step_is_enough():
    later = [trained(1), trained(2, **{"actor/clipx/receipt": 1e-7}), trained(3), trained(4)]
    assert logged(metrics=later, node=ACPO, options=UNTESTED) == [1, 2, 3, 4]


@pytest.mark.parametrize("node", [None, {"method": "observe"}, {"method": "acpo", "receipt": "off"}])
@pytest.mark.parametrize("options", [OF_RUN, UNTESTED], ids=["tested", "untested"])
def test_the_trainer_expects_none_where_none_is_due(node, options):
    assert logged(metrics=[trained(1), trained(2), trained(3)], node=node, options=options) == [1, 2, 3]
