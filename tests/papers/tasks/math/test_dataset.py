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
DEFINITIONS = {name: definition for name, definition in definitions().items() if definition.task == "math"}
CASES = [tuple(case.values()) for case in yaml.safe_load((FIXTURES / "expected.yaml").read_text())]


def list_rows(name, source):
    (split,) = DEFINITIONS[name].splits
    return list(DEFINITIONS[name].rows(source, split=split, prompt="r1_base"))


@pytest.mark.parametrize(("name", "fixture", "expected"), CASES)
def test_rows_and_their_right_answers(name, fixture, expected, tmp_path):
    definition = DEFINITIONS[name]
    (split,) = definition.splits
    prompt = definition.prompts[-1]
    record = build_split(definition, tmp_path, split=split, source=FIXTURES / fixture, prompt=prompt)
    assert record.duplicates == (2 if name == "dapo_17k" else 0)
    assert record.conflicts == 0
    rows = pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
    template = template_named(prompt)
    assert len({row["extra_info"]["index"] for row in rows}) == len(rows)
    assert [(row["prompt"], row["reward_model"]["ground_truth"]) for row in rows] == [
        (template.render(problem=problem), truth) for problem, truth in expected
    ]
    for row in rows:
        assert row["data_source"] == name
        assert row["reward_model"]["style"] == "rule"
        assert row["extra_info"]["split"] == split
        truth = row["reward_model"]["ground_truth"]
        answers = json.loads(truth) if truth.startswith('["') else [truth]
        for answer in answers:
            assert compute_score(name, rf"It is \boxed{{{answer}}}.", truth, row["extra_info"])["score"] == 1.0


def test_every_definition_is_tested():
    assert {name for name, _, _ in CASES} == DEFINITIONS.keys()


def test_what_the_sources_say_is_kept():
    first, _ = list_rows("dsr_uniform", FIXTURES / "dsr_uniform.jsonl")
    assert first["extra_info"] == {"index": 0, "split": "train", "difficulty": 12.5, "source_index": 7}
    with pytest.warns(UserWarning, match="rows 2"):
        first, _ = list_rows("skywork_or1_math", FIXTURES / "skywork.jsonl")
    assert first["extra_info"]["source"] == "train-math-deepscaler"
    assert first["extra_info"]["model_difficulty"] == {"DeepSeek-R1-Distill-Qwen-7B": 3}


def write_records(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def build_math500(copy, out, code=0) -> str:
    """Run `clipx papers data build` on a local copy of MATH-500, and return its output."""
    return clipx("papers", "data", "build", "math500", "--out", out, "--from", copy, code=code)


def read_rows(out):
    return pq.read_table(out / "test.parquet").to_pylist()


def test_problems_without_an_answer_are_left_out_and_their_rows_are_named(tmp_path):
    """A boxed solution stands in for a missing answer; tables spell one as NaN."""
    without_answer = [
        {"answer": None},
        {},
        {"answer": " "},
        {"solution": "It is 3, without a box."},
        {"solution": None, "final_answer": None},
        {"reward_model": {"style": "rule"}},
        {"reward_model": None},
    ]
    write_records(
        tmp_path / "0.jsonl",
        {"Problem": "What is $1+1$?", "Answer": 2.0},
        *({"problem": f"And {record}?", "prompt": [make_message("user", "?")], **record} for record in without_answer),
        {"problem": "$1+2$?", "answer": None, "solution": r"So \boxed{3}, as \boxed is asked."},
    )
    pq.write_table(pa.Table.from_pylist([{"problem": "And NaN?", "answer": float("nan")}]), tmp_path / "1.parquet")
    output = build_math500(tmp_path, tmp_path / "out")
    assert "8 problems without an answer were left out (rows 2, 3, 4, 5, 6, 7, 8, 10)" in output
    rows = read_rows(tmp_path / "out")
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["2", "3"]
    assert [row["extra_info"]["index"] for row in rows] == [0, 1]


def make_message(role, content):
    return {"role": role, "content": content}


def test_the_problem_is_the_users_message_and_not_the_system_message(tmp_path):
    problems = ["What is 2-1?", "What is 3-2?", "What is 4-3?"]
    records = []
    for problem in problems:
        prompt = [make_message("system", "Think step by step."), make_message("user", problem)]
        records.append({"prompt": prompt, "reward_model": {"ground_truth": "1"}})
    write_records(tmp_path / "copy.jsonl", *records)
    output = build_math500(tmp_path / "copy.jsonl", tmp_path / "out")
    assert "test.parquet: 3 rows, 0 duplicates" in output
    contents = [row["prompt"][-1]["content"] for row in read_rows(tmp_path / "out")]
    for problem, content in zip(problems, contents, strict=True):
        assert problem in content
        assert content != "Think step by step."


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param([make_message("system", "Only instructions.")], id="none"),
        pytest.param(
            [
                make_message("user", "What is 1+1?"),
                make_message("assistant", "2"),
                make_message("user", "And 2+2?"),
            ],
            id="two",
        ),
    ],
)
def test_a_prompt_without_the_one_message_of_the_user_is_refused(tmp_path, prompt):
    write_records(tmp_path / "copy.jsonl", {"prompt": prompt, "reward_model": {"ground_truth": "1"}})
    output = build_math500(tmp_path / "copy.jsonl", tmp_path / "out", code=1)
    assert "row 1" in output
    assert "messages of the user" in output
    assert not (tmp_path / "out" / "test.parquet").exists()


def test_final_answers_are_read_and_prose_is_counted(tmp_path):
    # From an answer to what is read of it.
    final_answers = {
        "She sold 48/2 = 24 clips in May.\nAltogether she sold 72.\n#### 72": "72",
        "He pays $1,000 in all.\n#### 1,000": "1,000",
        "The answer is 6.": "6",
        r"So the sum is \boxed{7}.": "7",
        r"\text{cannot be determined}": r"\text{cannot be determined}",
        "all real numbers except 2": "all real numbers except 2",
        r"24\text{ different ways}": r"24\text{ different ways}",
        "not enough information": "not enough information",
    }
    prose = [
        "She has 6 apples left over",
        "It rises at first.\nThen it falls.",
        "Sam is a knight and Tim is a knave, I think",
    ]
    answers = [*final_answers, *prose]
    records = [{"question": f"Question {number}?", "answer": answer} for number, answer in enumerate(answers)]
    write_records(tmp_path / "copy.jsonl", *records)
    output = build_math500(tmp_path / "copy.jsonl", tmp_path / "out")
    assert "3 problems whose answer is prose were left out (rows 9, 10, 11)" in output
    rows = read_rows(tmp_path / "out")
    assert [row["reward_model"]["ground_truth"] for row in rows] == [*final_answers.values()]
    assert [row["extra_info"]["index"] for row in rows] == [*range(len(final_answers))]
    assert compute_score("math500", r"\boxed{72}", rows[0]["reward_model"]["ground_truth"])["score"] == 1.0
