"""docs/tutorial.ipynb runs, prints what it shows, and is docs/tutorial.md, whose blocks and outputs tests/claims runs.

Not covered: that Jupyter shows it; its commands run in this process, as after `!` in a notebook.
"""

import contextlib
import io
import json
import runpy

import pytest
from typer.testing import CliRunner

from tests.claims.documents import ROOT
from verl_clipx.cli import app

PAGE = ROOT / "docs" / "tutorial.md"
NOTEBOOK = PAGE.with_suffix(".ipynb")


def test_the_notebook_is_the_page():
    made = runpy.run_path(str(ROOT / "scripts" / "demo.py"))["notebook_of"](PAGE.read_text())
    assert made == NOTEBOOK.read_text(), "python scripts/demo.py notebook"
    assert len(PAGE.read_text().split()) <= 1000


@pytest.mark.slow
def test_the_notebook_runs_and_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            if cell["source"].startswith("!clipx "):
                done = CliRunner().invoke(app, cell["source"].split()[1:])
                assert done.exit_code == 0, done.output
            else:
                exec(cell["source"], names)
        for output in cell["outputs"]:
            assert output["text"].split() == printed.getvalue().split()
    assert sum(bool(cell["outputs"]) for cell in cells) > 4 and (tmp_path / "clipx-demo/page/report.html").is_file()
