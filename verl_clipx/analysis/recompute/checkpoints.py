"""Loads a checkpoint's model: from Hugging Face's form, or from verl's, which verl's own merger puts together."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def load_model(folder: Path) -> Any:
    """Returns the model of a checkpoint, of transformers, in float32 and for evaluation.

    Args:
        folder: in Hugging Face's form, or verl's `global_step_N`, or `actor` in it.

    Raises:
        OSError, ValueError: it is none of these, or can't be loaded; says what to do.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    actor = folder / "actor" if (folder / "actor").is_dir() else folder
    for place in (actor, actor / "huggingface"):
        if (place / "config.json").is_file() and any(any(place.glob(name)) for name in WEIGHTS):
            with named(place):
                # By itself it would round them to what config.json calls their type.
                return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    by_hand = "Make a model of it with python -m verl.model_merger merge, and name its folder."
    if not (actor / "fsdp_config.json").is_file():
        raise ValueError(
            f"{folder}: neither a model in Hugging Face's format nor one of verl's FSDP checkpoints. {by_hand}"
        )
    with named(actor):
        config, weights = read_sharded_weights(actor)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing, unknown = model.load_state_dict(weights, strict=False)
    if unknown or not {*missing} <= {*(model._tied_weights_keys or ())}:
        raise ValueError(
            f"{folder}: weights missing: {missing[:3]}, unknown, as adapters are: {unknown[:3]}. {by_hand}"
        )
    return model


@contextlib.contextmanager
def named(folder: Path) -> Iterator[None]:
    """Within the block, an error of a damaged checkpoint names its folder, also one of a library's own kind."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{folder}: its model cannot be loaded ({type(error).__name__}: {error})") from error


def read_sharded_weights(actor: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Puts the shards of verl's FSDP checkpoint together in memory, as precise as they were saved.

    Args:
        actor: verl's folder of the checkpoint.

    Returns:
        The model's configuration, of transformers, and its whole weights by name.
    """
    from torch.distributed.tensor import DTensor
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    class PreciseMerger(FSDPModelMerger):
        """verl's merger, which rounds every weight to bfloat16, without the rounding.

        Steps that only float32 can hold would be lost.
        """

        def _load_and_merge_state_dicts(
            self, world_size: int, total_shards: int, mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]
        ) -> dict[str, torch.Tensor]:
            shards = [
                torch.load(actor / f"model_world_size_{world_size}_rank_{rank}.pt", "cpu", weights_only=False)
                for rank in range(total_shards)
            ]
            return {name: self._merged(name, [shard[name] for shard in shards]) for name in shards[0]}

        def _merged(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
            """Return a whole weight from its part on each rank."""
            if not isinstance(parts[0], DTensor):
                # FSDP keeps a whole copy on each rank of what it doesn't shard.
                if not all(torch.equal(part, parts[0]) for part in parts):
                    raise ValueError(f"{actor}: {name} is not sharded, but differs between the ranks.")
                return parts[0]
            # The last dimension of the mesh is the one that shards; the others hold copies.
            return self._merge_by_placement([part.to_local() for part in parts], parts[0].placements[-1])

        def save_hf_model_and_tokenizer(self, state_dict: dict[str, torch.Tensor]) -> None:
            """Keep the weights in memory instead of writing them."""
            weights.update(state_dict)

    weights: dict[str, torch.Tensor] = {}
    merger = PreciseMerger(
        ModelMergerConfig(
            operation="merge",
            backend="fsdp",
            local_dir=str(actor),
            hf_model_config_path=str(actor / "huggingface"),
        )
    )
    # verl prints what it does.
    with contextlib.redirect_stdout(sys.stderr):
        merger.merge_and_save()
    return merger.model_config, weights
