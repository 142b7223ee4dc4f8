"""What verl wrote, read again: exactly n responses to a prompt, chunks that are left, seeds that add samples.

Not covered: that verl writes such files (test_validation_run.py, tests/end_to_end/evaluation_round.py); the check of an
evaluation that goes on (test_commands.py).
"""

import pytest

from tests.papers.evaluation.tiny import validated_rows, write_rows
from verl_clipx.papers.evaluation.folder import pending_chunks, read_completions, read_responses


def write_chunk(folder, questions, seed=0):
    rows = validated_rows(questions, 2, seed, lambda question, sample: f"{seed}:{question}.{sample}")
    return write_rows(folder / f"{questions[0]:06d}" / "20.jsonl", rows)


def test_responses_in_order_of_question_and_sample_and_each_seed_adds_some(tmp_path):
    for questions, seed in (([3, 4], 0), ([0, 1, 2], 0), ([0, 1, 2, 3, 4], 5)):
        write_chunk(tmp_path / str(seed), questions, seed)
    table = read_completions([tmp_path / "0"], 5, 2)
    assert table["question"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4] and table["sample"].tolist() == [0, 1] * 5
    assert table["text"].tolist() == [f"0:{question}.{sample}" for question in range(5) for sample in (0, 1)]
    assert table["seed"].tolist()[:3] == [0, 1, 10] and table["length"].tolist() == [6] * 10
    both = read_completions([tmp_path / "5", tmp_path / "0"], 5, 2)
    assert both["sample"].tolist() == [0, 1, 2, 3] * 5
    assert both["text"].tolist()[:4] == ["5:0.0", "5:0.1", "0:0.0", "0:0.1"]


def test_what_is_left_is_cut_into_chunks(tmp_path):
    assert pending_chunks(tmp_path, 5, 2, 5) == [[0, 1], [2, 3], [4]]
    assert pending_chunks(tmp_path, 2, 2, 1) == [[0], [1]]
    write_chunk(tmp_path, [1, 2])
    write_rows(tmp_path / "unfinished" / "0.jsonl", validated_rows([0], 2))
    assert pending_chunks(tmp_path, 5, 2, 6) == [[0, 3, 4]]
    with pytest.raises(ValueError, match=r"4 responses, not exactly 2 to each of 5 questions\. Repeat the same"):
        read_completions([tmp_path], 5, 2)
    # Two commands at once can leave a question twice.
    write_chunk(tmp_path, [0, 1])
    with pytest.raises(ValueError, match="8 responses, not exactly 2 to each of 3 questions"):
        pending_chunks(tmp_path, 5, 2, 6)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rows: rows[:-1], "7 responses, not exactly 2 to each of 4 questions"),
        (lambda rows: [*rows[:-1], rows[0]], "8 responses, not exactly 2"),
        (lambda rows: [{**rows[0], "index": 9}, *rows[1:]], "8 responses, not exactly 2"),
        (lambda rows: [{**rows[0], "sample": 2}, *rows[1:]], "8 responses, not exactly 2"),
        # A question without any response.
        (lambda rows: [row for row in rows if row["index"] != 3], "6 responses, not exactly 2 to each of 4 questions"),
        (lambda rows: [], "0 responses"),
        (lambda rows: [{**rows[0], "truncated": None}, *rows[1:]], "truncated"),
        (lambda rows: [{key: rows[0][key] for key in ("output", "score")}], "index"),
    ],
)
def test_anything_but_n_responses_to_each_question_is_an_error(tmp_path, spoil, message):
    rows = validated_rows(range(4), 2)
    path = write_rows(tmp_path / "000000" / "0.jsonl", rows)
    assert len(read_responses(tmp_path, 2, range(4))) == len(read_responses(path.parent, 2, None, "*.jsonl")) == 8
    write_rows(path, spoil(rows))
    with pytest.raises(ValueError, match=message):
        read_responses(tmp_path, 2, range(4))
