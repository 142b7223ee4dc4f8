"""The tiny tokenizer: any text encodes, saving and loading agree, the chat template. Not covered: verl's processors."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, Qwen2Config

from verl_clipx.papers.tasks.tiny_policy.tokenizer import build_tokenizer

CHAT = [
    {"role": "system", "content": "count"},
    {"role": "user", "content": "13 2 5 = 21"},
    {"role": "assistant", "content": "<answer>13+2*5</answer>"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def reloaded(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    # The model's configuration decides which tokenizer class transformers rebuilds.
    Qwen2Config().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_size_and_marks(tokenizer):
    assert len(tokenizer) == 256 + 5 + 2 + 90
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|end|>", "<|pad|>")
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert max(tokenizer.get_vocab().values()) == len(tokenizer) - 1


@pytest.mark.parametrize("text", ["\n", "7", "42", "99", "+", " ", "<answer>", "</answer>", "<|user|>"])
def test_one_token(tokenizer, text):
    assert len(tokenizer.encode(text)) == 1


def test_pieces_of_a_problem(tokenizer):
    ids = tokenizer.encode("<answer>(13+123)*7</answer><|end|>")
    pieces = [tokenizer.decode([token]) for token in ids]
    assert pieces == ["<answer>", "(", "13", "+", "12", "3", ")", "*", "7", "</answer>", "<|end|>"]


def test_decoding_keeps_the_answer_tags_and_drops_the_marks(tokenizer):
    ids = tokenizer.encode("<|assistant|><answer>1+2</answer><|end|><|pad|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<answer>1+2</answer>"


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_and_the_reloaded_tokenizer_agrees(tokenizer, reloaded, text):
    import unicodedata

    ids = tokenizer.encode(text)
    assert reloaded.encode(text) == ids
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


def test_chat_template_by_hand(tokenizer, reloaded):
    expected = "<|system|>count<|end|><|user|>13 2 5 = 21<|end|><|assistant|>"
    for each in (tokenizer, reloaded):
        assert each.apply_chat_template(CHAT[:2], add_generation_prompt=True, tokenize=False) == expected
        assert each.apply_chat_template(CHAT, tokenize=False) == expected + "<answer>13+2*5</answer><|end|>"


def test_unknown_role_is_refused(tokenizer):
    with pytest.raises(TemplateError, match="unknown role tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": ""}], tokenize=False)


def test_verl_finds_the_generation_prompt(tokenizer):
    from verl.utils.tokenizer.chat_template import extract_system_prompt_and_generation, initialize_turn_separator

    system, generation = extract_system_prompt_and_generation(tokenizer)
    assert system == []
    assert generation == tokenizer.encode("<|assistant|>")
    assert initialize_turn_separator(tokenizer) == []
