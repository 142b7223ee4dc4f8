"""Prompt templates of the papers, by name; templates.yaml has their wording.

A template turns named fields into chat messages. The papers trained base models on plain text without chat markers. For
such a template (`plain_text`), set verl's `actor_rollout_ref.model.custom_chat_template` to PLAIN_TEXT_CHAT_TEMPLATE,
so that the tokenizer adds no markers.
"""

import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

Messages = list[dict[str, str]]

PLAIN_TEXT_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Jinja chat template that writes the messages as they are."""

_FIELD = re.compile(r"\{([a-z]+)\}")


@dataclass(frozen=True)
class PromptTemplate:
    """One way to pose a problem to a policy.

    Args:
        messages: the role and the text of each message.
        plain_text, source: as templates.yaml explains them.
    """

    name: str
    messages: tuple[tuple[str, str], ...]
    plain_text: bool
    source: str

    def render(self, **fields: Any) -> Messages:
        """Return the chat messages with the fields filled in.

        Args:
            **fields: a value for each field. It is inserted as `str`, and braces in it are not fields.

        Raises:
            ValueError: a field is missing or unknown; the message names the template and its fields.
        """
        field_names: list[str] = []
        for _, text in self.messages:
            for field_name in _FIELD.findall(text):
                if field_name not in field_names:
                    field_names.append(field_name)
        if set(fields) != set(field_names):
            raise ValueError(f"template {self.name!r} takes the fields {field_names}, not {sorted(fields)}")
        rendered = []
        for role, text in self.messages:
            content = _FIELD.sub(lambda match: str(fields[match[1]]), text)
            rendered.append({"role": role, "content": content})
        return rendered


_TEXT = files("verl_clipx.papers.tasks").joinpath("templates.yaml").read_text(encoding="utf-8")


def _build_template(name: str, entry: dict[str, Any]) -> PromptTemplate:
    """Return the template of an entry of templates.yaml, where each message is a mapping from its role to its text."""
    messages: list[tuple[str, str]] = []
    for message in entry["messages"]:
        messages += message.items()
    return PromptTemplate(name=name, messages=tuple(messages), plain_text=entry["plain_text"], source=entry["source"])


TEMPLATES = {name: _build_template(name, entry) for name, entry in yaml.safe_load(_TEXT).items()}
"""All templates by name."""


def template_named(name: str) -> PromptTemplate:
    """Return the template of a name.

    Raises:
        ValueError: no template has this name; the message lists the names of all templates.
    """
    if name not in TEMPLATES:
        raise ValueError(f"template {name!r} is unknown. There are {', '.join(TEMPLATES)}")
    return TEMPLATES[name]
