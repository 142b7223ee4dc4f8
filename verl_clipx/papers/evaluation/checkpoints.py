"""Finds a run's checkpoints, and what verl loads of each: its shards, or a model in Hugging Face format."""

import hashlib
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from verl_clipx.common.files import read_json, read_json_object, read_whole_number, write_json
from verl_clipx.common.run_files import STEP_FOLDER

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
MERGED_FOLDER = "merged_huggingface"
# Hidden, since it is not part of the model.
SOURCE_FILE = ".merged_from.json"
# Files that a model repository on the hub may contain but that are never loaded.
IGNORED_HUB_FILES = ["*.pth", "*.pt", "*.gguf", "*.onnx", "*.msgpack", "*.h5", "original/*"]

_CHUNK_BYTES = 1 << 20
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


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
            its `actor` folder, a folder in Hugging Face format, or a model id on the hub.

    Returns:
        At least one checkpoint. Steps of a run's folder that verl had not finished writing are left out.
    """
    folder = Path(model)
    if not folder.exists():
        if _HUB_ID.fullmatch(model) and not model.startswith("."):
            return [Checkpoint(model.rsplit("/", 1)[-1], None, model)]
        raise FileNotFoundError(f"{model}: there is no such folder, and it is not an id on the Hugging Face hub")
    folder = folder.resolve()
    if (folder / "config.json").is_file():
        return [Checkpoint(folder.name, None, str(folder))]
    if (folder / "fsdp_config.json").is_file():
        return [_of_step(folder.parent, folder)]
    if (folder / "actor").is_dir():
        return [_of_step(folder, folder / "actor")]
    steps = [path for path in folder.glob("global_step_*") if STEP_FOLDER.fullmatch(path.name)]
    found = [_of_step(path, path / "actor") for path in steps if (path / "actor").is_dir()]
    # verl writes this once a checkpoint is complete.
    tracker = folder / "latest_checkpointed_iteration.txt"
    if tracker.exists():
        last = read_whole_number(tracker)
        found = [checkpoint for checkpoint in found if checkpoint.step is None or checkpoint.step <= last]
    if not found:
        raise FileNotFoundError(
            f"{model}: contains neither a model (config.json) nor a verl checkpoint (global_step_<N>/actor, actor)"
        )
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def _of_step(folder: Path, actor: Path) -> Checkpoint:
    match = STEP_FOLDER.fullmatch(folder.name)
    return Checkpoint(folder.name, int(match.group(1)) if match else None, str(actor))


@dataclass(frozen=True)
class Weights:
    """What verl loads.

    Args:
        model: a folder in Hugging Face format, or an id on the hub.
        tokenizer: where the tokenizer and the model's configuration are.
        resume_from: verl's folder `global_step_<N>`, whose shards replace the model's weights; None to leave them.
        fingerprint: hash of the weights.
    """

    model: str
    tokenizer: str
    resume_from: str | None
    fingerprint: str


def find_weights(checkpoint: Checkpoint, ranks: int, base: str | None, cache: Path | None = None) -> Weights:
    """Return what verl loads: a model, or the base model and the checkpoint's shards on it.

    verl reads shards only on as many ranks as wrote them, and only onto the model that they were trained from. Without
    either, its own merger makes a model of them, in bfloat16. This is kept in the `actor` folder, so that it disappears
    when verl removes an old checkpoint, and made again when the shards have changed.

    Args:
        ranks: number of ranks that will load the weights.
        base: the model that was trained; None if it is not known.
        cache: keep merged models in `<cache>/<label>` instead.

    Raises:
        ValueError: the checkpoint is from Megatron, or contains LoRA adapters.
        PermissionError: the merged model cannot be written.
        RuntimeError: the merger failed; the message contains the end of its output.
    """
    folder = Path(checkpoint.source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(checkpoint.source, ignore_patterns=IGNORED_HUB_FILES))
    saved = folder / "huggingface"
    if any(path for pattern in WEIGHT_FILES for path in saved.glob(pattern)):
        folder = saved
    if (folder / "config.json").is_file():
        if base is not None:
            raise ValueError(
                f"actor_rollout_ref.model.path={base}: {folder} is a whole model, so it has no base; leave this out"
            )
        return Weights(str(folder), str(folder), None, fingerprint_of_folder(folder))
    if not (folder / "fsdp_config.json").is_file():
        raise ValueError(
            f"{folder}: it contains no FSDP checkpoint (fsdp_config.json). Merge a Megatron checkpoint with "
            f"`python -m verl.model_merger merge --backend megatron --local_dir {folder} --target_dir …` "
            "and evaluate that folder"
        )
    fingerprint = fingerprint_of_folder(folder)
    same_ranks = read_json_object(folder / "fsdp_config.json").get("world_size") == ranks
    if base is not None and same_ranks and STEP_FOLDER.fullmatch(folder.parent.name):
        return Weights(base, str(saved), str(folder.parent), fingerprint)
    merged = folder / MERGED_FOLDER if cache is None else cache / checkpoint.label
    source = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(folder.glob("model_*.pt"))}
    record = merged / SOURCE_FILE
    if not record.is_file() or read_json(record) != source:
        merge(folder, merged)
        write_json(record, source)
    return Weights(str(merged), str(merged), None, fingerprint)


def merge(actor: Path, target: Path) -> None:
    """Merge an FSDP checkpoint with verl's own merger; replace `target` once the merged model is complete."""
    if (actor / "lora_adapter").is_dir() or (actor / "lora_train_meta.json").is_file():
        raise ValueError(
            f"{actor}: it is a checkpoint of LoRA adapters. Merge them into the base model (peft's merge_and_unload) "
            "and evaluate that folder"
        )
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise PermissionError(
            f"{target}: cannot be written ({error}); set --merged-models to a folder that can be written"
        ) from error
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    command += ["--local_dir", str(actor), "--target_dir", str(partial)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode or not any(path for pattern in WEIGHT_FILES for path in partial.glob(pattern)):
        shutil.rmtree(partial, ignore_errors=True)
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise RuntimeError(f"verl's merger failed on {actor} (exit code {done.returncode}):\n{tail}")
    shutil.rmtree(target, ignore_errors=True)
    partial.replace(target)


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
