"""Finds a run's checkpoints, and what verl loads for each: its shards, or a model in Hugging Face format."""

import hashlib
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from verl_clipx.common.files import making_folder, read_json_object, read_text, read_whole_number, write_text
from verl_clipx.run.keys import MODEL_PATH
from verl_clipx.run.run_files import LATEST, STEP_FOLDER

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
# verl writes these beside the shards if it trains LoRA adapters.
LORA_FILES = ("lora_adapter", "lora_train_meta.json")
MERGED_FOLDER = "merged_huggingface"
# In a merged model, the file with the fingerprint of its checkpoint. It is hidden, because it is not part of the model.
SOURCE_FILE = ".merged_from"
# Files that a model repository on the hub may contain but that are never loaded.
IGNORED_HUB_FILES = ["*.pth", "*.pt", "*.gguf", "*.onnx", "*.msgpack", "*.h5", "original/*"]

_CHUNK_BYTES = 1 << 20
_HUB_ID = re.compile(r"(?!\.)[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Checkpoint:
    """A model to evaluate."""

    label: str
    """Name of its folder in the evaluation: `global_step_<N>`, or the model's name."""

    step: int | None
    """Training step of a verl checkpoint."""

    source: str
    """verl's `actor` folder, a folder in Hugging Face format, or an id on the hub."""


def find_checkpoints(model: str) -> list[Checkpoint]:
    """Find the checkpoints that a name stands for, ordered by training step.

    Args:
        model: a run's folder that contains `global_step_<N>` folders (trainer.default_local_dir), one of these folders,
            a folder in Hugging Face format, or a model id on the hub.

    Returns:
        At least one checkpoint. Steps of a run's folder that verl had not finished writing are left out.

    Raises:
        FileNotFoundError: nothing of this kind is there, or no checkpoint is complete.
    """
    folder = Path(model)
    if not folder.exists() and _HUB_ID.fullmatch(model):
        return [Checkpoint(label=model.rsplit("/", 1)[-1], step=None, source=model)]
    folder = folder.resolve()
    if (folder / "config.json").is_file():
        return [Checkpoint(label=folder.name, step=None, source=str(folder))]
    is_one_step = (folder / "actor").is_dir()
    step_folders = [folder] if is_one_step else folder.glob("global_step_*")
    checkpoints = []
    for step_folder in step_folders:
        match = STEP_FOLDER.fullmatch(step_folder.name)
        actor = step_folder / "actor"
        if match and actor.is_dir():
            checkpoints.append(Checkpoint(label=step_folder.name, step=int(match[1]), source=str(actor)))
    if not checkpoints:
        raise FileNotFoundError(
            f"{model}: neither a model's folder (config.json), nor a verl checkpoint (global_step_<N>/actor), nor an "
            "id on the hub"
        )
    # verl writes the step of the newest complete checkpoint into this file.
    if (folder / LATEST).exists():
        last_step = read_whole_number(folder / LATEST)
        checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.step <= last_step]
        if not checkpoints:
            raise FileNotFoundError(
                f"{model}: no checkpoint is complete. {LATEST} says that step {last_step} is the newest complete one, "
                "and all folders global_step_<N> are of later steps"
            )
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


@dataclass(frozen=True)
class Weights:
    """What verl loads.

    Args:
        model: a folder in Hugging Face format.
        tokenizer: where the tokenizer and the model's configuration are.
        resume_from: verl's folder `global_step_<N>`, whose shards replace the model's weights; None to keep the model's
            own weights.
        fingerprint: hash of the folder with the weights; see `fingerprint_of_folder`. For shards it includes the
            optimizer's files.
    """

    model: str
    tokenizer: str
    resume_from: str | None
    fingerprint: str


def find_weights(checkpoint: Checkpoint, ranks: int, base: str | None) -> Weights:
    """Return what verl loads: either a whole model, or the base model whose weights the checkpoint's shards replace.

    verl can read shards only with the number of ranks that wrote them, and only into the model that the training
    started from. If the number of ranks differs or that model is not known, verl's merger turns the shards into a
    model, in bfloat16.

    Args:
        checkpoint: what is evaluated.
        ranks: number of ranks that will load the weights.
        base: the model that the training started from; None if it is not known, or if the checkpoint is a whole model.

    Raises:
        ValueError: the checkpoint is from Megatron, or contains LoRA adapters, or `base` is given for a whole model.
        OSError: the checkpoint cannot be read or downloaded, or the merged model cannot be written.
        RuntimeError: the merger failed; the message contains the end of its output.
    """
    folder = Path(checkpoint.source)
    is_on_hub = not folder.is_dir()
    # verl always writes the tokenizer and the configuration here. If checkpoint.save_contents has hf_model, it writes
    # the weights, too.
    huggingface = folder / "huggingface"
    if _has_weights(huggingface):
        folder = huggingface
    is_whole_model = is_on_hub or (folder / "config.json").is_file()
    # Before a download, which may take long.
    if is_whole_model and base is not None:
        raise ValueError(
            f"{MODEL_PATH}={base}: {checkpoint.source} is a whole model, so leave out the model that its training "
            "started from"
        )
    if is_on_hub:
        folder = _download(checkpoint.source)
    fingerprint = fingerprint_of_folder(folder)
    if (folder / "config.json").is_file():
        return Weights(model=str(folder), tokenizer=str(folder), resume_from=None, fingerprint=fingerprint)
    if not (folder / "fsdp_config.json").is_file():
        raise ValueError(
            f"{folder}: not an FSDP checkpoint. If Megatron wrote it, merge it with `python -m verl.model_merger merge "
            "--backend megatron` and evaluate the folder that this writes"
        )
    if any((folder / name).exists() for name in LORA_FILES):
        raise ValueError(
            f"{folder}: has LoRA adapters. Merge them with peft's merge_and_unload and evaluate the folder where you "
            "save the merged model"
        )
    saved_ranks = read_json_object(folder / "fsdp_config.json").get("world_size")
    if base is not None and saved_ranks == ranks:
        return Weights(model=base, tokenizer=str(huggingface), resume_from=str(folder.parent), fingerprint=fingerprint)
    merged = str(write_merged_model(folder, fingerprint))
    return Weights(model=merged, tokenizer=merged, resume_from=None, fingerprint=fingerprint)


def _download(hub_id: str) -> Path:
    """Return the folder of a model that is downloaded from the hub, unless it is in the local cache.

    Raises:
        OSError: the download failed.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, ignore_patterns=IGNORED_HUB_FILES))
    except OSError as error:
        # A mistyped relative path may look like an id.
        raise OSError(
            f"{hub_id}: there is no such folder, and no model of this name came from the hub. {error}"
        ) from error


def write_merged_model(actor: Path, fingerprint: str) -> Path:
    """Write an FSDP checkpoint as a model in Hugging Face format, by verl's own merger, unless that has been done.

    The model is kept in the `actor` folder, so that it disappears when verl removes an old checkpoint. It is for verl's
    rollout; `clipx recompute` reads the weights into memory instead, without the merger's rounding to bfloat16.

    Args:
        actor: verl's folder of the checkpoint.
        fingerprint: hash of the checkpoint. It is stored with the model, and tells a later call whether the model is
            still the checkpoint's.

    Returns:
        The model's folder.

    Raises:
        OSError: the model cannot be written.
        RuntimeError: the merger failed; the message contains the end of its output.
    """
    target = actor / MERGED_FOLDER
    if (target / SOURCE_FILE).is_file() and read_text(target / SOURCE_FILE) == fingerprint:
        return target
    shutil.rmtree(target, ignore_errors=True)
    with making_folder(target) as partial:
        partial.mkdir()
        command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
        command += ["--local_dir", str(actor), "--target_dir", str(partial)]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if result.returncode or not _has_weights(partial):
            last_lines = "\n".join(result.stdout.splitlines()[-15:])
            raise RuntimeError(f"verl's merger failed on {actor} (exit code {result.returncode}):\n{last_lines}")
        write_text(partial / SOURCE_FILE, fingerprint)
    return target


def _has_weights(folder: Path) -> bool:
    """Return whether a folder contains a model's weights in Hugging Face format."""
    return any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES)


def fingerprint_of_folder(folder: Path) -> str:
    """Return the SHA-256 over the name, size, and first and last MiB of every non-hidden file directly in a folder.

    This does not prove equality, but the weights of two training steps differ everywhere, and even a 15 GB model is
    hashed almost instantly.
    """
    digest = hashlib.sha256()
    visible_files = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
    for path in sorted(visible_files):
        size = path.stat().st_size
        digest.update(f"{path.name}\x1f{size}\x1f".encode())
        with path.open("rb") as file:
            digest.update(file.read(_CHUNK_BYTES))
            file.seek(max(0, size - _CHUNK_BYTES))
            digest.update(file.read(_CHUNK_BYTES))
    return digest.hexdigest()
