"""Prompt templates of the papers, by name; templates.yaml has their wording.

A template turns named fields into chat messages. The papers trained base models on plain text without chat markers. For
such a template (`plain_text`), set verl's `actor_rollout_ref.model.custom_chat_template` to PLAIN_TEXT_CHAT_TEMPLATE,
so that the tokenizer adds no markers.
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

# Too many texts look like "3 4 = 7" to conclude that the template made them, and every text fits a bare field.
_FITTING_ALL = ("countdown_compact", "reversal_compact")

_FIELD = re.compile(r"\{([a-z]+)\}")


@dataclass(frozen=True)
class PromptTemplate:
    """One way to pose a problem to a policy; templates.yaml explains the attributes."""

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
            **fields: a value for each field. It is inserted as `str`, and braces in it are not fields.

        Raises:
            ValueError: a field is missing or unknown; the message names the template and its fields.
        """
        if set(fields) != set(self.fields):
            raise ValueError(f"template {self.name!r} takes the fields {list(self.fields)}, not {sorted(fields)}")
        return [
            {"role": role, "content": _FIELD.sub(lambda match: str(fields[match[1]]), text)}
            for role, text in self.messages
        ]

    @cached_property
    def _patterns(self) -> tuple[tuple[str, re.Pattern[str]], ...]:
        # Odd parts of the split are field names. A field that appears again must have the same value.
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
        ValueError: there is none; the message lists the names of all.
    """
    try:
        return TEMPLATES[name]
    except KeyError:
        raise ValueError(f"prompt={name!r} is not a template; there are {', '.join(TEMPLATES)}") from None


def problem_text(messages: Sequence[dict[str, str]]) -> str:
    """Return what is specific to a prompt: the fields of the template that made it, without the template's own text.

    If several templates could have made the prompt, the one with the longest text of its own counts.

    Returns:
        The fields, one per line. A field that another template made is reduced in the same way. If no template made the
        messages, the contents of all of them.
    """
    for template in sorted(TEMPLATES.values(), key=lambda template: -template._literal_length):
        if template.name not in _FITTING_ALL and (fields := template.match(messages)) is not None:
            own = (value for name, value in fields.items() if name not in template.shared)
            return "\n".join(problem_text([{"role": "user", "content": value}]) for value in own)
    return "\n".join(message["content"] for message in messages)
