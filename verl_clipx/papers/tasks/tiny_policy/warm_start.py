"""Supervised warm start of the tiny policy, after which it answers in the right form and is sometimes right."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from rich.progress import track
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl_clipx.common.files import making_folder, write_json
from verl_clipx.common.terminal import TerminalConsole
from verl_clipx.papers.tasks.tiny_policy.model import ModelConfig, build_model
from verl_clipx.papers.tasks.tiny_policy.tokenizer import build_tokenizer

# Part of the cache key. Raise it when a change of the code below changes the result.
RECIPE_VERSION = 1

# That of the second fit of `skill_and_habit`.
HABIT_LEARNING_RATE = 1e-3

# The label that cross_entropy ignores.
_IGNORED = -100


@dataclass(frozen=True)
class Example:
    """One demonstration: chat messages and the response to them."""

    prompt: list[dict[str, str]]
    response: str


@dataclass(frozen=True)
class WarmStartConfig:
    """Length and settings of the supervised fit: at least one step, and at least one example a step.

    Args:
        learning_rate: peak learning rate of AdamW, in (0, 1). It rises linearly during a tenth of the steps and then
            falls linearly to 0.
        seed: seed of the weights and of the order of the examples.

    Raises:
        ValueError: a value is of the wrong type or outside its range; the message names the key.
    """

    steps: int = 850
    batch_size: int = 32
    learning_rate: float = 3e-3
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)

    def __post_init__(self) -> None:
        for key in ("steps", "batch_size"):
            value = getattr(self, key)
            if type(value) is not int or value < 1:
                raise ValueError(f"{key}={value!r} is not a positive integer; give 1 or more")
        if not isinstance(self.learning_rate, float) or not 0 < self.learning_rate < 1:
            raise ValueError(f"learning_rate={self.learning_rate!r} is not between 0 and 1; try 3e-3")
        if type(self.seed) is not int:
            raise ValueError(f"seed={self.seed!r} is not an integer; give one")


Fit = tuple[Sequence[Example], WarmStartConfig]
"""A fit's demonstrations and settings."""


def skill_and_habit(
    examples: Callable[[float], list[Example]], mistakes: float, config: WarmStartConfig, habit_steps: int
) -> list[Fit]:
    """Return a fit to correct demonstrations, followed by a short one to demonstrations of which some are wrong.

    The first fit gives the policy a skill. The second, with few steps and a low learning rate, gives it a bad habit.
    Its samples then differ in reward, and reinforcement learning first has to undo the same habit on all problems.

    Args:
        examples: returns demonstrations with a given share of mistakes among them.
        mistakes: share of mistakes in the second fit, 0 to 1; at 0 there is no second fit.
        config: the settings of the first fit. The second has its own learning rate and number of steps.
        habit_steps: largest number of steps in the second fit.

    Raises:
        ValueError: `mistakes` is not from 0 to 1.
    """
    if not 0 <= mistakes <= 1:
        raise ValueError(f"mistakes={mistakes!r} is not a share; give a number from 0 to 1")
    fits: list[Fit] = [(examples(0.0), config)]
    if mistakes:
        habit = replace(config, steps=min(habit_steps, config.steps), learning_rate=HABIT_LEARNING_RATE)
        fits.append((examples(mistakes), habit))
    return fits


def warm_start(
    fits: Sequence[Fit],
    cache: Path,
    num_threads: int = 2,
    tokenizer: PreTrainedTokenizerBase | None = None,
    name: str = "tiny_policy",
) -> Path:
    """Return a folder with the tiny policy after all fits. If the cache has the folder, nothing is fitted.

    Args:
        fits: at least one, in their order. The settings of the first determine the model's shape and initial weights.
        cache: the folder of finished policies.
        num_threads: torch threads of the fits; more than one can change the last digits of the weights.
        tokenizer: None for the tiny policy's own.
        name: the beginning of the folder's name. Policies with different tokenizers need different ones.

    Raises:
        ValueError: there are no examples, or one is longer than the model's `max_length`.
    """
    if not all(examples for examples, _ in fits):
        raise ValueError("examples is empty; give at least one demonstration")
    fingerprints = [_fingerprint(examples, config) for examples, config in fits]
    folder = cache / "-".join([name, *fingerprints])
    if folder.is_dir():
        return folder
    tokenizer = tokenizer or build_tokenizer()
    _, first_config = fits[0]
    model = build_model(first_config.model, tokenizer, first_config.seed)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for examples, config in fits:
            fit(model, tokenizer, examples, config)
    finally:
        torch.set_num_threads(threads_before)
    with making_folder(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        write_json(partial / "warm_start.json", [asdict(config) for _, config in fits])
    return folder


def fit(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], config: WarmStartConfig
) -> None:
    """Minimise the cross-entropy of the responses' tokens, including the end token, by AdamW.

    Args:
        model: the policy. Its weights are changed.
    """
    input_ids, labels = encode(tokenizer, examples, config.model.max_length)
    generator = torch.Generator().manual_seed(config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm_up = max(1, config.steps // 10)

    def factor_of_learning_rate(step: int) -> float:
        """Return the factor on the peak learning rate at a step, which is counted from 0."""
        rise = (step + 1) / warm_up
        fall = (config.steps - step) / max(1, config.steps - warm_up)
        return min(rise, fall)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor_of_learning_rate)
    # The examples of the next steps. When they run out, all examples follow in a new order.
    order = torch.empty(0, dtype=torch.long)
    model.train()
    for _ in track(range(config.steps), "Warm start", console=TerminalConsole(stderr=True)):
        while len(order) < config.batch_size:
            order = torch.cat([order, torch.randperm(len(examples), generator=generator)])
        rows = order[: config.batch_size]
        order = order[config.batch_size :]
        # The length of the longest example of the batch: the padding behind it is left out.
        width = int((input_ids[rows] != tokenizer.pad_token_id).sum(1).max())
        batch = input_ids[rows, :width]
        logits = model(input_ids=batch, attention_mask=(batch != tokenizer.pad_token_id).long()).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[rows, 1:width].flatten(), ignore_index=_IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def encode(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], max_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn demonstrations into right-padded token ids and labels.

    Returns:
        `input_ids` and `labels`, both int64 [examples, longest]; labels are -100 on prompts and padding.

    Raises:
        ValueError: an example is longer than `max_length`.
    """
    prompts = []
    responses = []
    for example in examples:
        prompts.append(tokenizer.apply_chat_template(example.prompt, add_generation_prompt=True, tokenize=False))
        responses.append(example.response + tokenizer.eos_token)
    prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    response_ids = tokenizer(responses, add_special_tokens=False)["input_ids"]
    input_ids = []
    labels = []
    for prompt, response in zip(prompt_ids, response_ids, strict=True):
        input_ids.append(torch.tensor(prompt + response))
        labels.append(torch.tensor([_IGNORED] * len(prompt) + response))
    longest = max(map(len, input_ids))
    if longest > max_length:
        raise ValueError(f"max_length={max_length} is shorter than an example of {longest} tokens; raise it")
    return (
        pad_sequence(input_ids, batch_first=True, padding_value=tokenizer.pad_token_id),
        pad_sequence(labels, batch_first=True, padding_value=_IGNORED),
    )


def _fingerprint(examples: Sequence[Example], config: WarmStartConfig) -> str:
    """Return a hash of everything that determines the result of a fit, apart from the model that it begins with."""
    content = json.dumps([RECIPE_VERSION, asdict(config), [asdict(example) for example in examples]])
    return hashlib.sha256(content.encode()).hexdigest()[:16]
