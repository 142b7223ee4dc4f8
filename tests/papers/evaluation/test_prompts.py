"""Chat templates, the longest prompt, and the tokens that end a response.

Not covered: that verl encodes prompts in the same way (test_validation_run.py has what it is told).
"""

import pytest
from transformers import AutoTokenizer, GenerationConfig

from tests.papers.evaluation.tiny import save_model
from verl_clipx.papers.evaluation.benchmark import Benchmark, Question
from verl_clipx.papers.evaluation.prompts import read_prompt_format
from verl_clipx.papers.tasks.knights_and_knaves.prompt import QWEN_CHAT_TEMPLATE_WITH_THINK


@pytest.fixture
def model(tmp_path):
    return save_model(tmp_path / "model")


def benchmark_of(*contents: str) -> Benchmark:
    questions = [Question("s", [{"role": "user", "content": content}], "", {}) for content in contents]
    return Benchmark("b", None, "", questions)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("chat", "<|user|>2 3 = 5<|end|><|assistant|>"),
        # As with a run's chat template that adds nothing.
        ("plain", "2 3 = 5"),
    ],
)
def test_the_longest_prompt_under_a_template(model, template, text):
    length = len(AutoTokenizer.from_pretrained(model)(text, add_special_tokens=False)["input_ids"])
    assert read_prompt_format(str(model), benchmark_of("1", "2 3 = 5", "2"), template, 4).longest == length


def test_a_named_template_is_the_runs_own_chat_template(model):
    # The prompts of the trained rows of knights and knaves end in <think>.
    name = "verl_clipx.papers.tasks.knights_and_knaves.prompt:QWEN_CHAT_TEMPLATE_WITH_THINK"
    assert read_prompt_format(str(model), benchmark_of("1"), name, 4).template == QWEN_CHAT_TEMPLATE_WITH_THINK
    assert read_prompt_format(str(model), benchmark_of("1"), "chat", 4).template is None
    with pytest.raises(ValueError, match="--template json:dumps: is not text"):
        read_prompt_format(str(model), benchmark_of("1"), "json:dumps", 4)


def test_prompts_that_cannot_be_encoded_are_refused(model):
    with pytest.raises(ValueError, match="question 1: its prompt has no tokens"):
        read_prompt_format(str(model), benchmark_of("1", ""), "plain", 4)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{{ raise_exception('one turn only') }}"
    tokenizer.save_pretrained(model)
    with pytest.raises(ValueError, match="question 0: the chat template refuses its prompt"):
        read_prompt_format(str(model), benchmark_of("1"), "chat", 4)
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="--template plain"):
        read_prompt_format(str(model), benchmark_of("1"), "chat", 4)


def test_stop_tokens_are_the_tokenizers_and_the_models(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert read_prompt_format(str(model), benchmark_of("1"), "chat", 4).stop_token_ids == [tokenizer.eos_token_id]
    GenerationConfig(eos_token_id=[7, 8]).save_pretrained(model)
    stops = read_prompt_format(str(model), benchmark_of("1"), "chat", 4).stop_token_ids
    assert stops == sorted({7, 8, tokenizer.eos_token_id})


def test_responses_must_fit_the_context(model):
    longest = read_prompt_format(str(model), benchmark_of("1", "12"), "plain", 4).longest
    read_prompt_format(str(model), benchmark_of("1", "12"), "plain", 128 - longest)
    with pytest.raises(ValueError, match=f"to at most {128 - longest}"):
        read_prompt_format(str(model), benchmark_of("1", "12"), "plain", 129 - longest)
