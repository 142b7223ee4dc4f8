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
    said = clipx("papers", "data", "build", "math500", "--out", tmp_path / "out", "--from", tmp_path)
    assert "8 problems without an answer were left out (rows 2, 3, 4, 5, 6, 7, 8, 10)" in said
    rows = pq.read_table(tmp_path / "out" / "test.parquet").to_pylist()
    found = [(row["extra_info"]["index"], row["reward_model"]["ground_truth"]) for row in rows]
    assert found == [(0, "2"), (1, "3")]


def messages(*texts):
    return [{"role": role, "content": text} for role, text in texts]


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_problem_is_the_users_message_and_not_the_system_message(tmp_path):
    truth = {"reward_model": {"ground_truth": "1"}}
    system = ("system", "Think step by step.")
    rows = [{"prompt": messages(system, ("user", f"What is {number}-{number - 1}?")), **truth} for number in (2, 3, 4)]
    write(tmp_path / "copy.jsonl", *rows)
    said = clipx("papers", "data", "build", "math500", "--out", tmp_path / "out", "--from", tmp_path / "copy.jsonl")
    assert "test.parquet: 3 rows, 0 duplicates" in said
    contents = [row["prompt"][-1]["content"] for row in pq.read_table(tmp_path / "out" / "test.parquet").to_pylist()]
    assert ["What is 2-1?" in contents[0], "What is 3-2?" in contents[1], "What is 4-3?" in contents[2]] == [True] * 3
    assert not any(content == "Think step by step." for content in contents)


@pytest.mark.parametrize(
    "prompt",
    [
        messages(("system", "Only instructions.")),
        messages(("user", "What is 1+1?"), ("assistant", "2"), ("user", "And 2+2?")),
    ],
)
def test_a_prompt_without_the_one_message_of_the_user_is_refused(tmp_path, prompt):
    write(tmp_path / "copy.jsonl", {"prompt": prompt, "reward_model": {"ground_truth": "1"}})
    said = clipx(
        "papers", "data", "build", "math500", "--out", tmp_path / "out", "--from", tmp_path / "copy.jsonl", code=1
    )
    assert "row 1" in said and "messages of the user" in said
    assert not (tmp_path / "out" / "test.parquet").exists()


def test_final_answers_are_read_and_prose_is_counted(tmp_path):
    read = {
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
    rows = [{"question": f"Question {number}?", "answer": answer} for number, answer in enumerate([*read, *prose])]
    write(tmp_path / "copy.jsonl", *rows)
    said = clipx("papers", "data", "build", "math500", "--out", tmp_path / "out", "--from", tmp_path / "copy.jsonl")
    assert "3 problems whose answer is prose were left out (rows 9, 10, 11)" in said
    rows = pq.read_table(tmp_path / "out" / "test.parquet").to_pylist()
    assert [row["reward_model"]["ground_truth"] for row in rows] == [*read.values()]
    assert [row["extra_info"]["index"] for row in rows] == [*range(len(read))]
    assert compute_score("math500", r"\boxed{72}", rows[0]["reward_model"]["ground_truth"])["score"] == 1.0
