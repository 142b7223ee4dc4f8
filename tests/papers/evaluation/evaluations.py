"""Scored evaluations of chosen outcomes, made without a model: completions on disk, judged by `clipx eval score`."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.papers.evaluation.tiny import validated_rows, write_rows
from verl_clipx.common.files import hash_of_file
from verl_clipx.papers.evaluation.folder import EvaluationFolder
from verl_clipx.papers.evaluation.results import score


def is_right(data_source, solution_str, ground_truth, extra_info):
    """A reward that reads the outcome off the completion."""
    return {"score": float(solution_str == "right"), "length": float(len(solution_str))}


REWARD = f"{__name__}:is_right"


def questions_file(folder: Path, count: int) -> Path:
    """Questions, of which two in turn have one `family`."""
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


def evaluation_of(folder: Path, right: np.ndarray, questions: Path, **changes) -> Path:
    """Write a scored evaluation.

    Args:
        folder: its folder.
        right: ``[questions, samples]`` whether each sample is right.
        questions: from `questions_file`.
        changes: to its configuration, which has one checkpoint.
    """
    count, samples = right.shape
    config = {
        "model": "m",
        "checkpoints": {
            "last": {"source": "m", "step": 1, "fingerprint": hashlib.sha256(str(folder).encode()).hexdigest()}
        },
        "protocol": "sampled",
        "sampling": {"samples": samples, "seeds": [0], "max_tokens": 8, "temperature": 1.0, "top_p": 1.0},
        "benchmarks": {"b": {"path": str(questions), "sha256": hash_of_file(questions), "questions": count}},
        **{"reward": REWARD, "versions": {}},
        **changes,
    }
    evaluation = EvaluationFolder(folder)
    rows = validated_rows(range(count), samples, text=lambda q, s: "right" if right[q, s] else "wrong")
    write_rows(evaluation.completions("last", "b") / "seed-0" / "000000" / "1.jsonl", rows)
    evaluation.config.write_text(json.dumps(config))
    score(evaluation)
    return folder
