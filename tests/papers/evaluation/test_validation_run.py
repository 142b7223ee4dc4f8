"""The run of verl that `clipx papers eval run` composes, what its agent loop records, and how it fails.

The configuration is read again as the launched process reads it. Not covered: that verl does what it says
(tests/end_to_end/evaluation_round.py).
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from tests.papers.evaluation.tiny import answer_as_verl, write_rows
from verl_clipx.papers.evaluation import validation_run
from verl_clipx.papers.evaluation.agent_loop import EvaluationAgentLoop
from verl_clipx.papers.evaluation.benchmark import read_benchmark
from verl_clipx.papers.evaluation.checkpoints import Weights
from verl_clipx.papers.evaluation.prompts import PromptFormat
from verl_clipx.papers.evaluation.settings import SamplingSettings
from verl_clipx.papers.evaluation.validation_run import (
    AGENT_LOOP,
    AGENT_LOOP_CLASS,
    ValidationRun,
    compose_base,
    ranks_of,
)
from verl_clipx.training.seeded.agent_loop import sampling_seed

WHOLE_MODEL = Weights("/m", "/m", None, "f")
SHARDS = Weights("/base", "/run/global_step_4/actor/huggingface", "/run/global_step_4", "f")
# Quotes, braces and what looks like an interpolation.
JINJA = "{% for m in messages %}{{ m['content'] }} \"${x}\" \\{% endfor %}\n"
# From an entry of validation_runs.yaml to the arguments that it has instead of those of `make_run`.
CHANGED_ARGUMENTS = {
    "model": {},
    "shards": {
        "weights": SHARDS,
        "sampling": SamplingSettings(samples=1, max_tokens=20, temperature=0.0),
        "prompts": PromptFormat(JINJA, 11, [7, 256]),
    },
}
# validation_runs.yaml has it too, as actor_rollout_ref.rollout.seed.
SEED = 5
EXPECTED = yaml.safe_load(Path(__file__).with_name("validation_runs.yaml").read_text())
MESSAGES = [{"role": "user", "content": "2 3 = 5"}]


@pytest.fixture(scope="module")
def base():
    overrides = ["+hardware=cpu", "trainer.n_gpus_per_node=2"]
    # The evaluation sets these itself.
    overridden = [
        "trainer.val_before_train=false",
        "data.validation_shuffle=true",
        "data.filter_overlong_prompts=true",
        "algorithm.adv_estimator=gae",
        "data.prompt_key=x",
        "data.val_max_samples=3",
        "reward.num_workers=4",
    ]
    return compose_base([*overrides, *overridden])


@pytest.fixture
def make_run(base, inputs):
    """Makes a run with some arguments changed."""
    _, questions = inputs
    benchmark = read_benchmark(questions, "sums")

    def make(**changes) -> ValidationRun:
        arguments = {
            "base": base,
            "weights": WHOLE_MODEL,
            "benchmark": benchmark,
            "prompts": PromptFormat(None, 11, [7, 256]),
            "sampling": SamplingSettings(samples=3, max_tokens=20, temperature=0.6, top_p=0.9),
        }
        return ValidationRun(**arguments | changes)

    return make


def write_and_compose(run: ValidationRun, folder: Path, rows: Sequence[int] = (1, 3)) -> DictConfig:
    """Write a run's files into a folder, and return the configuration that verl's main would compose from them.

    Args:
        run: the run.
        folder: the folder, which is made.
        rows: the rows of the benchmark whose questions are asked.
    """
    folder.mkdir(exist_ok=True)
    run.write(folder, SEED, list(rows))
    with initialize_config_dir(str(folder), version_base=None):
        return compose(Path(validation_run.CONFIG).stem)


@pytest.mark.parametrize("name", CHANGED_ARGUMENTS)
def test_it_only_validates_and_its_values_reach_verl_as_they_are(make_run, tmp_path, name):
    folder = tmp_path / "chunk ${x} 'a'"
    config = write_and_compose(make_run(**CHANGED_ARGUMENTS[name]), folder)
    for key, value in {**EXPECTED["every run"], **EXPECTED[name]}.items():
        if value == "{folder}":
            value = str(folder)
        if value == "{jinja}":
            value = JINJA
        assert OmegaConf.select(config, key) == value, key


def test_verl_loads_the_evaluations_agent_loop(make_run, tmp_path):
    config = write_and_compose(make_run(), tmp_path / "chunk")
    (loop,) = OmegaConf.load(config.actor_rollout_ref.rollout.agent.agent_loop_config_path)
    assert loop.name == AGENT_LOOP
    assert list(loop.stop_token_ids) == [7, 256]
    assert loop._target_ == AGENT_LOOP_CLASS == f"{EvaluationAgentLoop.__module__}.{EvaluationAgentLoop.__name__}"


def test_verl_reads_the_questions_of_the_chunk(make_run, tmp_path):
    folder = tmp_path / "chunk ${x} 'a'"
    run = make_run()
    config = write_and_compose(run, folder, rows=(1, 3))
    assert config.data.val_files == str(folder / "questions.parquet")
    rows = pandas.read_parquet(config.data.val_files)
    assert [extra["index"] for extra in rows["extra_info"]] == [1, 3]
    assert set(rows["data_source"]) == {"sums"}
    assert [list(prompt) for prompt in rows["prompt"]] == [run.benchmark.questions[row]["prompt"] for row in (1, 3)]


def test_verl_accepts_the_configuration(make_run, tmp_path, monkeypatch):
    from verl.trainer.main_ppo import validate_config

    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    # Two ranks, and one question a chunk: verl checks that a training's batches could be divided among them.
    config = write_and_compose(make_run(), tmp_path / "chunk", rows=[1])
    validate_config(config=config, use_reference_policy=False, use_critic=False)


@pytest.mark.parametrize(
    ("overrides", "ranks", "engine"),
    [
        (["trainer.n_gpus_per_node=4", "trainer.nnodes=2"], 8, "vllm"),
        (["+hardware=h100x8"], 8, "vllm"),
        ([], 1, "vllm"),
        (["+hardware=cpu", "actor_rollout_ref.rollout.name=vllm"], 1, "vllm"),
        (["+hardware=cpu"], 1, "cpu"),
    ],
)
def test_ranks_and_engine_follow_from_the_overrides(overrides, ranks, engine, monkeypatch):
    monkeypatch.setattr(validation_run, "find_spec", lambda name: name)
    base = compose_base(overrides)
    assert (ranks_of(base), base.actor_rollout_ref.rollout.name) == (ranks, engine)


@pytest.mark.parametrize(
    ("tokens", "truncated"), [([1, 2], False), ([1, 2, 9], False), ([1, 2, 3], True), ([9], False), ([], False)]
)
def test_the_agent_loop_records_what_verls_files_lack(monkeypatch, tokens, truncated):
    requests = []

    async def generate(self, sampling_params, priority=0, **kwargs):
        requests.append(sampling_params)
        return AgentLoopOutput(
            prompt_ids=[1],
            response_ids=tokens,
            response_mask=[1] * len(tokens),
            metrics=AgentLoopMetrics(),
            extra_fields={},
        )

    monkeypatch.setattr(SingleTurnAgentLoop, "run", generate)
    loop = object.__new__(EvaluationAgentLoop)
    loop._stop_token_ids = frozenset({9})
    loop.response_length = 3
    loop.rollout_config = SimpleNamespace(seed=42)
    row = {"global_steps": 20, "index": np.int64(7), "session_id": 1, "raw_prompt": MESSAGES}
    output = asyncio.run(loop.run({"temperature": 1.0}, **row))
    # The same for every checkpoint.
    seed = sampling_seed(42, 0, 7, 1, MESSAGES)
    assert requests == [{"temperature": 1.0, "seed": seed}]
    assert output.reward_score == 0.0
    assert output.extra_fields["reward_extra_info"] == {
        "index": 7,
        "sample": 1,
        "seed": seed,
        "length": len(tokens),
        "truncated": truncated,
    }


def test_a_folder_appears_when_its_responses_are_complete(make_run, tmp_path, monkeypatch):
    folder = tmp_path / "seed" / "000001"

    def answer_all_but_one(unfinished, platform):
        answer_as_verl(unfinished, platform)
        lines = (unfinished / "0.jsonl").read_text().splitlines(keepends=True)
        (unfinished / "0.jsonl").write_text("".join(lines[:-1]))

    monkeypatch.setattr(validation_run, "_launch", answer_all_but_one)
    with pytest.raises(ValueError, match="5 responses, not exactly 3 to each of 2 questions"):
        make_run().run(folder.parent, SEED, [1, 3])
    assert not folder.exists()
    # What a killed run left does not count.
    write_rows(folder.with_name("unfinished") / "7.jsonl", [])
    monkeypatch.setattr(validation_run, "_launch", answer_as_verl)
    make_run().run(folder.parent, SEED, [1, 3])
    assert sorted(path.name for path in folder.glob("*.jsonl")) == ["0.jsonl"]
    assert [path.name for path in folder.parent.iterdir()] == ["000001"]


def test_a_run_that_fails_shows_the_end_of_its_log(make_run, tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho $VERL_PLATFORM $*; echo out of memory >&2; exit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(RuntimeError) as raised:
        make_run().run(tmp_path / "seed", SEED, [1, 3])
    unfinished = tmp_path / "seed" / "unfinished"
    command = f"cpu -m verl.trainer.main_ppo --config-path {unfinished} --config-name run"
    for text in ("exit code 3", str(unfinished / "run.log"), command, "out of memory"):
        assert text in str(raised.value)
