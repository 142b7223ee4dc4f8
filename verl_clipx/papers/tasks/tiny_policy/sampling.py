"""Samples responses from a policy to measure it. Has the options and the output of commands that prepare a policy."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from verl_clipx.papers.tasks.definition import Row

Messages = list[dict[str, str]]

MAX_NEW_TOKENS = 24

# The options of the commands.
Cache = Annotated[Path, typer.Argument(help="Folder that finished policies are kept in.")]
Mistakes = Annotated[float, typer.Option(help="Share of mistakes in the last steps of the fit, 0 to 1.")]
Steps = Annotated[int, typer.Option(help="Optimizer steps; more of them leave less to reinforcement learning.")]
Seed = Annotated[int, typer.Option(help="Seed of the weights, the examples and their order.")]
Threads = Annotated[int, typer.Option(help="Threads of the fit, at most as many as there are free cores.")]


@torch.inference_mode()
def sample_responses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Messages],
    seed: int,
    temperature: float = 1.0,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[str]:
    """Sample one response per prompt, all prompts in one batch.

    Args:
        model: a causal language model; it is put into evaluation mode for the call.
        seed: seed of the samples; torch's global generator is not changed.
        temperature: divisor of the logits, above 0.
        max_new_tokens: the largest number of tokens of a response.
    """
    was_training = model.training
    model.eval()
    texts = []
    for prompt in prompts:
        texts.append(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False))
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        output = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            do_sample=True,
            temperature=temperature,
            # Neither leaves out any token.
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_new_tokens,
        )
    model.train(was_training)
    prompt_length = batch["input_ids"].shape[1]
    return tokenizer.batch_decode(output[:, prompt_length:], skip_special_tokens=True)


def mean_scores(
    folder: Path,
    rows: Sequence[Row],
    seed: int,
    reward: Callable[..., dict[str, float]],
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> dict[str, float]:
    """Return the mean of each part of a task's reward, over one response per row, sampled at temperature 1.

    Args:
        folder: a model with its tokenizer, in Hugging Face format.
        rows: at least one.
        seed, max_new_tokens: as for `sample_responses`.
        reward: the task's `compute_score`.
    """
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [row["prompt"] for row in rows]
    responses = sample_responses(model, tokenizer, prompts, seed, max_new_tokens=max_new_tokens)
    scores = []
    for row, response in zip(rows, responses, strict=True):
        scores.append(reward(row["data_source"], response, row["reward_model"]["ground_truth"]))
    return {part: sum(score[part] for score in scores) / len(scores) for part in scores[0]}


def print_policy(
    prepare: Callable[[], tuple[Path, Sequence[Row]]],
    seed: int,
    reward: Callable[..., dict[str, float]],
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> None:
    """Print a prepared policy's folder to standard output, and its `mean_scores` on held-out rows to standard error.

    A ValueError of `prepare` ends the command with its message.

    Args:
        prepare: returns the folder and the held-out rows.
        seed, reward, max_new_tokens: as for `mean_scores`.
    """
    started = time.perf_counter()
    try:
        folder, held_out = prepare()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    seconds = time.perf_counter() - started
    means = mean_scores(folder, held_out, seed, reward, max_new_tokens)
    figures = ", ".join(f"{part} {mean:.3f}" for part, mean in means.items())
    typer.echo(f"warm start: {seconds:.0f} s; held out, {len(held_out)} problems: {figures}", err=True)
    typer.echo(folder)
