"""From generated tokens to stored completions, and what completions depend on.

Not covered: generating and storing them (test_run.py).
"""

from pathlib import Path

from verl_clipx.papers.evaluation.backends import SampleRequest
from verl_clipx.papers.evaluation.benchmark import Benchmark
from verl_clipx.papers.evaluation.sampling import origin, to_samples
from verl_clipx.papers.evaluation.settings import SamplingSettings
from verl_clipx.papers.tasks.tiny_policy.tokenizer import build_tokenizer


def test_a_response_without_a_stop_token_at_its_end_is_truncated():
    tokenizer = build_tokenizer()
    end = tokenizer.eos_token_id
    words = tokenizer("<answer>1+2</answer>")["input_ids"]
    generated = [[*words, end], words, [end], [end, *words], []]
    pairs = [(3, number) for number in range(5)]
    samples = to_samples(pairs, [SampleRequest([1], 10 + n) for n in range(5)], generated, tokenizer, frozenset({end}))
    assert [one.truncated for one in samples] == [False, True, False, True, True]
    assert [one.length for one in samples] == [len(words) + 1, len(words), 1, len(words) + 1, 0]
    # Without special tokens, as verl's reward managers see it; the answer tags are no special tokens.
    assert [one.text for one in samples] == ["<answer>1+2</answer>"] * 2 + ["", "<answer>1+2</answer>", ""]
    assert [(one.question, one.sample, one.seed) for one in samples] == [(3, n, 10 + n) for n in range(5)]


def test_the_number_of_samples_is_no_part_of_what_completions_depend_on():
    benchmark = Benchmark("b", Path("b.parquet"), "0" * 64, [])
    few, many, other = (
        origin("f", benchmark, SamplingSettings(samples=k, max_tokens=8, top_k=top_k), "cpu")
        for k, top_k in ((2, 0), (8, 0), (2, 5))
    )
    assert few == many != other
    assert few["versions"].keys() == {"torch", "transformers", "verl-clipx"}
