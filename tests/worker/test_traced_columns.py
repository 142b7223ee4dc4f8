"""Numbers and responses as columns of a trace: regions by hand, texts. Not covered: the rest (test_tracer.py)."""

import numpy
import pytest

from verl_clipx.worker.traced_columns import TokenTexts, regions


@pytest.mark.parametrize(
    ("bounded", "low", "high", "advantage", "region"),
    [
        (0.7, 0.8, 1.2, -1, "LN"),
        (1.3, 0.8, 1.2, 1, "HP"),
        (0.7, 0.8, 1.2, 1, "LP"),
        (1.3, 0.8, 1.2, -1, "HN"),
        (1.0, 0.8, 1.2, 1, "M"),
        # Equality, and no advantage.
        (1.2, 0.8, 1.2, 1, "M"),
        (0.8, 0.8, 1.2, -1, "M"),
        (1.3, 0.8, 1.2, 0, "M"),
        (1e9, 0.0, numpy.inf, 1, "M"),
        # Bounds that cross: above wins, as in the metrics.
        (1.0, 1.1, 0.9, 1, "HP"),
        (1.0, 1.1, 0.9, -1, "HN"),
    ],
)
def test_a_tokens_region(bounded, low, high, advantage, region):
    columns = (numpy.array([value], dtype=numpy.float32) for value in (bounded, low, high, advantage))
    assert regions(*columns).tolist() == [region]


def test_each_token_is_decoded_once():
    class Tokenizer:
        calls = 0

        def decode(self, tokens, clean_up_tokenization_spaces):
            assert not clean_up_tokenization_spaces
            self.calls += 1
            return "".join("ab"[token] for token in tokens)

    tokenizer = Tokenizer()
    texts = TokenTexts(tokenizer)
    assert [texts.of(token) for token in (0, 1, 0, 0)] == ["a", "b", "a", "a"]
    # With a neighbour and alone, for each of the two.
    assert tokenizer.calls == 4
