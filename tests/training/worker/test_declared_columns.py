"""A rollout batch of which verl sends references, as its NeoProto does: the worker declares the columns that the plugin
reads, and stops where verl would drop one. Not covered: NeoProto itself, which no release of verl has; what stands for
it here materialises, as it does, the declared columns and no other.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl.workers import engine_workers

from tests.training.worker.test_training_worker import Worker, worker_and_data  # noqa: F401
from verl_clipx.training.worker.declared_columns import DECLARATION, OURS


@dataclass(frozen=True)
class DeclaredColumns:
    """As verl's EngineBatchSpec."""

    required_keys: tuple[str, ...] = ()
    optional_keys: tuple[str, ...] = ()
    restore_padding_keys: tuple[str, ...] = ()


@dataclass
class BatchOfReferences:
    """A rollout batch of which the columns stay elsewhere until a worker's entry point asks for those it declares."""

    columns: Any
    # What the transport loses although it was declared.
    lost: tuple[str, ...] = ()
    finalized: list[Any] = field(default_factory=list)

    @property
    def ref_table(self) -> set[str]:
        return set(self.columns.keys())

    def prepare_engine_batch(self, declared):
        names = {*declared.required_keys, *declared.optional_keys} - set(self.lost)
        assert set(declared.required_keys) <= self.ref_table
        return Context(self.columns.select(*(names & self.ref_table)), self.finalized)


@dataclass
class Context:
    payload: Any
    finalized: list[Any]

    def finalize(self, output):
        self.finalized.append(output)
        return output


# What verl itself declares; none of it is a column of the plugin's.
DECLARED_BY_VERL = DeclaredColumns(
    required_keys=("prompts", "responses", "response_mask"),
    optional_keys=("old_log_probs", "advantages", "ref_log_prob", "dp_size", "batch_num_tokens", "global_batch_size"),
)


@pytest.fixture
def build_worker_and_batch(worker_and_data, monkeypatch):  # noqa: F811
    """A worker of +clipx=grpo and a batch of references with every column of ours, and those that verl declares."""

    def build(*, declared=DECLARED_BY_VERL, lost=()):
        monkeypatch.setattr(engine_workers, DECLARATION, declared, raising=False)
        worker, data = worker_and_data("+clipx=grpo", kind=RecordingWorker)
        for name in OURS:
            if name not in data:
                data[name] = torch.ones_like(data["advantages"])
        others = [name for name in sorted(data.keys()) if name not in OURS]
        if declared is DECLARED_BY_VERL:
            all_others = DeclaredColumns(DECLARED_BY_VERL.required_keys, tuple(others))
            monkeypatch.setattr(engine_workers, DECLARATION, all_others, raising=False)
        return worker, BatchOfReferences(data, lost)

    return build


class RecordingWorker(Worker):
    """Keeps the columns that verl's loop over the mini-batches got."""

    columns: frozenset[str] = frozenset()

    def train_batch(self, data):
        self.columns = frozenset(data.keys())
        return super().train_batch(data)


def test_the_worker_gets_every_column_of_ours_and_verl_gets_its_output_back(build_worker_and_batch):
    worker, batch = build_worker_and_batch()
    output = worker.train_mini_batch(batch)
    assert set(OURS) <= worker.columns
    assert batch.finalized == [output] and "clipx/ratio_mean" in tu.get(output, "metrics")


def test_a_batch_that_came_whole_needs_no_declaration(worker_and_data):  # noqa: F811
    worker, data = worker_and_data("+clipx=grpo")
    assert not hasattr(engine_workers, DECLARATION)
    assert "clipx/ratio_mean" in tu.get(worker.train_mini_batch(data), "metrics")


@pytest.mark.parametrize("name", OURS)
def test_the_run_stops_where_a_column_is_dropped_nevertheless(build_worker_and_batch, name):
    worker, batch = build_worker_and_batch(lost=(name,))
    with pytest.raises(RuntimeError, match=rf"drops {name} before the worker.*trainer\.use_v1=True"):
        worker.train_mini_batch(batch)
    assert not worker.columns


@pytest.mark.parametrize("declared", [None, ("input_ids",)], ids=str)
def test_the_run_stops_where_columns_can_not_be_declared(build_worker_and_batch, declared):
    worker, batch = build_worker_and_batch(declared=declared)
    with pytest.raises(RuntimeError, match=rf"no {DECLARATION} with optional_keys.*uid"):
        worker.train_mini_batch(batch)
