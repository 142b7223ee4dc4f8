"""Every builder on hand-made rows in its set's own schema, through to the Parquet file; wrong copies and messages.

Not covered: the public sets themselves, which need the hub (docs/tasks/math.md says what was checked on copies).
"""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.analysis.runs.commands import clipx
from verl_clipx.papers.tasks.building import build_split
from verl_clipx.papers.tasks.catalog import definitions
from verl_clipx.papers.tasks.math.reward import compute_score
from verl_clipx.papers.tasks.templates import template_named

FIXTURES = Path(__file__).parent / "fixtures"
BY_NAME = {name: definition for name, definition in definitions().items() if definition.task == "math"}
CASES = [tuple(case.values()) for case in yaml.safe_load((FIXTURES / "expected.yaml").read_text())]


def rows_of(name, source):
    return list(BY_NAME[name].rows(source, split=BY_NAME[name].splits[0], prompt="r1_base"))


@pytest.mark.parametrize(("name", "fixture", "expected"), CASES)
def test_rows_and_their_right_answers(name, fixture, expected, tmp_path):
    definition = BY_NAME[name]
    (split,), prompt = definition.splits, definition.prompts[-1]
    record = build_split(definition, tmp_path, split=split, source=FIXTURES / fixture, prompt=prompt)
    assert (record.duplicates, record.conflicts) == (2 if name == "dapo_17k" else 0, 0)
    rows = pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
    template = template_named(prompt)
    assert len({row["extra_info"]["index"] for row in rows}) == len(rows)
    assert [(row["prompt"], row["reward_model"]["ground_truth"]) for row in rows] == [
        (template.render(problem=problem), truth) for problem, truth in expected
    ]
    for row in rows:
        assert (row["data_source"], row["reward_model"]["style"], row["extra_info"]["split"]) == (name, "rule", split)
        truth = row["reward_model"]["ground_truth"]
        for answer in json.loads(truth) if truth.startswith('["') else [truth]:
            assert compute_score(name, rf"It is \boxed{{{answer}}}.", truth, row["extra_info"])["score"] == 1.0


def test_every_definition_is_tested():
    assert {name for name, _, _ in CASES} == set(BY_NAME)


def test_what_the_sources_say_is_kept():
    first, _ = rows_of("dsr_uniform", FIXTURES / "dsr_uniform.jsonl")
    assert first["extra_info"] == {"index": 0, "split": "train", "difficulty": 12.5, "source_index": 7}
    with pytest.warns(UserWarning, match="rows 2"):
        first, _ = rows_of("skywork_or1_math", FIXTURES / "skywork.jsonl")
    assert first["extra_info"]["source"] == "train-math-deepscaler"
    assert first["extra_info"]["model_difficulty"] == {"DeepSeek-R1-Distill-Qwen-7B": 3}


def test_problems_without_an_answer_are_left_out_and_their_rows_are_named(tmp_path):
    """A boxed solution stands in for a missing answer; tables spell one as NaN."""
    without = [
        *({"answer": None}, {}, {"answer": " "}, {"solution": "It is 3, without a box."}),
        *({"solution": None, "final_answer": None}, {"reward_model": {"style": "rule"}}, {"reward_model": None}),
    ]
    rows = [{"Problem": "What is $1+1$?", "Answer": 2.0}]
    rows += [{"problem": f"And {row}?", "prompt": [{"role": "user", "content": "?"}], **row} for row in without]
    rows += [{"problem": "$1+2$?", "answer": None, "solution": r"So \boxed{3}, as \boxed is asked."}]
    (tmp_path / "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist([{"problem": "And NaN?", "answer": float("nan")}]), tmp_path / "1.parquet")
    said = clipx("data", "build", "math500", "--out", tmp_path / "out", "--from", tmp_path)
    assert "8 problems without an answer were left out (rows 2, 3, 4, 5, 6, 7, 8, 10)" in said
    rows = pq.read_table(tmp_path / "out" / "test.parquet").to_pylist()
    found = [(row["extra_info"]["index"], row["reward_model"]["ground_truth"]) for row in rows]
    assert found == [(0, "2"), (1, "3")]
