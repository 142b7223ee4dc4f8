"""Checks that batches divide over optimizer steps and ranks, ranks over machines, and rows over micro-batches.

verl checks some of this in the driver, some in its workers minutes after the launch, and some only when the first long
response arrives. What depends on the model (attention heads) is not looked at.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_reference_policy

from verl_clipx.losses.base.refusal import format_exactly
from verl_clipx.run.keys import (
    ACTOR,
    DEVICES_A_NODE,
    FETCHED_PROMPTS,
    FSDP_SIZE,
    GROUP_FILTERING,
    LONGEST_PROMPT,
    LONGEST_RESPONSE,
    MINI_BATCH,
    NODES,
    REFERENCE,
    RESPONSES,
    ROLLOUT,
    ROLLOUT_PROMPTS,
    SEQUENCE_PARALLEL,
    STRATEGY,
    TENSOR_PARALLEL,
    read,
)
from verl_clipx.run.trainer import trainer_of

# The engines whose rules are known. Under others, ranks share a sequence or the layers in other ways.
FSDP = ("fsdp", "fsdp2")
# The keys whose numbers a script may count on the machine on which it runs, where it may find none.
COUNTED = (NODES, DEVICES_A_NODE)
# The keys of the other numbers with which the rules always calculate.
SIZES = (ROLLOUT_PROMPTS, MINI_BATCH, RESPONSES, LONGEST_PROMPT, LONGEST_RESPONSE)
# verl's older key for the number of GPUs that share a sequence, and the one that replaces it.
SEQUENCE_PARALLEL_OF_ACTOR = SEQUENCE_PARALLEL[:2]
# The keys of the numbers whose product is the number of GPUs of a rollout server.
SERVER_SIZES = (
    TENSOR_PARALLEL,
    f"{ROLLOUT}.data_parallel_size",
    f"{ROLLOUT}.pipeline_model_parallel_size",
)


def counted_nothing(config: DictConfig) -> list[str]:
    """Return those keys of `COUNTED` that are 0 or empty, because a script found no node or no GPU to count."""
    values = {key: OmegaConf.select(config, key) for key in COUNTED}
    return [key for key, value in values.items() if value == "" or (type(value) is int and value == 0)]


def wrong_numbers(config: DictConfig) -> list[str]:
    """Return a message for each value that the rules need and that is not a whole number above 0.

    The list is empty where the rules are not known (`has_rules`).

    Args:
        config: verl's whole configuration. There is no message on the keys that `counted_nothing` returns.
    """
    if not has_rules(config):
        return []
    uncounted = counted_nothing(config)
    needed = [*COUNTED, *SIZES, sequence_parallel_key(config), *SERVER_SIZES]
    values = {key: OmegaConf.select(config, key) for key in needed if key not in uncounted}
    # null means that verl fetches a whole rollout batch at once.
    fetched = OmegaConf.select(config, FETCHED_PROMPTS)
    if fetched is not None:
        values[FETCHED_PROMPTS] = fetched
    for micro_batch in micro_batches_of(config):
        value = OmegaConf.select(config, micro_batch.key)
        if micro_batch.is_token_budget:
            # Nothing has to divide a budget, which may be a fraction.
            is_needed = not isinstance(value, int | float) or value < 1
        else:
            # If a size is not set, verl's own check says so.
            is_needed = value is not None
        if is_needed:
            values[micro_batch.key] = value
    messages = []
    for key, value in values.items():
        if type(value) is not int or value < 1:
            messages.append(f"{key}={format_exactly(value)}: must be a whole number above 0.")
    shard = OmegaConf.select(config, FSDP_SIZE)
    if type(shard) is not int:
        messages.append(f"{FSDP_SIZE}={format_exactly(shard)}: must be a whole number; -1 stands for all GPUs.")
    return messages


def has_rules(config: DictConfig) -> bool:
    """Return whether the rules are known for the engine and the trainer of a run."""
    # If sampling has machines of its own, other sizes have to divide.
    return OmegaConf.select(config, STRATEGY) in FSDP and trainer_of(read(config)).in_step


def sequence_parallel_key(config: DictConfig) -> str:
    """Return the key that says how many GPUs share a sequence: verl's older one, unless it is 1, its default."""
    older, newer = SEQUENCE_PARALLEL_OF_ACTOR
    return newer if OmegaConf.select(config, older) == 1 else older


class MicroBatchSplit(NamedTuple):
    """The micro-batches of one kind of pass.

    Attributes:
        key: the key with the size of a micro-batch in responses, or with its most tokens on a GPU.
        is_token_budget: whether the key has a number of tokens.
        prompts: the number of prompts whose responses are divided into micro-batches, over all ranks.
    """

    key: str
    is_token_budget: bool
    prompts: int


def micro_batches_of(config: DictConfig) -> list[MicroBatchSplit]:
    """Return the micro-batches of an update, of the pass for old_log_probs, and of the reference model, if one is."""
    rollout_prompts = OmegaConf.select(config, ROLLOUT_PROMPTS)
    mini_batch = OmegaConf.select(config, MINI_BATCH)
    passes = [
        (f"{ACTOR}.ppo", f"{ACTOR}.use_dynamic_bsz", mini_batch),
        (f"{ROLLOUT}.log_prob", f"{ROLLOUT}.log_prob_use_dynamic_bsz", rollout_prompts),
    ]
    if need_reference_policy(config):
        passes.append((f"{REFERENCE}.log_prob", f"{REFERENCE}.log_prob_use_dynamic_bsz", rollout_prompts))
    micro_batches = []
    for prefix, switch, prompts in passes:
        is_token_budget = bool(OmegaConf.select(config, switch))
        name = "max_token_len_per_gpu" if is_token_budget else "micro_batch_size_per_gpu"
        micro_batches.append(MicroBatchSplit(f"{prefix}_{name}", is_token_budget, prompts))
    return micro_batches


def what_does_not_divide(config: DictConfig) -> list[str]:
    """Return a message for each rule that a run breaks, with the key, its value and what to do.

    The list is empty where the rules are not known (`has_rules`), and where the number of nodes or GPUs is 0 or empty.

    Args:
        config: verl's whole configuration, in which `wrong_numbers` finds nothing. Where it does, its messages are
            returned, because the rules cannot be checked.
    """
    if not has_rules(config):
        return []
    messages = wrong_numbers(config)
    if messages:
        return messages
    if counted_nothing(config):
        return []
    gpus = math.prod(OmegaConf.select(config, key) for key in COUNTED)
    key = sequence_parallel_key(config)
    gpus_a_sequence = OmegaConf.select(config, key)
    if gpus % gpus_a_sequence:
        # The number of ranks, which the other rules need, is then not whole.
        return [f"{key}={gpus_a_sequence}: does not divide the {gpus} GPUs. Choose a divisor."]
    ranks = gpus // gpus_a_sequence
    return [
        *check_batches(config, ranks),
        *check_micro_batches(config, ranks, gpus_a_sequence),
        *check_groups_of_gpus(config, gpus),
    ]


def check_batches(config: DictConfig, ranks: int) -> Iterator[str]:
    """Yield messages for sizes that do not divide the rollout batch, or whose responses do not divide over ranks."""
    prompts = OmegaConf.select(config, ROLLOUT_PROMPTS)
    fetched = OmegaConf.select(config, FETCHED_PROMPTS)
    responses = OmegaConf.select(config, RESPONSES)
    mini_batch = OmegaConf.select(config, MINI_BATCH)
    if prompts % mini_batch:
        yield (
            f"{MINI_BATCH}={mini_batch}: does not divide {ROLLOUT_PROMPTS}={prompts} (both in prompts): verl's v1 "
            f"trainer would fill the last mini-batch with padding, the older one stops. Choose a divisor of {prompts}."
        )
    elif mini_batch * responses % ranks:
        multiple = ranks // math.gcd(ranks, responses)
        yield (
            f"{MINI_BATCH}={mini_batch}: {mini_batch} prompts x {RESPONSES}={responses} = {mini_batch * responses} "
            f"responses do not divide over {ranks} data-parallel ranks. Use a multiple of {multiple} prompts, or "
            f"change {NODES} or {sequence_parallel_key(config)}."
        )
    if fetched and prompts % fetched and not OmegaConf.select(config, GROUP_FILTERING):
        yield f"{FETCHED_PROMPTS}={fetched}: does not divide {ROLLOUT_PROMPTS}={prompts}. Leave it null."


def check_micro_batches(config: DictConfig, ranks: int, gpus_a_sequence: int) -> Iterator[str]:
    """Yield messages for micro-batches that do not divide a rank's responses, and for token budgets that are too small.

    Args:
        config: verl's whole configuration.
        ranks: the number of data-parallel ranks.
        gpus_a_sequence: how many GPUs share a sequence, and so their token budgets.
    """
    responses = OmegaConf.select(config, RESPONSES)
    longest = OmegaConf.select(config, LONGEST_PROMPT) + OmegaConf.select(config, LONGEST_RESPONSE)
    for key, is_token_budget, prompts in micro_batches_of(config):
        value = OmegaConf.select(config, key)
        rows_of_rank = prompts * responses // ranks
        if is_token_budget and value * gpus_a_sequence < longest:
            yield (
                f"{key}={value}: times {gpus_a_sequence} GPUs that share a sequence is less than {LONGEST_PROMPT} + "
                f"{LONGEST_RESPONSE} = {longest}: verl stops when such a sequence comes. Set at least "
                f"{math.ceil(longest / gpus_a_sequence)}, or share sequences over more GPUs "
                f"({sequence_parallel_key(config)})."
            )
        # If the size is not set, verl's own check says so.
        elif not is_token_budget and value is not None and rows_of_rank % value:
            yield (
                f"{key}={value}: does not divide the {rows_of_rank} responses of a data-parallel rank. Choose a "
                f"divisor, or set {ACTOR}.use_dynamic_bsz=True."
            )


def check_groups_of_gpus(config: DictConfig, gpus: int) -> Iterator[str]:
    """Yield messages if the GPUs of a rollout server, or of one copy of the parameters, do not divide all GPUs."""
    machine = OmegaConf.select(config, DEVICES_A_NODE)
    server = math.prod(OmegaConf.select(config, key) for key in SERVER_SIZES)
    if gpus % server or (server % machine and machine % server):
        yield (
            f"{TENSOR_PARALLEL}={OmegaConf.select(config, TENSOR_PARALLEL)}: a rollout server takes {server} GPUs, "
            f"which does not divide the {gpus} GPUs, {machine} a machine. Choose a divisor of {machine}."
        )
    shard = OmegaConf.select(config, FSDP_SIZE)
    if 0 < shard < gpus and gpus % shard:
        yield (
            f"{FSDP_SIZE}={shard}: does not divide the {gpus} GPUs. Choose a divisor, or -1 to share "
            "the parameters over all of them."
        )
