"""The texts for verl's users in docs/dev/upstream do what they say; with `-m matrix`, the patch on a copy of verl, with
its example in verl's worker and engine. Not covered: their form, other engines, several ranks, GPUs.
"""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from shutil import copytree

import pytest
import verl

from tests.claims.documents import ROOT
from tests.hydra_main import explained
from tests.recipes.shell import Machine
from verl_clipx.common.verl_version import VERL_RANGE

TEXTS = ROOT / "docs" / "dev" / "upstream"
SCRIPT = TEXTS / "recipe" / "run_qwen3_8b_acpo_fsdp.sh"

USE_THE_PATCH = """
import os, sys
from pathlib import Path

# Last: a script's neighbours there must not hide the standard library's.
sys.path += sys.argv[1:]
import torch
from one_process.only_rank import become_only_rank
from update_actor import save_model
from worker_update import Row, compose_run, update

# verl reads it when it is imported.
become_only_rank()
os.environ |= {"HF_HUB_OFFLINE": "1", "RAY_ADDRESS": "127.0.0.1:6379"}
from pre_update_example import loss
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

calls = []
passes = []
forward_backward_batch = FSDPEngine.forward_backward_batch

def record_call(**call):
    mask = call["response_mask"]
    log_prob = call["log_prob"].detach()[mask].double()
    advantages = call["advantages"].detach()[mask].double()
    calls.append({"pre_update": call["pre_update"], "log_prob": log_prob, "advantage": advantages})
    return loss(**call)

def count_pass(self, *arguments, forward_only=False, **named):
    passes.append(forward_only)
    return forward_backward_batch(self, *arguments, forward_only=forward_only, **named)

POLICY_LOSS_REGISTRY["centred"] = record_call
FSDPEngine.forward_backward_batch = count_pass

save_model(Path("model"), width=64, layers=1)
rows = []
for length in range(3, 11):
    tokens = torch.arange(2, 4 + length)
    mask = torch.ones(length, dtype=torch.int64)
    rows.append(Row(tokens, 2, -6 * torch.ones(length), mask, length % 3 - 1.0))
overrides = [
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.actor.optim.lr=0.01",
]
for mode, expected in (("centred", [True, False] * 2), ("vanilla", [False] * 2)):
    passes.clear()
    config = compose_run(Path("model"), 1, [*overrides, f"actor_rollout_ref.actor.policy_loss.loss_mode={mode}"])
    update(config, rows, updates=2)
    assert passes == expected, (mode, passes)
assert len(calls) == 8 and calls[0]["pre_update"]["log_prob"] != calls[4]["pre_update"]["log_prob"]
for calls_of_update in (calls[:4], calls[4:]):
    for name in ("log_prob", "advantage"):
        mean = torch.cat([call[name] for call in calls_of_update]).mean()
        assert all(torch.isclose(call["pre_update"][name], mean, rtol=1e-6) for call in calls_of_update), name
"""


@pytest.mark.slow
@pytest.mark.matrix
def test_the_patch_gives_a_loss_the_whole_mini_batch(tmp_path):
    copytree(Path(verl.__file__).parent, tmp_path / "verl", ignore=lambda *_: ["__pycache__"])
    subprocess.run(["git", "apply", TEXTS / "pre_update_hook.patch"], cwd=tmp_path, check=True)
    (tmp_path / "use.py").write_text(USE_THE_PATCH)
    command = [sys.executable, "use.py", str(TEXTS), str(ROOT / "benchmarks")]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_the_recipe_trains_what_its_page_says(tmp_path):
    machine = Machine(tmp_path / "machine", python3="")
    assert machine.run(SCRIPT, "clipx.alpha=2").returncode == 0
    (call,) = machine.calls
    answer = explained(tmp_path, *call[3:])
    assert answer["loss"].startswith("clipx_acpo (+clipx=acpo), scope mini_batch") and "alpha=2" in answer["settings"]
    assert call[1:3] == ["-m", "verl.trainer.main_ppo"] and answer["stops"] == []


def test_the_recipe_requires_the_verl_that_is_tested():
    lines = (TEXTS / "recipe" / "REQUIRED_VERL.txt").read_text().splitlines()
    fields = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    assert "UPSTREAM" in fields and fields["MODE"] == "pinned_tag"
    tested = fields["TAG"].removeprefix("v")
    assert fields["PIP_INSTALL"] == f"pip install verl=={tested}" and tested == version("verl") and tested in VERL_RANGE
