"""What a run's log says of each rollout batch, and that what only observes ends no run once it has begun: through what
verl's trainers call, Tracking and compute_data_metrics. Not covered: runs of verl
(tests/end_to_end/test_quickstart.py), traces on a rank (tests/training/worker/test_training_worker.py).
"""

import importlib
import json

import numpy
import pytest
import torch
from verl import DataProto
from verl.trainer.ppo import metric_utils
from verl.utils.metric import reduce_metrics
from verl.utils.tracking import Tracking

from tests.analysis.runs.commands import clipx
from tests.training.trainer.test_health import TRAINERS
from verl_clipx.analysis.runs.run_log import read_log, read_run_log
from verl_clipx.training.trainer import health, log, watch
from verl_clipx.training.worker import fingerprints

PROMPTS = [[5, 6], [5, 6], [7], [7]]
RESPONSES = [[1, 2, 3], [1, 2], [2, 1], [2, 1]]
ADVANTAGES = [0.5, -0.5, 1.0, -1.0]


def pad(rows, width, on_left=False):
    padded = []
    for row in rows:
        padding = [0] * (width - len(row))
        padded.append(padding + row if on_left else row + padding)
    return torch.tensor(padded)


def make_batch(
    order=(0, 1, 2, 3), widths=(3, 4), v1=False, prompts=PROMPTS, responses=RESPONSES, advantages=ADVANTAGES
):
    """The rows in an order, padded to widths of prompt and response, as verl's v0 or v1 trainer gives them."""
    prompts = [prompts[row] for row in order]
    responses = [responses[row] for row in order]
    prompt_width, response_width = widths
    in_prompt = pad([[1] * len(row) for row in prompts], prompt_width, on_left=not v1)
    present = pad([[1] * len(row) for row in responses], response_width)
    tensors = {
        "prompts": pad(prompts, prompt_width, on_left=not v1),
        "responses": pad(responses, response_width),
        "response_mask": present,
        "attention_mask": torch.cat([in_prompt, present], 1),
        "advantages": torch.tensor([advantages[row] for row in order])[:, None] * present,
        "returns": torch.zeros(present.shape),
    }
    tensors |= {key: torch.zeros(present.shape) for key in ("token_level_scores", "token_level_rewards")}
    if v1:
        tensors["prompt_length"] = torch.tensor([float(len(row)) for row in prompts])
        tensors["response_length"] = torch.tensor([float(len(row)) for row in responses])
    return DataProto.from_dict(tensors=tensors)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of this process's trainer, as a function that logs a step with its rollout batch."""
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(path))
    trainer = {"logger": ["file"], "default_local_dir": str(tmp_path), "resume_mode": "disable"}
    config = {"trainer": trainer, "data": {"max_response_length": 9}, "clipx": {"method": "grpo", "receipt": "off"}}
    tracking = Tracking("project", "run", ["file"], config=config)

    def step(number, batch=None):
        batch = make_batch() if batch is None else batch
        metrics = metric_utils.compute_data_metrics(batch, use_critic=False)
        tracking.log(metrics | {"training/global_step": number, "actor/grad_norm": 1.0}, number)

    step.log = path
    yield step
    Tracking("project", "run", ["console"], config={"trainer": {}, "clipx": None})


def test_each_steps_line_has_the_fingerprints_of_its_batch_and_stays_one_of_verls(run):
    run(1)
    run(2, make_batch(responses=[[9], [9], [9], [8]]))
    first, second = read_log(run.log).batches.values()
    assert (first["groups"], first["sequences"]) == (2, 4)
    assert (first["tokens"], first["distinct"]) == (9, 3)
    assert (second["tokens"], second["distinct"]) == (4, 3)
    assert first["prompts"] == second["prompts"] and first["responses"] != second["responses"]
    assert list(read_run_log(run.log).index) == [1, 2]
    assert all(len(first[key]) == 16 for key in ("prompts", "responses", "rows"))


@pytest.mark.parametrize(
    "changes", [{"order": (3, 1, 0, 2)}, {"widths": (5, 9)}, {"v1": True}, {"v1": True, "order": (2, 0, 3, 1)}]
)
def test_neither_order_nor_padding_nor_trainer_changes_the_fingerprints(run, changes):
    run(1)
    run(2, make_batch(**changes))
    first, second = read_log(run.log).batches.values()
    assert first == second


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"advantages": [0.5, -0.5, 1.0, -1.5]}, {"prompts", "responses"}),
        # Swapped between two rows that differ, and within a row.
        ({"advantages": [-0.5, 0.5, 1.0, -1.0]}, {"prompts", "responses"}),
        ({"responses": [[1, 2, 3], [2, 1], [2, 1], [2, 1]]}, {"prompts"}),
        ({"prompts": [[6, 5], [6, 5], [7], [7]]}, set()),
        # A token that is 0, as padding is.
        ({"responses": [[1, 2, 3, 0], [1, 2], [2, 1], [2, 1]]}, {"prompts"}),
        ({"prompts": [[0, 5, 6], [5, 6], [7], [7]]}, set()),
    ],
)
def test_whatever_the_update_trains_on_changes_the_fingerprints(run, changes, same):
    run(1)
    run(2, make_batch(**changes))
    first, second = read_log(run.log).batches.values()
    assert {key for key in ("prompts", "responses", "rows") if first[key] == second[key]} == same


def test_where_the_mask_lies_changes_the_rows_alone_and_a_zeros_sign_changes_nothing(run):
    # The first response has four tokens, of which three count: 1110 becomes 0111, with the same advantages.
    multi_turn = make_batch()
    moved = make_batch()
    for data in (multi_turn, moved):
        data.batch["attention_mask"][0, -1] = 1
    for name in ("response_mask", "advantages"):
        moved.batch[name][0] = moved.batch[name][0].roll(1)
    run(1, multi_turn)
    run(2, moved)
    run(3, make_batch(advantages=[0.5, -0.5, 1.0, -0.0]))
    run(4, make_batch(advantages=[0.5, -0.5, 1.0, 0.0]))
    first, second, third, fourth = read_log(run.log).batches.values()
    assert {key for key in first if first[key] != second[key]} == {"rows"}
    assert third == fourth and third["rows"] != first["rows"]


def test_advantages_in_bfloat16_leave_the_fingerprints_on(run):
    run(1)
    in_bfloat16 = make_batch()
    in_bfloat16.batch["advantages"] = in_bfloat16.batch["advantages"].bfloat16()
    run(2, in_bfloat16)
    first, second = (json.loads(line) for line in run.log.read_text().splitlines())
    assert "off" not in second and first["batch"] == second["batch"]


def test_a_group_that_two_parts_of_a_step_cut_counts_once(run):
    run(1)
    metric_utils.compute_data_metrics(make_batch().select_idxs([0]), use_critic=False)
    run(2, make_batch().select_idxs([1, 2, 3]))
    first, second = read_log(run.log).batches.values()
    assert first == second and first["groups"] == 2


class FailingOrjson:
    """Stands for orjson."""

    OPT_SERIALIZE_NUMPY = 0

    @staticmethod
    def dumps(*_, **__):
        raise ZeroDivisionError("planted")


def fail(*_, **__):
    raise ZeroDivisionError("planted")


# By part of what only observes: the module, a name in it, and what stands there to make the part fail.
FAILURES = {
    "fingerprints": (fingerprints, "hash_rows", fail),
    "health": (health, "share_alike", fail),
    "rules": (watch, "table_of", fail),
    "log": (log, "orjson", FailingOrjson),
}


@pytest.mark.parametrize("part", FAILURES)
def test_a_part_that_fails_later_goes_off_with_its_traceback_and_training_goes_on(run, part, monkeypatch, caplog):
    run(1)
    module, name, failing = FAILURES[part]
    with monkeypatch.context() as patched:
        patched.setattr(module, name, failing)
        run(2)
        run(3)
    run(4)
    (record,) = [record for record in caplog.records if "training goes on without it" in record.getMessage()]
    assert "planted" in record.exc_text
    lines = [json.loads(line) for line in run.log.read_text().splitlines()]
    if part == "log":
        assert [line["step"] for line in lines] == [1]
        return
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    # The rules look at a step after it is in the log.
    first_step_off = 3 if part == "rules" else 2
    assert [bool(line.get("off")) for line in lines] == [step >= first_step_off for step in (1, 2, 3, 4)]
    if part == "fingerprints":
        assert read_log(run.log).batches.keys() == {1}
    if part == "health":
        assert ["health/alike_prompts" in line["data"] for line in lines] == [True, False, False, False]


def test_in_the_first_step_a_failure_ends_the_run(run, monkeypatch):
    monkeypatch.setattr(health, "share_alike", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(1)


def test_what_the_worker_says_stands_beside_the_log_and_in_no_metric(run):
    # All of verl's trainers reduce an actor's metrics by this function, in one call a rollout batch.
    assert all(importlib.import_module(trainer).reduce_metrics == reduce_metrics for trainer in TRAINERS)
    # verl's NeoProto leaves a list within the list.
    for updates, oldest in (([7, 2**64 - 1], 2), ([[5]], 3)):
        metrics = {"actor/clipx_updates": updates, "actor/clipx_off/the traces": [1.0], "actor/pg_loss": [1.0]}
        assert reduce_metrics(metrics) == {"actor/pg_loss": 1.0}
        data = with_versions(make_batch(), oldest=oldest, newest=4)
        # Several rollout batches are one step in verl's fully async trainer.
        if oldest == 2:
            metric_utils.compute_data_metrics(data, use_critic=False)
        else:
            run(1, data)
    run(2)
    first, second = (json.loads(line) for line in run.log.read_text().splitlines())
    assert first["off"] == second["off"] == ["the traces"]
    first, second = first["batch"], second["batch"]
    assert first["updates"] == ["0000000000000007", "f" * 16, "0000000000000005"] and "updates" not in second
    assert first["versions"] == [2, 4] and first["sequences"] == 2 * second["sequences"]
    assert int(first["rows"], 16) == 2 * int(second["rows"], 16) % 2**64


def with_versions(data, oldest, newest):
    """The data, of which the first row was begun with the oldest weights and all were ended with the newest."""
    size = len(data)
    data.non_tensor_batch["min_global_steps"] = numpy.array([oldest, *[newest] * (size - 1)], dtype=object)
    data.non_tensor_batch["max_global_steps"] = numpy.array([newest] * size, dtype=object)
    return data


def test_the_line_has_the_oldest_and_the_newest_version_that_sampled(run):
    run(6, with_versions(make_batch(), oldest=2, newest=5))
    run(7, with_versions(make_batch(), oldest=None, newest=None))
    first, second = read_log(run.log).batches.values()
    assert first["versions"] == [2, 5] and "versions" not in second


def test_certify_reads_the_fingerprints(run, tmp_path):
    for step in (1, 2, 3):
        run(step, make_batch(responses=[[9], [9], [9], [step % 2]]))
    output = clipx("certify", run.log, "vs", run.log, code=1)
    assert "failed: no batch was trained twice: metrics.jsonl" not in output
    assert "step 3 has the data of step 1; 1 of 3 repeat one" in output
