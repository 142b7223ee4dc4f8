"""Turns questions into the token ids that the policy continues."""

from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from verl_clipx.papers.evaluation.benchmark import Benchmark
from verl_clipx.papers.evaluation.scores import load_text


def encode_prompts(tokenizer: PreTrainedTokenizerBase, benchmark: Benchmark, template: str) -> list[list[int]]:
    """Return the token ids of every question's prompt.

    Args:
        template: "chat" applies the tokenizer's chat template with the generation prompt, as verl's data set does.
            "plain" concatenates the messages' contents without special tokens, as verl trains under a chat template
            that writes only the contents. `package.module:NAME` applies the Jinja template of that name.

    Raises:
        ValueError: "chat" with a tokenizer that has no chat template, a name that is not a text, a template that
            rejects the messages, or an empty prompt.
    """
    # Renders the templates. It belongs to the extra `tools`; the rest of the command reports first if that is missing.
    from jinja2 import TemplateError

    jinja = load_text(template, "--template") if ":" in template else None
    if template == "chat" and not tokenizer.chat_template:
        raise ValueError(
            "--template chat: the model's tokenizer has no chat template; use --template plain for a base model"
        )
    encoded = []
    for index, question in enumerate(benchmark.questions):
        where = f"benchmark {benchmark.name}, question {index}"
        try:
            encoded.append(_encode(tokenizer, question.prompt, template, jinja))
        except TemplateError as error:
            raise ValueError(f"{where}: the chat template refuses its prompt ({error})") from None
        if not encoded[-1]:
            raise ValueError(f"{where}: its prompt has no tokens")
    return encoded


def _encode(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], template: str, jinja: str | None
) -> list[int]:
    if template != "plain":
        options = {"add_generation_prompt": True, "return_dict": False}
        return list(tokenizer.apply_chat_template(messages, chat_template=jinja, **options))
    text = "".join(message["content"] for message in messages)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None) -> frozenset[int]:
    """Return the tokens that end a response: the tokenizer's end of sequence and those of the generation config."""
    found = getattr(generation_config, "eos_token_id", None)
    listed = found if isinstance(found, list | tuple) else [found]
    stops = frozenset(token for token in (*listed, tokenizer.eos_token_id) if token is not None)
    if not stops:
        raise ValueError("the model names no end-of-sequence token: set eos_token_id in its generation_config.json")
    return stops


def check_context(benchmark: Benchmark, prompts: list[list[int]], max_tokens: int, context: int | None) -> None:
    """Refuse to sample responses that the model's context has no room for.

    A response cut off by the context would wrongly count as truncated by --max-tokens.

    Args:
        context: the model's max_position_embeddings; None if it has no limit.
    """
    longest = max(map(len, prompts))
    if context is not None and longest + max_tokens > context:
        raise ValueError(
            f"--max-tokens {max_tokens}: benchmark {benchmark.name} has a prompt of {longest} tokens and the model's "
            f"context holds {context}; set --max-tokens to at most {context - longest}, or "
            "raise max_position_embeddings in the model's config.json if its position encoding allows"
        )
