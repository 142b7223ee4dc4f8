"""Loads a checkpoint's model: from Hugging Face's form, or from verl's, which verl's own merger puts together."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

# The files of weights in a folder of Hugging Face's form.
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
MERGE_BY_HAND = "Make a model of it with python -m verl.model_merger merge, and name its folder."


def load_model(folder: Path) -> Any:
    """Return the model of a checkpoint, of transformers, in float32 and for evaluation.

    Args:
        folder: a model in Hugging Face's form; or verl's folder `global_step_N`, or `actor` in that.

    Raises:
        OSError, ValueError: it is none of these, or can't be loaded; says what to do.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    actor = folder / "actor" if (folder / "actor").is_dir() else folder
    # verl may have saved a model in Hugging Face's form beside its own checkpoint.
    for place in (actor, actor / "huggingface"):
        if has_whole_model(place):
            with naming_folder(place):
                # Without dtype, transformers would round the weights to the type that config.json names.
                return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    if not (actor / "fsdp_config.json").is_file():
        raise ValueError(
            f"{folder}: neither a model in Hugging Face's format nor one of verl's FSDP checkpoints. {MERGE_BY_HAND}"
        )
    with naming_folder(actor):
        config, weights = merge_sharded_weights(actor)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing, unknown = model.load_state_dict(weights, strict=False)
    # Tied weights, as those of the embedding and the head may be, are saved once.
    tied = set(model._tied_weights_keys or ())
    if unknown or not set(missing) <= tied:
        raise ValueError(
            f"{folder}: weights missing: {missing[:3]}, unknown, as adapters are: {unknown[:3]}. {MERGE_BY_HAND}"
        )
    return model


def has_whole_model(folder: Path) -> bool:
    """Return whether a folder has a model's configuration and its weights in Hugging Face's form."""
    if not (folder / "config.json").is_file():
        return False
    return any(any(folder.glob(pattern)) for pattern in WEIGHTS)


@contextlib.contextmanager
def naming_folder(folder: Path) -> Iterator[None]:
    """Within the block, every error becomes a ValueError that names the checkpoint's folder.

    A damaged checkpoint may raise any error, also one of a library's own kind.
    """
    try:
        yield
    except Exception as error:
        raise ValueError(f"{folder}: its model cannot be loaded ({type(error).__name__}: {error})") from error


def merge_sharded_weights(actor: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Put the shards of verl's FSDP checkpoint together in memory, as precise as they were saved.

    Args:
        actor: the folder `actor` of the checkpoint.

    Returns:
        The model's configuration, of transformers, and its whole weights by name.
    """
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    weights: dict[str, torch.Tensor] = {}

    class PreciseMerger(FSDPModelMerger):
        """verl's merger without two of its steps: it rounds no weight to bfloat16, and writes no file.

        Rounding would lose what only float32 can hold, such as the updates of a few steps.
        """

        def _load_and_merge_state_dicts(
            self, world_size: int, total_shards: int, mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]
        ) -> dict[str, torch.Tensor]:
            """Return the whole weights by name; overrides verl's method, which rounds them.

            Args:
                world_size: how many ranks trained; the files are named by it.
                total_shards: how many of them saved a file: one for each rank of the mesh.
                mesh_shape, mesh_dim_names: of the mesh of ranks; not needed here.
            """
            shards: list[dict[str, torch.Tensor]] = []
            for rank in range(total_shards):
                file = actor / f"model_world_size_{world_size}_rank_{rank}.pt"
                shards.append(torch.load(file, map_location="cpu", weights_only=False))
            merged: dict[str, torch.Tensor] = {}
            for name in shards[0]:
                merged[name] = self._merge_weight(name, [shard[name] for shard in shards])
            return merged

        def _merge_weight(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
            """Return a whole weight from its part on each rank."""
            # This import takes long.
            from torch.distributed.tensor import DTensor

            first = parts[0]
            if isinstance(first, DTensor):
                # The last dimension of the mesh is the one that shards; the others hold copies.
                return self._merge_by_placement([part.to_local() for part in parts], first.placements[-1])
            # FSDP keeps a whole copy on each rank of what it doesn't shard.
            if not all(torch.equal(part, first) for part in parts):
                raise ValueError(f"{actor}: {name} is not sharded, but differs between the ranks.")
            return first

        def save_hf_model_and_tokenizer(self, state_dict: dict[str, torch.Tensor]) -> None:
            """Keep the weights in memory; overrides verl's method, which writes them."""
            weights.update(state_dict)

    merger = PreciseMerger(
        ModelMergerConfig(
            operation="merge",
            backend="fsdp",
            local_dir=str(actor),
            hf_model_config_path=str(actor / "huggingface"),
        )
    )
    # verl prints what it does, while the standard output is for results.
    with contextlib.redirect_stdout(sys.stderr):
        # This calls the methods above: it merges, and then "saves" into `weights`.
        merger.merge_and_save()
    return merger.model_config, weights
