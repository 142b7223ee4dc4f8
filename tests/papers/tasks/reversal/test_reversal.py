"""Reversal's texts, rows and reward, by `clipx papers data build` and by the function that verl calls.

Not covered: the warm start itself, which takes minutes; tests/benchmarks trains on rows like these.
"""

import itertools

import pytest

from tests.analysis.runs.commands import clipx
from verl_clipx.common.files import read_table
from verl_clipx.papers.tasks.reversal import policy
from verl_clipx.papers.tasks.reversal.policy import build_examples
from verl_clipx.papers.tasks.reversal.reward import common_length
from verl_clipx.papers.tasks.reward import compute_score


def test_rows_hold_different_texts_backwards_and_the_splits_share_none(tmp_path):
    clipx("papers", "data", "build", "reversal", "--out", tmp_path, "--option", "size=40")
    texts = set()
    for split in ("train", "test"):
        rows = read_table(tmp_path / f"{split}.parquet").to_pylist()
        assert len(rows) == 40
        for row in rows:
            (message,) = row["prompt"]
            text = message["content"]
            assert row["reward_model"]["ground_truth"] == text[::-1]
            # No letter comes twice.
            assert len(set(text)) == len(text)
            assert 40 <= len(text) <= 48
            texts.add(text)
    assert len(texts) == 80


def test_too_long_an_answer_is_none():
    assert compute_score("reversal", "<answer>" + "c" * 300 + "</answer>", "cba")["format"] == 0.0


def test_common_length_is_that_of_trying_all_subsequences():
    def list_subsequences(text):
        return {letters for size in range(len(text) + 1) for letters in itertools.combinations(text, size)}

    for letters in itertools.product("ab", repeat=4):
        first = "".join(letters)
        for second in ("", "abba", "bab", "cacb"):
            common = list_subsequences(first) & list_subsequences(second)
            assert common_length(first, second) == max(map(len, common)), (first, second)


def test_careful_demonstrations_are_right():
    for example in build_examples(500, 0, 10, 12, 0.0):
        (message,) = example.prompt
        assert example.response == f"<answer>{message['content'][::-1]}</answer>"


def test_careless_demonstrations_have_that_share_of_wrong_letters():
    letters = wrong_letters = 0
    for example in build_examples(500, 0, 10, 12, 0.35):
        (message,) = example.prompt
        answer = example.response.removeprefix("<answer>").removesuffix("</answer>")
        for letter, right_letter in zip(answer, message["content"][::-1], strict=True):
            letters += 1
            wrong_letters += letter != right_letter
    # One redrawn letter of 52 is the right one.
    assert wrong_letters / letters == pytest.approx(0.35 * 51 / 52, abs=0.03)


def test_a_carelessness_that_is_no_share_is_refused():
    with pytest.raises(ValueError, match=r"carelessness=1\.5 is not a share of letters; give 0 to 1"):
        build_examples(1, 0, 10, 12, 1.5)


@pytest.mark.parametrize(
    ("min_length", "max_length", "expected_ranges"),
    [
        pytest.param(40, 48, [(2, 14)] * 5 + [(12, 48)] * 3 + [(40, 48)], id="long texts"),
        pytest.param(2, 14, [(2, 14)] * 5 + [(2, 14)], id="short texts"),
    ],
)
def test_short_texts_come_before_long_ones_and_careless_ones_last(
    monkeypatch, tmp_path, min_length, max_length, expected_ranges
):
    fits = []
    monkeypatch.setattr(policy, "warm_start", lambda all_fits, cache, threads: fits.extend(all_fits))
    monkeypatch.setattr(policy, "print_policy", lambda prepare, *_, **__: prepare())
    policy.main(tmp_path, min_length=min_length, max_length=max_length)
    ranges = []
    for examples, _ in fits:
        lengths = [len(example.prompt[0]["content"]) for example in examples]
        ranges.append((min(lengths), max(lengths)))
    assert ranges == expected_ranges


@pytest.mark.parametrize("max_length", [14, 15])
def test_long_texts_are_drawn_only_for_fits_to_them(monkeypatch, tmp_path, max_length):
    ranges = []

    def build(count, seed, shortest, longest, carelessness=0.0):
        ranges.append((shortest, longest))
        return []

    monkeypatch.setattr(policy, "build_examples", build)
    monkeypatch.setattr(policy, "warm_start", lambda *_: tmp_path)
    monkeypatch.setattr(policy, "print_policy", lambda prepare, *_, **__: prepare())
    policy.main(tmp_path, min_length=2, max_length=max_length)
    assert ((12, 48) in ranges) == (max_length == 15)
