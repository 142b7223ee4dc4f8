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

WORDS = ["<pad>", "<eos>", *"abcdefghijklmnop"]
ARGUMENTS = dict(max_steps=2, num_iterations=2, num_generations=4, per_device_train_batch_size=8, seed=1, use_cpu=True)
ARGUMENTS |= dict(gradient_accumulation_steps=1, max_completion_length=12, learning_rate=0.05, max_grad_norm=1e9)
ARGUMENTS |= dict(report_to=[], save_strategy="no", disable_tqdm=True, bf16=False, gradient_checkpointing=False)


class Direct(GRPOTrainer):
    """Averages what `clip_loss` returns as TRL's dapo does."""

    clip = clip_loss("acpo")

    def _compute_loss(self, model, inputs):
        ids, seen = (torch.cat([inputs[f"prompt_{of}"], inputs[f"completion_{of}"]], 1) for of in ("ids", "mask"))
        mask = inputs["completion_mask"]
        log_prob, *_ = self._get_per_token_logps_and_entropies(model, ids, seen, mask.shape[1])
        old = inputs.get("old_per_token_logps", log_prob.detach())
        return self.clip(log_prob, old, inputs["advantages"][:, None], mask)[0].sum() / inputs["num_items_in_batch"]


class Gradients(TrainerCallback):
    """Keeps the gradient of each step."""

    def __init__(self):
        self.kept = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.kept.append(torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]).clone())


def tiny_model():
    size = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=len(WORDS), **size))


def gradients(kind, loss=None, **arguments):
    """The gradient of each step of a trainer, (steps, parameters)."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    model, kept = tiny_model(), Gradients()
    # Where TRL finds the reference model.
    model.config._name_or_path = str(reference)
    (type("Trainer", (kind,), {"clip": loss}) if loss else kind)(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [text.count("a") + 0.1 * len(text.split()) for text in completions],
        args=GRPOConfig(output_dir="out", **{"loss_type": "dapo", **ARGUMENTS, **arguments}),
        train_dataset=Dataset.from_list([{"prompt": f"{one} {other}"} for one in "abcd" for other in "abcd"]),
        callbacks=[kept],
    ).train()
    return torch.stack(kept.kept)


def largest(difference):
    """The largest number of each step, (steps, parameters)."""
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
reference = Path("reference").resolve()
torch.manual_seed(1)
tiny_model().save_pretrained(reference)

loss = clip_loss("grpo", clip_low=0.9, clip_high=1.15, dual_clip=None)
apart, acts = {}, {}
for name, options in OPTIONS.items():
    trls = gradients(GRPOTrainer, epsilon=0.1, epsilon_high=0.15, **options)
    apart[name] = largest(trls - gradients(ClipTrainer, loss, **options))
    # What an option changes in TRL's own gradients, without which its row would mean nothing.
    if name in ("grpo", "dapo"):
        trls_own = trls
    else:
        acts[name] = max(largest(trls - trls_own))
bnpo = {"loss_type": "bnpo", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
trls_bnpo = gradients(GRPOTrainer, epsilon=0.1, epsilon_high=0.15, **bnpo)
apart["short"] = largest(trls_bnpo - gradients(ShortTrainer, loss, **bnpo))
acpo = gradients(ClipTrainer)
apart["acpo"] = largest(acpo - gradients(Direct))
divided = gradients(ClipTrainer, per_device_train_batch_size=4, gradient_accumulation_steps=2)
apart["divided"] = largest(acpo - divided)
# What has to be seen for the others to mean anything: the clip acts in the second step.
clipped = largest(trls_own - acpo)
refused = []
for options in (
    {"loss_type": "dr_grpo"},
    {"delta": 4.0},
    {"loss_type": "grpo", "importance_sampling_level": "sequence"},
):
    try:
        gradients(ClipTrainer, loss, **options)
    except ValueError as error:
        refused.append(str(error))
print(json.dumps({"apart": apart, "acts": acts, "clipped": clipped, "size": largest(acpo), "refused": refused}))
