"""Micro-batches as verl's FSDP engine hands them to the loss function: jagged, prompts of one or two tokens; a rollout
batch as the worker's observers see it, for tests that call them without a worker. Two neighbouring rows have the same
prompt's name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_clipx.training.worker.step import Observer, RolloutBatch


def jagged(values):
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


def micro_batch(batch, rows, *, dp_size=1, total=None, sequences=6, entropy=None, reference=None):
    """Some rows of a padded batch as verl's micro-batch, and the model's output, whose leaf `log_prob` has a gradient.

    Args:
        batch: old_log_prob, log_prob, advantages, mask, each (sequences, length), and perhaps sampler_log_prob, without
            which the old policy sampled.
        dp_size, total, sequences: ranks, tokens and sequences of the whole mini-batch.
    """
    response_lengths = [max(int(length), 1) for length in batch["mask"][rows].sum(1)]
    prompt_lengths = [1 + row % 2 for row in rows]

    def response(tensor):
        return jagged([tensor[row][:length] for row, length in zip(rows, response_lengths, strict=True)])

    def prompt_and_response(tensor):
        # The model's output for a response token stands one position to its left.
        return [
            torch.cat([tensor.new_full((prompt - 1,), 9.0), tensor[row][:response], tensor.new_full((1,), 9.0)])
            for row, response, prompt in zip(rows, response_lengths, prompt_lengths, strict=True)
        ]

    fields = {
        "prompts": jagged([torch.zeros(length, dtype=torch.long) for length in prompt_lengths]),
        "responses": jagged([torch.zeros(length, dtype=torch.long) for length in response_lengths]),
        "response_mask": response(batch["mask"]),
        "old_log_probs": response(batch["old_log_prob"]),
        "rollout_log_probs": response(batch.get("sampler_log_prob", batch["old_log_prob"])),
        "advantages": response(batch["advantages"]),
    }
    if reference is not None:
        fields["ref_log_prob"] = response(reference)
    data = TensorDict(fields, batch_size=[len(rows)])
    total = int(batch["mask"].sum()) if total is None else total
    tu.assign_non_tensor(data, dp_size=dp_size, batch_num_tokens=total, global_batch_size=sequences)
    tu.assign_non_tensor_stack(data, "uid", [f"prompt {row // 2}" for row in rows])
    output = {"log_probs": jagged(prompt_and_response(batch["log_prob"]))}
    if entropy is not None:
        output["entropy"] = jagged(prompt_and_response(entropy))
    return data, output


@contextmanager
def rollout_batch(observer: Observer, data: Any, before: int = 0) -> Iterator[None]:
    """Begins and ends a rollout batch around the block; `before` is how many verl counted earlier."""
    batch = RolloutBatch(before)
    observer.begin_rollout_batch(data, batch)
    yield
    observer.end_rollout_batch(batch)
