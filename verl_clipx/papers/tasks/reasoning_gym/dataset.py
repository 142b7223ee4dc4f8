"""Tasks of reasoning-gym as rows in verl's schema, easy enough for a model of 135 million parameters."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_clipx.papers.tasks.definition import DatasetDefinition, Row, RowBuilder
from verl_clipx.papers.tasks.ground_truth import encode_ground_truth
from verl_clipx.papers.tasks.reasoning_gym.generator import SPLITS, Entry, generate_problems, solved_example
from verl_clipx.papers.tasks.templates import template_named

# If no solved problem comes first, SmolLM2 mostly explains, whatever the system message says.
PROMPTS = ("reasoning_shown", "reasoning_short")

DEFAULT_SIZES = {"train": 512, "test": 64}


@dataclass(frozen=True)
class ReasoningTask:
    """A data set of reasoning-gym, and how hard it is made here.

    Args:
        generator: reasoning-gym's name.
        settings: fields of the generator's configuration that differ from its defaults.
        kind: what the prompt asks for as an answer.
        wording: the problem's text, with fields of its metadata in braces; if empty, reasoning-gym's own question.
        prompts: names of its prompt templates, the default first.
    """

    name: str
    generator: str
    summary: str
    settings: dict[str, Any] = field(default_factory=dict)
    kind: str = "number"
    wording: str = ""
    prompts: tuple[str, ...] = PROMPTS

    def problem(self, entry: Entry) -> str:
        """Return the text of a problem."""
        return self.wording.format_map(entry["metadata"]) if self.wording else entry["question"].strip()


# docs/tasks/reasoning_gym.md has the starting accuracy of each.
TASKS = (
    ReasoningTask(
        "reasoning_gym_addition",
        "basic_arithmetic",
        "Sums of two numbers below 100",
        {
            "min_terms": 2,
            "max_terms": 2,
            "min_digits": 1,
            "max_digits": 2,
            "operators": ["+"],
            "allow_parentheses": False,
            "allow_negation": False,
        },
        # Asked for it twice, SmolLM2 sometimes answers with a bare number. After a solved problem, most answers are
        # bare numbers, but no more of them are right.
        wording="What is {expression}? Answer with the number only.",
        prompts=("reasoning_short", "reasoning_shown"),
    ),
    ReasoningTask(
        "reasoning_gym_chain_sum",
        "chain_sum",
        "Sums and differences of two or three numbers of one digit",
        {"min_terms": 2, "max_terms": 3, "max_digits": 1},
    ),
    ReasoningTask(
        "reasoning_gym_gcd",
        "gcd",
        "The greatest common divisor of two numbers up to 60",
        {"min_value": 2, "max_value": 60},
    ),
    ReasoningTask(
        "reasoning_gym_lcm",
        "lcm",
        "The least common multiple of two numbers up to 60",
        {"min_value": 2, "max_value": 60},
    ),
    ReasoningTask(
        "reasoning_gym_letter_counting",
        "letter_counting",
        "How often a letter occurs in two to four words",
        {"min_words": 2, "max_words": 4},
    ),
    ReasoningTask(
        "reasoning_gym_spell_backward",
        "spell_backward",
        "A word of three or four letters, backward",
        {"max_word_len": 4},
        kind="word",
    ),
    ReasoningTask(
        "reasoning_gym_syllogism",
        "syllogism",
        "Whether a conclusion follows from two statements, Yes or No",
        kind="word",
    ),
)


def build_row(task: ReasoningTask, entry: Entry, example: Entry, extra_info: dict[str, Any], prompt: str) -> Row:
    """Return the row of one problem, with the columns that verl's RLHFDataset and reward managers read.

    Args:
        example: a solved problem, for prompts that show one.
        extra_info: what else the row says about the problem, at least `index` and `split`.
    """
    template = template_named(prompt)
    fields = {
        "kind": task.kind,
        "problem": task.problem(entry),
        "example": task.problem(example),
        "result": example["answer"],
    }
    truth = {"answer": entry["answer"], "metadata": entry["metadata"]}
    return {
        "data_source": task.name,
        "prompt": template.render(**{key: fields[key] for key in template.fields}),
        "ability": "reasoning",
        "reward_model": {"style": "rule", "ground_truth": encode_ground_truth(truth)},
        "extra_info": extra_info,
    }


def row_builder(task: ReasoningTask) -> RowBuilder:
    """Return the function that yields a task's rows."""

    def rows(
        source: Path | None,
        *,
        split: str,
        prompt: str,
        size: int | None = None,
        seed: int = 0,
        settings: dict | None = None,
    ) -> Iterator[Row]:
        chosen = task.settings | (settings or {})
        count = DEFAULT_SIZES[split] if size is None else size
        example = solved_example(task.generator, chosen)
        for index, entry in enumerate(generate_problems(task.generator, chosen, count, seed, split)):
            yield build_row(task, entry, example, {"index": index, "split": split}, prompt)

    return rows


def define(task: ReasoningTask) -> DatasetDefinition:
    """Return a task's data set."""
    return DatasetDefinition(
        name=task.name,
        task="reasoning_gym",
        kind="train",
        summary=task.summary,
        license="Apache-2.0 (generated by reasoning-gym)",
        prompts=task.prompts,
        rows=row_builder(task),
        splits=SPLITS,
        generated=True,
    )


DATASETS = tuple(map(define, TASKS))
