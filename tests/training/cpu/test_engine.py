"""The engines in verl's registry, and the reference model's way around pinned memory. The registry tests fail first if
another verl version changes the interfaces that the engines rely on. Not covered: training (end-to-end runs).
"""

import ast
import inspect
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import _init_utils
from transformers import Qwen2Config, Qwen2ForTokenClassification
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.utils import fsdp_utils
from verl.utils import model as verl_models
from verl.workers.config import FSDPEngineConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead

from verl_clipx.training.cpu import engine


@pytest.fixture
def registry(monkeypatch):
    """verl's registry as it would be under VERL_PLATFORM=cpu, restored afterwards."""
    copy = {}
    for model, engines_by_backend in EngineRegistry._engines.items():
        copy[model] = {backend: dict(engines) for backend, engines in engines_by_backend.items()}
    monkeypatch.setattr(EngineRegistry, "_engines", copy)
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cpu")
    monkeypatch.setattr(verl_models, "load_valuehead_model", verl_models.load_valuehead_model)
    monkeypatch.setattr(fsdp_utils, "fsdp2_sharded_save_to_cpu", fsdp_utils.fsdp2_sharded_save_to_cpu)
    monkeypatch.setattr(transformer_impl, "load_fsdp_model_to_gpu", transformer_impl.load_fsdp_model_to_gpu)
    engine.register()
    return EngineRegistry


@pytest.mark.parametrize("backend", ["fsdp", "fsdp2"])
def test_verl_finds_the_engines_for_the_cpu_and_other_devices_keep_theirs(registry, monkeypatch, backend):
    engine.register()
    assert registry.get_engine_cls("language_model", backend) is engine.CPUFSDPEngineWithLMHead
    assert registry.get_engine_cls("value_model", backend) is engine.CPUFSDPEngineWithValueHead
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    assert registry.get_engine_cls("language_model", backend) is FSDPEngineWithLMHead
    assert registry.get_engine_cls("value_model", backend) is FSDPEngineWithValueHead


def test_what_it_overrides_is_still_there():
    parameters = list(inspect.signature(FSDPEngine.__init__).parameters)
    assert parameters == ["self", "model_config", "engine_config", "optimizer_config", "checkpoint_config"]
    assert list(inspect.signature(FSDPEngine._build_fsdp_module).parameters) == ["self", "module"]
    # As text: another test in this process may have registered ours.
    text = inspect.getsource(verl_models)
    (loader,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == "load_valuehead_model")
    assert [part.arg for part in loader.args.args] == list(inspect.signature(engine.load_critic).parameters)
    assert 'attn_implementation="flash_attention_2"' in ast.get_source_segment(text, loader)
    for function, texts in {
        FSDPEngine._build_fsdp_module: (
            "offload_policy or self.engine_config.forward_only",
            "CPUOffloadPolicy(pin_memory=True)",
            "sync_module_states=True",
        ),
        # Looked up in the engine's module.
        FSDPEngine.get_per_tensor_param: ("load_fsdp_model_to_gpu(self.module)",),
        # Looked up at the call, and by keyword.
        FSDPEngine._build_module: ("from verl.utils.model import load_valuehead_model", "local_path="),
        # Without a copy on a CPU.
        engine.SHARDS_TO_CPU: ("local_gpu_tensor.detach().cpu()", "return cpu_sharded_state, global_spec"),
    }.items():
        source = inspect.getsource(function)
        for text in texts:
            assert text in source, function


def test_a_critic_has_the_attention_of_its_configuration(registry, tmp_path):
    sizes = dict(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    config = Qwen2Config(**sizes, num_key_value_heads=1, num_labels=1, attn_implementation="sdpa")
    Qwen2ForTokenClassification(config).save_pretrained(tmp_path)
    critic = verl_models.load_valuehead_model(
        local_path=tmp_path, torch_dtype=torch.float32, model_config=config, trust_remote_code=False
    )
    assert critic.config._attn_implementation == "sdpa"
    assert critic(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 1)


def test_saved_weights_are_a_copy_that_an_update_leaves_alone(registry, monkeypatch):
    # Stands for FSDP2's wrapping, which needs a process group: verl takes a parameter's shard as it lies.
    monkeypatch.setattr(engine, "SHARDS_TO_CPU", lambda model: ({"weight": (model.weight.detach().cpu(), None)}, None))
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    worker = SimpleNamespace(config=SimpleNamespace(actor=SimpleNamespace(strategy="fsdp2")), _strategy_handlers=None)
    save, _ = DetachActorWorker._get_strategy_handlers(worker)
    shards, _ = save(model)
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(shards["weight"][0], before)


def test_torch_checks_where_the_states_of_fsdp1_are_only_outside_the_wrapping():
    states = [torch.zeros(1)]
    with engine.allow_broadcast_in_host_memory():
        _init_utils._check_module_states_for_sync_module_states(states)
    with pytest.raises(ValueError, match="CPU parameters or buffers when `sync_module_states=True`"):
        _init_utils._check_module_states_for_sync_module_states(states)


def test_weights_of_fsdp1_are_not_loaded_from_where_they_are(registry):
    assert transformer_impl.load_fsdp_model_to_gpu is engine.load_nothing
    assert engine.load_nothing(torch.nn.Linear(1, 1)) is None


@pytest.mark.parametrize("fails", [False, True])
def test_a_reference_model_is_wrapped_without_offloading_and_stays_forward_only(monkeypatch, fails):
    configs_of_wrapping = []

    def wrap(self, module):
        configs_of_wrapping.append(self.engine_config)
        if fails:
            raise MemoryError
        return module

    monkeypatch.setattr(FSDPEngine, "_build_fsdp_module", wrap)
    config = FSDPEngineConfig(strategy="fsdp2", forward_only=True, offload_policy=True)
    cpu_engine = object.__new__(engine.CPUFSDPEngineWithLMHead)
    cpu_engine.engine_config = config
    with pytest.raises(MemoryError) if fails else nullcontext():
        assert cpu_engine._build_fsdp_module("module") == "module"
    (config_of_wrapping,) = configs_of_wrapping
    assert not config_of_wrapping.forward_only and not config_of_wrapping.offload_policy
    assert config_of_wrapping.strategy == "fsdp2"
    assert cpu_engine.engine_config is config and config.forward_only and config.offload_policy
