"""`clipx demo`, what ships for it and how `scripts/demo.py` makes that, the pictures of README.md, and the notebook of
docs/tutorial.md, whose blocks tests/claims runs. Not covered: how the page looks (tests/analysis/report), whether the
runs are those of today's quick start (tests/end_to_end/test_quickstart.py), the wheel (test_wheel.py there), Jupyter.
"""

import math
import os
import re
import resource
import runpy
import shutil
import subprocess
import sys

import pandas
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from tests.claims.documents import ROOT
from verl_clipx.analysis.certify.certify import SEPARATOR, certify
from verl_clipx.analysis.demo.files import PAGE, RUNS, SHIPPED
from verl_clipx.cli import app

TUTORIAL = ROOT / "docs" / "tutorial.md"
NOTEBOOK = TUTORIAL.with_suffix(".ipynb")
BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("torch", "verl"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
from verl_clipx.cli import main
main()
"""


def test_ten_seconds_without_torch_and_verl_and_a_diagnosis(tmp_path):
    # Processor time, because other tests run beside it.
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, "-c", BLOCKED]
    done = subprocess.run([*command, "demo"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 10
    assert (tmp_path / "clipx-demo" / PAGE).read_bytes() == (SHIPPED / PAGE).read_bytes()
    assert subprocess.run([*command, "diagnose", f"clipx-demo/{RUNS[0]}"], cwd=tmp_path).returncode == 0


def run(*words: str) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.slow
def test_certify_says_of_its_runs_what_its_page_shows():
    answers = certify([str(SHIPPED / RUNS[0]), SEPARATOR, str(SHIPPED / RUNS[1])], [])
    (evidence,) = (answer.evidence for answer in answers if answer.question == "the clip acted")
    page = (ROOT / "docs/certify.md").read_text("utf-8")
    # Split at white space, because evidence has narrow spaces before its percent signs.
    assert f"passed: the clip acted: {' '.join(evidence.split())}" in " ".join(page.split())


@pytest.mark.slow
def test_what_it_says_next_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^  clipx (.+)$", run("demo"), re.M)
    assert [command.split()[0] for command in commands] == ["diagnose", "replay", "report"]
    for command in commands:
        run(*command.split())
    assert (tmp_path / "clipx-demo/page" / PAGE).is_file()


def test_it_comes_again_and_leaves_what_is_not_its_own(tmp_path):
    run("demo", "--out", str(tmp_path))
    run("demo", "--out", str(tmp_path))
    (tmp_path / PAGE).unlink()
    mine = tmp_path / "metrics.csv"
    mine.write_text("mine")
    for out, said in ((tmp_path, f"{mine}: already exists"), (mine, "is a file.")):
        done = CliRunner().invoke(app, ["demo", "--out", str(out)])
        assert done.exit_code == 1 and "".join(said.split()) in "".join(done.output.split())
    assert mine.read_text() == "mine" and not (tmp_path / PAGE).exists()


@pytest.mark.slow
def test_page_and_pictures_are_of_the_shipped_runs(tmp_path, monkeypatch):
    """Drawings are compared by their texts: lines and letters' places depend on Matplotlib and on fonts."""
    script = runpy.run_path(str(ROOT / "scripts" / "demo.py"))
    script["make_page"](tmp_path, tmp_path)
    for made in sorted(tmp_path.iterdir()):
        committed = (ROOT / "docs/figures" if made.suffix == ".svg" else SHIPPED) / made.name
        assert texts_of(made) == texts_of(committed), f"{made.name} is old: python scripts/demo.py page"


def test_the_page_begins_with_what_the_runs_show_and_has_one_number_for_each_thing():
    page = (SHIPPED / PAGE).read_text()
    logs = [pandas.read_json(SHIPPED / run / "metrics.jsonl", lines=True).data.apply(pandas.Series) for run in RUNS]
    grpo, acpo = (
        100 * log[[f"actor/clipx/clip_fraction_{side}" for side in ("low", "high")]].sum(axis=1)[1:].mean()
        for log in logs
    )
    says = (
        f"GRPO clipped {grpo:.1f}\u202f% of the tokens, mostly improbable ones in bad answers; ACPO {acpo:.2f}\u202f%"
    )
    assert f"<h1>{says}</h1>" in page
    steps = [pandas.read_parquet(SHIPPED / run / "traces") for run in RUNS]
    lost = steps[0][(steps[0].weight == 0) & (steps[0].advantage != 0)]
    assert ((lost.advantage < 0) & (lost.old_log_prob < math.log(0.5))).mean() > 0.5
    # The tokens of the last update are counted alike everywhere.
    last = [step[step["update"] == 7] for step in steps]
    assert {*re.findall(r"(?:, |of the )(\d+) tokens", page)} == {str(len(tokens)) for tokens in last}
    # What was trained stands before what was found.
    assert page.index("80 prompts × 8 responses") < page.index("<figure") < page.index("In numbers")
    assert f"{logs[1]['actor/ppo_kl'].max():.2g}&ensp;<small>step 1; the median" in page
    assert "In words" not in page and 'data-rule="grpo"' in page


def test_of_a_trained_run_is_kept_what_ships(tmp_path):
    trained, kept, name = tmp_path / "trained", tmp_path / "kept", RUNS[1]
    shutil.copytree(SHIPPED / name, trained)
    last = next((trained / "traces").iterdir())
    shutil.copy(last, last.with_name("step_00000001_update_0000_rank_00000.parquet"))
    (trained / "run.log").write_text("verl's words")
    record = trained / "metrics.run.json"
    record.write_text(record.read_text().replace("runs/quickstart", str(tmp_path)))
    answers = trained / "validation/0.jsonl"
    answers.write_text(answers.read_text().replace("}", ', "output": "1+1"}'))
    runpy.run_path(str(ROOT / "scripts" / "demo.py"))["keep_run"](trained, kept, str(tmp_path))
    kept_files, shipped = (
        {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
        for folder in (kept, SHIPPED / name)
    )
    assert kept_files.keys() == shipped.keys()
    for path, file in kept_files.items():
        if path.suffix == ".parquet":
            assert parquet.read_table(file).equals(parquet.read_table(shipped[path]), check_metadata=True)
        else:
            assert file.read_text() == shipped[path].read_text()


def texts_of(path) -> list[str]:
    """What a page, a drawing or a table says."""
    text = path.read_text()
    return text.splitlines() if path.suffix == ".csv" else re.findall(r">\s*([^<>]*[^<>\s])\s*<", text)


def last_update(run: str) -> pandas.DataFrame:
    """The tokens of the update that README's pictures show."""
    traces = pandas.concat(map(pandas.read_parquet, (SHIPPED / run / "traces").iterdir()))
    return traces[traces["update"] == traces["update"].max()]


def test_readme_has_the_numbers_of_the_pictured_update():
    grpo, acpo = map(last_update, RUNS)
    clipped = grpo[(grpo.weight == 0) & (grpo.advantage != 0)]
    improbable, bad = (clipped.old_log_prob < math.log(0.5)).sum(), (clipped.advantage < 0).sum()
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{len(grpo)} under GRPO and {len(acpo)} under ACPO" in readme
    assert f"Of the {len(clipped)} tokens that GRPO clips in this update, {improbable} had" in readme
    assert f"and {bad} stand in answers worse than average" in readme


def test_what_ships_is_small_and_names_nobodys_folders():
    shipped = [path for path in SHIPPED.rglob("*") if path.is_file()]
    runs = [path for path in shipped if path.relative_to(SHIPPED).parts[0] in RUNS]
    assert 0 < sum(path.stat().st_size for path in runs) < 700_000
    for path in shipped:
        # verl's configuration names Ray's own folder.
        words = re.findall(rb"/(?:work|home|root|Users|tmp(?!/ray/))/[\w./-]*", path.read_bytes())
        assert not words, (path, words)
        assert os.environ.get("HOSTNAME", "no host").encode() not in path.read_bytes()


def test_the_notebook_is_the_page():
    made = runpy.run_path(str(ROOT / "scripts" / "demo.py"))["notebook_of"](TUTORIAL.read_text())
    assert made == NOTEBOOK.read_text(), "python scripts/demo.py notebook"
