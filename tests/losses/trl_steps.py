"""Steps of TRL's GRPOTrainer and of docs/elsewhere.md's two trainers on a tiny model of random weights; prints how far
the gradients of each pair of runs are apart. tests/end_to_end/test_wheel.py runs it where TRL is, and verl isn't.
"""

import json
import sys
from pathlib import Path

import torch
from clip_trainer import ClipTrainer
from datasets import Dataset
from short_trainer import ShortTrainer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from verl_clipx import clip_loss

# As if it were not installed.
assert "verl" not in sys.modules
sys.modules["verl"] = None

VOCABULARY = ["<pad>", "<eos>", *"abcdefghijklmnop"]
COMMON_ARGUMENTS = {
    "loss_type": "dapo",
    "max_steps": 2,
    "num_iterations": 2,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 12,
    "learning_rate": 0.05,
    "max_grad_norm": 1e9,
    "seed": 1,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
}


class AveragingTrainer(GRPOTrainer):
    """Averages what `clip_loss` returns as TRL's dapo does."""

    clip = clip_loss("acpo")

    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        mask = inputs["completion_mask"]
        log_prob, *_ = self._get_per_token_logps_and_entropies(model, ids, attention_mask, mask.shape[1])
        old_log_prob = inputs.get("old_per_token_logps", log_prob.detach())
        per_token, _ = self.clip(log_prob, old_log_prob, inputs["advantages"][:, None], mask)
        return per_token.sum() / inputs["num_items_in_batch"]


class KeepGradients(TrainerCallback):
    """Keeps the gradient of each step, (parameters,)."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        parts = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        self.gradients.append(torch.cat(parts))


def make_tiny_model():
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return Qwen2ForCausalLM(config)


def make_tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def reward_letters(completions, **_):
    return [text.count("a") + 0.1 * len(text.split()) for text in completions]


def train(trainer_class, loss=None, **arguments):
    """Return the gradient of each step of a trainer, (steps, parameters).

    Args:
        loss: what its attribute `clip` is, None for the class's own.
    """
    if loss is not None:
        trainer_class = type("Trainer", (trainer_class,), {"clip": loss})
    torch.manual_seed(0)
    model = make_tiny_model()
    # Where TRL finds the reference model.
    model.config._name_or_path = str(reference_folder)
    callback = KeepGradients()
    trainer = trainer_class(
        model=model,
        processing_class=make_tokenizer(),
        reward_funcs=reward_letters,
        args=GRPOConfig(output_dir="out", **COMMON_ARGUMENTS | arguments),
        train_dataset=Dataset.from_list([{"prompt": f"{first} {second}"} for first in "abcd" for second in "abcd"]),
        callbacks=[callback],
    )
    trainer.train()
    return torch.stack(callback.gradients)


def largest(difference):
    """Return the largest size of a number in each step, from (steps, parameters)."""
    return difference.abs().amax(1).tolist()


# Options of TRL's that act beside its clip. The threshold takes out a sequence in the second step.
OPTIONS = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {},
    "kl": {"beta": 0.1},
    "kl without its ratio": {"beta": 0.1, "use_bias_correction_kl": False},
    "off-policy mask": {"off_policy_mask_threshold": 1e-4},
    "off-policy mask and kl": {"off_policy_mask_threshold": 1e-4, "beta": 0.1},
}
# The KL term compares with the model of this folder, and not with the one that trains.
reference_folder = Path("reference").resolve()
torch.manual_seed(1)
make_tiny_model().save_pretrained(reference_folder)

BOUNDS_OF_TRL = {"epsilon": 0.1, "epsilon_high": 0.15}
SAME_BOUNDS = clip_loss("grpo", clip_low=0.9, clip_high=1.15, dual_clip=None)
IN_TWO_MICRO_BATCHES = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}

# By pair of runs, how far their gradients are apart in each step.
apart = {}
# By option, what it changes in TRL's own gradients, without which its row would mean nothing.
acts = {}
for name, options in OPTIONS.items():
    of_trl = train(GRPOTrainer, **BOUNDS_OF_TRL, **options)
    apart[name] = largest(of_trl - train(ClipTrainer, SAME_BOUNDS, **options))
    if name == "dapo":
        of_trl_without_options = of_trl
    elif name != "grpo":
        acts[name] = max(largest(of_trl - of_trl_without_options))
bnpo = {"loss_type": "bnpo", **IN_TWO_MICRO_BATCHES}
apart["short"] = largest(train(GRPOTrainer, **BOUNDS_OF_TRL, **bnpo) - train(ShortTrainer, SAME_BOUNDS, **bnpo))
acpo = train(ClipTrainer)
apart["acpo"] = largest(acpo - train(AveragingTrainer))
apart["divided"] = largest(acpo - train(ClipTrainer, **IN_TWO_MICRO_BATCHES))
# What has to be seen for the others to mean anything: the clip acts in the second step.
clipped = largest(of_trl_without_options - acpo)
refused = []
for options in (
    {"loss_type": "dr_grpo"},
    {"delta": 4.0},
    {"loss_type": "grpo", "importance_sampling_level": "sequence"},
):
    try:
        train(ClipTrainer, SAME_BOUNDS, **options)
    except ValueError as error:
        refused.append(str(error))
print(json.dumps({"apart": apart, "acts": acts, "clipped": clipped, "size": largest(acpo), "refused": refused}))
