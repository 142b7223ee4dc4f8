"""The catalog: every task's data sets, each as `clipx data` expects it.

Not covered: the rows; each task's tests build them.
"""

from importlib import import_module

import pytest

from verl_clipx.papers.tasks.building import option_names
from verl_clipx.papers.tasks.catalog import TASKS, definition_named, definitions
from verl_clipx.papers.tasks.definition import DatasetDefinition


def test_no_two_sets_have_one_name():
    of_tasks = [import_module(f"verl_clipx.papers.tasks.{task}.dataset").DATASETS for task in TASKS]
    assert len(definitions()) == sum(map(len, of_tasks))


def test_every_task_and_every_set_of_the_papers_is_there():
    found = definitions()
    assert {definition.task for definition in found.values()} == set(TASKS)
    assert {
        "countdown", "countdown_3to4", "hitab", "knights_and_knaves", "orz_57k", "dapo_17k", "dsr_uniform",
        "skywork_or1_math", "aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench",
    } <= set(found)  # fmt: skip


@pytest.mark.parametrize("name", sorted(definitions()))
def test_definitions_are_complete(name):
    definition = definition_named(name)
    assert definition.name == name and name.isidentifier()
    assert definition.summary and definition.license and "\n" not in definition.summary
    assert len(set(definition.splits)) == len(definition.splits)
    option_names(definition)
    if definition.kind == "evaluation":
        assert definition.splits == ("test",)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ValueError,
        match=r"^data set 'math' is unknown\. Did you mean math500\? There are countdown, countdown_3to4, hitab",
    ):
        definition_named("math")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "test"}, "hitab: kind='test' is unknown; use 'train' or 'evaluation'"),
        ({"prompts": ()}, "hitab: prompts is empty"),
        ({"splits": ()}, "hitab: splits is empty"),
    ],
)
def test_definition_checks(changes, message):
    with pytest.raises(ValueError, match=message):
        DatasetDefinition(**(vars(definition_named("hitab")) | changes))
