"""Chat templates, the longest prompt, and the tokens that end a response.

Not covered: that verl encodes prompts in the same way (test_validation_run.py has what it is told).
"""

import shutil

import pytest
from transformers import AutoTokenizer, GenerationConfig

from verl_clipx.papers.evaluation.benchmark import Benchmark
from verl_clipx.papers.evaluation.prompts import TEMPLATES, load_template, read_prompt_format
from verl_clipx.papers.tasks.knights_and_knaves.prompt import QWEN_CHAT_TEMPLATE_WITH_THINK

TEMPLATE_WITH_THINK = "verl_clipx.papers.tasks.knights_and_knaves.prompt:QWEN_CHAT_TEMPLATE_WITH_THINK"


@pytest.fixture
def read(inputs):
    """Reads the format of prompts with some contents."""
    default_model, _ = inputs

    def read(*contents: str, template: str = "chat", max_tokens: int = 4, model=default_model):
        questions = [{"prompt": [{"role": "user", "content": content}]} for content in contents]
        benchmark = Benchmark("b", None, "", questions)
        return read_prompt_format(str(model), benchmark, load_template(template), max_tokens)

    return read


@pytest.mark.parametrize(
    ("template", "text", "jinja"),
    [
        ("chat", "<|user|>2 3 = 5<|end|><|assistant|>", None),
        # As with a run's chat template that adds nothing.
        ("plain", "2 3 = 5", TEMPLATES["plain"]),
        # The prompts of the trained rows of knights and knaves end in <think>.
        (TEMPLATE_WITH_THINK, None, QWEN_CHAT_TEMPLATE_WITH_THINK),
    ],
)
def test_template_and_longest_prompt(inputs, read, template, text, jinja):
    prompt_format = read("1", "2 3 = 5", "2", template=template)
    assert prompt_format.template == jinja
    if text:
        model, _ = inputs
        tokenizer = AutoTokenizer.from_pretrained(model)
        assert prompt_format.longest_prompt == len(tokenizer(text, add_special_tokens=False).input_ids)


@pytest.fixture
def model(inputs, tmp_path):
    """A copy of the model that a test may change."""
    shared_model, _ = inputs
    return shutil.copytree(shared_model, tmp_path / "model")


def test_prompt_and_response_must_fit_the_models_context(read):
    longest = read("1", "12", template="plain").longest_prompt
    read("1", "12", template="plain", max_tokens=128 - longest)
    with pytest.raises(ValueError, match=f"to at most {128 - longest}"):
        read("1", "12", template="plain", max_tokens=129 - longest)


def test_a_prompt_without_tokens_is_refused(read):
    with pytest.raises(ValueError, match="question 1: its prompt has no tokens"):
        read("1", "", template="plain")


def test_a_template_that_is_no_text_is_refused(read):
    with pytest.raises(ValueError, match="--template json:dumps: is of the type function"):
        read("1", template="json:dumps")


def test_a_prompt_that_the_chat_template_refuses_is_named(read, model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{{ raise_exception('one turn only') }}"
    tokenizer.save_pretrained(model)
    with pytest.raises(ValueError, match="question 0: the chat template refuses its prompt"):
        read("1", model=model)


def test_a_model_without_a_chat_template_is_refused_with_the_remedy(read, model):
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="--template plain"):
        read("1", model=model)


def test_stop_tokens_are_the_tokenizers_and_the_models(read, model):
    end = AutoTokenizer.from_pretrained(model).eos_token_id
    assert read("1").stop_token_ids == [end]
    GenerationConfig(eos_token_id=[7, 8]).save_pretrained(model)
    assert read("1", model=model).stop_token_ids == sorted({7, 8, end})
