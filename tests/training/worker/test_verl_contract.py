"""What verl_clipx/run, worker and trainer and `clipx recompute` rely on in verl, so that another verl version fails
here, by name. Not covered: what verl_clipx/training/cpu relies on (tests/training/cpu).
`PYTHONPATH=<a checkout of verl> python -m pytest tests/training/worker/test_verl_contract.py` asks that checkout and
says whether it is older or newer than 0.9.1.
"""

import inspect
import json
import pickle
import re
import runpy
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import verl
from omegaconf import OmegaConf
from packaging.version import Version
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from verl.trainer import main_ppo, main_ppo_v0
from verl.trainer.ppo import core_algos, ray_trainer, rollout_corr_helper
from verl.trainer.ppo.v1 import trainer_base
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import AggregationType, Metric
from verl.workers import engine_workers, engine_workers_tinker
from verl.workers.config.actor import ActorConfig, PolicyLossConfig
from verl.workers.config.engine import FSDPEngineConfig
from verl.workers.engine import BaseEngine
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.utils import losses

from tests.training.cpu.policy import random_policy
from verl_clipx.analysis.recompute.checkpoints import load_model
from verl_clipx.common.verl_version import unsuitable_verl
from verl_clipx.run.keys import MINI_BATCHES_AT_ONCE, ROLLOUT_NODES, STEPS_A_VERSION, row_of

LOSS_KEYS = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "verl_loss_keys.py"))
# By verl's version, the keys that its losses read, as they were written down.
STORED_KEYS = {
    path.stem: path.read_text().split() for path in (Path(__file__).parent / "fixtures/verl_loss_keys").iterdir()
}


def parameters(function):
    return list(inspect.signature(function).parameters)


def compare_with_0_9_1():
    """older, newer or the same: by content first, since some that are older in content call themselves 0.10.0.dev."""
    if "use_no_sync_for_gradient_accumulation" not in FSDPEngineConfig.__dataclass_fields__:
        return "older"
    return "newer" if Version(verl.__version__) > Version("0.9.1") else "the same"


def test_the_plugin_extends_this_verl():
    comparison = compare_with_0_9_1()
    message = f"verl {verl.__version__} in {verl.__path__[0]}, compared with 0.9.1: {comparison}"
    if comparison == "newer":
        warnings.warn(message, stacklevel=1)
    assert unsuitable_verl() is None, message


def source(code):
    """The source of a module, a class or a function, also of one that is wrapped."""
    return inspect.getsource(inspect.unwrap(code))


ACTOR_WORKER = engine_workers.ActorRolloutRefWorker
# Beneath the plugin's, which takes the name over.
(TRAINING_WORKER,) = [base for base in engine_workers.TrainingWorker.__mro__ if "infer_batch" in vars(base)]
TINKER_WORKER = engine_workers_tinker.TinkerTrainingWorker
KEYWORDS = ("old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "rollout_is_weights", "config")

# What the plugin relies on, the code of verl's in whose source it stands, and what stands there.
SOURCES = {
    "run_ppo starts Ray": (main_ppo.run_ppo, "ray.init("),
    **{f"ppo_loss passes {key} by keyword": (losses.ppo_loss, f"{key}={key}") for key in KEYWORDS},
    "the engine calls a loss_function": (transformer_impl, "loss_function(\n"),
    "with these keywords": (transformer_impl, "model_output=model_output, data=micro_batch, dp_group="),
    "the engine says how many tokens there are": (transformer_impl, "assign_non_tensor(data, batch_num_tokens="),
    "and how many ranks": (transformer_impl, "assign_non_tensor(data, dp_size="),
    "ranks that share a sequence are known": (transformer_impl, "self.ulysses_sequence_parallel_size = "),
    "the actor's worker class can be chosen": (ACTOR_WORKER, "self.actor_worker_cls("),
    "it is given the loss function": (ACTOR_WORKER, "self.actor.set_loss_fn(self.loss_fn)"),
    "which is a partial with the configuration": (ACTOR_WORKER, "partial(ppo_loss, config=actor_config)"),
    "log-probabilities come through infer_batch": (ACTOR_WORKER.compute_log_prob, "self.actor.infer_batch("),
    "and the engine's": (TRAINING_WORKER.infer_batch, "self.engine.infer_batch("),
    "an update's metrics are joined here": (TRAINING_WORKER.train_batch, "self._postprocess_output(\n"),
    "by Tinker's worker too": (TINKER_WORKER.forward_backward, "self._postprocess_output(\n"),
    "over the ranks": (TRAINING_WORKER._postprocess_output, "final_metrics = allgather_dict_into_dict(data=metrics,"),
    "and returned by this name": (TRAINING_WORKER._postprocess_output, 'non_tensor_dict={"metrics": final_metrics}'),
    # 0.9.1 has a function for it.
    "they are of the tempered policy": (transformer_impl, re.compile(r"logits = (_scale_logits_by_|logits / )temp")),
    "at the rollout's temperature": (ray_trainer, "self.config.actor_rollout_ref.rollout.temperature"),
    "an adapter can be left out": (TRAINING_WORKER.infer_batch, 'key="no_lora_adapter"'),
    "the trainer's module names its queue tq": (trainer_base, "tq.kv_batch_get(keys=batch.keys, partition_id="),
}


@pytest.mark.parametrize("name", SOURCES)
def test_what_the_plugin_relies_on_stands_in_verls_source(name):
    code, text = SOURCES[name]
    pattern = text if isinstance(text, re.Pattern) else re.compile(re.escape(text))
    assert pattern.search(source(code))


def test_verls_functions_and_classes_have_the_names_that_ours_use():
    assert parameters(inspect.unwrap(main_ppo.run_ppo))[0] == "config"
    assert isinstance(core_algos.POLICY_LOSS_REGISTRY, dict)
    needed = {"loss_mat", "loss_mask", "loss_agg_mode", "dp_size", "batch_num_tokens", "global_batch_size"}
    assert needed | {"loss_scale_factor"} <= {*parameters(core_algos.agg_loss)}
    assert issubclass(ACTOR_WORKER.actor_worker_cls, engine_workers.TrainingWorker)
    for name in ("is_mp_src_rank_with_outputs", "get_data_parallel_rank", "get_data_parallel_group"):
        assert callable(getattr(BaseEngine, name))
    assert "loss_mode" in PolicyLossConfig.__dataclass_fields__
    bounds = {"clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"}
    assert {"policy_loss", "global_batch_info", *bounds} <= ActorConfig.__dataclass_fields__.keys()


def test_the_workers_name_can_be_rebound_and_merging_an_adapter_is_about_the_rollouts_weights_alone():
    # Under the rebound name either would lead back to the plugin's subclass.
    text = source(TRAINING_WORKER)
    assert "super(TrainingWorker" not in text and "TrainingWorker." not in text.split('"""', 2)[2]
    # So that a worker's numbers are LoRA's with and without it.
    read_of_merge = 'lora.get("merge"'
    assert source(transformer_impl).count(read_of_merge) == 1
    assert source(transformer_impl.FSDPEngine.get_per_tensor_param).count(read_of_merge) == 1


def test_the_keys_by_which_a_run_s_trainer_is_recognised_are_where_they_were(composed):
    v1 = composed().trainer.v1
    assert {"trainer_mode", "sync", "colocate_async", "separate_async"} <= v1.keys()
    assert "parameter_sync_step" in v1.separate_async and "use_v1" in composed().trainer
    # 0.9.0 has no switch, and what was separate_async.enable_switch for a while is a node since 0.9.1.
    assert "enable_switch" in v1.separate_async.get("hybrid_rollout", ("enable_switch",))
    assert "enable_switch" not in v1.separate_async


def test_the_older_trainer_is_still_there():
    assert find_spec("verl.trainer.main_ppo_v0") is not None


def find_missing_keys(file: Path, keys: tuple[str, ...]) -> list[str]:
    """Return the dotted keys, of some, to which a YAML file of verl's gives no value."""
    config = OmegaConf.load(file)
    return [key for key in keys if OmegaConf.select(config, key) is None]


# verl_clipx/run/trainer.py recognises an experimental trainer by these keys; schedule.py reads fully_async's values.
@pytest.mark.parametrize(
    ("module", "keys"),
    [
        ("verl.experimental.one_step_off_policy.main_ppo", (ROLLOUT_NODES,)),
        ("verl.experimental.fully_async_policy.fully_async_main", (MINI_BATCHES_AT_ONCE, STEPS_A_VERSION)),
    ],
)
def test_an_experimental_trainer_is_still_there_and_each_of_its_configurations_has_its_keys(module, keys):
    spec = find_spec(module)
    assert spec is not None
    main = Path(spec.origin)
    files = list((main.parent / "config").glob("*.yaml"))
    assert files
    for file in files:
        assert find_missing_keys(file, keys) == [], file.name
    # The plugin starts where a driver calls auto_set_device.
    assert "auto_set_device(config)" in main.read_text()


def test_a_key_that_stands_in_another_node_or_a_comment_is_missing(tmp_path):
    file = tmp_path / "trainer.yaml"
    file.write_text("# rollout: nnodes: 1\nactor_rollout_ref:\n  rollout:\n    nnodes: 1\n")
    assert find_missing_keys(file, (ROLLOUT_NODES,)) == [ROLLOUT_NODES]


def test_only_distillation_chooses_another_loss_function_for_the_actor():
    # verl's score centering chooses one by a function of its own, past the registry of policy losses.
    text = source(ACTOR_WORKER)
    assert "select_actor_loss_fn" not in source(engine_workers)
    assert text.count("self.loss_fn = partial(") == 2 and text.count("self.actor.set_loss_fn(self.loss_fn)") == 1


def test_metrics_are_summed_over_micro_batches_and_averaged_over_ranks():
    for kind, expected in ((AggregationType.SUM, 5.0), (AggregationType.MEAN, 2.5)):
        # Each rank has two micro-batches.
        first_rank = Metric(kind, 1.0)
        first_rank.append(2.0)
        second_rank = Metric(kind, 3.0)
        second_rank.append(4.0)
        assert Metric.aggregate_dp([first_rank, second_rank]) == expected


def test_bypass_mode_names_verls_loss_on_the_driver_alone(composed):
    config = composed("+clipx=grpo", "algorithm.rollout_correction.bypass_mode=True", "trainer.use_v1=False")
    start = inspect.getsource(main_ppo_v0)
    assert start.index("trainer.init_workers()") < start.index("trainer.fit()")
    trainer = inspect.getsource(ray_trainer.RayPPOTrainer)
    assert "config=self.config.actor_rollout_ref," in trainer and "actor_rollout_wg.set_loss_fn" not in trainer
    # What Ray pickles for the workers, before the first step.
    config_of_worker = pickle.loads(pickle.dumps(config.actor_rollout_ref))
    rollout = SimpleNamespace(batch={"rollout_log_probs": 1})
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    rollout_corr_helper.apply_bypass_mode(rollout, config.algorithm.rollout_correction, policy_loss)
    assert rollout.batch["old_log_probs"] == 1 and policy_loss.loss_mode == "bypass_mode"
    assert omega_conf_to_dataclass(config_of_worker.actor).policy_loss.loss_mode == "clipx_grpo"


def advice_on_unknown_keys(package):
    """What to do about each key that verl's losses read, by their source, and that the table doesn't know."""
    advice = []
    for key, places in LOSS_KEYS["keys_of"](package).items():
        if row_of(key) is None:
            advice.append(
                f"verl's {', '.join(places)} reads {key}: say in verl_clipx/run/keys.py what becomes of it under a "
                "method of the plugin"
            )
    return advice


def test_the_table_knows_every_key_that_verls_losses_read_and_they_are_written_down_for_the_version():
    assert advice_on_unknown_keys(Path(verl.__path__[0])) == []
    keys = list(LOSS_KEYS["keys_of"](Path(verl.__path__[0])))
    advice = (
        "once each difference is understood: python scripts/verl_loss_keys.py > "
        f"tests/training/worker/fixtures/verl_loss_keys/{verl.__version__}.txt"
    )
    # Of what calls itself 0.10.0.dev nothing is written down.
    assert keys == STORED_KEYS.get(verl.__version__, keys), advice
    if compare_with_0_9_1() == "the same":
        assert verl.__version__ in STORED_KEYS


@pytest.mark.parametrize("version", STORED_KEYS)
def test_the_table_knows_every_key_that_was_written_down(version):
    assert {f"{LOSS_KEYS['ACTOR']}.clip_ratio_c", "algorithm.rollout_correction.bypass_mode"} <= set(
        STORED_KEYS[version]
    )
    assert [key for key in STORED_KEYS[version] if row_of(key) is None] == []


# A loss that reads four keys of which the table knows nothing.
NEW_LOSS = """

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
        text = (package / module).read_text()
        if module.endswith("core_algos.py"):
            text += NEW_LOSS
        (tmp_path / module).write_text(text)
    keys = []
    for advice in advice_on_unknown_keys(tmp_path):
        assert "trainer/ppo/core_algos.py:" in advice and "verl_clipx/run/keys.py" in advice
        keys.append(re.search(r"reads actor_rollout_ref\.actor\.([\w.]+):", advice).group(1))
    assert sorted(keys) == ["new_scale", "new_shift", "policy_loss.new_width", "rollout_correction.new_veto"]


@pytest.mark.parametrize("tied", [False, True])
def test_verls_merger_makes_a_whole_model_of_shards_as_precise_as_they_were_saved(tmp_path, tied):
    model = random_policy(tied=tied)
    actor = tmp_path / "global_step_3" / "actor"
    model.config.save_pretrained(actor / "huggingface")
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 2}))
    # Two ranks' shards, as verl's FSDP2 saves them.
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        for rank in range(2):
            halves = {name: weight.chunk(2)[rank].clone() for name, weight in model.state_dict().items()}
            shards = {name: DTensor.from_local(half, mesh, [Shard(0)]) for name, half in halves.items()}
            torch.save(shards, actor / f"model_world_size_2_rank_{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()
    for folder in (actor, actor.parent):
        loaded = load_model(folder).state_dict()
        assert all(torch.equal(weight, loaded[name]) for name, weight in model.state_dict().items())
    assert not all(torch.equal(weight, weight.bfloat16().float()) for weight in loaded.values())
    adapted = {f"base_model.model.{name}": weight for name, weight in model.state_dict().items()}
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))
    torch.save(adapted, actor / "model_world_size_1_rank_0.pt")
    with pytest.raises(ValueError, match="unknown, as adapters are"):
        load_model(actor)
