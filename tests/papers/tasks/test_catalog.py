"""The catalog: every task's data sets, each as `clipx papers data` expects it.

Not covered: the rows, which each task's tests cover.
"""

import pytest

from verl_clipx.papers.tasks.catalog import definition_named, definitions
from verl_clipx.papers.tasks.templates import TEMPLATES


@pytest.mark.parametrize("name", sorted(definitions()))
def test_definitions_are_complete(name):
    definition = definition_named(name)
    assert definition.name == name and name.isidentifier()
    assert definition.summary and definition.license and "\n" not in definition.summary
    assert set(definition.splits) <= {"train", "dev", "test"} and len(set(definition.splits)) == len(definition.splits)
    assert name == "knights_and_knaves_tiny" or set(definition.prompts) <= set(TEMPLATES)
    assert definition.kind == "train" or list(definition.splits) == ["test"]
