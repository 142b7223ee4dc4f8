"""Writes the card of a built data set: README.md for people, card.json for programs."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_clipx.common.files import write_json, write_text
from verl_clipx.papers.tasks.building import SplitRecord
from verl_clipx.papers.tasks.definition import DatasetDefinition
from verl_clipx.papers.tasks.templates import PLAIN_TEXT_CHAT_TEMPLATE, TEMPLATES

PLAIN_TEXT_HINT = (
    "the prompt is plain text for a base model; verl adds no chat markers to it with\n"
    f'actor_rollout_ref.model.custom_chat_template="\\"{PLAIN_TEXT_CHAT_TEMPLATE}\\""'
)


@dataclass(frozen=True)
class DataCard:
    """What users should know about a folder of built splits.

    Args:
        splits: records of all finished splits in the folder.
    """

    definition: DatasetDefinition
    splits: tuple[SplitRecord, ...]


def write_card(folder: Path, card: DataCard) -> None:
    """Write README.md and card.json into the folder, each of them atomically."""
    write_json(folder / "card.json", card_content(card))
    write_text(folder / "README.md", card_markdown(card))


def is_plain_text(prompt: str) -> bool:
    """Return whether a template's prompts must stay without chat markers."""
    return prompt in TEMPLATES and TEMPLATES[prompt].plain_text


def card_content(card: DataCard) -> dict[str, Any]:
    """Return the card as JSON values."""
    shown = ("name", "task", "kind", "summary", "hub", "license")
    return {
        **{key: getattr(card.definition, key) for key in shown},
        "splits": {record.request.split: asdict(record) for record in card.splits},
    }


def card_markdown(card: DataCard) -> str:
    """Return the card as Markdown."""
    definition = card.definition
    lines = [
        f"# {definition.name}",
        "",
        definition.summary,
        "",
        f"- task: {definition.task} ({definition.kind})",
        f"- source: {_source(definition)}",
        f"- license of the source: {definition.license}",
        "",
        "| split | rows | duplicates left out | of them with another answer | prompt | from | limit | options |",
        "|---|---|---|---|---|---|---|---|",
    ]
    plain = sorted({record.request.prompt for record in card.splits if is_plain_text(record.request.prompt)})
    for record in card.splits:
        request = record.request
        options = ", ".join(f"{key}={value}" for key, value in request.options.items())
        lines.append(
            f"| {request.split} | {record.rows} | {record.duplicates} | {record.conflicts} | {request.prompt} | "
            f"{request.source} | {request.limit or ''} | {options} |"
        )
    if plain:
        lines += ["", f"{', '.join(plain)}: {PLAIN_TEXT_HINT.replace(chr(10), chr(10) * 2 + '    ')}"]
    lines += ["", "SHA-256 of the rows, as canonical JSON lines:", ""]
    lines += [f"- {record.request.split}: `{record.sha256}`" for record in card.splits]
    return "\n".join(lines) + "\n"


def _source(definition: DatasetDefinition) -> str:
    return f"Hugging Face hub, {definition.hub}" if definition.hub else "generated, or a local copy"
