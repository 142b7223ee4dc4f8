"""One run of verl that only validates: its configuration, which `clipx eval run` composes, and its launch."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf

from verl_clipx.common.extras import needs_tool
from verl_clipx.common.files import replacing, write_json, write_text
from verl_clipx.common.with_parent import end_with_parent
from verl_clipx.papers.evaluation.benchmark import Benchmark
from verl_clipx.papers.evaluation.checkpoints import Weights
from verl_clipx.papers.evaluation.folder import UNFINISHED, chunk_folder, read_dump
from verl_clipx.papers.evaluation.prompts import PromptFormat
from verl_clipx.papers.evaluation.settings import SamplingSettings

AGENT_LOOP = "clipx_evaluation"
AGENT_LOOP_CLASS = "verl_clipx.papers.evaluation.agent_loop.EvaluationAgentLoop"
ENGINES = ("vllm", "cpu")
CONFIG, QUESTIONS, AGENT_LOOPS, LOG = "run.yaml", "questions.parquet", "agent_loops.yaml", "run.log"
_ON_THE_CPU = "+hardware=cpu"
# What +hardware=cpu has for the workers, the driver needs too.
_PLATFORM = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_PLATFORM"
_LINES_OF_A_FAILURE = 20


def compose_base(overrides: Sequence[str]) -> DictConfig:
    """Compose verl's configuration with seeded rollouts and the user's overrides.

    Without a hardware group or an override that says otherwise, it takes this machine's GPUs and vLLM.

    Raises:
        ValueError: Hydra refuses an override, the engine takes no seed for a request, or it is not installed.
    """
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException

    names = {override.partition("=")[0] for override in overrides}
    own = ["+clipx/rollout=seeded"]
    if _ON_THE_CPU not in overrides:
        own += [] if "actor_rollout_ref.rollout.name" in names else ["actor_rollout_ref.rollout.name=vllm"]
        if not names & {"+hardware", "trainer.n_gpus_per_node"}:
            import torch

            own.append(f"trainer.n_gpus_per_node={max(1, torch.cuda.device_count())}")
    try:
        with initialize_config_module("verl.trainer.config", version_base=None):
            base = compose("ppo_trainer", [*own, *overrides])
    except HydraException as error:
        raise ValueError(f"{error}. These are Hydra overrides of verl's configuration: {' '.join(overrides)}") from None
    engine = base.actor_rollout_ref.rollout.name
    if engine not in ENGINES:
        raise ValueError(
            f"actor_rollout_ref.rollout.name={engine}: must be {' or '.join(ENGINES)}, which take seeds with requests"
        )
    if engine == "vllm" and find_spec("vllm") is None:
        raise ValueError(f"{needs_tool('actor_rollout_ref.rollout.name=vllm', 'vllm')}. On a CPU, add {_ON_THE_CPU}")
    return base


def ranks_of(base: DictConfig) -> int:
    """Return the number of ranks that load the model."""
    return int(base.trainer.nnodes) * int(base.trainer.n_gpus_per_node)


@dataclass(frozen=True)
class ValidationRun:
    """Runs of verl that sample responses of a model to questions of a benchmark and stop.

    Args:
        base: verl's configuration with the user's overrides.
    """

    base: DictConfig
    weights: Weights
    benchmark: Benchmark
    prompts: PromptFormat
    sampling: SamplingSettings

    def run(self, completions: Path, seed: int, questions: list[int]) -> None:
        """Sample a chunk, whose folder appears once its responses are complete.

        Args:
            completions: folder of the seed.
            questions: rows of the benchmark.

        Raises:
            RuntimeError: verl failed; the message names its log and shows the end of it.
            ValueError: verl did not write exactly the responses that it was asked for.
        """
        unfinished = completions / UNFINISHED
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        self.write(unfinished, seed, questions)
        _launch(unfinished, OmegaConf.select(self.base, _PLATFORM))
        read_dump(unfinished, self.sampling.samples, questions)
        unfinished.replace(chunk_folder(completions, questions))

    def write(self, folder: Path, seed: int, questions: list[int]) -> None:
        """Write what verl reads: questions, agent loop and configuration."""
        table = {
            "data_source": [self.benchmark.name] * len(questions),
            "prompt": [self.benchmark.questions[index]["prompt"] for index in questions],
            # The answers stay here: responses are scored from verl's files.
            "reward_model": [{"ground_truth": ""}] * len(questions),
            "extra_info": [{"index": index} for index in questions],
        }
        with replacing(folder / QUESTIONS) as partial:
            pq.write_table(pa.table(table), partial)
        # JSON is YAML.
        loop = {"name": AGENT_LOOP, "_target_": AGENT_LOOP_CLASS, "stop_token_ids": self.prompts.stop_token_ids}
        write_json(folder / AGENT_LOOPS, [loop])
        config = self.base.copy()
        for key, value in self._settings(folder, seed).items():
            OmegaConf.update(config, key, _as_it_is(value), force_add=True)
        write_text(folder / CONFIG, OmegaConf.to_yaml(config))

    def _settings(self, folder: Path, seed: int) -> dict[str, Any]:
        questions = [str(folder / QUESTIONS)]
        sampling, weights = self.sampling, self.weights
        rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
        settings = {
            "hydra.run.dir": str(folder),
            "hydra.output_subdir": None,
            # verl validates before training and, told only to validate, stops then. Without the first key it trains.
            "trainer.val_before_train": True,
            "trainer.val_only": True,
            "trainer.use_v1": True,
            "trainer.v1.trainer_mode": "sync",
            "trainer.validation_data_dir": str(folder),
            "trainer.default_local_dir": str(folder / "checkpoints"),
            "trainer.logger": ["console"],
            "trainer.resume_mode": "resume_path" if weights.resume_from else "disable",
            "trainer.resume_from_path": weights.resume_from,
            # Optimizer states, schedules and random states are of no use here.
            f"{actor}.checkpoint.load_contents": ["model"],
            "actor_rollout_ref.model.path": weights.model,
            "actor_rollout_ref.model.tokenizer_path": weights.tokenizer,
            "data.val_files": questions,
            "data.val_batch_size": None,
            "data.val_max_samples": -1,
            "data.validation_shuffle": False,
            "data.prompt_key": "prompt",
            "data.filter_overlong_prompts": False,
            "data.max_prompt_length": self.prompts.longest,
            "data.max_response_length": sampling.max_tokens,
            f"{rollout}.seed": seed,
            f"{rollout}.val_kwargs.n": sampling.samples,
            f"{rollout}.val_kwargs.do_sample": sampling.temperature > 0,
            f"{rollout}.val_kwargs.temperature": sampling.temperature,
            f"{rollout}.val_kwargs.top_p": sampling.top_p,
            f"{rollout}.agent.default_agent_loop": AGENT_LOOP,
            f"{rollout}.agent.agent_loop_config_path": str(folder / AGENT_LOOPS),
            "reward.num_workers": 1,
            # verl checks that a training, which this is not, would be divisible by its ranks.
            "algorithm.adv_estimator": "grpo",
            "data.train_files": questions,
            "data.train_batch_size": 1,
            f"{rollout}.n": ranks_of(self.base),
            f"{actor}.ppo_mini_batch_size": 1,
            f"{actor}.ppo_micro_batch_size_per_gpu": 1,
            f"{rollout}.log_prob_micro_batch_size_per_gpu": 1,
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 1,
        }
        if self.prompts.template is not None:
            settings["actor_rollout_ref.model.custom_chat_template"] = self.prompts.template
        return settings


def _as_it_is(value: Any) -> Any:
    """Protect a path or a chat template from being read as an interpolation."""
    if isinstance(value, list):
        return [_as_it_is(one) for one in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _launch(folder: Path, platform: str | None) -> None:
    """Run verl's main program on the configuration in a folder, and wait for it."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-path", str(folder), "--config-name", "run"]
    log = folder / LOG
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **({"VERL_PLATFORM": platform} if platform else {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=end_with_parent,
        )
        try:
            code = process.wait()
        finally:
            # An interrupt ends the run too, and Ray ends with it. A run that has ended is left alone.
            process.terminate()
            process.wait()
    if code:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-_LINES_OF_A_FAILURE:])
        raise RuntimeError(f"verl's validation failed (exit code {code}); its log is {log}. The end of it:\n{end}")
