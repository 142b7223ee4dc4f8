"""What the plugin relies on in verl, so that another verl version fails here, by name.

Covers: the extension points and internal names that verl_clipx/run and verl_clipx/worker use; that each key of the
configuration that verl's losses read is in the plugin's table, and which these are in each version. Not covered: those
of verl_clipx/cpu (tests/cpu has them).

`PYTHONPATH=<a checkout of verl> python -m pytest tests/worker/test_verl_contract.py` asks that checkout instead of
the installed verl, and says whether it is older or newer than 0.9.1.
"""

import inspect
import pickle
import runpy
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import verl
from packaging.version import Version
from verl.trainer import main_ppo, main_ppo_v0
from verl.trainer.ppo import core_algos, ray_trainer, rollout_corr_helper
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import AggregationType, Metric
from verl.workers import engine_workers
from verl.workers.config.actor import ActorConfig, PolicyLossConfig
from verl.workers.config.engine import FSDPEngineConfig
from verl.workers.engine import BaseEngine
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.utils import losses

from verl_clipx.check.doctor import VERL_RANGE
from verl_clipx.run.verl_keys import row_of

LOSS_KEYS = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "verl_loss_keys.py"))
STORED = {path.stem: path.read_text().split() for path in (Path(__file__).parent / "fixtures/verl_loss_keys").iterdir()}


def parameters(function):
    return set(inspect.signature(function).parameters)


def compared_with_0_9_1():
    """older, newer or the same: by content first, since some that are older in content call themselves 0.10.0.dev."""
    if "use_no_sync_for_gradient_accumulation" not in FSDPEngineConfig.__dataclass_fields__:
        return "older"
    return "newer" if Version(verl.__version__) > Version("0.9.1") else "the same"


def test_verl_is_in_the_tested_range():
    found = compared_with_0_9_1()
    said = f"verl {verl.__version__} in {verl.__path__[0]}, compared with 0.9.1: {found}"
    if found == "newer":
        warnings.warn(said, stacklevel=1)
    assert VERL_RANGE.contains(verl.__version__, prereleases=True), said


def test_run_ppo_gets_the_configuration_first_and_starts_ray():
    run_ppo = inspect.unwrap(main_ppo.run_ppo)
    assert next(iter(inspect.signature(run_ppo).parameters)) == "config"
    assert "ray.init(" in inspect.getsource(run_ppo)


def test_the_registry_takes_a_name_and_keeps_the_function():
    assert isinstance(core_algos.POLICY_LOSS_REGISTRY, dict)
    assert parameters(core_algos.register_policy_loss) == {"name"}


def test_the_aggregation_takes_the_global_batch_information():
    needed = {"loss_mat", "loss_mask", "loss_agg_mode", "dp_size", "batch_num_tokens", "global_batch_size"}
    assert needed | {"loss_scale_factor"} <= parameters(core_algos.agg_loss)


def test_the_policy_loss_is_called_with_the_keywords_that_ours_takes():
    source = inspect.getsource(losses.ppo_loss)
    for keyword in ("old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "rollout_is_weights"):
        assert f"{keyword}={keyword}" in source, f"ppo_loss no longer passes {keyword} by keyword"
    assert "config=config" in source


def test_the_engine_calls_the_loss_function_with_the_keywords_that_our_wrapper_takes():
    source = inspect.getsource(transformer_impl)
    assert "loss_function(\n" in source and "model_output=model_output, data=micro_batch, dp_group=" in source
    for key in ("batch_num_tokens", "dp_size"):
        assert f"assign_non_tensor(data, {key}=" in source


def test_the_actors_worker_class_can_be_chosen():
    worker = engine_workers.ActorRolloutRefWorker
    assert issubclass(worker.actor_worker_cls, engine_workers.TrainingWorker)
    assert "self.actor_worker_cls(" in inspect.getsource(worker)
    assert "self.actor.set_loss_fn(self.loss_fn)" in inspect.getsource(worker)
    assert "partial(ppo_loss, config=actor_config)" in inspect.getsource(worker)


def test_the_workers_name_can_be_rebound():
    (of_verl,) = [base for base in engine_workers.TrainingWorker.__mro__ if "_postprocess_output" in vars(base)]
    source = inspect.getsource(of_verl)
    # Under the rebound name either would lead back to the plugin's subclass.
    assert "super(TrainingWorker" not in source and "TrainingWorker." not in source.split('"""', 2)[2]


def test_merging_an_adapter_is_about_the_rollouts_weights_alone():
    # So that a worker's numbers are LoRA's with and without it.
    source = inspect.getsource(transformer_impl)
    reads = 'lora.get("merge"'
    assert source.count(reads) == inspect.getsource(transformer_impl.FSDPEngine.get_per_tensor_param).count(reads) == 1


def test_log_probs_come_through_the_engines_infer_batch():
    (of_verl,) = [base for base in engine_workers.TrainingWorker.__mro__ if "_postprocess_output" in vars(base)]
    source = inspect.getsource(of_verl.infer_batch)
    assert "self.engine.infer_batch(" in source and 'key="no_lora_adapter"' in source
    assert "self.actor.infer_batch(" in inspect.getsource(engine_workers.ActorRolloutRefWorker.compute_log_prob)


def test_engines_say_which_ranks_have_outputs():
    for name in ("is_mp_src_rank_with_outputs", "get_data_parallel_rank", "get_data_parallel_group"):
        assert callable(getattr(BaseEngine, name))
    assert "self.ulysses_sequence_parallel_size = " in inspect.getsource(transformer_impl)


def test_the_configurations_have_the_fields_that_ours_extend_and_read():
    assert "loss_mode" in PolicyLossConfig.__dataclass_fields__
    fields = ActorConfig.__dataclass_fields__
    for name in ("policy_loss", "global_batch_info", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"):
        assert name in fields


@pytest.mark.parametrize(("aggregation", "expected"), [("SUM", 5.0), ("MEAN", 2.5)])
def test_metrics_are_summed_over_micro_batches_and_averaged_over_ranks(aggregation, expected):
    kind = AggregationType[aggregation]
    ranks = [Metric(kind, 1.0), Metric(kind, 3.0)]
    for rank, second in zip(ranks, (2.0, 4.0), strict=True):
        rank.append(second)
    assert Metric.aggregate_dp(ranks) == expected


def test_bypass_mode_names_verls_loss_on_the_driver_alone(composed):
    config = composed("+clipx=grpo", "algorithm.rollout_correction.bypass_mode=True", "trainer.use_v1=False")
    start = inspect.getsource(main_ppo_v0)
    assert start.index("trainer.init_workers()") < start.index("trainer.fit()")
    trainer = inspect.getsource(ray_trainer.RayPPOTrainer)
    assert "config=self.config.actor_rollout_ref," in trainer and "actor_rollout_wg.set_loss_fn" not in trainer
    # What Ray pickles for the workers, before the first step.
    of_worker = pickle.loads(pickle.dumps(config.actor_rollout_ref))
    rollout = SimpleNamespace(batch={"rollout_log_probs": "the sampler's"})
    rollout_corr_helper.apply_bypass_mode(
        rollout, config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss
    )
    assert rollout.batch["old_log_probs"] == "the sampler's"
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "bypass_mode"
    assert omega_conf_to_dataclass(of_worker.actor).policy_loss.loss_mode == "clipx_grpo"


def unknown_keys(package):
    """What to say of each key that verl's losses read, by their source, and that the table doesn't know."""
    return [
        f"verl's {', '.join(places)} reads {key}: say in verl_clipx/run/verl_keys.py what becomes of it under a "
        "method of the plugin"
        for key, places in LOSS_KEYS["keys_of"](package).items()
        if row_of(key) is None
    ]


def test_the_table_knows_every_key_that_verls_losses_read():
    assert unknown_keys(Path(verl.__path__[0])) == []


def test_verls_losses_read_the_keys_that_are_written_down_for_the_version():
    found = list(LOSS_KEYS["keys_of"](Path(verl.__path__[0])))
    # Of what calls itself 0.10.0.dev nothing is.
    again = (
        "once each difference is understood: python scripts/verl_loss_keys.py > tests/worker/fixtures/verl_loss_keys/"
    )
    assert found == STORED.get(verl.__version__, found), f"{again}{verl.__version__}.txt"
    if compared_with_0_9_1() == "the same":
        assert verl.__version__ in STORED


@pytest.mark.parametrize("version", STORED)
def test_the_table_knows_every_key_that_was_written_down(version):
    assert {f"{LOSS_KEYS['ACTOR']}.clip_ratio_c", "algorithm.rollout_correction.bypass_mode"} <= set(STORED[version])
    assert [key for key in STORED[version] if row_of(key) is None] == []


NEW = """

@register_policy_loss("new")
def compute_policy_loss_new(log_prob, config: Optional[ActorConfig] = None, **others):
    node, correction = config.policy_loss, config.get("rollout_correction", None) if config else None
    width = node.get("new_width", 0.2) + getattr(config, "new_scale", 1.0) + config["new_shift"]
    return width * log_prob + config.clip_ratio, {"new": correction.new_veto, **config.global_batch_info}
"""


def test_a_new_key_is_named(tmp_path):
    package = Path(verl.__path__[0])
    for module in LOSS_KEYS["MODULES"]:
        (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / module).write_text((package / module).read_text() + NEW * module.endswith("core_algos.py"))
    said = unknown_keys(tmp_path)
    expected = {"policy_loss.new_width", "new_scale", "new_shift", "rollout_correction.new_veto"}
    assert all("trainer/ppo/core_algos.py:" in one and "verl_clipx/run/verl_keys.py" in one for one in said)
    assert {key for key in expected if any(f"reads actor_rollout_ref.actor.{key}:" in one for one in said)} == expected
    assert len(said) == len(expected)
