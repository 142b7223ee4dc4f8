"""Chat templates, the longest prompt, and the tokens that end a response.

Not covered: that verl encodes prompts in the same way (test_validation_run.py has what it is told).
"""

import shutil

import pytest
from transformers import AutoTokenizer, GenerationConfig

from verl_clipx.papers.evaluation.benchmark import Benchmark
from verl_clipx.papers.evaluation.prompts import TEMPLATES, load_template, read_prompt_format
from verl_clipx.papers.tasks.knights_and_knaves.prompt import QWEN_CHAT_TEMPLATE_WITH_THINK

NAMED = "verl_clipx.papers.tasks.knights_and_knaves.prompt:QWEN_CHAT_TEMPLATE_WITH_THINK"


@pytest.fixture
def read(inputs):
    """A function from prompts to their format."""

    def read(*contents: str, template: str = "chat", max_tokens: int = 4, model=inputs[0]):
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
        (NAMED, None, QWEN_CHAT_TEMPLATE_WITH_THINK),
    ],
)
def test_template_and_longest_prompt(inputs, read, template, text, jinja):
    found = read("1", "2 3 = 5", "2", template=template)
    assert found.template == jinja
    if text:
        tokenizer = AutoTokenizer.from_pretrained(inputs[0])
        assert found.longest_prompt == len(tokenizer(text, add_special_tokens=False).input_ids)


def test_what_cannot_be_encoded_is_refused(inputs, read, tmp_path):
    longest = read("1", "12", template="plain").longest_prompt
    read("1", "12", template="plain", max_tokens=128 - longest)
    with pytest.raises(ValueError, match=f"to at most {128 - longest}"):
        read("1", "12", template="plain", max_tokens=129 - longest)
    with pytest.raises(ValueError, match="question 1: its prompt has no tokens"):
        read("1", "", template="plain")
    with pytest.raises(ValueError, match="--template json:dumps: is of the type function"):
        read("1", template="json:dumps")
    model = shutil.copytree(inputs[0], tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{{ raise_exception('one turn only') }}"
    tokenizer.save_pretrained(model)
    with pytest.raises(ValueError, match="question 0: the chat template refuses its prompt"):
        read("1", model=model)
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="--template plain"):
        read("1", model=model)


def test_stop_tokens_are_the_tokenizers_and_the_models(inputs, read, tmp_path):
    end = AutoTokenizer.from_pretrained(inputs[0]).eos_token_id
    assert read("1").stop_token_ids == [end]
    model = shutil.copytree(inputs[0], tmp_path / "model")
    GenerationConfig(eos_token_id=[7, 8]).save_pretrained(model)
    assert read("1", model=model).stop_token_ids == sorted({7, 8, end})
