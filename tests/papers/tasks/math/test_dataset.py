"""Every builder on hand-made rows in its set's own schema, through to the Parquet file; wrong copies and messages.

Not covered: the public sets themselves, which need the hub (docs/tasks/math.md says what was checked on copies).
"""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.papers.command import clipx
from verl_clipx.papers.tasks.building import build_split
from verl_clipx.papers.tasks.catalog import definitions
from verl_clipx.papers.tasks.math.reward import compute_score
from verl_clipx.papers.tasks.templates import template_named

FIXTURES = Path(__file__).parent / "fixtures"
BY_NAME = {name: definition for name, definition in definitions().items() if definition.task == "math"}
CASES = [tuple(case.values()) for case in yaml.safe_load((FIXTURES / "expected.yaml").read_text())]


def rows_of(name, source, prompt="r1_base"):
    return list(BY_NAME[name].rows(source, split=BY_NAME[name].splits[0], prompt=prompt))


@pytest.mark.parametrize(("name", "fixture", "expected"), CASES)
def test_rows_and_their_right_answers(name, fixture, expected, tmp_path):
    definition = BY_NAME[name]
    (split,) = definition.splits
    build_split(definition, tmp_path, split=split, source=FIXTURES / fixture)
    rows = pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
    template = template_named(definition.prompts[0])
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


def test_the_public_repeats_of_dapo_are_dropped_and_counted(tmp_path):
    record = build_split(BY_NAME["dapo_17k"], tmp_path, split="train", source=FIXTURES / "dapo.jsonl")
    assert (record.rows, record.duplicates, record.conflicts) == (2, 2, 0)


def test_what_the_sources_say_is_kept():
    first, _ = rows_of("dsr_uniform", FIXTURES / "dsr_uniform.jsonl")
    assert first["extra_info"] == {"index": 0, "split": "train", "difficulty": 12.5, "source_index": 7}
    with pytest.warns(UserWarning, match="rows 2"):
        first, _ = rows_of("skywork_or1_math", FIXTURES / "skywork.jsonl")
    assert first["extra_info"]["source"] == "train-math-deepscaler"
    assert first["extra_info"]["model_difficulty"] == {"DeepSeek-R1-Distill-Qwen-7B": 3}


def test_the_prompt_is_chosen_by_name():
    for prompt, end in (("r1_base", "coordinates.\nAssistant: <think>"), ("boxed_step_by_step", "within \\boxed{}.")):
        (row,) = rows_of("math500", FIXTURES / "math500.jsonl", prompt)
        assert row["prompt"][0]["content"].endswith(end)


@pytest.mark.parametrize(
    ("second", "ends"),
    [
        ({"answer": None}, "jsonl"),
        ({}, "jsonl"),
        ({"answer": float("nan")}, "parquet"),
        ({"answer": " "}, "jsonl"),
        ({"solution": "It is 3, without a box."}, "jsonl"),
        ({"solution": None, "final_answer": None}, "jsonl"),
        ({"prompt": [{"role": "user", "content": "?"}], "reward_model": {"style": "rule"}}, "jsonl"),
        ({"prompt": [{"role": "user", "content": "?"}], "reward_model": None}, "jsonl"),
    ],
)
def test_a_problem_without_an_answer_is_left_out_and_its_row_is_named(second, ends, tmp_path):
    path = tmp_path / f"copy.{ends}"
    rows = [{"problem": "What is $1+1$?", "answer": 2.0}, {"problem": "And $1+2$?", **second}]
    if ends == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = clipx("data", "build", "math500", "--out", tmp_path / "out", "--from", path)
    assert "1 problems without an answer were left out (rows 2)" in said
    (row,) = pq.read_table(tmp_path / "out" / "test.parquet").to_pylist()
    assert row["reward_model"]["ground_truth"] == "2"


def test_a_boxed_solution_stands_in_for_a_missing_answer(tmp_path):
    path = tmp_path / "copy.jsonl"
    path.write_text(json.dumps({"problem": "?", "answer": None, "solution": r"So \boxed{3}, as \boxed is asked."}))
    (row,) = rows_of("math500", path)
    assert row["reward_model"]["ground_truth"] == "3"
