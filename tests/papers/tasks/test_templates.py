"""The prompt templates: their wording and what they refuse.

Not covered: whether the wording equals the papers' beyond what stood here before; what they render to (each data set's
tests).
"""

import hashlib

import pytest

from verl_clipx.papers.tasks.templates import TEMPLATES, template_named


def test_every_letter_is_as_it_was():
    """Line ends and doubled blanks too: folding the lines of templates.yaml otherwise could lose them."""
    wording = repr([(template.name, template.messages) for template in TEMPLATES.values()])
    assert hashlib.sha256(wording.encode()).hexdigest()[:16] == "202b43d82d846738"


@pytest.mark.parametrize("fields", [{}, {"problem": "a", "target": 1}, {"question": "a"}])
def test_wrong_fields_and_names_are_named(fields):
    with pytest.raises(ValueError, match=r"^template 'r1_base' takes the fields \['problem'\], not "):
        template_named("r1_base").render(**fields)
    with pytest.raises(ValueError, match=r"^template 'r1' is unknown\. There are r1_base, boxed_step_by_step"):
        template_named("r1")
