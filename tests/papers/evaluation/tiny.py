"""A random policy and Countdown questions small enough for tests, and a stand-in for verl that answers them."""

import json
import zlib
from pathlib import Path

import pandas
import yaml

from tests.countdown_files import write_countdown
from tests.cpu.policy import random_policy
from verl_clipx.papers.tasks.tiny_policy.tokenizer import build_tokenizer

REWARD = "verl_clipx.papers.tasks.countdown.reward:compute_score"


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


def validated_rows(questions, samples: int, seed: int = 0, text=lambda question, sample: "x") -> list[dict]:
    """Rows as verl writes them with the evaluation's agent loop, in an order of its own."""
    of_verl = {"input": "?", "gts": "", "score": 0.0, "step": 0, "reward": 0.0, "uid": "u_0", "data_source": "b"}
    return [
        {
            **{**of_verl, "output": text(question, sample), "index": question, "sample": sample, "truncated": False},
            **{"seed": 1000 * seed + 10 * question + sample, "length": len(text(question, sample)) + 1},
        }
        for sample in range(samples)
        for question in questions
    ]


def write_rows(path: Path, rows: list[dict]) -> Path:
    """Write them as lines of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answer_as_verl(folder: Path, platform: str) -> None:
    """Do what verl does with the configuration in a folder, but a text follows from model and seed alone."""
    assert platform == "cpu"
    config = yaml.safe_load((folder / "run.yaml").read_text())
    rollout = config["actor_rollout_ref"]["rollout"]
    assert config["trainer"]["val_only"] and config["trainer"]["validation_data_dir"] == str(folder)
    (file,) = config["data"]["val_files"]
    questions = [extra["index"] for extra in pandas.read_parquet(file)["extra_info"]]
    seed, model = rollout["seed"], config["actor_rollout_ref"]["model"]["path"]

    def text(question: int, sample: int) -> str:
        return "x" * (1 + zlib.crc32(f"{seed} {question} {sample} {len(model)}".encode()) % 7)

    write_rows(folder / "0.jsonl", validated_rows(questions, rollout["val_kwargs"]["n"], seed, text))
