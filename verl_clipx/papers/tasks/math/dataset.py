"""The papers' mathematics data sets as rows in verl's schema."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from verl_clipx.papers.tasks.definition import DatasetDefinition, Row
from verl_clipx.papers.tasks.ground_truth import encode_ground_truth
from verl_clipx.papers.tasks.math import problems
from verl_clipx.papers.tasks.math.problems import ProblemReader, parse_skywork, parse_verl, reader
from verl_clipx.papers.tasks.templates import template_named

R1_FIRST = ("r1_base", "boxed_step_by_step")
BOXED_FIRST = ("boxed_step_by_step", "r1_base")


def _define(
    name: str,
    summary: str,
    licence: str,
    read: ProblemReader,
    hub: str | None,
    kind: Literal["train", "evaluation"] = "evaluation",
    prompts: tuple[str, ...] = BOXED_FIRST,
    alternatives: bool = False,
    repeats: bool = False,
) -> DatasetDefinition:
    """Return the definition of a set.

    Args:
        name: name of the set, which is also the rows' `data_source`.
        alternatives: if true, any of a problem's answers is right, and the ground truth is their list as JSON.
            Otherwise all of them together are the right answer, and the ground truth is that text.
    """

    def rows(source: Path | None, *, split: str, prompt: str) -> Iterator[Row]:
        template = template_named(prompt)
        for index, problem in enumerate(read(source)):
            truth = encode_ground_truth(problem.answers) if alternatives else ", ".join(problem.answers)
            yield {
                "data_source": name,
                "prompt": template.render(problem=problem.text),
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": truth},
                "extra_info": {"index": index, "split": split, **problem.about},
            }

    splits = ("train",) if kind == "train" else ("test",)
    return DatasetDefinition(name, "math", kind, summary, licence, prompts, rows, splits, hub, repeats)


def _benchmark(name: str, summary: str, hub: str, licence: str, hub_split: str = "test", **other) -> DatasetDefinition:
    read = reader(hub, hub_split, other.pop("hub_config", None))
    return _define(name, summary, licence, read, hub, **other)


_training = partial(_define, kind="train")
_UNVERIFIED = "not verified; see the hub"

DATASETS: tuple[DatasetDefinition, ...] = (
    _training(
        "orz_57k",
        "Open-Reasoner-Zero's 57k problems; ACPO, AR-Lopti",
        "MIT",
        problems.read_orz_57k,
        problems.ORZ_HUB,
        prompts=R1_FIRST,
    ),
    _training(
        "dapo_17k",
        "DAPO's 17k problems with integer answers, out of 1.8 million public rows; DGPO",
        "Apache-2.0",
        reader(problems.DAPO_HUB, "train", parse=parse_verl),
        problems.DAPO_HUB,
    ),
    _training(
        "dsr_uniform",
        "DeepScaleR problems of uniform difficulty, from a local copy of AR-Lopti's file; AR-Lopti",
        "not stated by AR-Lopti; DeepScaleR: MIT",
        problems.read_dsr_uniform,
        None,
        repeats=True,
    ),
    _training(
        "skywork_or1_math",
        "Mathematics of Skywork-OR1, 105k problems; BAPO",
        "not stated",
        reader(problems.SKYWORK_HUB, "math", parse=parse_skywork),
        problems.SKYWORK_HUB,
        alternatives=True,
    ),
    _benchmark("aime24", "AIME 2024, 30 problems", "HuggingFaceH4/aime_2024", _UNVERIFIED, "train"),
    _benchmark("aime25", "AIME 2025, 30 problems", "math-ai/aime25", "Apache-2.0"),
    _benchmark("amc23", "AMC 12 of 2023, 40 problems; DGPO", "math-ai/amc23", _UNVERIFIED),
    _benchmark(
        "amc",
        "AMC 12 of 2022 and 2023, 83 problems; ACPO, AR-Lopti",
        "AI-MO/aimo-validation-amc",
        "Apache-2.0",
        "train",
    ),
    _benchmark("math500", "500 problems of MATH's test set", "HuggingFaceH4/MATH-500", _UNVERIFIED),
    _benchmark(
        "minerva",
        "Minerva's 272 undergraduate problems of science",
        "math-ai/minervamath",
        _UNVERIFIED,
        alternatives=True,
    ),
    _benchmark(
        "olympiadbench",
        "OlympiadBench, open-ended English mathematics without images, 674 problems",
        "Hothan/OlympiadBench",
        _UNVERIFIED,
        "train",
        hub_config="OE_TO_maths_en_COMP",
    ),
)
