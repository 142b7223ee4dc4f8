"""Every builder on hand-made rows in its set's own schema, through to the Parquet file; wrong copies and messages.

Not covered: the public sets themselves, which need the hub (docs/tasks/math.md says what was checked on copies).
"""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_clipx.papers.tasks.building import build_split
from verl_clipx.papers.tasks.math.dataset import DATASETS
from verl_clipx.papers.tasks.math.reward import compute_score
from verl_clipx.papers.tasks.templates import template_named

FIXTURES = Path(__file__).parent / "fixtures"
BY_NAME = {definition.name: definition for definition in DATASETS}

# data set, fixture, problems and ground truths in order
CASES = [
    (
        "orz_57k",
        "orz.json",
        [("What is the sum of the first ten positive integers?", "55"), ("Simplify $\\frac{6}{8}$.", "\\frac{3}{4}")],
    ),
    (
        "dapo_17k",
        "dapo.jsonl",
        [("How many positive divisors does 12 have?", "6"), ("Find the remainder of $2^{10}$ divided by 7.", "2")],
    ),
    (
        "dsr_uniform",
        "dsr_uniform.jsonl",
        [("Compute $\\sqrt{48}$ in simplest form.", "4\\sqrt{3}"), ("What is $15\\%$ of 200?", "30")],
    ),
    (
        "skywork_or1_math",
        "skywork.jsonl",
        [
            ("Solve $x^2=2$ for positive $x$.", r'["\\sqrt{2}"]'),
            ("What is one half as a decimal or a fraction?", r'["0.5", "\\frac{1}{2}"]'),
        ],
    ),
    ("aime24", "aime24.jsonl", [("Find the least $n$ with $n^2>900$.", "031")]),
    ("aime25", "aime24.jsonl", [("Find the least $n$ with $n^2>900$.", "031")]),
    ("amc", "amc.jsonl", [("How much is $7\\cdot 6+100$?", "142")]),
    ("amc23", "amc.jsonl", [("How much is $7\\cdot 6+100$?", "142")]),
    ("math500", "math500.jsonl", [("Convert $(0,3)$ to polar coordinates.", "\\left(3,\\frac{\\pi}{2}\\right)")]),
    ("minerva", "minerva.jsonl", [("How many centimetres are there in 3 metres?", '["3e2"]')]),
    (
        "minerva",
        "verl_minerva.jsonl",
        [("Express the angle whose sine is 10/13.", r'["\\arcsin{\\frac{1}{1.3}}", "\\arcsin{\\frac{10}{13}}"]')],
    ),
    (
        "olympiadbench",
        "olympiadbench.jsonl",
        [
            ("Let $n$ be a positive integer.\nFor which $n$ is $n^2=n$?", "$1$"),
            ("Solve $x^2-5x+6=0$.", "$2$, $3$"),
        ],
    ),
]


@pytest.mark.parametrize(("name", "fixture", "expected"), CASES)
def test_rows(name, fixture, expected, tmp_path):
    definition = BY_NAME[name]
    split = definition.splits[0]
    build_split(definition, tmp_path, split=split, source=FIXTURES / fixture)
    rows = pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
    template = template_named(definition.prompts[0])
    assert [(row["prompt"], row["reward_model"]["ground_truth"]) for row in rows] == [
        (template.render(problem=problem), truth) for problem, truth in expected
    ]
    for row in rows:
        assert row["data_source"] == name
        assert row["reward_model"]["style"] == "rule"
        assert row["extra_info"]["split"] == split


@pytest.mark.parametrize(("name", "fixture", "expected"), CASES)
def test_the_right_answer_scores(name, fixture, expected):
    definition = BY_NAME[name]
    for row in definition.rows(FIXTURES / fixture, split=definition.splits[0], prompt="boxed_step_by_step"):
        truth = row["reward_model"]["ground_truth"]
        for answer in json.loads(truth) if truth.startswith('["') else [truth]:
            assert compute_score(name, rf"It is \boxed{{{answer}}}.", truth, row["extra_info"])["score"] == 1.0


def test_every_definition_is_tested():
    assert {name for name, _, _ in CASES} == set(BY_NAME)


def test_the_public_repeats_of_dapo_are_dropped_and_counted(tmp_path):
    record = build_split(BY_NAME["dapo_17k"], tmp_path, split="train", source=FIXTURES / "dapo.jsonl")
    assert (record.rows, record.duplicates, record.conflicts) == (2, 2, 0)


def test_what_the_sources_say_is_kept():
    (first, _) = BY_NAME["dsr_uniform"].rows(FIXTURES / "dsr_uniform.jsonl", split="train", prompt="r1_base")
    assert first["extra_info"] == {"index": 0, "split": "train", "difficulty": 12.5, "source_index": 7}
    (first, _) = BY_NAME["skywork_or1_math"].rows(FIXTURES / "skywork.jsonl", split="train", prompt="r1_base")
    assert first["extra_info"]["source"] == "train-math-deepscaler"
    assert first["extra_info"]["model_difficulty"] == {"DeepSeek-R1-Distill-Qwen-7B": 3}


def test_the_prompt_is_chosen_by_name(tmp_path):
    texts = {}
    for prompt in BY_NAME["math500"].prompts:
        (row,) = BY_NAME["math500"].rows(FIXTURES / "math500.jsonl", split="test", prompt=prompt)
        texts[prompt] = row["prompt"][0]["content"]
    assert texts["r1_base"].endswith("polar coordinates.\nAssistant: <think>")
    assert texts["boxed_step_by_step"].endswith("final answer within \\boxed{}.")


def test_a_copy_without_questions_is_named():
    with pytest.raises(ValueError, match=r"unknown\.jsonl.*\['text'\].*problem"):
        list(BY_NAME["aime25"].rows(FIXTURES / "unknown.jsonl", split="test", prompt="r1_base"))


def test_a_copy_of_another_schema_is_named():
    with pytest.raises(ValueError, match=r"unknown\.jsonl.*\['text'\].*reward_model"):
        list(BY_NAME["dapo_17k"].rows(FIXTURES / "unknown.jsonl", split="train", prompt="r1_base"))


@pytest.mark.parametrize("content", ["[[1]]", '[[{"value": "x"}]]', '{"a": 1}', "[{}]", "not json"])
def test_a_broken_copy_of_orz_is_named(content, tmp_path):
    path = tmp_path / "orz.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"orz\.json.*orz_math_57k_collection\.json"):
        list(BY_NAME["orz_57k"].rows(path, split="train", prompt="r1_base"))


def test_dsr_uniform_says_where_its_file_is():
    with pytest.raises(ValueError, match="AR-Lopti"):
        list(BY_NAME["dsr_uniform"].rows(None, split="train", prompt="r1_base"))


@pytest.mark.parametrize(
    ("second", "ends"),
    [
        ({"answer": None}, "jsonl"),
        ({}, "jsonl"),
        ({"answer": float("nan")}, "parquet"),
        ({"answer": " "}, "jsonl"),
        ({"solution": "It is 3, without a box."}, "jsonl"),
        ({"solution": None, "final_answer": None}, "jsonl"),
    ],
)
def test_a_problem_without_an_answer_is_left_out_and_its_row_is_named(second, ends, tmp_path):
    from typer.testing import CliRunner

    from verl_clipx.cli import app

    path = tmp_path / f"copy.{ends}"
    rows = [{"problem": "What is $1+1$?", "answer": 2.0}, {"problem": "And $1+2$?", **second}]
    if ends == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["data", "build", "math500", "--out", str(out), "--from", str(path)])
    assert result.exit_code == 0, result.output
    assert "1 problems without an answer were left out (rows 2)" in result.output
    (row,) = pq.read_table(out / "test.parquet").to_pylist()
    assert row["reward_model"]["ground_truth"] == "2"


def test_a_ground_truth_that_is_missing_is_left_out_too(tmp_path):
    path = tmp_path / "copy.jsonl"
    row = {"prompt": [{"role": "user", "content": "?"}], "reward_model": {"style": "rule"}}
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"reward_model": None}) + "\n")
    with pytest.warns(UserWarning, match=r"rows 1, 2"):
        assert list(BY_NAME["math500"].rows(path, split="test", prompt="r1_base")) == []


def test_a_boxed_solution_stands_in_for_a_missing_answer(tmp_path):
    path = tmp_path / "copy.jsonl"
    path.write_text(json.dumps({"problem": "?", "answer": None, "solution": r"So \boxed{3}, as \boxed is asked."}))
    (row,) = BY_NAME["math500"].rows(path, split="test", prompt="r1_base")
    assert row["reward_model"]["ground_truth"] == "3"


def test_a_row_without_a_question_is_named_by_its_number(tmp_path):
    path = tmp_path / "copy.jsonl"
    path.write_text('{"problem": "?", "answer": 1}\n{"answer": 1}\n')
    with pytest.raises(ValueError, match=r"copy\.jsonl, row 2: .*problem"):
        list(BY_NAME["math500"].rows(path, split="test", prompt="r1_base"))
