"""What a worker observes, by verl's worker and FSDP2 engine: an update's fingerprint is the same on 1 and 2 ranks (and
with `-m matrix` 4), in any order and micro-batches, that of the trainer's process, and costs no collective; a part that
raises on one rank goes off, on all of them if it is joined over ranks. Not covered: what the trainer's process does
with it (tests/trainer/test_observing.py), skipped updates (tests/worker/test_training_worker.py).
"""

import pytest
import torch
from verl import DataProto

from verl_clipx.worker.fingerprints import fingerprints_of, hexadecimal

from .observing_ranks import METRICS, PLANTED, ROWS, TRACES, UPDATES, observe_on_rank
from .training_ranks import make_policy, make_rows, on_ranks

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("observing"), {}
    policy, rows = make_policy(folder / "policy"), make_rows(folder, ROWS, masked=(3, 11), drift=0.3)

    def on(world):
        if world not in found:
            found[world] = on_ranks(world, observe_on_rank, str(policy), str(rows), folder / f"traces{world}")
        return found[world]

    on.rows = torch.load(rows, weights_only=False)
    return on


def of_trainer(rows):
    """The fingerprint of rows as verl's v0 trainer pads them."""

    def padded(of, left=False):
        return torch.nn.utils.rnn.pad_sequence(of, batch_first=True, padding_side="left" if left else "right")

    ids, lengths = [row["ids"] for row in rows], [row["prompt"] for row in rows]
    prompts, responses = zip(*((one[:cut], one[cut:]) for one, cut in zip(ids, lengths, strict=True)), strict=True)
    present = [padded([torch.ones_like(one) for one in of], left) for of, left in ((prompts, True), (responses, False))]
    tensors = {
        "prompts": padded(prompts, True),
        "responses": padded(responses),
        "attention_mask": torch.cat(present, 1),
    }
    tensors |= {"response_mask": padded([row["mask"] for row in rows])}
    tensors |= {"advantages": padded([row["advantage"] for row in rows]).float()}
    return fingerprints_of(DataProto.from_dict(tensors=tensors))["rows"]


WORLDS = [1, 2, pytest.param(4, marks=pytest.mark.matrix)]


@pytest.mark.parametrize("world", WORLDS)
def test_an_updates_fingerprint_depends_on_its_rows_alone_and_costs_no_collective(results, world):
    halves = [results.rows[at : at + ROWS // UPDATES] for at in range(0, ROWS, ROWS // UPDATES)]
    (first, second) = results(world)["orders"]
    assert [hexadecimal([one]) for one in first] == [of_trainer(half) for half in halves]
    assert first == second and first[0] != first[1]
    assert hexadecimal(first) == of_trainer(results.rows)
    assert results(world)["collectives"] == 0


@pytest.mark.parametrize("world", WORLDS[:2])
@pytest.mark.parametrize("planted", PLANTED)
def test_what_fails_goes_off_on_all_ranks_or_on_the_one_where_nothing_is_joined(results, world, planted):
    name, of_ranks = PLANTED[planted].format(world - 1), results(world)["failed"][planted]
    for metrics in of_ranks:
        assert metrics[f"clipx_off/{name}"] == [1.0]
        assert ("clipx/ratio_mean" in metrics) == (name != METRICS)
        assert ("clipx_updates" in metrics) == (name in (METRICS, TRACES.format(world - 1)))
        assert not [key for key in metrics if key.startswith(("clipx_sum/", "clipx_report"))]
