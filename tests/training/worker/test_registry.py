"""Registration with verl: in a fresh interpreter, beside another plugin that is loaded before this one or after it,
when a name is taken, when the plugin fails. Not covered: seconds (docs/dev/measurements.md), Ray workers (`clipx
doctor`).
"""

import pytest
from ray import cloudpickle
from verl.trainer import sft_trainer_ray
from verl.workers import engine_workers
from verl.workers.engine_workers_tinker import TinkerTrainingWorker

from verl_clipx.losses.methods import BUILT_IN
from verl_clipx.training.worker.registry import install_worker
from verl_clipx.training.worker.training_worker import ClipxTraining

FIRST_IMPORTS = """
import sys, verl
rooms = ("verl_clipx.training.worker", "verl_clipx.run", "verl_clipx.losses.applying", "verl_clipx.losses.methods")
heavy = ("verl.trainer.ppo.core_algos", "verl.workers.engine_workers")
print([name for name in sys.modules if name.startswith(rooms) or name in heavy])
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.engine_workers import ActorRolloutRefWorker
print(sorted(name for name in POLICY_LOSS_REGISTRY if name.startswith("clipx_")))
print(ActorRolloutRefWorker.actor_worker_cls.__mro__)
"""


@pytest.mark.slow
def test_importing_verl_loads_no_heavy_module_of_the_plugin_and_verls_own_imports_register(run_fresh, tmp_path):
    result = run_fresh(FIRST_IMPORTS, tmp_path)
    assert result.returncode == 0, result.stderr
    heavy, losses, worker = result.stdout.strip().splitlines()[-3:]
    assert heavy == "[]" and "ClipxTraining" in worker
    assert [name for name in BUILT_IN if f"'clipx_{name}'" not in losses] == []


def test_whoever_imports_verls_worker_later_gets_the_plugins_and_ray_sends_it_by_its_name():
    class UsersWorker(engine_workers.TrainingWorker): ...

    install_worker(engine_workers)
    actor_worker = engine_workers.ActorRolloutRefWorker
    for worker in (
        TinkerTrainingWorker,
        sft_trainer_ray.TrainingWorker,
        actor_worker.ref_worker_cls,
        actor_worker.actor_worker_cls,
    ):
        assert issubclass(worker, ClipxTraining)
    assert TinkerTrainingWorker.train_batch is ClipxTraining.train_batch
    assert cloudpickle.loads(cloudpickle.dumps(engine_workers.TrainingWorker)) is engine_workers.TrainingWorker
    assert len(cloudpickle.dumps(engine_workers.TrainingWorker)) < 200
    assert cloudpickle.loads(cloudpickle.dumps(UsersWorker)).__mro__[1] is engine_workers.TrainingWorker


@pytest.mark.slow
def test_a_failing_plugin_prints_its_traceback_and_fails_where_losses_are_needed(run_fresh, tmp_path):
    program = (
        "import sys\nsys.modules['verl_clipx.training.cpu'] = None\nimport verl\nprint('verl swallowed it')\n"
        "import verl.trainer.ppo.core_algos\nprint('never reached')\n"
    )
    result = run_fresh(program, tmp_path)
    assert result.returncode == 1
    assert "verl swallowed it" in result.stdout and "never reached" not in result.stdout
    assert "could not be set up" in result.stderr
    assert "verl_clipx failed while verl was imported" in result.stderr


# Programs: another plugin's worker, two ways to install it, another plugin's loss, and what imports and starts verl.
OTHER_WORKER = """
from verl.workers import engine_workers

class OtherWorker(engine_workers.TrainingWorker):
    def train_batch(self, data):
        print("other acts")
        return super().train_batch(data)

"""
INSTALLED_UNDER_BOTH_NAMES = (
    "engine_workers.TrainingWorker = engine_workers.ActorRolloutRefWorker.actor_worker_cls = OtherWorker"
)
INSTALLED_FOR_THE_ACTOR = "engine_workers.ActorRolloutRefWorker.actor_worker_cls = OtherWorker"
OTHER_LOSS = """
from verl.trainer.ppo.core_algos import register_policy_loss

@register_policy_loss("clipx_acpo")
def other_loss(**_):
    raise AssertionError
"""
IMPORT_VERL = """
import verl
from verl.workers.engine_workers import ActorRolloutRefWorker
print("worker", [kind.__name__ for kind in ActorRolloutRefWorker.actor_worker_cls.__mro__])
from verl.trainer.ppo.core_algos import get_policy_loss_fn
print("loss", get_policy_loss_fn("clipx_acpo"))
"""
START_RUN = """
from hydra import compose, initialize_config_module
from verl.utils.device import auto_set_device
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", ["+clipx=acpo"])
auto_set_device(config)
"""
# By where the other plugin comes on the path, the call that puts its folder there.
PLACES = {"first": "insert(0, {!r})", "last": "append({!r})"}


@pytest.fixture
def import_beside(run_fresh, tmp_path):
    """Imports verl where another distribution in verl's entry-point group comes first or last on the path."""

    def run(place, code, more=""):
        """Runs a program; code: the other plugin's; more: what follows the imports."""
        (tmp_path / "other_plugin.py").write_text(code)
        metadata = tmp_path / "other_plugin-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plugin\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text("[verl.plugins]\nother = other_plugin\n")
        return run_fresh(f"import sys\nsys.path.{PLACES[place].format(str(tmp_path))}\n{IMPORT_VERL}{more}", tmp_path)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "installation"), [("first", INSTALLED_FOR_THE_ACTOR), ("last", INSTALLED_UNDER_BOTH_NAMES)]
)
def test_another_plugins_worker_and_ours_act_together(import_beside, place, installation):
    result = import_beside(place, OTHER_WORKER + installation)
    assert result.returncode == 0, result.stderr
    (workers,) = [line for line in result.stdout.splitlines() if line.startswith("worker")]
    assert "ClipxTraining" in workers and "OtherWorker" in workers
    assert "loss functools.partial(<function policy_loss" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_loss_under_a_name_of_ours_is_refused_by_both_names(import_beside, place):
    result = import_beside(place, OTHER_LOSS, START_RUN)
    assert result.returncode == 1
    message = result.stderr.splitlines()[-1]
    assert "RuntimeError" in message and "'clipx_acpo'" in message and "other_plugin" in message
