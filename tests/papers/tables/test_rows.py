"""The tables of runs: how a table is read and refused, Hydra's view of it through the plugin, and the whole of the
committed ones: few files, and values that stay (configurations.json, written by `python -m
tests.papers.tables.configurations`).

Not covered: what the rows say (test_presets.py, test_presets_cpu.py), where their values come from
(test_origins.py), an installed wheel (tests/end_to_end/test_wheel.py).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import open_dict

from tests.papers.tables.configurations import FILE, configurations
from verl_clipx.common import preset_rows as rows
from verl_clipx.common.configs_folder import configs_folder
from verl_clipx.common.preset_rows import Setting, entry_at, papers, read_rows

TABLE = """# Made up.

every_row:

  # [choice] the row's name
  trainer.experiment_name: <name>

parts:

  # How many.
  # A second line.
  method/few:

    # [script] run.sh: few
    clipx.n: 1e-1

rows:

  # Made up: one.
  # A second line.
  one: [task/this, /recipe/common/that, clipx=grpo, clipx/update=lopti, method/few]

  # Made up: two.
  two:
    - task/this
    # [paper] Table 9: prompts
    # of a batch
    - data.train_batch_size: 8
    - data.files: [a, b]
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A configs folder with the paper `made`; writes its table."""
    monkeypatch.setattr(rows, "configs_folder", lambda: tmp_path)
    (tmp_path / "recipe" / "made").mkdir(parents=True)

    def write(text: str):
        rows._read.cache_clear()
        (tmp_path / "recipe" / "made" / "rows.yaml").write_text(text)
        return read_rows("made")

    yield write
    rows._read.cache_clear()


def test_a_row_is_a_list_of_parts(made):
    one = made(TABLE).rows["one"]
    assert one.title == "Made up: one."
    assert one.defaults == (
        "/recipe/made/task/this",
        "/recipe/common/that",
        {"/clipx": "grpo"},
        {"/clipx/update": "lopti"},
        "/recipe/made/method/few",
        "_self_",
    )
    assert one.settings == (Setting("trainer.experiment_name", "one", "[choice] the row's name"),)


def test_values_of_a_row_and_of_a_part_keep_their_comments(made):
    table = made(TABLE)
    assert table.rows["two"].settings[1:] == (
        Setting("data.train_batch_size", 8, "[paper] Table 9: prompts of a batch"),
        Setting("data.files", ["a", "b"], ""),
    )
    # A number, as Hydra reads it; text to plain YAML.
    assert table.parts["method/few"].settings == (Setting("clipx.n", 0.1, "[script] run.sh: few"),)
    assert table.parts["method/few"].title == "How many."


def test_every_row_and_parts_may_be_left_out(made):
    table = made("rows:\n  one: [base]\n")
    assert table.rows["one"].settings == () and table.parts == {}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("row:\n  one: [base]\n", "row: use every_row, parts and rows"),
        ("parts: {}\n", "it has no rows"),
        ("rows:\n  one: base\n", r"rows: one: must be a list of parts"),
        ("rows:\n  one: [base, 3]\n", r"rows: one: 3: must be a part or a value"),
        ("parts:\n  a: [b]\nrows:\n  one: [a]\n", r"parts: a: must be values, one on each line"),
        ("rows:\n  one:\n  - data.n: 1\n  - base\n", r"rows: one: base comes after a value"),
    ],
)
def test_a_table_that_is_none_is_refused(made, text, match):
    with pytest.raises(ValueError, match=match):
        made(text)


def test_a_part_is_in_one_place(made, tmp_path):
    (tmp_path / "recipe/made/method").mkdir()
    (tmp_path / "recipe/made/method/few.yaml").touch()
    with pytest.raises(ValueError, match="method/few: is also a file of this folder"):
        made(TABLE)


@pytest.mark.parametrize(
    "path", ["recipe", "recipe/made", "recipe/made/none", "recipe/none/one", "clipx/made/one", "recipe//one"]
)
def test_there_is_nothing_elsewhere(made, path):
    made(TABLE)
    assert entry_at(path) is None and entry_at("recipe/made/one") is not None


def test_every_way_into_hydra_finds_the_rows(tmp_path):
    (tmp_path / "app.yaml").write_text("clipx: {clip_high: 9}\ntrainer: {device: cpu}\n")
    with initialize(version_base=None):
        plain = compose(None, ["+recipe=acpo/hitab_3b_cispo_off"])
    # Hydra starts anew in one process, as an application that composes in another does.
    with initialize_config_dir(str(tmp_path), version_base=None):
        onto = compose("app", ["+recipe=acpo/hitab_3b_cispo_off"])
        changed = compose("app", ["clipx.alpha=2", "+recipe=acpo/hitab_3b_acpo_off"])
    assert plain.trainer.experiment_name == onto.trainer.experiment_name == "hitab_3b_cispo_off"
    assert plain.clipx.clip_high == onto.clipx.clip_high == 1.45 and onto.trainer.device == "cpu"
    assert changed.clipx.alpha == 2


def documented(start: str) -> str:
    """The YAML block of docs/dev/presets.md that has this text."""
    blocks = (Path(__file__).parents[3] / "docs" / "dev" / "presets.md").read_text().split("```")[1::2]
    (block,) = [block.removeprefix("yaml\n") for block in blocks if block.startswith("yaml\n") and start in block]
    return block


def test_the_documented_row_is_in_the_table():
    row = documented("countdown_3b_cispo_off").removeprefix("rows:\n\n")
    assert row in (configs_folder() / "recipe/acpo/rows.yaml").read_text()


def test_a_run_is_added_as_documented(tmp_path, monkeypatch):
    table = (configs_folder() / "recipe/acpo/rows.yaml").read_text() + documented("countdown_3b_acpo_alpha_2_off")
    (tmp_path / "recipe/acpo").mkdir(parents=True)
    (tmp_path / "recipe/acpo/rows.yaml").write_text(table)
    monkeypatch.setattr(rows, "configs_folder", lambda: tmp_path)
    with initialize(version_base=None):
        added, paper_s = (compose(None, [f"+recipe=acpo/countdown_3b_acpo{part}_off"]) for part in ("_alpha_2", ""))
    assert added.clipx.alpha == 2 and "alpha" not in paper_s.clipx
    assert added.trainer.experiment_name == "countdown_3b_acpo_alpha_2_off"
    with open_dict(paper_s):
        paper_s.clipx.alpha, paper_s.trainer.experiment_name = 2.0, added.trainer.experiment_name
    assert added == paper_s


def test_hydra_names_the_rows_where_one_is_unknown():
    with initialize(version_base=None), pytest.raises(HydraException) as error:
        compose(None, ["+recipe=acpo/hitab_3b_cispo_of"])
    message = str(error.value)
    assert "Did you mean +recipe=acpo/hitab_3b_cispo_off" in message
    # The nearest, and not every row.
    assert len(message) < 250


def test_an_application_without_a_row_reads_no_table(monkeypatch):
    monkeypatch.setattr(rows, "_read", lambda path, paper: pytest.fail(f"{path} was read"))
    with initialize(version_base=None):
        assert compose(None, ["+clipx=grpo"]).clipx.method == "grpo"


def test_the_source_needs_little():
    heavy = ("torch", "verl", "numpy", "verl_clipx.papers")
    code = f"import sys, hydra_plugins.verl_clipx.rows_source; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("paper", papers())
def test_every_row_has_a_title_of_its_own(paper):
    titles = [row.title for row in read_rows(paper).rows.values()]
    assert all(titles) and len({*titles}) == len(titles)


def test_there_are_few_files():
    assert sum(path.is_file() for path in configs_folder().rglob("*")) <= 130


def test_values_stay():
    assert configurations() == json.loads(FILE.read_text())
