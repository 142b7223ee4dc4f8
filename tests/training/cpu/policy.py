"""A random language model small enough for tests, and a checkpoint of it that verl can load."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY_SIZE = 40
END = 1


def random_policy(
    seed: int = 0, *, tied: bool = False, size: int = VOCABULARY_SIZE, end: int = END, padding: int = 0, **changed
) -> Qwen2ForCausalLM:
    """Two layers, grouped-query attention, float32; sharp enough that its choices differ. `changed`: further keys."""
    torch.manual_seed(seed)
    tokens = dict(vocab_size=size, bos_token_id=None, eos_token_id=end, pad_token_id=padding, tie_word_embeddings=tied)
    heads = dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    sizes = dict(hidden_size=64, intermediate_size=128, max_position_embeddings=128, initializer_range=0.15)
    config = Qwen2Config(**tokens, **heads, **(sizes | changed))
    return Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa").eval()


def save_checkpoint(folder: Path, model: Qwen2ForCausalLM) -> Path:
    """Write the model and a tokenizer with one token a vocabulary entry."""
    vocabulary = {f"t{token}": token for token in range(VOCABULARY_SIZE)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="t0")), eos_token=f"t{END}", pad_token="t0"
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
