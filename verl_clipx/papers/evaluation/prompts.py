"""Reads what a model's tokenizer makes of prompts: their chat template, their length, and what ends a response."""

from dataclasses import dataclass

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from verl_clipx.papers.evaluation.benchmark import Benchmark
from verl_clipx.papers.evaluation.scores import import_object

TEMPLATES = {"chat": None, "plain": "{% for message in messages %}{{ message['content'] }}{% endfor %}"}
"""The chat templates for which --template has a word.

"chat" is the tokenizer's own, here None. "plain" is the text of the messages alone, as base models are trained.
"""


@dataclass(frozen=True)
class PromptFormat:
    """How prompts are written, and how responses end.

    Args:
        template: the Jinja chat template that replaces the tokenizer's own; None if none replaces it.
        longest_prompt: number of tokens of the longest prompt.
        stop_token_ids: the tokens that end a response: the tokenizer's end of sequence, and what the model's generation
            config lists.
    """

    template: str | None
    longest_prompt: int
    stop_token_ids: list[int]


def load_template(name: str) -> str | None:
    """Return the chat template that --template names.

    Args:
        name: a key of TEMPLATES, or `package.module:NAME`; see `SamplingSettings`.

    Returns:
        What `PromptFormat` has as `template`.

    Raises:
        ValueError: there is no such template.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    return import_object(name, "--template", str)


def read_prompt_format(folder: str, benchmark: Benchmark, template: str | None, max_tokens: int) -> PromptFormat:
    """Return the format of a benchmark's prompts for a model, after checking that the model can take them.

    The prompts are encoded as verl encodes them.

    Args:
        folder: the folder of the model's tokenizer and configuration.
        benchmark: the questions, with their prompts.
        template: from `load_template`.
        max_tokens: the limit on a response, in tokens.

    Raises:
        ValueError: the tokenizer has no chat template or no end of sequence, the template rejects a prompt, a prompt
            has no tokens, or the model's context is too short for the longest prompt and response. A response that the
            context cuts would wrongly count as truncated by --max-tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if template is None and not tokenizer.chat_template:
        raise ValueError(
            "--template chat: the model's tokenizer has no chat template; use --template plain for a base model"
        )
    longest_prompt = _count_longest_prompt(tokenizer, benchmark, template)
    context = getattr(AutoConfig.from_pretrained(folder).get_text_config(), "max_position_embeddings", None)
    if context is not None and longest_prompt + max_tokens > context:
        raise ValueError(
            f"--max-tokens {max_tokens}: benchmark {benchmark.name} has a prompt of {longest_prompt} tokens and the "
            f"model's context holds {context}; set --max-tokens to at most {context - longest_prompt}, or "
            "raise max_position_embeddings in the model's config.json if its position encoding allows"
        )
    return PromptFormat(
        template=template,
        longest_prompt=longest_prompt,
        stop_token_ids=_stop_token_ids(folder, tokenizer.eos_token_id),
    )


def _count_longest_prompt(tokenizer: PreTrainedTokenizerBase, benchmark: Benchmark, template: str | None) -> int:
    """Return how many tokens a benchmark's longest prompt has.

    Raises:
        ValueError: the template rejects a prompt, or a prompt has no tokens.
    """
    # jinja2 renders the templates. It is imported here, so that this module can be imported without it. Without it, a
    # command that comes to this line ends with a message that says how to install it.
    from jinja2 import TemplateError

    longest = 0
    for row, question in enumerate(benchmark.questions):
        where = f"benchmark {benchmark.name}, question {row}"
        try:
            encoded = tokenizer.apply_chat_template(
                question["prompt"], chat_template=template, add_generation_prompt=True, return_dict=False
            )
        except TemplateError as error:
            raise ValueError(f"{where}: the chat template refuses its prompt ({error})") from None
        if len(encoded) == 0:
            raise ValueError(f"{where}: its prompt has no tokens")
        longest = max(longest, len(encoded))
    return longest


def _stop_token_ids(folder: str, end_of_sequence: int | None) -> list[int]:
    """Return the tokens that end a response, in ascending order.

    Args:
        folder: the folder of the model. Its generation config may name no such token, one, or several.
        end_of_sequence: the tokenizer's end of sequence; None if it has none.

    Raises:
        ValueError: neither the model nor its tokenizer names such a token.
    """
    try:
        named = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        # The model has no generation config.
        named = None
    token_ids = set(named) if isinstance(named, list) else {named}
    token_ids.add(end_of_sequence)
    token_ids.discard(None)
    if not token_ids:
        raise ValueError("the model names no end-of-sequence token: set eos_token_id in its generation_config.json")
    return sorted(token_ids)
