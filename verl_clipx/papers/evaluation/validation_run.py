"""Lets verl respond to the questions of an evaluation that have no responses yet. verl only validates in such a run."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf

from verl_clipx.common.extras import needs_tool
from verl_clipx.common.files import replacing, write_json, write_text
from verl_clipx.common.verl_version import installed_version
from verl_clipx.common.with_parent import end_with_parent
from verl_clipx.papers.evaluation.benchmark import Benchmark
from verl_clipx.papers.evaluation.checkpoints import Checkpoint, Weights, find_weights
from verl_clipx.papers.evaluation.folder import (
    UNFINISHED,
    EvaluationFolder,
    pending_chunks,
    read_responses,
)
from verl_clipx.papers.evaluation.prompts import PromptFormat, load_template, read_prompt_format
from verl_clipx.papers.evaluation.settings import SamplingSettings
from verl_clipx.papers.versions import versions_here
from verl_clipx.run.keys import (
    CHAT_TEMPLATE,
    CHECKPOINT_FOLDER,
    DEVICES_A_NODE,
    ENGINE_NAME,
    LONGEST_PROMPT,
    LONGEST_RESPONSE,
    MODEL_PATH,
    NAMED_CHECKPOINT,
    NODES,
    PLATFORM_OF_WORKERS,
    RESUME_MODE,
    RESUME_PATH,
    ROLLOUT,
    TOKENIZER_PATH,
    TRAINING_FILES,
    VALIDATION_FILES,
    VALIDATION_FOLDER,
)

AGENT_LOOP = "clipx_evaluation"
AGENT_LOOP_CLASS = "verl_clipx.papers.evaluation.agent_loop.EvaluationAgentLoop"
# The engines that take a seed with each request.
ENGINES = ("vllm", "cpu")
# The files in the folder of a chunk.
CONFIG = "run.yaml"
QUESTIONS = "questions.parquet"
AGENT_LOOPS = "agent_loops.yaml"
LOG = "run.log"
_ON_THE_CPU = "+hardware=cpu"
# How many of the log's last lines the message about a failure has.
_LINES_OF_A_FAILURE = 20


def compose_base(overrides: Sequence[str]) -> DictConfig:
    """Compose verl's configuration with seeded rollouts and the user's overrides.

    Without a hardware group or an override that says otherwise, it takes this machine's GPUs and vLLM.

    Raises:
        ValueError: Hydra refuses an override, the engine takes no seed for a request, or it is not installed.
    """
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException

    keys = {override.partition("=")[0] for override in overrides}
    defaults = ["+clipx/rollout=seeded"]
    if _ON_THE_CPU not in overrides:
        if ENGINE_NAME not in keys:
            defaults.append(f"{ENGINE_NAME}=vllm")
        if not keys & {"+hardware", DEVICES_A_NODE}:
            import torch

            defaults.append(f"{DEVICES_A_NODE}={max(1, torch.cuda.device_count())}")
    try:
        with initialize_config_module("verl.trainer.config", version_base=None):
            base = compose("ppo_trainer", [*defaults, *overrides])
    except HydraException as error:
        raise ValueError(f"{error}. These are Hydra overrides of verl's configuration: {' '.join(overrides)}") from None
    engine = OmegaConf.select(base, ENGINE_NAME)
    if engine not in ENGINES:
        raise ValueError(f"{ENGINE_NAME}={engine}: must be {' or '.join(ENGINES)}, which take seeds with requests")
    if engine == "vllm" and find_spec("vllm") is None:
        raise ValueError(f"{needs_tool(f'{ENGINE_NAME}=vllm', 'vllm')}. On a CPU, add {_ON_THE_CPU}")
    return base


def ranks_of(base: DictConfig) -> int:
    """Return the number of ranks that load the model."""
    nodes = OmegaConf.select(base, NODES)
    return int(nodes) * int(OmegaConf.select(base, DEVICES_A_NODE))


def sample(
    folder: EvaluationFolder,
    checkpoints: list[Checkpoint],
    benchmarks: list[Benchmark],
    sampling: SamplingSettings,
    overrides: list[str],
    recorded: dict[str, Any],
    chunk_size: int,
    say: Callable[[str], None],
) -> None:
    """Find or merge the models, record the configuration, and sample what is missing.

    Args:
        folder: the evaluation's.
        overrides: Hydra overrides of verl's configuration.
        recorded: settings that only the evaluation's configuration needs: model, protocol, reward and cluster.
        chunk_size: the largest number of responses of one run of verl. An interruption can lose so many.
        say: takes a line about what happens now.

    Raises:
        ValueError: the folder holds completions of another configuration, or the model cannot process these questions.
    """
    base = compose_base(overrides)
    template = load_template(sampling.template)
    # verl loads a checkpoint's shards into the model that the user names.
    names_model = any(override.startswith(f"{MODEL_PATH}=") for override in overrides)
    base_model = OmegaConf.select(base, MODEL_PATH) if names_model else None
    weights_by_label = {}
    for checkpoint in checkpoints:
        weights_by_label[checkpoint.label] = find_weights(checkpoint, ranks_of(base), base_model)
    runs = {}
    for label, weights in weights_by_label.items():
        for benchmark in benchmarks:
            prompts = read_prompt_format(weights.tokenizer, benchmark, template, sampling.max_tokens)
            runs[label, benchmark.name] = ValidationRun(
                base=base, weights=weights, benchmark=benchmark, prompts=prompts, sampling=sampling
            )
    # Enough to interpret a number and to score the completions again.
    recorded_checkpoints = {}
    for checkpoint in checkpoints:
        weights = weights_by_label[checkpoint.label]
        recorded_checkpoints[checkpoint.label] = {
            "source": checkpoint.source,
            "step": checkpoint.step,
            "fingerprint": weights.fingerprint,
            "loaded": "as saved" if weights.resume_from else "in Hugging Face format",
        }
    recorded_benchmarks = {}
    for benchmark in benchmarks:
        recorded_benchmarks[benchmark.name] = {
            "path": str(benchmark.path.resolve()),
            "sha256": benchmark.sha256,
            "questions": len(benchmark.questions),
        }
    config = {
        **recorded,
        "overrides": overrides,
        "checkpoints": recorded_checkpoints,
        "sampling": asdict(sampling) | {"samples": sampling.samples_per_question},
        "benchmarks": recorded_benchmarks,
        "versions": versions_here() | {"math-verify": installed_version("math-verify")},
    }
    folder.write_sampling_config(config)
    for (label, name), run in runs.items():
        question_count = len(run.benchmark.questions)
        for seed in sampling.seeds:
            completions = folder.completions_folder(label, name, seed)
            for chunk in pending_chunks(completions, question_count, sampling.samples, chunk_size):
                say(
                    f"{label} on {name}, seed {seed}: {len(chunk)} of {question_count} questions, from number "
                    f"{chunk[0]} on; verl's log is {completions / UNFINISHED / LOG}"
                )
                run.run(completions, seed, chunk)


@dataclass(frozen=True)
class ValidationRun:
    """Runs of verl that sample responses of a model to questions of a benchmark and stop.

    Args:
        base: verl's configuration with the user's overrides.
        prompts: the format of the benchmark's prompts for this model.
    """

    base: DictConfig
    weights: Weights
    benchmark: Benchmark
    prompts: PromptFormat
    sampling: SamplingSettings

    def run(self, completions: Path, seed: int, questions: list[int]) -> None:
        """Sample a chunk. Its folder appears once its responses are complete.

        Args:
            completions: the folder of the seed's completions.
            questions: the rows of the benchmark that the chunk consists of.

        Raises:
            RuntimeError: verl failed; the message names its log and shows the end of it.
            ValueError: verl did not write exactly the responses that it was asked for.
        """
        unfinished = completions / UNFINISHED
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        self.write(unfinished, seed, questions)
        # The driver needs the platform that +hardware=cpu sets for the workers, too.
        _launch(unfinished, OmegaConf.select(self.base, PLATFORM_OF_WORKERS))
        read_responses(unfinished, self.sampling.samples, questions, "*.jsonl")
        # No two chunks of a seed have the same first question.
        unfinished.replace(completions / f"{questions[0]:06d}")

    def write(self, folder: Path, seed: int, questions: list[int]) -> None:
        """Write what verl reads: questions, agent loop and configuration.

        Args:
            folder: the folder of the chunk.
            seed, questions: as for `run`.
        """
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
        sampling = self.sampling
        weights = self.weights
        rollout = ROLLOUT
        settings = {
            "hydra.run.dir": str(folder),
            VALIDATION_FOLDER: str(folder),
            CHECKPOINT_FOLDER: str(folder / "checkpoints"),
            RESUME_MODE: NAMED_CHECKPOINT if weights.resume_from else "disable",
            RESUME_PATH: weights.resume_from,
            MODEL_PATH: weights.model,
            TOKENIZER_PATH: weights.tokenizer,
            VALIDATION_FILES: str(folder / QUESTIONS),
            TRAINING_FILES: str(folder / QUESTIONS),
            LONGEST_PROMPT: self.prompts.longest_prompt,
            LONGEST_RESPONSE: sampling.max_tokens,
            f"{rollout}.n": ranks_of(self.base),
            f"{rollout}.seed": seed,
            f"{rollout}.val_kwargs.n": sampling.samples,
            f"{rollout}.val_kwargs.do_sample": sampling.temperature > 0,
            f"{rollout}.val_kwargs.temperature": sampling.temperature,
            f"{rollout}.val_kwargs.top_p": sampling.top_p,
            f"{rollout}.agent.agent_loop_config_path": str(folder / AGENT_LOOPS),
        }
        if self.prompts.template is not None:
            settings[CHAT_TEMPLATE] = self.prompts.template
        config = self.base.copy()
        OmegaConf.set_struct(config, False)
        config.merge_with(OmegaConf.load(Path(__file__).with_name("validation.yaml")))
        for key, value in settings.items():
            if isinstance(value, str):
                # A path or a chat template must not be read as an interpolation.
                value = value.replace("${", "\\${")
            OmegaConf.update(config, key, value)
        write_text(folder / CONFIG, OmegaConf.to_yaml(config))


def _launch(folder: Path, platform: str | None) -> None:
    """Run verl's main program on the configuration in a folder, and wait for it.

    Args:
        folder: the folder of a chunk.
        platform: the value of VERL_PLATFORM for the run; None to leave it as it is.

    Raises:
        RuntimeError: verl failed; the message names its log and shows the end of it.
    """
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-path", str(folder), "--config-name", "run"]
    log = folder / LOG
    environment = dict(os.environ)
    if platform:
        environment["VERL_PLATFORM"] = platform
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
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
