"""Writes the card of a built data set, README.md."""

from collections.abc import Sequence
from pathlib import Path

from verl_clipx.common.files import write_text
from verl_clipx.papers.tasks.building import SplitRecord
from verl_clipx.papers.tasks.definition import DatasetDefinition
from verl_clipx.papers.tasks.templates import PLAIN_TEXT_CHAT_TEMPLATE, TEMPLATES

PLAIN_TEXT_HINT = (
    "the prompt is plain text for a base model; verl adds no chat markers to it with\n"
    f'actor_rollout_ref.model.custom_chat_template="\\"{PLAIN_TEXT_CHAT_TEMPLATE}\\""'
)


def is_plain_text(prompt: str) -> bool:
    """Return whether a template's prompts must stay without chat markers."""
    return prompt in TEMPLATES and TEMPLATES[prompt].plain_text


def write_card(folder: Path, definition: DatasetDefinition, splits: Sequence[SplitRecord]) -> None:
    """Write what users should know about a folder of built splits into its README.md, atomically."""
    source = f"Hugging Face hub, {definition.hub}" if definition.hub else "generated, or a local copy"
    lines = [
        f"# {definition.name}\n\n{definition.summary}\n",
        f"- task: {definition.task} ({definition.kind})\n- source: {source}",
        f"- license of the source: {definition.license}\n",
        "| split | rows | duplicates left out | with another answer | prompt | from | limit | options | SHA-256 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for record in splits:
        request = record.request
        options = ", ".join(f"{key}={value}" for key, value in request.options.items())
        lines.append(
            f"| {request.split} | {record.rows} | {record.duplicates} | {record.conflicts} | {request.prompt} | "
            f"{request.source} | {request.limit or ''} | {options} | {record.sha256} |"
        )
    lines.append("\nThe SHA-256 is that of the rows, as canonical JSON lines.")
    for prompt in sorted({record.request.prompt for record in splits if is_plain_text(record.request.prompt)}):
        lines.append(f"\n{prompt}: " + PLAIN_TEXT_HINT.replace("\n", "\n\n    "))
    write_text(folder / "README.md", "\n".join(lines) + "\n")
