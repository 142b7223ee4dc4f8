"""Prompt templates of the papers, by name; templates.yaml has their wording.

A template turns named fields into chat messages. Base models were trained in the papers on plain text without chat
marks; for such a template (`plain_text`) give verl
`actor_rollout_ref.model.custom_chat_template` the value of PLAIN_TEXT_CHAT_TEMPLATE, so that the tokenizer adds none.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import Any

import yaml

Messages = list[dict[str, str]]

PLAIN_TEXT_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Jinja chat template that writes the messages as they are."""

# "3 4 = 7" fits too many texts to be taken for a template's, and a bare text fits all.
_FITTING_ALL = ("countdown_compact", "reversal_compact")

_FIELD = re.compile(r"\{([a-z]+)\}")


@dataclass(frozen=True)
class PromptTemplate:
    """One way to put a problem to a policy; templates.yaml says what the fields are."""

    name: str
    messages: tuple[tuple[str, str], ...]
    plain_text: bool
    source: str
    shared: tuple[str, ...] = ()

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


def _read() -> dict[str, PromptTemplate]:
    entries = yaml.safe_load(files("verl_clipx.tasks").joinpath("templates.yaml").read_text(encoding="utf-8"))
    return {
        name: PromptTemplate(
            name, tuple(item for message in entry.pop("messages") for item in message.items()), **entry
        )
        for name, entry in entries.items()
    }


TEMPLATES: dict[str, PromptTemplate] = _read()


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

    Returns:
        The fields, one a line, again without the words of a template that made them; the contents of all messages if
        no template made these. Where several could have, the one with the most text of its own did.
    """
    for template in sorted(TEMPLATES.values(), key=lambda template: -template._literal_length):
        if template.name not in _FITTING_ALL and (fields := template.match(messages)) is not None:
            own = (value for name, value in fields.items() if name not in template.shared)
            return "\n".join(problem_text([{"role": "user", "content": value}]) for value in own)
    return "\n".join(message["content"] for message in messages)
