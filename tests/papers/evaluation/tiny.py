"""A random policy, Countdown questions and a generator for the CPU, small enough for tests."""

from pathlib import Path

from tests.countdown_files import write_countdown
from tests.cpu.policy import random_policy
from verl_clipx.cli import generate_on_cpu
from verl_clipx.papers.evaluation.backends import cpu_backend
from verl_clipx.papers.tasks.tiny_policy.tokenizer import build_tokenizer

REWARD = "verl_clipx.papers.tasks.countdown.reward:compute_score"
CPU_BACKEND = cpu_backend(generate_on_cpu)


def save_model(folder: Path, seed: int = 0) -> Path:
    """Write a random Qwen2 of two layers, with the tiny policy's tokenizer."""
    tokenizer = build_tokenizer()
    ends = {"end": tokenizer.eos_token_id, "padding": tokenizer.pad_token_id}
    random_policy(seed, size=len(tokenizer), **ends).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_questions(folder: Path, count: int = 6, seed: int = 0) -> Path:
    """Write Countdown questions; returns the file."""
    return write_countdown(folder, 1, count, seed)["test"]
