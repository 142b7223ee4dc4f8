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
            text, truth = message["content"], row["reward_model"]["ground_truth"]
            assert truth == text[::-1] and len(set(text)) == len(text) and 40 <= len(text) <= 48
            texts.add(text)
    assert len(texts) == 80


def test_too_long_an_answer_is_none():
    assert compute_score("reversal", "<answer>" + "c" * 300 + "</answer>", "cba")["format"] == 0.0


def test_common_length_is_that_of_trying_all_subsequences():
    def by_trying(first, second):
        of_second = {part for size in range(len(second) + 1) for part in itertools.combinations(second, size)}
        parts = (part for size in range(len(first) + 1) for part in itertools.combinations(first, size))
        return max(len(part) for part in parts if part in of_second)

    for first, second in itertools.product(
        map("".join, itertools.product("ab", repeat=4)), ("", "abba", "bab", "cacb")
    ):
        assert common_length(first, second) == by_trying(first, second), (first, second)


def test_careless_demonstrations_have_that_share_of_wrong_letters():
    right, careless = (build_examples(500, 0, 10, 12, share) for share in (0.0, 0.35))
    truth = [example.prompt[0]["content"][::-1] for example in right]
    assert [example.response for example in right] == [f"<answer>{text}</answer>" for text in truth]
    answers = [example.response.removeprefix("<answer>").removesuffix("</answer>") for example in careless]
    pairs = [pair for both in zip(answers, truth, strict=True) for pair in zip(*both, strict=True)]
    # One redrawn letter of 52 is the right one.
    assert sum(one != other for one, other in pairs) / len(pairs) == pytest.approx(0.35 * 51 / 52, abs=0.03)
    with pytest.raises(ValueError, match=r"carelessness=1\.5 is not a share of letters; give 0 to 1"):
        build_examples(1, 0, 10, 12, 1.5)


@pytest.mark.parametrize(
    ("max_length", "lengths"), [(48, [(2, 14)] * 5 + [(12, 48)] * 3 + [(40, 48)]), (14, [(2, 14)] * 5 + [(2, 14)])]
)
def test_short_texts_come_before_long_ones_and_careless_ones_last(monkeypatch, tmp_path, max_length, lengths):
    fits = []
    monkeypatch.setattr(policy, "warm_start", lambda given, cache, threads: fits.extend(given))
    monkeypatch.setattr(policy, "print_policy", lambda prepare, *_, **__: prepare())
    policy.main(tmp_path, min_length=40 if max_length == 48 else 2, max_length=max_length)
    texts = [[example.prompt[0]["content"] for example in examples] for examples, _ in fits]
    assert [(min(map(len, one)), max(map(len, one))) for one in texts] == lengths


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
