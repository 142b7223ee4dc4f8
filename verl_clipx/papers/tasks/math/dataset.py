"""The papers' mathematics data sets as rows in verl's schema; sets.yaml lists them."""

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from verl_clipx.papers.tasks.definition import DatasetDefinition, Row
from verl_clipx.papers.tasks.ground_truth import encode_ground_truth
from verl_clipx.papers.tasks.math.problems import read_problems
from verl_clipx.papers.tasks.templates import template_named

PROMPTS = ("boxed_step_by_step", "r1_base")


def _define(
    name: str,
    kind: str,
    summary: str,
    license: str,
    hub: str | None,
    read: str = "benchmark",
    answers: str = "all",
    prompt: str = PROMPTS[0],
    repeats: bool = False,
    **of_hub: Any,
) -> DatasetDefinition:
    """Return the definition of a set, which sets.yaml explains; its name is also the rows' `data_source`.

    The ground truth is the JSON of a list if any of a problem's answers is right, and otherwise the text of all.
    """

    def rows(source: Path | None, *, split: str, prompt: str) -> Iterator[Row]:
        template = template_named(prompt)
        for index, problem in enumerate(read_problems(source, read, hub, **of_hub)):
            truth = encode_ground_truth(problem.answers) if answers == "any" else ", ".join(problem.answers)
            yield {
                "data_source": name,
                "prompt": template.render(problem=problem.text),
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": truth},
                "extra_info": {"index": index, "split": split, **problem.about},
            }

    prompts = tuple(sorted(PROMPTS, key=lambda one: one != prompt))
    splits = ("train",) if kind == "train" else ("test",)
    return DatasetDefinition(name, "math", kind, summary, license, prompts, rows, splits, hub, repeats)


def _read() -> tuple[DatasetDefinition, ...]:
    sets = yaml.safe_load(files("verl_clipx.papers.tasks.math").joinpath("sets.yaml").read_text(encoding="utf-8"))
    return tuple(_define(name, **settings) for name, settings in sets.items())


DATASETS = _read()
