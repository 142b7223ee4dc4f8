r"""Turns the records of public sets of mathematics problems into rows in verl's schema."""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_clipx.common.files import EMPTY, read_json
from verl_clipx.papers.responses import find_last_boxed
from verl_clipx.papers.tasks.definition import Row, RowBuilder
from verl_clipx.papers.tasks.ground_truth import decode_ground_truth, encode_ground_truth, spell_answer
from verl_clipx.papers.tasks.math.prose import final_answer, is_prose
from verl_clipx.papers.tasks.records import read_records
from verl_clipx.papers.tasks.templates import template_named

# Instructions that some sources put around a problem. They are removed, because our templates have their own.
_INSTRUCTIONS = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.",
    'Remember to put your answer on its own line after "Answer:".',
    "Let's think step by step and output the final answer within \\boxed{}.",
)
# The largest number of characters of an answer in a solution's box.
_MAX_BOX = 2000


def rows_of(
    name: str,
    hub: str | None,
    answers: str = "all",
    hub_split: str = "test",
    hub_config: str | None = None,
    file: str | None = None,
    about: Mapping[str, str] = EMPTY,
) -> RowBuilder:
    """Return the function that yields the rows of a set.

    A row's ground truth is the JSON of a list if any of a problem's answers is right, and otherwise the text of all.
    Problems without an answer are left out, and so are those whose answer is prose, which no response would equal.
    Warnings count them and name their rows.

    Args:
        name: the name of the set, which is also the rows' `data_source`.
        hub: the repository on the hub; None if the set is not there.
        answers, hub_split, hub_config, file, about: the settings that sets.yaml explains.
    """

    def rows(source: Path | None, *, split: str, prompt: str) -> Iterator[Row]:
        """Yield the rows of the set from the hub, or from a local copy."""
        template = template_named(prompt)
        where = source or hub
        if where is None:
            raise ValueError(f"the set is not on the hub; give a local copy of {file}")
        without_answer: list[int] = []
        in_prose: list[int] = []
        if hub and file:
            records = _records_of_file(source, hub, file)
        else:
            records = read_records(source, hub=hub or "", hub_split=hub_split, hub_config=hub_config)
        for number, record in enumerate(records, 1):
            try:
                text, truth = _text_and_truth(record)
                known = {key: _read_path(record, path) for key, path in about.items()}
            except (LookupError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{where}, row {number}: {type(error).__name__}: {error} in {record!s:.200}; it needs verl's "
                    f"columns, or problem or question, and answer, final_answer or solution; is it {file or hub}?"
                ) from None
            stated = _stated_answers(truth, accepts_any=answers == "any")
            accepted = [answer for answer in stated if not is_prose(answer)]
            if not text or not stated:
                without_answer.append(number)
                continue
            if not accepted or (answers == "all" and len(accepted) < len(stated)):
                in_prose.append(number)
                continue
            yield {
                "data_source": name,
                "prompt": template.render(problem=text),
                "ability": "math",
                "reward_model": {
                    "style": "rule",
                    "ground_truth": encode_ground_truth(accepted) if answers == "any" else ", ".join(accepted),
                },
                "extra_info": {"index": number - 1 - len(without_answer) - len(in_prose), "split": split, **known},
            }
        _warn_of_left_out(where, "without an answer", without_answer)
        _warn_of_left_out(where, "whose answer is prose", in_prose)

    return rows


def _read_path(record: Any, path: str) -> Any:
    """Return the value of a record at a path such as `extra_info.level`."""
    value = record
    for key in path.split("."):
        value = value[key]
    return value


def _records_of_file(source: Path | None, hub: str, file: str) -> list[Any]:
    """Return the records of a JSON file, which is downloaded from the hub unless there is a local copy."""
    if source is None:
        from huggingface_hub import hf_hub_download

        source = Path(hf_hub_download(hub, file, repo_type="dataset"))
    content = read_json(source)
    return content if isinstance(content, list) else [content]


def _stated_answers(truth: Any, *, accepts_any: bool) -> list[str]:
    """Return the answers that a source states for a problem, spelled as a ground truth, each once.

    Args:
        truth: what the source has: a text, a list of texts, or None.
        accepts_any: whether any of several answers is right. Then a text that is a list in JSON is taken for one.
    """
    if accepts_any and isinstance(truth, str) and truth.startswith("["):
        truth = decode_ground_truth(truth)
    answers = truth if isinstance(truth, list) else [truth]
    spelled = [final_answer(spell_answer(answer)) for answer in answers]
    return list(dict.fromkeys(filter(None, spelled)))


def _warn_of_left_out(where: Path | str, which: str, numbers: list[int]) -> None:
    """Warn that problems were left out, and name the first of them.

    Args:
        where: the source of the problems.
        which: what is wrong with them.
        numbers: the numbers of their rows, counted from 1.
    """
    if not numbers:
        return
    rows = ", ".join(map(str, numbers[:10]))
    if len(numbers) > 10:
        rows += ", …"
    # With this level, the warning seems to come from the caller of `rows`.
    warnings.warn(f"{where}: {len(numbers)} problems {which} were left out (rows {rows})", stacklevel=3)


def _question(messages: list[Any], role: str, content: str, user: str) -> str:
    """Return the text of the only message of the user. A message without a role is the user's.

    Args:
        messages: the chat messages.
        role, content: the keys under which a message has its role and its text.
        user: the user's role.

    Raises:
        LookupError: the user has no message or several.
    """
    texts = [message[content] for message in messages if message.get(role, user) == user]
    if len(texts) != 1:
        raise LookupError(f"{len(texts)} messages of the {user}, and a problem is one")
    return str(texts[0])


def _text_and_truth(record: Any) -> tuple[str, Any]:
    """Return the text of a problem without its source's instructions, and its right answer.

    Args:
        record: from one of the sources, which have three forms.

    Returns:
        The right answer is as the source has it: a text, a number or a list; None if there is none.

    Raises:
        LookupError, TypeError, AttributeError: the record has another form.
    """
    if isinstance(record, list):
        # Open-Reasoner-Zero's messages, of which the last has the right answer.
        text = _question(record[:-1], role="from", content="value", user="human")
        return text.strip(), record[-1]["ground_truth"]["value"]
    if "reward_model" in record:
        # A row in verl's schema.
        text = _question(record["prompt"], role="role", content="content", user="user")
        for instruction in _INSTRUCTIONS:
            text = text.replace(instruction, "")
        return text.strip(), (record["reward_model"] or {}).get("ground_truth")
    fields = {name.lower(): value for name, value in record.items()}
    context = fields.get("context") or ""
    problem = fields.get("problem") or fields["question"]
    text = f"{context.strip()}\n{problem.strip()}".strip()
    # The first of these that is an answer counts.
    truths = (fields.get("answer"), fields.get("final_answer"), find_last_boxed(fields.get("solution"), _MAX_BOX))
    for truth in truths:
        if isinstance(truth, list) or spell_answer(truth):
            return text, truth
    return text, None
