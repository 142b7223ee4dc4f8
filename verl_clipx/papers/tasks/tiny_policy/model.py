"""The tiny policy: a randomly initialised Qwen2."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

# The smallest head that the CPU attention kernels of inference engines support.
HEAD_SIZE = 32


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the tiny policy.

    Args:
        hidden_size: width, a multiple of 32.
        max_length: largest number of tokens in a prompt and its response together.

    Raises:
        ValueError: a value is not a positive integer, or `hidden_size` is not a multiple of the head size.
    """

    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4
    max_length: int = 512

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            step = HEAD_SIZE if key == "hidden_size" else 1
            if type(value) is not int or value < 1 or value % step:
                raise ValueError(f"{key}={value!r} is not a positive integer; give a multiple of {step}")


def build_model(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen2ForCausalLM:
    """Build a randomly initialised policy in float32.

    Args:
        tokenizer: its length is the exact size of the vocabulary, because verl masks tokens beyond it.
        seed: seed of the weights; torch's global generator is not changed.

    Returns:
        The model, in training mode. Input and output embeddings are separate tensors, so that a state dict contains
        each weight once.
    """
    heads = config.hidden_size // HEAD_SIZE
    qwen_config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=HEAD_SIZE,
        max_position_embeddings=config.max_length,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(qwen_config)
    return model.float().train()
