"""The tiny policy's model, its fit, its cache, and sampling. Not covered: its size, the reward after a full fit."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_clipx.papers.tasks.tiny_policy import warm_start as module
from verl_clipx.papers.tasks.tiny_policy.model import ModelConfig, build_model
from verl_clipx.papers.tasks.tiny_policy.sampling import sample_responses
from verl_clipx.papers.tasks.tiny_policy.tokenizer import build_tokenizer
from verl_clipx.papers.tasks.tiny_policy.warm_start import Example, WarmStartConfig, encode, warm_start

pytestmark = pytest.mark.usefixtures("limit_torch_to_one_thread")

SMALL = ModelConfig(hidden_size=64, intermediate_size=64, num_layers=1, max_length=32)
CONFIG = WarmStartConfig(steps=3, batch_size=4, model=SMALL)
LEARNED = WarmStartConfig(steps=150, batch_size=7, learning_rate=1e-2, model=SMALL)


def make_prompt(text):
    return [{"role": "user", "content": text}]


EXAMPLES = [Example(make_prompt(f"{n} 2"), f"<answer>{n}+2</answer>") for n in range(1, 8)]
PROMPTS = [example.prompt for example in EXAMPLES]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_seeds_decide_weights_and_samples_and_nothing_else_changes(tokenizer):
    before = torch.get_rng_state()
    model = build_model(SMALL, tokenizer, seed=0)
    weights = model.lm_head.weight
    assert torch.equal(build_model(SMALL, tokenizer, seed=0).lm_head.weight, weights)
    assert not torch.equal(build_model(SMALL, tokenizer, seed=1).lm_head.weight, weights)
    samples = sample_responses(model, tokenizer, PROMPTS, 0, max_new_tokens=5)
    assert len(samples) == len(PROMPTS)
    assert sample_responses(model, tokenizer, PROMPTS, 0, max_new_tokens=5) == samples
    assert sample_responses(model, tokenizer, PROMPTS, 1, max_new_tokens=5) != samples
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training


def test_the_learning_rate_rises_over_a_tenth_of_the_steps_and_falls_to_almost_zero(tokenizer):
    rates = []
    original_step = torch.optim.AdamW.step

    def step_and_record(optimizer, closure=None):
        rates.append(optimizer.param_groups[0]["lr"])
        return original_step(optimizer, closure)

    with patch.object(torch.optim.AdamW, "step", step_and_record):
        config = replace(CONFIG, steps=20, learning_rate=0.018)
        module.fit(build_model(SMALL, tokenizer, 0), tokenizer, EXAMPLES, config)
    assert rates == pytest.approx([0.009, 0.018, *(k / 1000 for k in range(18, 0, -1))])


def test_labels_cover_the_response_and_its_end_only(tokenizer):
    input_ids, labels = encode(tokenizer, [EXAMPLES[0], Example(make_prompt("10 20 30 40"), "<answer>10</answer>")], 32)
    assert tokenizer.decode(input_ids[0]) == "<|user|>1 2<|end|><|assistant|><answer>1+2</answer><|end|><|pad|><|pad|>"
    assert tokenizer.decode(labels[0][labels[0] >= 0]) == "<answer>1+2</answer><|end|>"
    assert torch.equal(input_ids[labels >= 0], labels[labels >= 0])
    assert tokenizer.decode(labels[1][labels[1] >= 0]) == "<answer>10</answer><|end|>"


def test_a_policy_is_saved_with_its_tokenizer_found_again_and_the_same_on_one_thread(tokenizer, tmp_path, monkeypatch):
    threads = torch.get_num_threads()
    folder = warm_start([(EXAMPLES, CONFIG)], tmp_path, num_threads=1)
    # A policy that was fitted before is found by this name.
    assert folder.name == "tiny_policy-dbde5edde9e965d0"
    model, loaded = load(folder)
    assert model.dtype == torch.float32 and model.config.vocab_size == len(loaded)
    assert loaded.encode("<answer>13\n") == tokenizer.encode("<answer>13\n")
    # verl's engine reads these before it reads the weights.
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    again, _ = load(warm_start([(EXAMPLES, CONFIG)], tmp_path / "again", 1))
    assert all(torch.equal(again.state_dict()[key], value) for key, value in model.state_dict().items())
    for examples, changes in (
        (EXAMPLES[:-1], {}),
        (EXAMPLES, {"seed": 1}),
        (EXAMPLES, {"model": replace(SMALL, num_layers=2)}),
    ):
        other = warm_start([(examples, replace(CONFIG, **changes))], tmp_path, threads + 1)
        assert other != folder and torch.get_num_threads() == threads
    monkeypatch.setattr(module, "fit", None)  # a call would raise
    assert warm_start([(EXAMPLES, CONFIG)], tmp_path, 2) == folder


@pytest.mark.slow
def test_a_fit_reads_the_prompt_and_a_second_one_goes_on_from_it(tmp_path):
    # Copying the number out of the prompt is the least that shows the prompt reaches the response.
    other_examples = [Example(example.prompt, "<answer>9-9</answer>") for example in EXAMPLES]
    first_fit = (EXAMPLES, LEARNED)
    one_step = (other_examples, replace(CONFIG, steps=1))
    second_fit = (other_examples, replace(LEARNED, steps=60))

    def fit_and_answer(*fits):
        model, tokenizer = load(warm_start([*fits], tmp_path, 1))
        return sample_responses(model, tokenizer, PROMPTS, 0, temperature=0.01)

    right_answers = [example.response for example in EXAMPLES]
    assert fit_and_answer(first_fit) == right_answers
    assert fit_and_answer(first_fit, one_step) == right_answers
    assert fit_and_answer(first_fit, second_fit) == [example.response for example in other_examples]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("broken", [f"{module.__name__}.fit", "transformers.PreTrainedTokenizerBase.save_pretrained"])
def test_interrupted_fit_leaves_nothing_behind(tmp_path, broken):
    with patch(broken, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        warm_start([(EXAMPLES, CONFIG)], tmp_path, 1)
    assert list(tmp_path.iterdir()) == []
    assert warm_start([(EXAMPLES, CONFIG)], tmp_path, 1).is_dir()


def test_too_long_an_example_and_none_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^max_length=32 is shorter than an example of"):
        warm_start([([Example(make_prompt("9" * 80), "")], CONFIG)], tmp_path, 1)
    with pytest.raises(ValueError, match=r"^examples is empty"):
        warm_start([([], CONFIG)], tmp_path, 1)
