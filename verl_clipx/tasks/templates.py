"""Prompt templates of the papers, by name.

A template turns named fields into chat messages. Base models were trained in the papers on plain text without chat
marks; for such a template (`plain_text`) give verl
`actor_rollout_ref.model.custom_chat_template` the value of PLAIN_TEXT_CHAT_TEMPLATE, so that the tokenizer adds none.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Messages = list[dict[str, str]]

PLAIN_TEXT_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Jinja chat template that writes the messages as they are."""

_FIELD = re.compile(r"\{([a-z]+)\}")


@dataclass(frozen=True)
class PromptTemplate:
    """One way to put a problem to a policy."""

    name: str
    """What `--prompt` calls it."""

    messages: tuple[tuple[str, str], ...]
    """Role and text of each message; `{field}` in lower-case letters stands for a field, other braces are text."""

    plain_text: bool
    """Whether the text already holds everything, so that no chat marks belong around it."""

    source: str
    """Paper, repository or upstream project that uses it."""

    shared: tuple[str, ...] = ()
    """Fields that hold the same in every prompt of a set, such as a solved example: no part of the problem."""

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields, in order of appearance."""
        return tuple(dict.fromkeys(name for _, text in self.messages for name in _FIELD.findall(text)))

    def render(self, **fields: Any) -> Messages:
        """Return the chat messages with the fields filled in.

        Args:
            **fields: one value a field; `str` of it is inserted, and braces in it are left alone.

        Raises:
            ValueError: if a field is missing or unknown; the message names the template and its fields.
        """
        if set(fields) != set(self.fields):
            raise ValueError(f"template {self.name!r} takes the fields {list(self.fields)}, not {sorted(fields)}")
        return [
            {"role": role, "content": _FIELD.sub(lambda match: str(fields[match[1]]), text)}
            for role, text in self.messages
        ]

    @cached_property
    def _patterns(self) -> tuple[tuple[str, re.Pattern[str]], ...]:
        # Odd parts of the split are field names. A field that appears again must repeat what it held.
        patterns, seen = [], set()
        for role, text in self.messages:
            pattern = ""
            for index, part in enumerate(_FIELD.split(text)):
                if index % 2 == 0:
                    pattern += re.escape(part)
                elif part in seen:
                    pattern += f"(?P={part})"
                else:
                    seen.add(part)
                    pattern += f"(?P<{part}>.*)"
            patterns.append((role, re.compile(pattern, re.DOTALL)))
        return tuple(patterns)

    @cached_property
    def _literal_length(self) -> int:
        return sum(len(_FIELD.sub("", text)) for _, text in self.messages)

    def match(self, messages: Sequence[dict[str, str]]) -> dict[str, str] | None:
        """Return the fields that render to these messages, or None if the template did not make them."""
        if len(messages) != len(self.messages):
            return None
        fields: dict[str, str] = {}
        for message, (role, pattern) in zip(messages, self._patterns, strict=True):
            found = pattern.fullmatch(message["content"]) if message["role"] == role else None
            if found is None:
                return None
            fields |= found.groupdict()
        return fields


# The wording of a template is part of what a paper measured: it is kept to the letter, oddities included.
_TEMPLATES = (
    PromptTemplate(
        name="r1_base",
        messages=(
            (
                "user",
                "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. "
                "The assistant first thinks about the reasoning process in the mind and then provides the user with "
                "the answer. The reasoning process and answer are enclosed within <think> </think> and <answer> "
                "</answer> tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here "
                "</answer>. \n\nUser: You must put your answer inside <answer> </answer> tags, i.e.,\n<answer> answer "
                "here </answer>. And your final answer will be extracted automatically by the \\boxed{} tag.\n"
                "{problem}\nAssistant: <think>",
            ),
        ),
        plain_text=True,
        source="Open-Reasoner-Zero; ACPO's math runs",
    ),
    PromptTemplate(
        name="boxed_step_by_step",
        messages=(("user", "{problem} Let's think step by step and output the final answer within \\boxed{}."),),
        plain_text=False,
        source="DeepScaleR; AR-Lopti's math runs",
    ),
    PromptTemplate(
        name="kk_chat",
        messages=(
            (
                "system",
                "You are a helpful assistant. The assistant first thinks about the reasoning process in the mind and "
                "then provides the user with the answer. The reasoning process and answer are enclosed within <think> "
                "</think> and<answer> </answer> tags, respectively, i.e., <think> reasoning process here </think>"
                "<answer> answer here </answer>.  Now the user asks you to solve a logical reasoning problem. After "
                "thinking, when you finally reach a conclusion, clearly state the identity of each character within "
                "<answer> </answer> tags. i.e., <answer> (1) Zoey is a knight\n(2) ... </answer>.\n",
            ),
            ("user", "{problem}\n"),
        ),
        plain_text=False,
        source="Logic-RL; AR-Lopti's Knights and Knaves runs, which also put <think> after the assistant's mark",
    ),
    PromptTemplate(
        name="kk_puzzle",
        messages=(
            (
                "user",
                "A very special island is inhabited only by knights and knaves. Knights always tell the truth, and "
                "knaves always lie. {puzzle} So who is a knight and who is a knave?",
            ),
        ),
        plain_text=False,
        source="K&K (arXiv 2410.23123): the problem of kk_chat, the same words around every puzzle",
    ),
    PromptTemplate(
        name="table_question",
        messages=(
            (
                "user",
                "Answer a question about a table. Headers above or left of others are joined by ' > '.\n\n{table}\n\n"
                "Question: {question}\nAnswer with the number, or with the words of the table, and nothing else; put "
                "' | ' between several answers.",
            ),
        ),
        plain_text=False,
        source="this project: the problem of HiTab's prompts, around which r1_base or boxed_step_by_step goes",
    ),
    PromptTemplate(
        name="reasoning_short",
        messages=(("system", "Answer with the {kind} only."), ("user", "{problem}")),
        plain_text=False,
        source="this project: a system message of its own spares a small model's longer one",
        shared=("kind",),
    ),
    PromptTemplate(
        name="reasoning_shown",
        messages=(
            ("system", "Answer with the {kind} only."),
            ("user", "{example}"),
            ("assistant", "{result}"),
            ("user", "{problem}"),
        ),
        plain_text=False,
        source="this project: a solved problem before the one that is asked shows a small model the form",
        shared=("kind", "example", "result"),
    ),
    PromptTemplate(
        name="countdown_compact",
        messages=(("user", "{numbers} = {target}"),),
        plain_text=False,
        source="this project: a few tokens, for the policy of the quick start",
    ),
    PromptTemplate(
        name="countdown_base",
        messages=(
            (
                "user",
                "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. "
                "The assistant first thinks about the reasoning process in the mind and then provides the user with "
                "the answer.\nUser: Using the numbers {numbers}, create an equation that equals {target}. You can use "
                "basic arithmetic operations (+, -, *, /) and each number can only be used once. Show your work in "
                "<think> </think> tags. And return the final answer in <answer> </answer> tags, for example <answer> "
                "(1 + 2) / 3 </answer>.\nAssistant: Let me solve this step by step.\n<think>",
            ),
        ),
        plain_text=True,
        source="TinyZero; ACPO's Countdown runs on base models",
    ),
    PromptTemplate(
        name="countdown_base_boxed",
        messages=(
            (
                "user",
                "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. "
                "The assistant first thinks about the reasoning process in the mind and then provides the user with "
                "the answer.\nUser: Using the numbers {numbers}, create an equation that equals {target}. You can use "
                "basic arithmetic operations (+, -, *, /) and each number can only be used once. Show your work in "
                "<think> </think> tags. \nAnd your final answer will be extracted automatically by the \\boxed{} tag, "
                "for example \\boxed{(1 + 2) / 3}.\nAssistant: Let me solve this step by step.\n<think>",
            ),
        ),
        plain_text=True,
        source="ACPO's Countdown runs on base models, boxed variant",
    ),
    PromptTemplate(
        name="countdown_qwen_instruct",
        messages=(
            (
                "user",
                "<|im_start|>system\nYou are a helpful assistant. You first thinks about the reasoning process in the "
                "mind and then provides the user with the answer.<|im_end|>\n<|im_start|>user\n Using the numbers "
                "{numbers}, create an equation that equals {target}. You can use basic arithmetic operations (+, -, "
                "*, /) and each number can only be used once. Show your work in <think> </think> tags. And return the "
                "final answer in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>.<|im_end|>\n"
                "<|im_start|>assistant\nLet me solve this step by step.\n<think>",
            ),
        ),
        plain_text=True,
        source="TinyZero; ACPO's Countdown runs on Qwen2.5 instruct models, chat marks and opening words in the text",
    ),
)

TEMPLATES: dict[str, PromptTemplate] = {template.name: template for template in _TEMPLATES}


def template_named(name: str) -> PromptTemplate:
    """Return the template of that name.

    Raises:
        ValueError: if there is none; the message lists those there are.
    """
    try:
        return TEMPLATES[name]
    except KeyError:
        raise ValueError(f"prompt={name!r} is not a template; there are {', '.join(TEMPLATES)}") from None


def problem_text(messages: Sequence[dict[str, str]]) -> str:
    """Return what is particular to a prompt: the fields of the template that made it, without the template's words.

    Args:
        messages: chat messages, each with `role` and `content`.

    Returns:
        The fields, one a line, again without the words of a template that made them; the contents of all messages if
        no template made these. Where several could have, the one with the most text of its own did.
    """
    for template in sorted(_TEMPLATES, key=lambda template: -template._literal_length):
        # "3 4 = 7" fits too many texts to be taken for a template's.
        if template.name != "countdown_compact" and (fields := template.match(messages)) is not None:
            own = (value for name, value in fields.items() if name not in template.shared)
            return "\n".join(problem_text([{"role": "user", "content": value}]) for value in own)
    return "\n".join(message["content"] for message in messages)
