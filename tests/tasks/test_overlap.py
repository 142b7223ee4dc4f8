"""Overlap of training and evaluation problems: by hand, and against comparing all pairs of rows.

Not covered: rewordings, which n-grams cannot see; the sizes of the papers' sets.
"""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_clipx.tasks.knights_and_knaves.dataset import rows
from verl_clipx.tasks.overlap import MAX_EXAMPLES, OverlapExample, compare_files, find_overlap, problems, word_ngrams
from verl_clipx.tasks.templates import template_named


def test_ngrams_by_hand():
    assert word_ngrams("The cat, the DOG!", 3) == ["the cat the", "cat the dog"]
    assert word_ngrams("The cat", 3) == ["the cat"]
    assert word_ngrams("?!", 3) == []
    assert word_ngrams("a b c", 3) == ["a b c"]


def test_report_by_hand():
    train = ["one two three four five", "Six seven", "nothing here at all"]
    evaluation = ["zero TWO three, four", "six-seven!", "six seven eight", "six"]
    report = find_overlap(train, evaluation, size=3)
    assert (report.train_rows, report.evaluation_rows) == (3, 4)
    assert (report.train_rows_touched, report.evaluation_rows_touched) == (2, 2)
    assert report.examples == (OverlapExample(0, 0, "two three four"), OverlapExample(1, 1, "six seven"))


def test_thirteen_words_by_default():
    words = [f"w{number}" for number in range(20)]
    assert find_overlap([" ".join(words)], [" ".join(["x", *words[3:16]])]).evaluation_rows_touched == 1
    assert find_overlap([" ".join(words)], [" ".join(["x", *words[3:15], "y"])]).evaluation_rows_touched == 0


def test_examples_are_few_and_one_an_evaluation_row():
    texts = [f"problem {number}" for number in range(20)]
    report = find_overlap(texts + texts, texts, size=3)
    assert report.evaluation_rows_touched == 20
    assert report.train_rows_touched == 40
    assert [example.evaluation_row for example in report.examples] == list(range(MAX_EXAMPLES))


TEXTS = st.lists(st.lists(st.sampled_from("abc"), max_size=8).map(" ".join), max_size=6)


@given(TEXTS, TEXTS, st.integers(1, 4))
def test_agrees_with_all_pairs(train, evaluation, size):
    def share(first, second):
        def pieces(text):
            words = text.split()
            if len(words) < size:
                return {tuple(words)} - {()}
            return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}

        return bool(pieces(first) & pieces(second))

    report = find_overlap(train, evaluation, size)
    assert report.train_rows_touched == sum(any(share(t, e) for e in evaluation) for t in train)
    assert report.evaluation_rows_touched == sum(any(share(t, e) for t in train) for e in evaluation)
    for example in report.examples:
        assert share(train[example.train_row], evaluation[example.evaluation_row])


def write(path, prompts):
    pq.write_table(pa.Table.from_pylist([{"prompt": prompt} for prompt in prompts]), path)
    return path


def test_words_of_templates_do_not_count(tmp_path):
    def rendered(template, texts):
        return [template_named(template).render(problem=text) for text in texts]

    train = write(tmp_path / "train.parquet", rendered("r1_base", ["Find x in 2x = 4.", "How many primes are there?"]))
    test = write(tmp_path / "test.parquet", rendered("boxed_step_by_step", ["find X in 2x=4", "Name a prime."]))
    report = compare_files(train, test)
    assert (report.train_rows_touched, report.evaluation_rows_touched) == (1, 1)
    assert report.examples[0].shared == "find x in 2x 4"


def test_puzzles_do_not_overlap_in_what_all_puzzles_say(tmp_path):
    train, test = (
        write(
            tmp_path / f"{split}.parquet",
            [row["prompt"] for row in rows(None, split=split, prompt="kk_chat", people=(3, 7), count=5)],
        )
        for split in ("train", "test")
    )
    assert compare_files(train, test).evaluation_rows_touched == 0
    assert compare_files(test, test).evaluation_rows_touched == 10


def test_plain_strings_are_prompts_too(tmp_path):
    assert list(problems(write(tmp_path / "a.parquet", ["Find x."]))) == ["Find x."]


def test_other_files_are_refused(tmp_path):
    pq.write_table(pa.Table.from_pylist([{"question": "x"}]), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet: it has no column 'prompt', only \['question'\]"):
        list(problems(tmp_path / "a.parquet"))
    with pytest.raises(FileNotFoundError, match=r"b.parquet does not exist"):
        list(problems(tmp_path / "b.parquet"))
