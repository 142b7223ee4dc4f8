"""The tiny tokenizer: any text encodes, saving and loading agree, the chat template. Not covered: verl's processors."""

import unicodedata

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
    assert len(tokenizer) == 256 + 5 + 2 + 90 == max(tokenizer.get_vocab().values()) + 1
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|end|>", "<|pad|>")
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_pieces_of_a_response(tokenizer):
    pieces = ["<|assistant|>", "<answer>", "(", "13", "+", "12", "3", ")", "*", "7", "\n", " ", "</answer>", "<|end|>"]
    ids = tokenizer.encode("".join(pieces))
    assert [tokenizer.decode([token]) for token in ids] == pieces
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<answer>(13+123)*7\n </answer>"


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_and_the_reloaded_tokenizer_agrees(tokenizer, reloaded, text):
    ids = tokenizer.encode(text)
    assert reloaded.encode(text) == ids
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


def test_chat_template_by_hand(tokenizer, reloaded):
    expected = "<|system|>count<|end|><|user|>13 2 5 = 21<|end|><|assistant|>"
    for either in (tokenizer, reloaded):
        assert either.apply_chat_template(CHAT[:2], add_generation_prompt=True, tokenize=False) == expected
        assert either.apply_chat_template(CHAT, tokenize=False) == expected + "<answer>13+2*5</answer><|end|>"
    with pytest.raises(TemplateError, match="unknown role tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": ""}], tokenize=False)


def test_verl_finds_the_generation_prompt(tokenizer):
    from verl.utils.tokenizer.chat_template import extract_system_prompt_and_generation, initialize_turn_separator

    assert extract_system_prompt_and_generation(tokenizer) == ([], tokenizer.encode("<|assistant|>"))
    assert initialize_turn_separator(tokenizer) == []
