"""The files of presets: how one is read and refused, Hydra's view of it, and the whole of the committed ones
(configurations.json, written by `python -m tests.papers.tables.configurations`). Not covered: what the presets say
(tests/papers/tables); an installed wheel (tests/end_to_end/test_wheel.py).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import open_dict

from tests.claims.documents import ROOT, blocks_of
from tests.papers.tables.configurations import FILE, configurations
from verl_clipx.losses.configs_folder import configs_folder
from verl_clipx.run import presets
from verl_clipx.run.presets import PresetEntry, PresetSetting, entry_at, papers, read_presets

TABLE = Path(__file__).with_name("made_presets.yaml").read_text()


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A configs folder with the paper `made`; writes its table."""
    monkeypatch.setattr(presets, "configs_folder", lambda: tmp_path)
    (tmp_path / "recipe" / "made").mkdir(parents=True)

    def write(text: str):
        presets._read.cache_clear()
        (tmp_path / "recipe" / "made" / "presets.yaml").write_text(text)
        return read_presets("made")

    yield write
    presets._read.cache_clear()


def test_a_preset_is_a_list_of_parts_and_values_keep_their_comments(made):
    assert made("presets:\n  one: [base]\n") == ({"one": PresetEntry("", ("/recipe/made/base", "_self_"), ())}, {})
    table = made(TABLE)
    parts = ("/recipe/made/task/this", "/recipe/common/that", {"/clipx": "grpo"}, {"/clipx/update": "lopti"})
    name = PresetSetting("trainer.experiment_name", "one", "[choice] the preset's name")
    assert table.presets["one"] == ("Made up: one.", (*parts, "/recipe/made/method/few", "_self_"), (name,))
    assert table.presets["two"].settings[1:] == (
        PresetSetting("data.train_batch_size", 8, "[paper] Table 9: prompts of a batch"),
        PresetSetting("data.files", ["a", "b"], ""),
    )
    # A number, as Hydra reads it; text to plain YAML.
    few = (PresetSetting("clipx.n", 0.1, "[script] run.sh: few"),)
    assert table.parts["method/few"] == ("How many.", ("_self_",), few)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("preset:\n  one: [base]\n", "preset: use every_preset, parts and presets"),
        ("parts: {}\n", "it has no presets"),
        ("presets:\n  one: base\n", r"presets: one: must be a list of parts"),
        ("presets:\n  one: [base, 3]\n", r"presets: one: 3: must be a part or a value"),
        ("parts:\n  a: [b]\npresets:\n  one: [a]\n", r"parts: a: must be a mapping of keys to values"),
        ("parts: [a]\npresets:\n  one: [a]\n", r"parts: must be a mapping"),
        ("presets: [one]\n", r"presets: must be a mapping"),
        ("parts:\n  1: {a: 2}\npresets:\n  one: [a]\n", r"parts: 1: must be a text"),
        ("b: 1\n2: 1\na: 1\n", r"yaml: b, 2, a: use every_preset"),
        ("presets:\n  one:\n  - data.n: 1\n  - base\n", r"presets: one: base comes after a value"),
    ],
)
def test_a_table_that_is_none_is_refused(made, text, match):
    with pytest.raises(ValueError, match=match):
        made(text)


def test_no_other_path_has_an_entry_and_a_part_is_in_one_place(made, tmp_path):
    made(TABLE)
    assert entry_at("recipe/made/one") is not None
    for path in ("recipe", "recipe/made", "recipe/made/none", "recipe/none/one", "clipx/made/one", "recipe//one"):
        assert entry_at(path) is None, path
    (tmp_path / "recipe/made/method").mkdir()
    (tmp_path / "recipe/made/method/few.yaml").touch()
    with pytest.raises(ValueError, match=r"method/few: the folder has a file method/few.yaml too"):
        made(TABLE)
    (tmp_path / "recipe/made/method/few.yaml").rename(tmp_path / "recipe/made/one.yaml")
    with pytest.raises(ValueError, match=r"one: the folder has a file one.yaml too"):
        made(TABLE)


def test_every_way_into_hydra_finds_the_presets(tmp_path):
    (tmp_path / "app.yaml").write_text("clipx: {clip_high: 9}\ntrainer: {device: cpu}\n")
    with initialize(version_base=None):
        composed_alone = compose(None, ["+recipe=acpo/hitab_3b_cispo_off"])
    # Hydra starts anew in one process, as an application that composes in another does.
    with initialize_config_dir(str(tmp_path), version_base=None):
        onto_application = compose("app", ["+recipe=acpo/hitab_3b_cispo_off"])
        with_override = compose("app", ["clipx.alpha=2", "+recipe=acpo/hitab_3b_acpo_off"])
    for config in (composed_alone, onto_application):
        assert config.trainer.experiment_name == "hitab_3b_cispo_off"
        assert config.clipx.clip_high == 1.45
    assert onto_application.trainer.device == "cpu"
    assert with_override.clipx.alpha == 2


def test_a_preset_is_added_as_documented(tmp_path, monkeypatch):
    table = (configs_folder() / "recipe/acpo/presets.yaml").read_text()
    blocks = blocks_of((ROOT / "docs" / "papers.md").read_text())
    yaml_texts = [block.text for block in blocks if block.language == "yaml"]
    (new_preset,) = [text for text in yaml_texts if "countdown_3b_acpo_alpha_2_off" in text]
    (tmp_path / "recipe/acpo").mkdir(parents=True)
    (tmp_path / "recipe/acpo/presets.yaml").write_text(table + new_preset)
    monkeypatch.setattr(presets, "configs_folder", lambda: tmp_path)
    with initialize(version_base=None):
        added = compose(None, ["+recipe=acpo/countdown_3b_acpo_alpha_2_off"])
        expected = compose(None, ["+recipe=acpo/countdown_3b_acpo_off"])
    assert added.clipx.alpha == 2 and "alpha" not in expected.clipx
    assert added.trainer.experiment_name == "countdown_3b_acpo_alpha_2_off"
    # But for its value and its name it is the paper's preset.
    with open_dict(expected):
        expected.clipx.alpha = 2.0
        expected.trainer.experiment_name = added.trainer.experiment_name
    assert added == expected


def test_hydra_names_the_preset_where_one_is_unknown():
    with initialize(version_base=None), pytest.raises(HydraException) as error:
        compose(None, ["+recipe=acpo/hitab_3b_cispo_of"])
    # The nearest, and not every row.
    assert "Did you mean +recipe=acpo/hitab_3b_cispo_off" in str(error.value) and len(str(error.value)) < 250


def test_an_application_without_a_preset_reads_no_file(monkeypatch):
    monkeypatch.setattr(presets, "_read", lambda path, paper: pytest.fail(f"{path} was read"))
    with initialize(version_base=None):
        assert compose(None, ["+clipx=grpo"]).clipx.method == "grpo"


def test_hydras_source_of_presets_imports_nothing_heavy():
    heavy = ("torch", "verl", "numpy", "verl_clipx.papers")
    program = f"import sys, hydra_plugins.verl_clipx.preset_source; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.stdout == "[]\n", result.stderr


def test_values_stay_and_every_preset_has_a_title_of_its_own():
    assert configurations() == json.loads(FILE.read_text())
    for paper in papers():
        titles = [preset.title for preset in read_presets(paper).presets.values()]
        assert all(titles) and len({*titles}) == len(titles), paper
