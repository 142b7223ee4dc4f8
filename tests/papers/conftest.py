"""A model and questions that every evaluation can read; nobody writes to them."""

import pytest

from tests.papers.evaluation.tiny import save_model, save_questions


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """A random model and six Countdown questions."""
    folder = tmp_path_factory.mktemp("inputs")
    return save_model(folder / "model"), save_questions(folder / "data", 6)
