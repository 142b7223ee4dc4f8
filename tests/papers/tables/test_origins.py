"""Where values come from, on files written here and on every preset, and the commands that show it.

Not covered: whether a comment is true to its paper. test_presets.py compares the reader's merging with Hydra's.
"""

import functools
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from tests.papers.tables.compositions import PAPERS
from verl_clipx.cli import app
from verl_clipx.papers.tables import origins, recipe_commands
from verl_clipx.papers.tables.definition import load_table, table_names
from verl_clipx.papers.tables.origins import LABELS, groups_of, mark_overridden, read_origins, title_of
from verl_clipx.papers.tables.presets import preset_names
from verl_clipx.run import presets

NAMES = preset_names()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of made_configs, which the reader takes instead of the project's configs."""
    made = shutil.copytree(Path(__file__).with_name("made_configs"), tmp_path / "configs")
    for module in (origins, presets):
        monkeypatch.setattr(module, "configs_folder", lambda: made)
    origins._read_part.cache_clear()
    yield made
    origins._read_part.cache_clear()


def test_the_comment_above_the_value_that_wins_is_its_origin(folder):
    found = {one.key: (one.value, one.kind, one.comment, one.file) for one in read_origins("made/run").values()}
    own, base = "recipe/made/presets.yaml", "recipe/made/base.yaml"
    assert found == {
        "data.train_batch_size": (8, "paper", "Table 9: prompts of a rollout batch", own),
        "data.files": (["a.parquet", "b.parquet"], "choice", "both silent: files", base),
        "data.shuffle": (True, None, "of no origin", base),
        "data.seed": (1, None, "", base),
        "trainer": ({}, None, "", base),
        # A number, as Hydra reads it; text to plain YAML.
        "clipx.clip_high": (0.1, "method", "upper bound", "clipx/method.yaml"),
        "clipx.clip_low": (0.5, "script", "run.sh: upper bound", own),
    }
    changed = mark_overridden(read_origins("made/run")["data.train_batch_size"])
    assert changed.kind == "override" and "8 (Table 9" in changed.comment
    assert (groups_of("made/run"), title_of("made/run")) == (["clipx=method"], "Made up: the run.")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("# no package\ndata: {}\n", ValueError),
        ("# @package _global_\ndefaults:\n  - base\n", ValueError),
        ("# @package _global_\ndefaults:\n  - override /clipx: x\n  - _self_\n", ValueError),
        ("# @package _global_\ndefaults:\n  - /clipx@a: x\n  - _self_\n", ValueError),
        ("# @package _global_\ndefaults:\n  - /recipe/made/none\n  - _self_\n", FileNotFoundError),
    ],
)
def test_files_that_it_cannot_read_are_refused(folder, text, error):
    (folder / "recipe/made/base.yaml").write_text(text)
    with pytest.raises(error, match=r"recipe/made/(base|none)"):
        read_origins("made/run")


def test_a_file_without_a_comment_below_its_package_has_no_title(folder):
    path = folder / "recipe/made/bare.yaml"
    path.write_text("# @package _global_\ndata: {seed: 1}\n")
    assert title_of("made/bare") == ""
    path.write_text("# @package _global_\n# A run.\ndata: {seed: 1}\n")
    origins._read_part.cache_clear()
    assert title_of("made/bare") == "A run."


def test_every_value_that_a_preset_sets_has_an_origin():
    found = {(one.file, one.key, one.kind, one.comment) for name in NAMES for one in read_origins(name).values()}
    assert not [one for one in found if one[2] not in ("paper", "script", "choice", "method") or not one[3]]


# Of a method's group, and without effect on the training.
WIRING = ("_target_", "method", "loss_mode", "function", "group", "taken", "rule", "calculate_log_probs")


def test_every_parameter_of_a_group_has_an_origin():
    folder = Path(origins.configs_folder()) / "clipx"
    files = [path.relative_to(folder.parent).with_suffix("").as_posix() for path in folder.rglob("*.yaml")]
    leaves = {
        (leaf.file, leaf.key): leaf for file in files if "rollout" not in file for leaf in origins._merge_origins(file)
    }
    without = {
        f"{leaf.file}: {leaf.key}"
        for leaf in leaves.values()
        if leaf.kind == "method"
        and leaf.key.rpartition(".")[2] not in WIRING
        and not (isinstance(leaf.value, str) and leaf.value.startswith("${"))
    }
    assert len(leaves) > 100 and not without


@pytest.mark.parametrize("name", [name for name in table_names() if name not in ("cpu_small", "reversal")])
def test_a_tables_footnotes_name_every_choice_of_its_trainings(name):
    """But those that all papers share, which are verl's defaults, and what cannot change a number."""
    table = load_table(name)
    text = " ".join(note.text for note in table.footnotes)
    chosen = {
        origin.key
        for source, _ in table.sources()
        if source.preset and source.preset.split("/")[0] in PAPERS
        for origin in read_origins(source.preset).values()
        if origin.kind == "choice" and not origin.file.startswith(("clipx/", "recipe/common/base"))
    }
    names = {"trainer.project_name", "trainer.experiment_name", "reward.custom_reward_function.name", "data.val_files"}
    assert {key for key in chosen if f"`{key}`" not in text} <= names


@functools.cache
def recipe(*arguments: str, code: int = 0) -> str:
    """What `clipx papers recipe` prints on a wide terminal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe_commands.console, "width", 220)
        result = CliRunner().invoke(app, ["papers", "recipe", *arguments], env={"COLUMNS": "220"})
    assert result.exit_code == code, result.output
    return result.output


def test_the_list_has_a_line_a_preset():
    output = recipe("list", "dgpo/")
    assert all(name in output for name in NAMES if name.startswith("dgpo/")) and "acpo/" not in output
    assert "DGPO Table 3: DAPO-Math-17K, DeepSeek-R1-Distill-Qwen-7B, ASPO" in output


def test_show_has_value_and_origin_and_with_all_verls_whole_configuration():
    output = recipe("show", "dgpo/dapo17k_7b_dgpo", "clipx.n=3")
    assert "16 optimizer steps for each rollout batch" in output and "_target_" not in output
    for key, words in {
        "actor_rollout_ref.actor.optim.lr ": ("4.63e-07", "paper", "Table 12"),
        "clipx.m ": ("paper", "above the upper bound"),
        "clipx.n ": ("override", "the preset: 1.0"),
    }.items():
        line = next(line for line in output.splitlines() if key in line)
        assert all(word in line for word in words)
    config = OmegaConf.create(recipe("show", "dgpo/dapo17k_7b_dgpo", "--all"))
    assert config.actor_rollout_ref.actor.policy_loss.clipx.method == "dgpo" and config.critic.ppo_epochs == 1
    assert set(recipe_commands.COLOURS) == set(LABELS)
