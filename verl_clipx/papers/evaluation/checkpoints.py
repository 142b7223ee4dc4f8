"""Finds a run's checkpoints, and what verl loads of each: its shards, or a model in Hugging Face format."""

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
OF_LORA = ("lora_adapter", "lora_train_meta.json")
MERGED_FOLDER = "merged_huggingface"
# Hidden, since it is not part of the model.
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
    """
    folder = Path(model)
    if not folder.exists() and _HUB_ID.fullmatch(model):
        return [Checkpoint(label=model.rsplit("/", 1)[-1], step=None, source=model)]
    folder = folder.resolve()
    if (folder / "config.json").is_file():
        return [Checkpoint(label=folder.name, step=None, source=str(folder))]
    checkpoints = []
    for path in [folder] if (folder / "actor").is_dir() else folder.glob("global_step_*"):
        step = STEP_FOLDER.fullmatch(path.name)
        if step and (path / "actor").is_dir():
            checkpoints.append(Checkpoint(label=path.name, step=int(step[1]), source=str(path / "actor")))
    # verl writes this once a checkpoint is complete.
    if (folder / LATEST).exists():
        last = read_whole_number(folder / LATEST)
        checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.step <= last]
    if not checkpoints:
        raise FileNotFoundError(
            f"{model}: neither a model's folder (config.json), nor a verl checkpoint (global_step_<N>/actor), nor an "
            "id on the hub"
        )
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


@dataclass(frozen=True)
class Weights:
    """What verl loads.

    Args:
        model: a folder in Hugging Face format.
        tokenizer: where the tokenizer and the model's configuration are.
        resume_from: verl's folder `global_step_<N>`, whose shards replace the model's weights; None to leave them.
        fingerprint: hash of the weights.
    """

    model: str
    tokenizer: str
    resume_from: str | None
    fingerprint: str


def find_weights(checkpoint: Checkpoint, ranks: int, base: str | None) -> Weights:
    """Return what verl loads: a model, or the base model and the checkpoint's shards on it.

    verl reads shards only on as many ranks as wrote them, and only onto the model that they were trained from. If the
    ranks are another number, or that model is not known, verl's merger makes a model of the shards, in bfloat16.

    Args:
        checkpoint: the one that is evaluated.
        ranks: number of ranks that will load the weights.
        base: the model that was trained; None if it is not known, or if the checkpoint is a whole model.

    Raises:
        ValueError: the checkpoint is from Megatron, or contains LoRA adapters, or `base` is given for a whole model.
        OSError: the checkpoint cannot be read or downloaded, or the merged model cannot be written.
        RuntimeError: the merger failed; the message contains the end of its output.
    """
    folder = Path(checkpoint.source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(checkpoint.source, ignore_patterns=IGNORED_HUB_FILES))
    saved = folder / "huggingface"
    if _has_weights(saved):
        folder = saved
    fingerprint = fingerprint_of_folder(folder)
    if (folder / "config.json").is_file():
        if base is not None:
            raise ValueError(f"{MODEL_PATH}={base}: {folder} is a whole model, so leave out the model it began from")
        return Weights(model=str(folder), tokenizer=str(folder), resume_from=None, fingerprint=fingerprint)
    if not (folder / "fsdp_config.json").is_file() or any((folder / name).exists() for name in OF_LORA):
        raise ValueError(
            f"{folder}: not an FSDP checkpoint, or one with LoRA adapters. Make a model of it with `python -m "
            "verl.model_merger merge --backend megatron` or peft's merge_and_unload, and evaluate that folder"
        )
    if base is not None and read_json_object(folder / "fsdp_config.json").get("world_size") == ranks:
        return Weights(model=base, tokenizer=str(saved), resume_from=str(folder.parent), fingerprint=fingerprint)
    merged = str(write_merged_model(folder, fingerprint))
    return Weights(model=merged, tokenizer=merged, resume_from=None, fingerprint=fingerprint)


def write_merged_model(actor: Path, fingerprint: str) -> Path:
    """Write an FSDP checkpoint as a model in Hugging Face format, by verl's own merger, unless that has been done.

    The model is kept in the `actor` folder, so that it disappears when verl removes an old checkpoint. It is for verl's
    rollout; `clipx recompute` reads the weights into memory instead, without the merger's rounding to bfloat16.

    Args:
        actor: verl's folder of the checkpoint.
        fingerprint: hash of the checkpoint, by which the model is known again.

    Returns:
        The model's folder.
    """
    target = actor / MERGED_FOLDER
    if (target / SOURCE_FILE).is_file() and read_text(target / SOURCE_FILE) == fingerprint:
        return target
    shutil.rmtree(target, ignore_errors=True)
    with making_folder(target) as partial:
        partial.mkdir()
        command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
        command += ["--local_dir", str(actor), "--target_dir", str(partial)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode or not _has_weights(partial):
            tail = "\n".join(done.stdout.splitlines()[-15:])
            raise RuntimeError(f"verl's merger failed on {actor} (exit code {done.returncode}):\n{tail}")
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
    for path in sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")):
        size = path.stat().st_size
        digest.update(f"{path.name}\x1f{size}\x1f".encode())
        with path.open("rb") as file:
            digest.update(file.read(_CHUNK_BYTES))
            file.seek(max(0, size - _CHUNK_BYTES))
            digest.update(file.read(_CHUNK_BYTES))
    return digest.hexdigest()
