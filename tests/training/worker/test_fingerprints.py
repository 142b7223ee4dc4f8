"""The hashes of rows and the fingerprints of a rollout batch: what changes them, and what doesn't.

Not covered: what the trainer's log has of them (tests/training/trainer/test_observing.py), ranks and collectives
(tests/end_to_end/test_observing.py).
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy
import pytest
import torch
from verl import DataProto

from verl_clipx.training.worker.fingerprints import (
    DEFINITION,
    BatchHashes,
    RowHashes,
    fingerprints_of,
    hash_batch,
    hash_field,
    hash_rows,
    join,
)


class Row(NamedTuple):
    """A prompt and a response, which of its tokens count, and an advantage for each of these."""

    prompt: list[int]
    response: list[int]
    mask: Sequence[int]
    advantages: Sequence[float]


PROMPT = [5, 6, 7]
RESPONSE = [11, 12, 13, 14, 15]
ROW = Row(PROMPT, RESPONSE, mask=[1, 1, 0, 1, 1], advantages=[0.5, -0.25, 1.5, 0.0])


def pad(values, width, left=False, fill=0):
    padding = [fill] * (width - len(values))
    return padding + list(values) if left else list(values) + padding


def spread(mask, values, fill):
    """The values at the places that count, with a filling elsewhere."""
    remaining = iter(values)
    return [next(remaining) if counts else fill for counts in mask]


def padded_batch(rows, extra=0, dtype=torch.float32, fill=0.0):
    """Rows as verl's v0 trainer has them: prompts padded at the left, responses at the right."""
    prompt_width = max(len(row.prompt) for row in rows) + extra
    width = max(len(row.response) for row in rows) + extra
    present = [
        [*pad([1] * len(row.prompt), prompt_width, left=True), *pad([1] * len(row.response), width)] for row in rows
    ]
    advantages = [pad(spread(row.mask, row.advantages, fill), width, fill=fill) for row in rows]
    return {
        "prompts": torch.tensor([pad(row.prompt, prompt_width, left=True) for row in rows]),
        "responses": torch.tensor([pad(row.response, width) for row in rows]),
        "response_mask": torch.tensor([pad(row.mask, width) for row in rows]),
        "attention_mask": torch.tensor(present),
        "advantages": torch.tensor(advantages).to(dtype),
    }


def jagged_batch(rows, dtype=torch.float32):
    """Rows as verl's v1 trainer sends them to a worker."""

    def nest(values, dtype=torch.int64):
        return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in values], layout=torch.jagged)

    return {
        "prompts": nest(row.prompt for row in rows),
        "responses": nest(row.response for row in rows),
        "response_mask": nest(row.mask for row in rows),
        "advantages": nest((spread(row.mask, row.advantages, 0.0) for row in rows), dtype),
    }


def hash_row(row):
    (hashes,) = hash_rows(padded_batch([row]))
    return hashes


def fingerprints(rows):
    return fingerprints_of(hash_batch(DataProto.from_dict(tensors=padded_batch(rows))))


def masks():
    """Every mask over five tokens that counts four or three of them."""
    return [mask for mask in numpy.ndindex(*[2] * 5) if sum(mask) in (3, 4)]


def test_where_the_mask_lies_changes_the_row_and_neither_prompt_nor_response():
    hashes_by_mask = {mask: hash_row(Row(PROMPT, RESPONSE, mask, [1.0] * sum(mask))) for mask in masks()}
    assert len({hashes.row for hashes in hashes_by_mask.values()}) == len(masks()) == 15
    assert len({(hashes.prompt, hashes.pair) for hashes in hashes_by_mask.values()}) == 1
    assert hashes_by_mask[0, 1, 1, 1, 1].tokens == 4


def test_a_mask_that_moved_changes_only_the_fingerprint_of_rows():
    first = fingerprints([Row(PROMPT, RESPONSE, mask=[0, 1, 1, 1, 1], advantages=[1.0] * 4)])
    second = fingerprints([Row(PROMPT, RESPONSE, mask=[1, 1, 1, 1, 0], advantages=[1.0] * 4)])
    assert {key for key in first if first[key] != second[key]} == {"rows"}


def random_rows(count):
    """Rows of several turns, whose advantages bfloat16 has exactly."""
    draw = random.Random(3)
    rows = []
    for _ in range(count):
        prompt = [draw.randrange(1, 90) for _ in range(draw.randint(1, 9))]
        response = [draw.randrange(1, 90) for _ in range(draw.randint(1, 9))]
        mask = [draw.randint(0, 1) for _ in response]
        advantages = [draw.choice([-1.5, -0.5, 0.0, 0.25, 2.0]) for _ in range(sum(mask))]
        rows.append(Row(prompt, response, mask, advantages))
    return rows


def test_neither_padding_nor_layout_nor_what_stands_outside_the_mask_changes_a_row():
    rows = random_rows(40)
    expected = hash_rows(padded_batch(rows))
    assert {row is None for row in expected} == {True, False}
    assert hash_rows(padded_batch(rows, extra=7)) == expected
    assert hash_rows(padded_batch(rows, extra=2, fill=float("nan"))) == expected
    assert hash_rows(jagged_batch(rows)) == expected
    assert hash_field(jagged_batch(rows)).tolist() == hash_field(padded_batch(rows, extra=3)).tolist()


def test_the_order_of_rows_changes_no_fingerprint():
    rows = random_rows(40)
    assert fingerprints(rows) == fingerprints(random.Random(1).sample(rows, len(rows)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_advantages_of_another_precision_with_the_same_values_are_the_same(dtype):
    rows = random_rows(20)
    assert (
        hash_rows(padded_batch(rows, dtype=dtype))
        == hash_rows(jagged_batch(rows, dtype))
        == hash_rows(padded_batch(rows))
    )


def test_a_mask_in_bfloat16_counts_every_token():
    data = padded_batch([Row(PROMPT, [1] * 300, mask=[1] * 299 + [0], advantages=[1.0] * 299)])
    data["response_mask"] = data["response_mask"].to(torch.bfloat16)
    # A sum in bfloat16 stops at 256.
    assert fingerprints_of(hash_batch(DataProto.from_dict(tensors=data)))["tokens"] == 299


def test_zero_and_nan_have_one_spelling_and_other_advantages_differ():
    def hash_advantages(*advantages):
        return hash_row(ROW._replace(advantages=advantages)).row

    assert hash_advantages(0.0, -0.0, 1.0, -1.0) == hash_advantages(-0.0, 0.0, 1.0, -1.0)
    negative_nan = float(numpy.copysign(numpy.nan, -1.0))
    hash_with_nan = hash_advantages(float("nan"), 0.0, 1.0, 1.0)
    assert hash_with_nan == hash_advantages(negative_nan, 0.0, 1.0, 1.0)
    assert hash_with_nan != hash_advantages(0.0, 0.0, 1.0, 1.0)
    different = [(1.0, 2.0, 3.0, 4.0), (2.0, 1.0, 3.0, 4.0), (1.0, 2.0, 3.0, -4.0)]
    assert len({hash_advantages(*advantages) for advantages in different}) == 3


def test_a_group_that_parts_of_a_step_cut_counts_once():
    other = Row([8, 9], [21], mask=[1], advantages=[1.0])
    group = [Row(PROMPT, [token], mask=[1], advantages=[0.5]) for token in (1, 2, 3, 3)]
    whole = fingerprints([*group, other])
    assert (whole["groups"], whole["sequences"], whole["distinct"]) == (2, 5, 4)
    for cut in range(1, 5):
        rows = [*group, other]
        parts = [hash_batch(DataProto.from_dict(tensors=padded_batch(part))) for part in (rows[:cut], rows[cut:])]
        assert fingerprints_of(join(join(None, parts[0]), parts[1])) == whole


def test_joined_parts_keep_updates_and_versions_only_if_both_have_them():
    row = RowHashes(prompt=1, pair=2, row=3, tokens=4)
    first = BatchHashes([row], versions=(2, 5), updates=(1,))
    second = BatchHashes([row], versions=(1, 3), updates=(2, 3))
    assert join(first, second) == BatchHashes([row, row], versions=(1, 5), updates=(1, 2, 3))
    # What a version before wrote has neither.
    without = BatchHashes([row])
    assert join(first, without) == BatchHashes([row, row])
    assert join(without, second) == BatchHashes([row, row])


def test_the_log_keeps_which_definition_its_fingerprints_follow():
    assert fingerprints([ROW])["definition"] == DEFINITION
    # A change of what is hashed changes these, and needs a new definition.
    assert (DEFINITION, fingerprints([ROW])["rows"]) == (2, "f3cd53772f9187de")
