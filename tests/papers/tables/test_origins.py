"""Where values come from, on files written here and on every preset, and the commands that show it.

Not covered: whether a comment is true to its paper. test_presets.py compares the reader's merging with Hydra's.
"""

import functools
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from verl_clipx.cli import app
from verl_clipx.common import preset_rows as rows
from verl_clipx.papers.tables import origins, recipe_commands
from verl_clipx.papers.tables.origins import LABELS, groups_of, overridden, read_origins, title_of
from verl_clipx.papers.tables.presets import PAPERS, preset_names

NAMES = [name for name in preset_names() if name.split("/")[0] in PAPERS]

FILES = {
    "recipe/made/rows.yaml": """# Made up.

parts:

  # A part.
  method/high:

    # [script] run.sh: upper bound
    clipx.clip_low: 0.5

rows:

  # Made up: the run.
  # A second line.
  run:
    - base
    - clipx=method
    - method/high
    # [paper] Table 9: prompts
    # of a rollout batch
    - data.train_batch_size: 8
""",
    "recipe/made/base.yaml": """# @package _global_
# Shared.

data:

  # [script] run.sh: prompts
  train_batch_size: 4

  # [choice] both silent: files
  files:
    - a.parquet
    - b.parquet

  # of no origin
  shuffle: true

  seed: 1
trainer: {}
""",
    "clipx/method.yaml": """# @package _global_
# A method.

defaults:
  - base
  - _self_

clipx:

  # upper bound
  clip_high: 1e-1
""",
    "clipx/base.yaml": """# @package _global_
# Shared.

clipx:

  # overridden
  clip_high: 2
""",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A configs folder of files written here, which the reader takes instead of the project's."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for module in (origins, rows):
        monkeypatch.setattr(module, "configs_folder", lambda: tmp_path)
    origins._read.cache_clear()
    yield tmp_path
    origins._read.cache_clear()


def test_the_file_that_sets_a_value_last_is_its_origin(folder):
    found = read_origins("made/run")["data.train_batch_size"]
    assert (found.value, found.kind, found.file) == (8, "paper", "recipe/made/rows.yaml")
    assert found.comment == "Table 9: prompts of a rollout batch"


def test_a_part_in_the_table_is_an_origin(folder):
    found = read_origins("made/run")["clipx.clip_low"]
    assert (found.value, found.kind, found.comment) == (0.5, "script", "run.sh: upper bound")
    assert found.file == "recipe/made/rows.yaml"


def test_a_list_is_one_value(folder):
    found = read_origins("made/run")["data.files"]
    assert (found.value, found.kind) == (["a.parquet", "b.parquet"], "choice")


def test_values_of_a_methods_group_have_its_comment(folder):
    found = read_origins("made/run")["clipx.clip_high"]
    # A number, as Hydra reads it; text to plain YAML.
    assert (found.value, found.kind, found.comment) == (0.1, "method", "upper bound")
    assert found.file == "clipx/method.yaml"


def test_without_a_label_there_is_no_kind(folder):
    found = read_origins("made/run")
    assert (found["data.shuffle"].kind, found["data.shuffle"].comment) == (None, "of no origin")
    assert (found["data.seed"].kind, found["data.seed"].comment) == (None, "")


def test_what_the_preset_leaves_alone_is_verls_default(folder):
    assert "data.max_prompt_length" not in read_origins("made/run")
    assert read_origins("made/run")["data.seed"].kind is None


def test_an_override_says_what_the_preset_had(folder):
    found = overridden(read_origins("made/run")["data.train_batch_size"])
    assert found.kind == "override" and found.comment.startswith("the preset: 8 (Table 9")


def test_groups_and_title(folder):
    assert groups_of("made/run") == ["clipx=method"]
    assert title_of("made/run") == "Made up: the run."


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("# no package\ndata: {}\n", ValueError, "first line must be '# @package _global_'"),
        ("# @package _global_\ndefaults:\n  - base\n", ValueError, "defaults needs _self_"),
        ("# @package _global_\ndefaults:\n  - override /clipx: x\n  - _self_\n", ValueError, "without keywords"),
        ("# @package _global_\ndefaults:\n  - /clipx@a: x\n  - _self_\n", ValueError, "without keywords or packages"),
        (
            "# @package _global_\ndefaults:\n  - /recipe/made/none\n  - _self_\n",
            FileNotFoundError,
            "none.yaml is not in",
        ),
    ],
)
def test_files_that_it_cannot_read_are_refused(folder, text, error, match):
    (folder / "recipe/made/base.yaml").write_text(text)
    with pytest.raises(error, match=match):
        read_origins("made/run")


def test_every_value_that_a_preset_sets_has_an_origin():
    without = {
        f"{origin.file}: {origin.key}"
        for name in NAMES
        for origin in read_origins(name).values()
        if origin.kind not in ("paper", "script", "choice", "method")
    }
    assert not without


def test_every_parameter_of_a_group_has_an_origin():
    folder = Path(origins.configs_folder()) / "clipx"
    files = [
        path.relative_to(folder.parent).with_suffix("").as_posix()
        for path in folder.rglob("*.yaml")
        if path.parent.name != "rollout"
    ]
    leaves = {(leaf.file, leaf.key): leaf for file in files for leaf in origins._merged(file)}
    wiring = ("_target_", "method", "loss_mode", "function", "group", "taken")
    without = {
        f"{leaf.file}: {leaf.key}"
        for leaf in leaves.values()
        if leaf.kind == "method"
        and leaf.key.rpartition(".")[2] not in wiring
        and not (isinstance(leaf.value, str) and leaf.value.startswith("${"))
    }
    assert len(leaves) > 100 and not without


def test_every_part_is_used():
    folder = Path(origins.configs_folder()) / "recipe"
    files = {path.relative_to(folder.parent).with_suffix("").as_posix() for path in folder.rglob("*.yaml")}
    tables = {f"recipe/{paper}/rows" for paper in rows.papers()}
    parts = {f"recipe/{paper}/{part}" for paper in rows.papers() for part in rows.read_rows(paper).parts}
    used = {f"recipe/{name}" for name in preset_names()}
    pending = list(used)
    while pending:
        path = pending.pop()
        for entry in origins._read(path)[0].defaults:
            if entry != "_self_" and (child := origins._path_of(entry, path)) not in used:
                used.add(child)
                pending.append(child)
    assert len(parts) > 30 and (files - tables) | parts <= used


@functools.cache
def output_of(*arguments: str):
    result = CliRunner().invoke(app, ["recipe", *arguments], env={"COLUMNS": "220"})
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setattr(recipe_commands.console, "width", 220)


def test_the_list_has_a_row_a_preset():
    code, output = output_of("list", "dgpo/")
    assert code == 0
    assert all(name in output for name in NAMES if name.startswith("dgpo/"))
    assert "acpo/" not in output and "DGPO Table 3: DAPO-Math-17K, DeepSeek-R1-Distill-Qwen-7B, ASPO" in output


def test_the_list_says_when_nothing_matches():
    code, output = output_of("list", "gsm8k")
    assert code == 1 and "no preset has 'gsm8k' in its name" in output


def line_of(output: str, key: str) -> str:
    return next(line for line in output.splitlines() if key in line)


def test_show_has_value_and_origin():
    code, output = output_of("show", "dgpo/dapo17k_7b_dgpo", "clipx.n=3")
    assert code == 0 and "16 optimizer steps for each rollout batch" in output
    rate = line_of(output, "actor_rollout_ref.actor.optim.lr ")
    assert "4.63e-07" in rate and "paper" in rate and "Table 12" in rate
    default = line_of(output, "clipx.m ")
    assert "paper" in default and "above the upper bound" in default
    overridden_line = line_of(output, "clipx.n ")
    assert "override" in overridden_line and "the preset: 1.0" in overridden_line
    assert "_target_" not in output


def test_show_all_is_verls_whole_configuration():
    code, output = output_of("show", "dgpo/dapo17k_7b_dgpo", "--all")
    config = OmegaConf.create(output)
    assert code == 0
    assert config.actor_rollout_ref.actor.policy_loss.clipx.method == "dgpo"
    assert config.critic.ppo_epochs == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dgpo/dapo17k_7b_dppo",), "did you mean dgpo/dapo17k_7b_"),
        (("dgpo/dapo17k_7b_dgpo", "clipx.nn=3"), "clipx.nn"),
        (("dgpo/dapo17k_7b_dgpo", "clipx.n=[1"), "[1"),
        (("dgpo/dapo17k_7b_dgpo", "clipx.n=-1"), "clipx.n=-1: must be a number"),
    ],
)
def test_show_says_what_is_wrong(arguments, message):
    code, output = output_of("show", *arguments)
    assert code == 1 and message in output


def test_every_kind_of_origin_has_a_meaning():
    assert set(recipe_commands.COLOURS) == set(LABELS)
