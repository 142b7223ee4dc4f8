"""A random policy, Countdown questions and a generator for the CPU, small enough for tests."""

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.countdown_files import write_countdown
from verl_clipx.cli import generate_on_cpu
from verl_clipx.evaluation.backends import cpu_backend
from verl_clipx.tasks.tiny_policy.tokenizer import build_tokenizer

REWARD = "verl_clipx.tasks.countdown.reward:compute_score"
CPU_BACKEND = cpu_backend(generate_on_cpu)


def save_model(folder: Path, seed: int = 0) -> Path:
    """Write a random Qwen2 of two layers, with the tiny policy's tokenizer."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_questions(folder: Path, count: int = 6, seed: int = 0) -> Path:
    """Write Countdown questions; returns the file."""
    return write_countdown(folder, 1, count, seed)["test"]
