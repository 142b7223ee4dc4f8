"""`clipx recipe plan` as a user sees it: an estimate with its assumptions, or exit code 1 and what to do.

The preset is a stand-in composed on verl's main configuration. Not covered: the presets themselves (test_presets.py).
"""

import re
from dataclasses import fields

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from tests.papers.tables.runs import composed
from verl_clipx.papers.tables import plan_command, presets
from verl_clipx.papers.tables.cost.assumptions import Assumptions

app = typer.Typer()
app.command("plan")(plan_command.plan)


@pytest.fixture
def plan(monkeypatch):
    given = []

    def compose_preset(name, overrides):
        given.append((name, list(overrides)))
        rest = [override for override in overrides if not override.startswith("+hardware=")]
        machine = next(override for override in overrides if override.startswith("+hardware="))
        return composed("Qwen/Qwen2.5-7B", *rest, hardware=machine.removeprefix("+hardware="))

    monkeypatch.setattr(presets, "compose_preset", compose_preset)
    monkeypatch.setattr(plan_command, "console", Console(width=200))

    def run(*arguments: str):
        result = CliRunner().invoke(app, list(arguments))
        return result.exit_code, re.sub(r"\s+", " ", result.output), given

    return run


def test_an_estimate_with_its_memory_work_and_assumptions(plan):
    code, output, given = plan("acpo/some_run", "--train-prompts", "5120")
    assert code == 0, output
    assert given == [("acpo/some_run", ["+hardware=a100x8", "trainer.nnodes=1"])]
    assert "acpo/some_run on 1 x a100x8" in output
    assert "7.62B parameters" in output and "8 x A100-SXM4-80GB" in output
    for name in (
        "actor update",
        "optimizer step",
        "log-probabilities",
        "generation",
        "weight transfer",
        "host, a node",
    ):
        assert name in output
    assert "actor update 38.7" in output
    assert "2.10M of prompts, 16.78M of responses" in output
    assert "300 steps, 4800 updates, 5.66G tokens" in output
    for assumption in fields(Assumptions):
        assert assumption.name in output and assumption.metadata["meaning"][:40] in output


def test_machines_nodes_and_overrides_reach_the_configuration(plan):
    code, output, given = plan(
        "acpo/some_run",
        "data.max_response_length=2048",
        "--hardware",
        "h100x8",
        "--nodes",
        "2",
        "--mean-response",
        "0.25",
    )
    assert code == 0, output
    assert given[0][1] == ["+hardware=h100x8", "trainer.nnodes=2", "data.max_response_length=2048"]
    assert "16 x H100-SXM5-80GB, nodes: 2" in output
    # 4096 responses of 512 tokens.
    assert "2.10M of responses" in output


def test_a_run_of_unknown_length_says_what_to_add(plan):
    code, output, _ = plan("acpo/some_run")
    assert code == 0 and "--train-prompts" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["actor_rollout_ref.actor.ppo_mini_batch_size=30"], "ppo_mini_batch_size=30: does not divide"),
        (["actor_rollout_ref.rollout.gpu_memory_utilization=0.95"], "gpu_memory_utilization=0.95: generation needs"),
        (["actor_rollout_ref.model.path=some/model"], "model.path=some/model: its shape is unknown"),
        (["actor_rollout_ref.actor.ppo_mini_batch=3"], "ppo_mini_batch"),
        (["--hardware", "a100x16"], "a100x16"),
        (["--hardware", "tpu"], "--hardware=tpu: its speed is unknown. Use a100x4"),
    ],
)
def test_refusals_exit_with_1_and_say_what_to_change(plan, arguments, message):
    code, output, _ = plan("acpo/some_run", *arguments)
    assert code == 1
    assert message in output
    assert "Traceback" not in output


def test_an_unknown_preset_is_named(monkeypatch):
    monkeypatch.setattr(plan_command, "console", Console(width=200))
    result = CliRunner().invoke(app, ["acpo/no_such_run"])
    assert result.exit_code == 1 and "no_such_run" in result.output


def test_data_that_the_reward_cannot_use_are_refused(plan, tmp_path):
    path = tmp_path / "train.parquet"
    overrides = (
        f"data.train_files={path}",
        "reward.custom_reward_function.path=pkg://verl_clipx.papers.tasks.math.reward",
    )
    for truths, code in ((["7", "8"], 0), (["7", ""], 1)):
        rows = [{"style": "rule", "ground_truth": truth} for truth in truths]
        pq.write_table(pa.table({"data_source": ["math500"] * 2, "reward_model": rows}), path)
        found, output, _ = plan("acpo/some_run", *overrides)
        assert found == code, output
    assert "train.parquet, row 1: ground_truth=''" in output and "mathematics needs the right answer" in output


def test_parameters_that_a_launch_would_refuse_are_refused(plan):
    code, output, _ = plan("acpo/some_run", "--train-prompts", "5120", "clipx.clip_low=2")
    assert code == 1 and "clipx.clip_low=2" in output
