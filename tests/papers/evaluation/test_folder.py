"""What verl wrote, read again: exactly n responses to a prompt, chunks that are left, seeds that add samples.

Not covered: that verl writes such files (test_validation_run.py, tests/end_to_end/evaluation_round.py); the check of an
evaluation that goes on (test_commands.py).
"""

import pytest

from tests.papers.evaluation.tiny import make_validation_rows, write_rows
from verl_clipx.papers.evaluation.folder import pending_chunks, read_completions, read_responses


def write_chunk(folder, questions, seed=0):
    """Write two completions of each question, each the text SEED:QUESTION.SAMPLE."""
    rows = make_validation_rows(questions, 2, seed, lambda question, sample: f"{seed}:{question}.{sample}")
    return write_rows(folder / f"{questions[0]:06d}" / "20.jsonl", rows)


def test_responses_are_in_order_of_question_and_sample(tmp_path):
    write_chunk(tmp_path, [3, 4])
    write_chunk(tmp_path, [0, 1, 2])
    table = read_completions([tmp_path], question_count=5, samples=2)
    assert table["question"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert table["sample"].tolist() == [0, 1] * 5
    assert table["text"].tolist() == [f"0:{question}.{sample}" for question in range(5) for sample in (0, 1)]
    assert table["seed"].tolist()[:3] == [0, 1, 10]
    assert table["length"].tolist() == [6] * 10


def test_each_seed_adds_samples_in_the_order_of_the_seeds(tmp_path):
    write_chunk(tmp_path / "0", [0, 1, 2, 3, 4])
    write_chunk(tmp_path / "5", [0, 1, 2, 3, 4], seed=5)
    table = read_completions([tmp_path / "5", tmp_path / "0"], question_count=5, samples=2)
    assert table["sample"].tolist() == [0, 1, 2, 3] * 5
    assert table["text"].tolist()[:4] == ["5:0.0", "5:0.1", "0:0.0", "0:0.1"]


def test_questions_are_cut_into_chunks_of_at_most_so_many_responses(tmp_path):
    assert pending_chunks(tmp_path, 5, 2, 5) == [[0, 1], [2, 3], [4]]
    # At least one question.
    assert pending_chunks(tmp_path, 2, 2, 1) == [[0], [1]]


def test_questions_that_have_no_responses_are_left(tmp_path):
    write_chunk(tmp_path, [1, 2])
    write_rows(tmp_path / "unfinished" / "0.jsonl", make_validation_rows([0], 2))
    assert pending_chunks(tmp_path, 5, 2, 6) == [[0, 3, 4]]
    with pytest.raises(ValueError, match=r"4 responses, not exactly 2 to each of 5 questions\. Repeat the same"):
        read_completions([tmp_path], question_count=5, samples=2)


def test_a_question_that_two_commands_at_once_answered_is_an_error(tmp_path):
    write_chunk(tmp_path, [1, 2])
    write_chunk(tmp_path, [0, 1])
    with pytest.raises(ValueError, match="8 responses, not exactly 2 to each of 3 questions"):
        pending_chunks(tmp_path, 5, 2, 6)


# Two samples of each of four questions.
ROWS = make_validation_rows(range(4), 2)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        pytest.param(ROWS[:-1], "7 responses, not exactly 2 to each of 4 questions", id="a response is missing"),
        pytest.param([*ROWS[:-1], ROWS[0]], "8 responses, not exactly 2", id="a response is there twice"),
        pytest.param([{**ROWS[0], "index": 9}, *ROWS[1:]], "8 responses, not exactly 2", id="an unknown question"),
        pytest.param([{**ROWS[0], "sample": 2}, *ROWS[1:]], "8 responses, not exactly 2", id="a third sample"),
        pytest.param(
            [row for row in ROWS if row["index"] != 3],
            "6 responses, not exactly 2 to each of 4 questions",
            id="a question without any response",
        ),
        pytest.param([], "0 responses", id="no response"),
        pytest.param([{**ROWS[0], "truncated": None}, *ROWS[1:]], "truncated", id="a value that is null"),
        pytest.param([{"output": "x", "score": 0.0}], "index", id="a row without our columns"),
    ],
)
def test_anything_but_n_responses_to_each_question_is_an_error(tmp_path, rows, message):
    write_rows(tmp_path / "000000" / "0.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        read_responses(tmp_path, 2, range(4))


def test_n_responses_to_each_question_are_read_from_all_chunks_and_from_one(tmp_path):
    path = write_rows(tmp_path / "000000" / "0.jsonl", ROWS)
    assert len(read_responses(tmp_path, 2, range(4))) == 8
    assert len(read_responses(path.parent, 2, None, "*.jsonl")) == 8
