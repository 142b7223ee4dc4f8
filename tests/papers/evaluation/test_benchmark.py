"""Questions from Parquet, and their token ids.

Not covered: the data sets themselves (tests/papers/tasks).
"""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import GenerationConfig

from tests.papers.evaluation.tiny import save_questions
from verl_clipx.papers.evaluation.benchmark import Benchmark, Question, read_benchmark
from verl_clipx.papers.evaluation.prompts import check_context, encode_prompts, stop_token_ids
from verl_clipx.papers.tasks.knights_and_knaves.prompt import QWEN_CHAT_TEMPLATE_WITH_THINK
from verl_clipx.papers.tasks.tiny_policy.tokenizer import build_tokenizer


def test_rows_in_verls_schema_become_questions(tmp_path):
    path = save_questions(tmp_path, 3)
    row = pq.read_table(path).to_pylist()[2]
    benchmark = read_benchmark(path)
    assert (benchmark.name, len(benchmark.questions), len(benchmark.sha256)) == ("test", 3, 64)
    question = benchmark.questions[2]
    assert question.data_source == "countdown"
    assert question.prompt == row["prompt"]
    assert question.ground_truth == row["reward_model"]["ground_truth"]
    assert question.extra_info == row["extra_info"]
    cut = read_benchmark(path, "countdown", limit=2)
    assert (cut.name, cut.questions, cut.sha256) == ("countdown", benchmark.questions[:2], benchmark.sha256)


def test_files_that_are_no_benchmark_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_benchmark(tmp_path / "none.parquet")
    pq.write_table(pa.table({"prompt": ["x"]}), tmp_path / "odd.parquet")
    with pytest.raises(ValueError, match="data_source, reward_model"):
        read_benchmark(tmp_path / "odd.parquet")
    pq.write_table(
        pa.table(
            {
                "data_source": ["s"],
                "prompt": [[{"role": "user", "content": "x"}]],
                "reward_model": [{"style": "rule"}],
            }
        ),
        tmp_path / "bare.parquet",
    )
    with pytest.raises(ValueError, match="has no ground_truth"):
        read_benchmark(tmp_path / "bare.parquet")
    path = save_questions(tmp_path, 1)
    pq.write_table(pq.read_table(path).slice(0, 0), tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match="contains no question"):
        read_benchmark(tmp_path / "empty.parquet")
    for limit in (0, -1):
        with pytest.raises(ValueError, match=f"--limit {limit}: must be at least 1"):
            read_benchmark(path, limit=limit)
    for name in ("a/b", "..", ""):
        with pytest.raises(ValueError, match="becomes a folder"):
            read_benchmark(path, name)


def benchmark_of(*contents: str) -> Benchmark:
    questions = [Question("s", [{"role": "user", "content": content}], "", {}) for content in contents]
    return Benchmark("b", None, "", questions)


def test_chat_prompts_are_those_of_verls_data_set():
    tokenizer = build_tokenizer()
    (encoded,) = encode_prompts(tokenizer, benchmark_of("2 3 = 5"), "chat")
    # As verl's agent loop calls it.
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2 3 = 5"}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert encoded == expected
    assert tokenizer.decode(encoded) == "<|user|>2 3 = 5<|end|><|assistant|>"


def test_plain_prompts_are_the_text_alone():
    tokenizer = build_tokenizer()
    (encoded,) = encode_prompts(tokenizer, benchmark_of("2 3 = 5"), "plain")
    assert tokenizer.decode(encoded) == "2 3 = 5"
    # The same as training on it with a chat template that adds nothing.
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    assert encode_prompts(tokenizer, benchmark_of("2 3 = 5"), "chat") == [encoded]


def test_a_named_template_is_the_runs_own_chat_template():
    # The prompts of the trained rows of knights and knaves end in <think>.
    name = "verl_clipx.papers.tasks.knights_and_knaves.prompt:QWEN_CHAT_TEMPLATE_WITH_THINK"
    tokenizer = build_tokenizer()
    (encoded,) = encode_prompts(tokenizer, benchmark_of("2 3 = 5"), name)
    tokenizer.chat_template = QWEN_CHAT_TEMPLATE_WITH_THINK
    assert encode_prompts(tokenizer, benchmark_of("2 3 = 5"), "chat") == [encoded]
    with pytest.raises(ValueError, match="--template json:dumps: is not text"):
        encode_prompts(tokenizer, benchmark_of("1"), "json:dumps")


def test_prompts_that_cannot_be_encoded_are_refused():
    tokenizer = build_tokenizer()
    with pytest.raises(ValueError, match="question 1: its prompt has no tokens"):
        encode_prompts(tokenizer, benchmark_of("1", ""), "plain")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="--template plain"):
        encode_prompts(tokenizer, benchmark_of("1"), "chat")


def test_stop_tokens_are_the_tokenizers_and_the_models():
    tokenizer = build_tokenizer()
    assert stop_token_ids(tokenizer, GenerationConfig(eos_token_id=[7, 8])) == {7, 8, tokenizer.eos_token_id}
    assert stop_token_ids(tokenizer, None) == {tokenizer.eos_token_id}
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        stop_token_ids(tokenizer, None)


def test_responses_must_fit_the_context():
    benchmark = benchmark_of("1", "2")
    check_context(benchmark, [[1] * 3, [1] * 5], 11, 16)
    check_context(benchmark, [[1] * 3, [1] * 5], 10**6, None)
    with pytest.raises(ValueError, match="to at most 11"):
        check_context(benchmark, [[1] * 3, [1] * 5], 12, 16)
