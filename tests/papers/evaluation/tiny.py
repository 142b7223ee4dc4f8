"""A random policy, Countdown questions, a stand-in for verl that answers them, and evaluations of chosen outcomes."""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.countdown_files import write_countdown
from tests.training.cpu.policy import random_policy
from verl_clipx.common.files import hash_of_file
from verl_clipx.papers.evaluation.folder import EvaluationFolder
from verl_clipx.papers.evaluation.scores import score
from verl_clipx.papers.tasks.tiny_policy.tokenizer import build_tokenizer


def save_model(folder: Path, seed: int = 0) -> Path:
    """Write a random Qwen2 of two layers, with the tiny policy's tokenizer."""
    tokenizer = build_tokenizer()
    policy = random_policy(seed, size=len(tokenizer), end=tokenizer.eos_token_id, padding=tokenizer.pad_token_id)
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_questions(folder: Path, count: int = 6, seed: int = 0) -> Path:
    """Write Countdown questions; return the file."""
    return write_countdown(folder, 1, count, seed)["test"]


def always_x(question: int, sample: int) -> str:
    return "x"


def make_validation_rows(
    questions: Iterable[int], samples: int, seed: int = 0, text: Callable[[int, int], str] = always_x
) -> list[dict]:
    """Return rows as verl writes them with the evaluation's agent loop, in an order of its own.

    Args:
        questions: their places in the benchmark.
        text: the completion of a question's sample.
    """
    rows = []
    for sample in range(samples):
        for question in questions:
            completion = text(question, sample)
            rows.append(
                {
                    "input": "?",
                    "output": completion,
                    "gts": "",
                    "score": 0.0,
                    "step": 0,
                    "reward": 0.0,
                    "uid": "u_0",
                    "data_source": "b",
                    "index": question,
                    "sample": sample,
                    "seed": 1000 * seed + 10 * question + sample,
                    "length": len(completion) + 1,
                    "truncated": False,
                }
            )
    return rows


def write_rows(path: Path, rows: list[dict]) -> Path:
    """Write rows as lines of JSON; return the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answer_as_verl(folder: Path, platform: str) -> None:
    """Do what verl does with the configuration in a folder, but a text follows from model and seed alone."""
    assert platform == "cpu"
    config = yaml.safe_load((folder / "run.yaml").read_text())
    assert config["trainer"]["val_only"]
    assert config["trainer"]["validation_data_dir"] == str(folder)
    questions = [extra["index"] for extra in pandas.read_parquet(config["data"]["val_files"])["extra_info"]]
    rollout = config["actor_rollout_ref"]["rollout"]
    seed = rollout["seed"]
    model = config["actor_rollout_ref"]["model"]["path"]

    def text(question: int, sample: int) -> str:
        return "x" * (1 + zlib.crc32(f"{seed} {question} {sample} {len(model)}".encode()) % 7)

    write_rows(folder / "0.jsonl", make_validation_rows(questions, rollout["val_kwargs"]["n"], seed, text))


def is_right(data_source, solution_str, ground_truth, extra_info):
    """Judge a completion that says whether it is right."""
    return {"score": float(solution_str == "right"), "length": float(len(solution_str))}


def write_questions(folder: Path, count: int) -> Path:
    """Write questions, of which two in turn have one `family`; return the file."""
    path = folder / f"b{count}.parquet"
    rows = [
        {
            "data_source": "d",
            "prompt": [{"role": "user", "content": str(row)}],
            "reward_model": {"ground_truth": "1"},
            "extra_info": {"index": row, "family": f"f{row // 2}"},
        }
        for row in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_evaluation(folder: Path, right: np.ndarray, questions: Path, **changes) -> Path:
    """Write an evaluation, whose completions `is_right` judges, and score it; return its folder.

    Args:
        folder: its folder.
        right: ``[questions, samples]`` whether each sample is right.
        questions: the file that `write_questions` returns.
        changes: to its configuration, which has one checkpoint.
    """
    count, samples = right.shape
    fingerprint = hashlib.sha256(str(folder).encode()).hexdigest()
    config = {
        "model": "m",
        "protocol": "sampled",
        "reward": f"{__name__}:is_right",
        "versions": {},
        "checkpoints": {"last": {"source": "m", "step": 1, "fingerprint": fingerprint}},
        "sampling": {"samples": samples, "seeds": [0], "max_tokens": 8, "temperature": 1.0, "top_p": 1.0},
        "benchmarks": {"b": {"path": str(questions), "sha256": hash_of_file(questions), "questions": count}},
        **changes,
    }
    evaluation = EvaluationFolder(folder)

    def text(question: int, sample: int) -> str:
        return "right" if right[question, sample] else "wrong"

    rows = make_validation_rows(range(count), samples, text=text)
    write_rows(evaluation.completions_folder("last", "b", 0) / "000000" / "1.jsonl", rows)
    evaluation.write_config(config)
    score(evaluation)
    return folder
