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
from verl_clipx.papers.tables.origins import LABELS, Origin, groups_of, mark_overridden, read_origins, title_of
from verl_clipx.papers.tables.presets import preset_names
from verl_clipx.run import presets

NAMES = preset_names()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of made_configs, which the reader takes instead of the project's configs."""
    copy = shutil.copytree(Path(__file__).with_name("made_configs"), tmp_path / "configs")
    for module in (origins, presets):
        monkeypatch.setattr(module, "configs_folder", lambda: copy)
    origins._read_part.cache_clear()
    yield copy
    origins._read_part.cache_clear()


def test_the_comment_above_the_value_that_wins_is_its_origin(folder):
    presets_file = "recipe/made/presets.yaml"
    base_file = "recipe/made/base.yaml"
    expected = [
        Origin(
            key="data.train_batch_size",
            value=8,
            kind="paper",
            comment="Table 9: prompts of a rollout batch",
            file=presets_file,
        ),
        Origin(
            key="data.files",
            value=["a.parquet", "b.parquet"],
            kind="choice",
            comment="both silent: files",
            file=base_file,
        ),
        Origin(key="data.shuffle", value=True, kind=None, comment="of no origin", file=base_file),
        Origin(key="data.seed", value=1, kind=None, comment="", file=base_file),
        Origin(key="trainer", value={}, kind=None, comment="", file=base_file),
        # A number, as Hydra reads it; text to plain YAML.
        Origin(key="clipx.clip_high", value=0.1, kind="method", comment="upper bound", file="clipx/method.yaml"),
        Origin(key="clipx.clip_low", value=0.5, kind="script", comment="run.sh: upper bound", file=presets_file),
    ]
    assert read_origins("made/run") == {origin.key: origin for origin in expected}


@pytest.mark.usefixtures("folder")
def test_an_overridden_value_keeps_what_the_preset_has_in_its_comment():
    overridden = mark_overridden(read_origins("made/run")["data.train_batch_size"])
    assert overridden.kind == "override"
    assert "8 (Table 9" in overridden.comment


@pytest.mark.usefixtures("folder")
def test_a_preset_has_groups_and_a_title():
    assert groups_of("made/run") == ["clipx=method"]
    assert title_of("made/run") == "Made up: the run."


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
    without = set()
    for name in NAMES:
        for origin in read_origins(name).values():
            if origin.kind not in ("paper", "script", "choice", "method") or not origin.comment:
                without.add(f"{origin.file}: {origin.key}")
    assert not without


# The last part of keys of a method's group that have no effect on the training.
WITHOUT_EFFECT = ("_target_", "method", "loss_mode", "function", "group", "taken", "rule", "calculate_log_probs")


def test_every_parameter_of_a_group_has_an_origin():
    folder = Path(origins.configs_folder()) / "clipx"
    files = [path.relative_to(folder.parent).with_suffix("").as_posix() for path in folder.rglob("*.yaml")]
    values = {}
    for file in files:
        if "rollout" not in file:
            values |= {(origin.file, origin.key): origin for origin in origins._merge_origins(file)}
    assert len(values) > 100
    assert [f"{file}: {key}" for (file, key), origin in values.items() if lacks_origin(origin)] == []


def lacks_origin(origin):
    """Return whether a value of a group has an effect and its comment does not say where it is from."""
    is_interpolation = isinstance(origin.value, str) and origin.value.startswith("${")
    has_effect = origin.key.rpartition(".")[2] not in WITHOUT_EFFECT
    return origin.kind == "method" and has_effect and not is_interpolation


@pytest.mark.parametrize("name", [name for name in table_names() if name not in ("cpu_small", "reversal")])
def test_a_tables_footnotes_name_every_choice_of_its_trainings(name):
    """But those that all papers share, which are verl's defaults, and what cannot change a number."""
    table = load_table(name)
    footnotes = " ".join(footnote.text for footnote in table.footnotes)
    presets_of_papers = {
        source.preset for source, _ in table.sources() if source.preset and source.preset.split("/")[0] in PAPERS
    }
    choices = set()
    for preset in presets_of_papers:
        for origin in read_origins(preset).values():
            is_shared = origin.file.startswith(("clipx/", "recipe/common/base"))
            if origin.kind == "choice" and not is_shared:
                choices.add(origin.key)
    cannot_change_a_number = {
        "trainer.project_name",
        "trainer.experiment_name",
        "reward.custom_reward_function.name",
        "data.val_files",
    }
    assert {key for key in choices if f"`{key}`" not in footnotes} <= cannot_change_a_number


@functools.cache
def run_recipe(*arguments: str) -> str:
    """Run `clipx papers recipe` on a wide terminal, and return what it prints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe_commands.console, "width", 220)
        result = CliRunner().invoke(app, ["papers", "recipe", *arguments], env={"COLUMNS": "220"})
    assert result.exit_code == 0, result.output
    return result.output


def test_the_list_has_a_line_a_preset():
    output = run_recipe("list", "dgpo/")
    assert [name for name in NAMES if name.startswith("dgpo/") and name not in output] == []
    assert "acpo/" not in output
    assert "DGPO Table 3: DAPO-Math-17K, DeepSeek-R1-Distill-Qwen-7B, ASPO" in output


def test_show_has_the_updates_and_no_wiring():
    output = run_recipe("show", "dgpo/dapo17k_7b_dgpo", "clipx.n=3")
    assert "16 optimizer steps for each rollout batch" in output
    assert "_target_" not in output


@pytest.mark.parametrize(
    ("key", "facts"),
    [
        ("actor_rollout_ref.actor.optim.lr", ["4.63e-07", "paper", "Table 12"]),
        ("clipx.m", ["paper", "above the upper bound"]),
        ("clipx.n", ["override", "the preset: 1.0"]),
    ],
)
def test_show_has_a_line_with_value_and_origin_for_each_key(key, facts):
    lines = run_recipe("show", "dgpo/dapo17k_7b_dgpo", "clipx.n=3").splitlines()
    line = next(line for line in lines if f"{key} " in line)
    assert [fact for fact in facts if fact not in line] == []


def test_show_all_has_verls_whole_configuration():
    config = OmegaConf.create(run_recipe("show", "dgpo/dapo17k_7b_dgpo", "--all"))
    assert config.actor_rollout_ref.actor.policy_loss.clipx.method == "dgpo"
    assert config.critic.ppo_epochs == 1


def test_each_kind_of_origin_has_a_colour():
    assert {*recipe_commands.COLOURS} == {*LABELS}
