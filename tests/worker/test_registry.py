"""Registration with verl: in a fresh interpreter, when a name is taken, when the plugin fails, and what it costs.

Covers: the entry point, the post-import hooks, who inherits the worker, the errors, which modules importing verl loads.
Not covered: seconds (docs/dev/measurements.md), Ray workers (`clipx doctor` and tests/end_to_end look there).
"""

import types

import pytest
from ray import cloudpickle
from verl.trainer import sft_trainer_ray
from verl.trainer.ppo import core_algos
from verl.workers import engine_workers
from verl.workers.engine_workers_tinker import TinkerTrainingWorker

from verl_clipx.methods import BUILT_IN
from verl_clipx.worker.registry import install_worker, register_losses
from verl_clipx.worker.training_worker import ClipxTraining


def fake_core_algos(**registry):
    module = types.SimpleNamespace(POLICY_LOSS_REGISTRY=dict(registry))
    module.register_policy_loss = lambda name: lambda function: module.POLICY_LOSS_REGISTRY.__setitem__(name, function)
    return module


@pytest.mark.slow
def test_importing_verl_loads_no_heavy_module_of_the_plugin_and_verls_own_imports_register(run_fresh, tmp_path):
    code = (
        "import sys, verl\n"
        "rooms = ('verl_clipx.worker', 'verl_clipx.run', 'verl_clipx.loss', 'verl_clipx.methods')\n"
        "print([m for m in sys.modules if m.startswith(rooms) "
        "or m in ('verl.trainer.ppo.core_algos', 'verl.workers.engine_workers')])\n"
        "from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY\n"
        "from verl.workers.engine_workers import ActorRolloutRefWorker\n"
        "print(sorted(n for n in POLICY_LOSS_REGISTRY if n.startswith('clipx_')))\n"
        "print(ActorRolloutRefWorker.actor_worker_cls.__mro__)\n"
    )
    done = run_fresh(code, tmp_path)
    assert done.returncode == 0, done.stderr
    heavy, losses, worker = done.stdout.strip().splitlines()[-3:]
    assert heavy == "[]"
    for name in BUILT_IN:
        assert f"'clipx_{name}'" in losses
    assert "ClipxTraining" in worker


def test_a_taken_name_is_an_error_that_names_both():
    def somebody_elses(): ...

    with pytest.raises(RuntimeError, match=r"'clipx_grpo' is already .*somebody_elses.*verl_clipx"):
        register_losses(fake_core_algos(clipx_grpo=somebody_elses))


def test_registering_twice_is_fine():
    module = fake_core_algos()
    register_losses(module)
    register_losses(module)
    assert "clipx_grpo" in module.POLICY_LOSS_REGISTRY and "clipx_grpo" in core_algos.POLICY_LOSS_REGISTRY
    install_worker(engine_workers)
    assert issubclass(engine_workers.ActorRolloutRefWorker.actor_worker_cls, ClipxTraining)


def test_whoever_imports_verls_worker_later_gets_the_plugins():
    assert issubclass(TinkerTrainingWorker, ClipxTraining)
    assert TinkerTrainingWorker.train_batch is ClipxTraining.train_batch
    assert issubclass(sft_trainer_ray.TrainingWorker, ClipxTraining)
    assert issubclass(engine_workers.ActorRolloutRefWorker.ref_worker_cls, ClipxTraining)


def test_ray_sends_the_worker_by_its_name():
    class AUsers(engine_workers.TrainingWorker): ...

    assert cloudpickle.loads(cloudpickle.dumps(engine_workers.TrainingWorker)) is engine_workers.TrainingWorker
    assert len(cloudpickle.dumps(engine_workers.TrainingWorker)) < 200
    assert cloudpickle.loads(cloudpickle.dumps(AUsers)).__mro__[1] is engine_workers.TrainingWorker


def test_another_plugins_worker_is_inherited():
    class SomebodyElses: ...

    names = types.SimpleNamespace(actor_worker_cls=SomebodyElses)
    module = types.SimpleNamespace(__name__="verl.workers.engine_workers", ActorRolloutRefWorker=names)
    install_worker(module)
    assert issubclass(names.actor_worker_cls, SomebodyElses) and module.TrainingWorker is names.actor_worker_cls


@pytest.mark.slow
def test_a_failing_plugin_prints_its_traceback_and_fails_where_losses_are_needed(run_fresh, tmp_path):
    code = (
        "import sys\n"
        "sys.modules['verl_clipx.cpu'] = None\n"
        "import verl\n"
        "print('verl swallowed it')\n"
        "import verl.trainer.ppo.core_algos\n"
        "print('never reached')\n"
    )
    done = run_fresh(code, tmp_path)
    assert done.returncode == 1
    assert "verl swallowed it" in done.stdout and "never reached" not in done.stdout
    assert "could not be set up" in done.stderr
    assert "verl_clipx failed while verl was imported" in done.stderr
