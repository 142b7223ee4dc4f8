"""What an update of a run consists of: what `clipx explain` says of extra passes and updates, and what the record's
readers take for the number of updates, against the passes and updates that the worker makes on a rollout batch. Not
covered: which statistics the bounds are decided from (tests/worker/test_plan.py), engines and ranks (tests/end_to_end).
"""

import re

import pytest
import torch
from omegaconf import OmegaConf
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass

from tests.claims.first_call import NEAR, ROWS, moved_batch
from tests.composition import composition
from tests.hydra_main import NEEDED, explained
from tests.jagged import micro_batch
from tests.worker.updates import PassEngine, VerlsWorker
from verl_clipx.run.start import decide
from verl_clipx.runs.run import Run, flat
from verl_clipx.worker.extra_pass import extra_pass
from verl_clipx.worker.training_worker import ClipxTraining

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
BATCH = (
    "data.train_batch_size=8",
    "trainer.n_gpus_per_node=1",
    "clipx.receipt=off",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
)
ONE = (f"{ACTOR}.ppo_mini_batch_size=8",)
FOUR = (f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2")
LOPTI, LOW_ONLY = ("+clipx/update=lopti",), ("+clipx/update=lopti", "clipx.update.order=low_only")
HELD = ("+clipx/hold=clip_fraction", "clipx.hold.value=0.1")
RETURNED = "actor_rollout_ref.rollout.calculate_log_probs=True"
BYPASS = (f"{CORRECTION}.bypass_mode=True", RETURNED)
REJECTING = (f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold='0.5_2'")
SELECTING = ("+clipx=grpo", "+clipx/select=high_entropy")
BY_ENTROPY = ("+clipx=custom", "clipx.function=tests.example_losses:ByEntropy")


class Repeating(VerlsWorker):
    """verl's loop over mini-batches, without the metrics of its updates."""

    def forward_backward(self, data):
        self.loss_fn(model_output=self.output, data=data)
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": {}})

    def train_mini_batch(self, data):
        for _ in range(self.updates):
            output = self.train_batch(data.copy())
        return output


class Worker(ClipxTraining, Repeating):
    """Ours on verl's, which makes so many updates on a rollout batch and counts those, and the extra passes."""

    def __init__(self, config, data, output, updates):
        super().__init__(config, output)
        self.updates, self.made, self.passes = updates, 0, 0
        if self.extra_pass is not None:
            engine = PassEngine([(data, output)])

            def count(*given):
                self.passes += 1
                return extra_pass(config.policy_loss, engine, *given, cut={}, device="cpu")

            self.extra_pass = count

    def _cut(self):
        return {}

    def train_batch(self, data):
        self.made += 1
        return super().train_batch(data)


def configuration(*words):
    """verl's configuration with overrides, and what the driver decides."""
    config = composition(*BATCH, *words)
    return config, decide(config)


def counted(monkeypatch, *words):
    """The extra passes and the updates that the worker makes on a rollout batch after its first."""
    monkeypatch.setattr("verl_clipx.worker.training_worker.get_device_id", lambda: "cpu")
    config, decision = configuration(*words)
    batch = moved_batch(NEAR)
    data, output = micro_batch(batch, ROWS, entropy=batch["entropy"])
    data["rm_scores"] = torch.zeros_like(data["advantages"])
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    worker = Worker(actor, data, output, decision.run.schedule.updates)
    for _ in range(2):
        worker.made = worker.passes = 0
        worker.train_mini_batch(data.copy())
    return worker.passes, worker.made


def said(folder, *words):
    """The same two numbers, as `clipx explain` says them."""
    answer = explained(folder, *NEEDED, *BATCH, *words)
    assert answer["stops"] == []
    updates = int(re.match(r"(\d+) updates? ", answer["updates"])[1])
    updates *= 2 if "second pass of each update" in answer["cost"] else 1
    passes = re.search("extra forward pass before each update(?! of the first rollout batch)", answer["cost"])
    return updates * (passes is not None), updates


@pytest.mark.parametrize(
    "words",
    [
        ("+clipx=grpo", *FOUR),
        ("+clipx=acpo", *FOUR),
        ("+clipx=acpo", *ONE),
        ("+clipx=acpo", *ONE, *BYPASS),
        ("+clipx=acpo", "clipx.scope=lagged", *FOUR),
        ("+clipx=acpo", "clipx.scope=micro_batch", *FOUR, *LOPTI),
        ("+clipx=bapo", *FOUR, *LOPTI),
        ("+clipx=acpo", *FOUR, *LOW_ONLY),
        ("+clipx=grpo", *ONE, *LOPTI),
        ("+clipx=grpo", *ONE, *HELD),
        (*SELECTING, *FOUR),
        (*SELECTING, "clipx.select.over=mini_batch", *ONE),
        (*SELECTING, *FOUR, RETURNED, *REJECTING),
        (*BY_ENTROPY, *FOUR),
        ("+clipx=acpo", *ONE, *LOPTI),
        ("+clipx=acpo", *ONE, *LOW_ONLY),
        ("+clipx=grpo", *ONE, *LOPTI, *HELD),
        (*SELECTING, *FOUR, *BYPASS, *REJECTING),
        (*BY_ENTROPY, *ONE),
        (*BY_ENTROPY, "clipx.scope=lagged", *FOUR),
    ],
    ids=lambda words: " ".join(word.rpartition(".")[2] for word in words),
)
def test_explain_says_the_passes_and_updates_that_the_worker_makes(tmp_path, monkeypatch, words):
    assert said(tmp_path, *words) == counted(monkeypatch, *words)


@pytest.mark.parametrize(
    "modifier", [(), LOPTI, LOW_ONLY, ("+clipx/update=lopti_quantile",), (*LOPTI, "clipx.update.order=high_first")]
)
@pytest.mark.parametrize("updates", [ONE, FOUR])
def test_readers_of_the_record_count_the_updates_that_the_worker_makes(monkeypatch, updates, modifier):
    words = ("+clipx=grpo", *updates, *modifier)
    config, _ = configuration(*words)
    run = Run("run", log=None, configuration=flat(OmegaConf.to_container(config, resolve=True)))
    assert run.schedule.updates_a_step == counted(monkeypatch, *words)[1]
