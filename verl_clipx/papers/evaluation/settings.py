"""How responses are sampled, and the random seed of each."""

import hashlib
import math
from dataclasses import dataclass

TEMPLATES = ("chat", "plain")

MOST_SAMPLES = 1 << 14
"""Limit per question: more than any published pass@k uses, and few enough that all requests fit in memory."""

MOST_TOKENS = 1 << 20
"""Limit per response: the longest context of any model."""

MOST = (1 << 63) - 1
"""Largest integer that random number generators and engines accept."""


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are sampled.

    Args:
        samples: samples per question (k), 1 to `MOST_SAMPLES`.
        max_tokens: longest response in tokens, 1 to `MOST_TOKENS`. A response that has not ended by then counts as
            truncated.
        temperature: divisor of the logits; 0 takes the most likely token.
        top_p: keep the smallest set of most likely tokens whose probability reaches this; in (0, 1].
        top_k: keep this many most likely tokens; 0 keeps all.
        template: "chat": the tokenizer's chat template, as in verl's training; "plain": only the messages' text;
            `package.module:NAME`: the Jinja chat template of that name, as in a run's `custom_chat_template`.

    Raises:
        ValueError: a value is outside its range; the message names the option.
    """

    samples: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    template: str = "chat"

    def __post_init__(self) -> None:
        allowed = {
            "samples": (1 <= self.samples <= MOST_SAMPLES, f"from 1 to {MOST_SAMPLES}"),
            "max_tokens": (1 <= self.max_tokens <= MOST_TOKENS, f"from 1 to {MOST_TOKENS}"),
            "temperature": (0 <= self.temperature < math.inf, "a number, at least 0"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (0 <= self.top_k <= MOST, f"from 0 (which keeps all) to {MOST}"),
            "seed": (0 <= self.seed <= MOST, f"from 0 to {MOST}"),
            "template": (
                self.template in TEMPLATES or ":" in self.template,
                f"one of {', '.join(TEMPLATES)}, or package.module:NAME",
            ),
        }
        for key, (holds, range_) in allowed.items():
            if not holds:
                raise ValueError(f"--{key.replace('_', '-')} {getattr(self, key)}: must be {range_}")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"--samples {self.samples} --temperature 0: greedy samples of a question are all the same; "
                "set --samples 1, or a temperature above 0"
            )


def sample_seed(seed: int, benchmark: str, question: int, sample: int) -> int:
    """Return the seed of one sample. It depends only on these four, so any part of an evaluation can be repeated."""
    digest = hashlib.sha256("\x1f".join(map(str, (seed, benchmark, question, sample))).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
