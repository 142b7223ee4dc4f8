"""The papers' mathematics data sets as rows in verl's schema."""

from collections.abc import Iterator
from pathlib import Path

from verl_clipx.papers.tasks.definition import DatasetDefinition, Row, RowBuilder
from verl_clipx.papers.tasks.ground_truth import encode_ground_truth
from verl_clipx.papers.tasks.math.problems import (
    DAPO_HUB,
    ORZ_HUB,
    SKYWORK_HUB,
    ProblemReader,
    read_dapo_17k,
    read_dsr_uniform,
    read_orz_57k,
    read_skywork_or1_math,
    reader_of_benchmark,
)
from verl_clipx.papers.tasks.templates import template_named

R1_FIRST = ("r1_base", "boxed_step_by_step")
BOXED_FIRST = ("boxed_step_by_step", "r1_base")


def _rows_of(name: str, read: ProblemReader, alternatives: bool) -> RowBuilder:
    """Return the row builder of a source.

    Args:
        name: name of the data set, which is also the rows' `data_source`.
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

    return rows


def _train(
    name: str,
    read: ProblemReader,
    summary: str,
    hub: str | None,
    licence: str,
    prompts: tuple[str, ...] = BOXED_FIRST,
    alternatives: bool = False,
    repeats: bool = False,
) -> DatasetDefinition:
    rows = _rows_of(name, read, alternatives)
    return DatasetDefinition(name, "math", "train", summary, licence, prompts, rows, ("train",), hub, repeats)


def _evaluation(
    name: str,
    summary: str,
    hub: str,
    hub_split: str,
    licence: str,
    hub_config: str | None = None,
    alternatives: bool = False,
) -> DatasetDefinition:
    rows = _rows_of(name, reader_of_benchmark(hub, hub_split, hub_config), alternatives)
    return DatasetDefinition(name, "math", "evaluation", summary, licence, BOXED_FIRST, rows, ("test",), hub)


_UNVERIFIED = "not verified; see the hub"

DATASETS: tuple[DatasetDefinition, ...] = (
    _train("orz_57k", read_orz_57k, "Open-Reasoner-Zero's 57k problems; ACPO, AR-Lopti", ORZ_HUB, "MIT", R1_FIRST),
    _train(
        "dapo_17k",
        read_dapo_17k,
        "DAPO's 17k problems with integer answers, out of 1.8 million public rows; DGPO",
        DAPO_HUB,
        "Apache-2.0",
    ),
    _train(
        "dsr_uniform",
        read_dsr_uniform,
        "DeepScaleR problems of uniform difficulty, from a local copy of AR-Lopti's file; AR-Lopti",
        None,
        "not stated by AR-Lopti; DeepScaleR: MIT",
        repeats=True,
    ),
    _train(
        "skywork_or1_math",
        read_skywork_or1_math,
        "Mathematics of Skywork-OR1, 105k problems; BAPO",
        SKYWORK_HUB,
        "not stated",
        alternatives=True,
    ),
    _evaluation("aime24", "AIME 2024, 30 problems", "HuggingFaceH4/aime_2024", "train", _UNVERIFIED),
    _evaluation("aime25", "AIME 2025, 30 problems", "math-ai/aime25", "test", "Apache-2.0"),
    _evaluation("amc23", "AMC 12 of 2023, 40 problems; DGPO", "math-ai/amc23", "test", _UNVERIFIED),
    _evaluation(
        "amc",
        "AMC 12 of 2022 and 2023, 83 problems; ACPO, AR-Lopti",
        "AI-MO/aimo-validation-amc",
        "train",
        "Apache-2.0",
    ),
    _evaluation("math500", "500 problems of MATH's test set", "HuggingFaceH4/MATH-500", "test", _UNVERIFIED),
    _evaluation(
        "minerva",
        "Minerva's 272 undergraduate problems of science",
        "math-ai/minervamath",
        "test",
        _UNVERIFIED,
        alternatives=True,
    ),
    _evaluation(
        "olympiadbench",
        "OlympiadBench, open-ended English mathematics without images, 674 problems",
        "Hothan/OlympiadBench",
        "train",
        _UNVERIFIED,
        hub_config="OE_TO_maths_en_COMP",
    ),
)
