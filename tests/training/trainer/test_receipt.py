"""The receipt in the trainer's process, through verl's Tracking: the logged steps must have one.

Covers: another worker stops the run at the first step where tests ran its options, and elsewhere is a warning at the
first and stops at the second; steps without actor; runs in which none is due. The receipt itself is in
tests/training/worker/test_receipt.py.
"""

import types

import pytest
from omegaconf import OmegaConf
from verl.utils.tracking import Tracking

from tests.composition import composition
from tests.messages import assert_names
from verl_clipx.run.support import untested

# Options that tests ran.
TESTED = {
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.rollout.name": "vllm",
    "algorithm.adv_estimator": "grpo",
}
# The loss runs elsewhere, as in a hosted backend.
UNTESTED = TESTED | {"actor_rollout_ref.rollout.name": "hosted"}
ACPO = {"method": "acpo"}

VALIDATION = {"val/score": 1.0}
PARAMETER_SYNC = {"timing_s/param_sync": 0.1}
RECEIPT = {"actor/clipx/receipt": 1e-7}

# What the messages must name: the warning of the first step, and the errors of the first and of the second one.
FIRST_STEP = ("first logged training step", "no clipx/receipt")
STOPPED_AT_FIRST_STEP = (*FIRST_STEP, "clipx.receipt=off")
STOPPED_AT_SECOND_STEP = ("first 2 logged training steps", "no clipx/receipt", "clipx.receipt=off")


def log_with_node(*, metrics, node, options=TESTED, critic_warmup=0):
    """Log metrics through the Tracking of a trainer that has a clipx node; see `log_with_configuration`."""
    policy_loss = {
        "loss_mode": "clipx_acpo",
        "clipx": node,
        "run": {"record": {"untested": untested(options)}},
    }
    config = {
        "actor_rollout_ref": {"actor": {"policy_loss": policy_loss}},
        "trainer": {"critic_warmup": critic_warmup},
        "clipx": node,
    }
    return log_with_configuration(config, metrics)


def log_with_configuration(config, metrics):
    """Log metrics through a trainer's Tracking as the steps 1, 2, …, and return the steps that its loggers got."""
    tracking = Tracking("p", "e", [], config=config)
    logged_steps = []
    logger_of_verl = types.SimpleNamespace(log=lambda data, step: logged_steps.append(step))
    tracking.logger = {"of verl": logger_of_verl, **tracking.logger}
    for step, data in enumerate(metrics, 1):
        tracking.log(data=data, step=step)
    return logged_steps


def training_step(step, metrics_of_worker=None):
    """Return what a trainer logs of a training step, with the metrics that a worker gave it."""
    metrics = {"training/global_step": step, "training/epoch": 0}
    return metrics | (metrics_of_worker or {})


@pytest.mark.parametrize("metrics_of_worker", [{}, {"actor/pg_loss": 0.1}], ids=["no-metrics", "verls-metrics"])
def test_the_trainer_stops_at_the_first_step_without_a_receipt(metrics_of_worker):
    with pytest.raises(RuntimeError) as raised:
        log_with_node(metrics=[VALIDATION, PARAMETER_SYNC, training_step(1, metrics_of_worker)], node=ACPO)
    assert_names(str(raised.value), *STOPPED_AT_FIRST_STEP)


@pytest.mark.parametrize("metrics_of_worker", [{}, {"actor/pg_loss": 0.1}], ids=["no-metrics", "verls-metrics"])
def test_the_trainer_expects_no_receipt_after_a_first_step_that_has_one(metrics_of_worker):
    metrics = [VALIDATION, training_step(1, RECEIPT), training_step(2, metrics_of_worker)]
    assert log_with_node(metrics=metrics, node=ACPO) == [1, 2, 3]


def test_the_trainer_expects_no_receipt_of_steps_that_train_the_critic_alone():
    # With critic_warmup=3 the actor is trained from step 3 on.
    critic_steps = [training_step(1), training_step(2)]
    assert log_with_node(metrics=critic_steps, node=ACPO, critic_warmup=3) == [1, 2]
    with pytest.raises(RuntimeError) as raised:
        log_with_node(metrics=[*critic_steps, training_step(3)], node=ACPO, critic_warmup=3)
    assert_names(str(raised.value), *STOPPED_AT_FIRST_STEP)


@pytest.mark.parametrize(
    ("receipt", "strategy"),
    [("auto", "fsdp2"), ("auto", "fsdp"), ("stop", "megatron")],
)
def test_the_trainer_stops_where_tests_cover_the_run_or_stopping_is_asked_for(receipt, strategy):
    options = TESTED | {"actor_rollout_ref.actor.strategy": strategy}
    with pytest.raises(RuntimeError) as raised:
        log_with_node(metrics=[training_step(1)], node=ACPO | {"receipt": receipt}, options=options)
    assert_names(str(raised.value), *STOPPED_AT_FIRST_STEP)


@pytest.mark.parametrize(("receipt", "strategy"), [("auto", "megatron"), ("warn", "fsdp2")])
def test_the_trainer_warns_where_no_test_covers_the_run_or_a_warning_is_asked_for(caplog, receipt, strategy):
    options = TESTED | {"actor_rollout_ref.actor.strategy": strategy}
    assert log_with_node(metrics=[training_step(1)], node=ACPO | {"receipt": receipt}, options=options) == [1]
    assert_names(caplog.text, *FIRST_STEP)


def container_of_run(rollout):
    """Return the configuration of a run with a rollout backend, as verl's trainer gives it to its Tracking."""
    config = composition(
        "+clipx=acpo",
        "clipx.log=False",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.strategy=fsdp2",
        f"actor_rollout_ref.rollout.name={rollout}",
    )
    return OmegaConf.to_container(config, resolve=True)


def test_a_composed_run_with_a_tested_rollout_backend_is_stopped():
    with pytest.raises(RuntimeError) as raised:
        log_with_configuration(container_of_run("cpu"), [training_step(1)])
    assert_names(str(raised.value), *STOPPED_AT_FIRST_STEP)


def test_a_composed_run_with_an_untested_rollout_backend_is_warned(caplog):
    assert log_with_configuration(container_of_run("sglang"), [training_step(1)]) == [1]
    assert_names(caplog.text, *FIRST_STEP)


@pytest.mark.parametrize(
    ("receipt", "options"),
    [
        pytest.param("auto", UNTESTED, id="auto-untested"),
        pytest.param("warn", UNTESTED, id="warn-untested"),
        pytest.param("warn", TESTED, id="warn-tested"),
    ],
)
@pytest.mark.parametrize("critic_warmup", [0, 3])
def test_a_receipt_that_never_comes_stops_the_run_after_the_second_step_that_trains_the_actor(
    caplog, receipt, options, critic_warmup
):
    run = {"node": ACPO | {"receipt": receipt}, "options": options, "critic_warmup": critic_warmup}
    first_actor_step = max(critic_warmup, 1)
    critic_steps = [training_step(step) for step in range(1, first_actor_step)]
    until_first = [VALIDATION, *critic_steps, training_step(first_actor_step), PARAMETER_SYNC, VALIDATION]
    assert len(log_with_node(metrics=until_first, **run)) == len(until_first)
    warnings = [record.getMessage() for record in caplog.records if "clipx/receipt" in record.getMessage()]
    assert len(warnings) == 1
    assert_names(warnings[0], *FIRST_STEP)
    with pytest.raises(RuntimeError) as raised:
        log_with_node(metrics=[*until_first, training_step(first_actor_step + 1)], **run)
    assert_names(str(raised.value), *STOPPED_AT_SECOND_STEP)


def test_a_receipt_that_comes_with_the_second_step_is_enough():
    metrics = [training_step(1), training_step(2, RECEIPT), training_step(3), training_step(4)]
    assert log_with_node(metrics=metrics, node=ACPO, options=UNTESTED) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "node",
    [
        pytest.param(None, id="no-clipx"),
        pytest.param({"method": "observe"}, id="observe"),
        pytest.param({"method": "acpo", "receipt": "off"}, id="receipt-off"),
    ],
)
@pytest.mark.parametrize("options", [TESTED, UNTESTED], ids=["tested", "untested"])
def test_the_trainer_expects_no_receipt_where_none_is_due(node, options):
    metrics = [training_step(1), training_step(2), training_step(3)]
    assert log_with_node(metrics=metrics, node=node, options=options) == [1, 2, 3]
