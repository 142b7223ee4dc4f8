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
from pathlib import Path

import pandas
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from tests.claims.documents import ROOT
from tests.messages import assert_names
from verl_clipx.analysis.certify.certify import SEPARATOR, certify
from verl_clipx.analysis.demo.files import PAGE, RUNS, SHIPPED
from verl_clipx.cli import app

TUTORIAL = ROOT / "docs" / "tutorial.md"
NOTEBOOK = TUTORIAL.with_suffix(".ipynb")
# Runs the command where neither torch nor verl can be imported.
COMMAND_WITHOUT_TORCH_AND_VERL = """
import sys
class Blocker:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("torch", "verl"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocker())
from verl_clipx.cli import main
main()
"""


GRPO_RUN, ACPO_RUN = RUNS


def test_the_demo_and_a_diagnosis_of_its_runs_need_neither_torch_nor_verl_and_ten_seconds(tmp_path):
    # Processor time, because other tests run beside it.
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, "-c", COMMAND_WITHOUT_TORCH_AND_VERL]
    demo = subprocess.run([*command, "demo"], cwd=tmp_path, capture_output=True, text=True)
    assert demo.returncode == 0, demo.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 10
    assert (tmp_path / "clipx-demo" / PAGE).read_bytes() == (SHIPPED / PAGE).read_bytes()
    diagnosis = subprocess.run([*command, "diagnose", f"clipx-demo/{GRPO_RUN}"], cwd=tmp_path)
    assert diagnosis.returncode == 0


def run_command(*words: str) -> str:
    """Return what a command of the plugin prints."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
def test_certify_says_of_its_runs_what_its_page_shows():
    answers = certify([str(SHIPPED / RUNS[0]), SEPARATOR, str(SHIPPED / RUNS[1])], [])
    (evidence,) = (answer.evidence for answer in answers if answer.question == "the clip acted")
    page = (ROOT / "docs/certify.md").read_text("utf-8")
    # Split at white space, because evidence has narrow spaces before its percent signs.
    assert f"passed: the clip acted: {' '.join(evidence.split())}" in " ".join(page.split())


@pytest.mark.slow
def test_the_commands_that_the_demo_prints_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^  clipx (.+)$", run_command("demo"), re.M)
    assert [command.split()[0] for command in commands] == ["diagnose", "replay", "report"]
    for command in commands:
        run_command(*command.split())
    assert (tmp_path / "clipx-demo/page" / PAGE).is_file()


def test_a_second_demo_replaces_the_first(tmp_path):
    run_command("demo", "--out", str(tmp_path))
    (tmp_path / PAGE).unlink()
    run_command("demo", "--out", str(tmp_path))
    assert (tmp_path / PAGE).is_file()


def test_the_demo_leaves_what_is_not_its_own(tmp_path):
    # A file of the name of one that ships.
    mine = tmp_path / "metrics.csv"
    mine.write_text("mine")
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 1
    # Lines are broken within paths.
    assert f"{mine}:alreadyexists" in "".join(result.output.split())
    assert mine.read_text() == "mine"
    assert not (tmp_path / PAGE).exists()


def test_the_demo_writes_into_no_file(tmp_path):
    file = tmp_path / "mine"
    file.write_text("mine")
    result = CliRunner().invoke(app, ["demo", "--out", str(file)])
    assert result.exit_code == 1
    assert_names(" ".join(result.output.split()), "is a file")
    assert file.read_text() == "mine"


@pytest.mark.slow
def test_page_and_pictures_are_of_the_shipped_runs(tmp_path, monkeypatch):
    """Drawings are compared by their texts: lines and letters' places depend on Matplotlib and on fonts."""
    script = runpy.run_path(str(ROOT / "scripts" / "demo.py"))
    script["make_page"](tmp_path, tmp_path)
    for made in sorted(tmp_path.iterdir()):
        folder = ROOT / "docs/figures" if made.suffix == ".svg" else SHIPPED
        assert read_texts(made) == read_texts(folder / made.name), f"{made.name} is old: python scripts/demo.py page"


def read_shipped_log(run: str) -> pandas.DataFrame:
    """Return the metrics that a run logged, a row a step."""
    return pandas.read_json(SHIPPED / run / "metrics.jsonl", lines=True).data.apply(pandas.Series)


def read_shipped_tokens(run: str) -> pandas.DataFrame:
    """Return the tokens of the last update that a run traced, which README's pictures show."""
    tokens = pandas.read_parquet(SHIPPED / run / "traces")
    return tokens[tokens["update"] == tokens["update"].max()]


def clipped_per_cent(log: pandas.DataFrame) -> float:
    """Return the mean share of clipped tokens, without that of step 0, which only validates."""
    shares = log["actor/clipx/clip_fraction_low"] + log["actor/clipx/clip_fraction_high"]
    return 100 * shares[1:].mean()


def test_the_page_begins_with_what_the_runs_show():
    page = (SHIPPED / PAGE).read_text()
    grpo = clipped_per_cent(read_shipped_log(GRPO_RUN))
    acpo = clipped_per_cent(read_shipped_log(ACPO_RUN))
    assert (
        f"<h1>GRPO clipped {grpo:.1f}\u202f% of the tokens, mostly improbable ones in bad answers; "
        f"ACPO {acpo:.2f}\u202f%</h1>"
    ) in page
    tokens = pandas.read_parquet(SHIPPED / GRPO_RUN / "traces")
    clipped = tokens[(tokens.weight == 0) & (tokens.advantage != 0)]
    improbable_in_bad_answers = (clipped.advantage < 0) & (clipped.old_log_prob < math.log(0.5))
    assert improbable_in_bad_answers.mean() > 0.5
    # What was trained stands before what was found.
    assert page.index("80 prompts × 8 responses") < page.index("<figure") < page.index("In numbers")


def test_the_page_has_one_number_for_each_thing():
    page = (SHIPPED / PAGE).read_text()
    counts = {str(len(read_shipped_tokens(run))) for run in RUNS}
    assert {*re.findall(r"(?:, |of the )(\d+) tokens", page)} == counts
    highest_kl = read_shipped_log(ACPO_RUN)["actor/ppo_kl"].max()
    assert f"{highest_kl:.2g}&ensp;<small>step 1; the median" in page
    assert "In words" not in page
    assert 'data-rule="grpo"' in page


def list_files(folder: Path) -> dict[Path, Path]:
    """Return the files below a folder, by their paths from there."""
    return {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}


def test_of_a_trained_run_is_kept_what_ships(tmp_path):
    trained = tmp_path / "trained"
    shutil.copytree(SHIPPED / ACPO_RUN, trained)
    # What does not ship: an earlier step's trace, the console, the folder, and answers.
    trace_of_last_step = next((trained / "traces").iterdir())
    shutil.copy(trace_of_last_step, trained / "traces/step_00000001_update_0000_rank_00000.parquet")
    (trained / "run.log").write_text("verl's words")
    record = trained / "metrics.run.json"
    record.write_text(record.read_text().replace("runs/quickstart", str(tmp_path)))
    answers = trained / "validation/0.jsonl"
    answers.write_text(answers.read_text().replace("}", ', "output": "1+1"}'))

    runpy.run_path(str(ROOT / "scripts" / "demo.py"))["keep_run"](trained, tmp_path / "kept", str(tmp_path))
    kept_files = list_files(tmp_path / "kept")
    shipped_files = list_files(SHIPPED / ACPO_RUN)
    assert kept_files.keys() == shipped_files.keys()
    for path, file in kept_files.items():
        if path.suffix == ".parquet":
            assert parquet.read_table(file).equals(parquet.read_table(shipped_files[path]), check_metadata=True)
        else:
            assert file.read_text() == shipped_files[path].read_text()


def read_texts(path: Path) -> list[str]:
    """Return what a page, a drawing or a table says."""
    text = path.read_text()
    if path.suffix == ".csv":
        return text.splitlines()
    return re.findall(r">\s*([^<>]*[^<>\s])\s*<", text)


def test_readme_has_the_numbers_of_the_pictured_update():
    grpo = read_shipped_tokens(GRPO_RUN)
    acpo = read_shipped_tokens(ACPO_RUN)
    clipped = grpo[(grpo.weight == 0) & (grpo.advantage != 0)]
    improbable = (clipped.old_log_prob < math.log(0.5)).sum()
    in_bad_answers = (clipped.advantage < 0).sum()
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert_names(readme, f"{len(grpo)} under GRPO and {len(acpo)} under ACPO")
    assert_names(readme, f"Of the {len(clipped)} tokens that GRPO clips in this update, {improbable} had")
    assert_names(readme, f"{in_bad_answers} stand in answers worse than average")


def test_what_ships_is_small_and_names_nobodys_folders():
    shipped = [path for path in SHIPPED.rglob("*") if path.is_file()]
    files_of_runs = [path for path in shipped if path.relative_to(SHIPPED).parts[0] in RUNS]
    assert 0 < sum(path.stat().st_size for path in files_of_runs) < 700_000
    for path in shipped:
        # verl's configuration names Ray's own folder.
        private_folders = re.findall(rb"/(?:work|home|root|Users|tmp(?!/ray/))/[\w./-]*", path.read_bytes())
        assert not private_folders, (path, private_folders)
        assert os.environ.get("HOSTNAME", "no host").encode() not in path.read_bytes()


def test_the_notebook_is_the_page():
    notebook = runpy.run_path(str(ROOT / "scripts" / "demo.py"))["notebook_of"](TUTORIAL.read_text())
    assert notebook == NOTEBOOK.read_text(), "python scripts/demo.py notebook"
