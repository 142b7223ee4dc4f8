"""How responses are sampled."""

import math
from dataclasses import dataclass

MOST = {"samples": 1 << 14, "max_tokens": 1 << 20, "top_k": (1 << 31) - 1, "seed": (1 << 31) - 1}
"""Largest values: more samples than any published pass@k uses, and few enough that all responses fit in memory; the
longest context of any model; what every engine accepts."""


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are sampled.

    Args:
        samples: samples per question and seed, at least 1.
        max_tokens: longest response in tokens, at least 1. A response that has not ended by then counts as truncated.
        temperature: divisor of the logits; 0 takes the most likely token.
        top_p: keep the smallest set of most likely tokens whose probability reaches this; in (0, 1].
        top_k: keep this many most likely tokens; 0 keeps all.
        seeds: seeds of the samples. Each adds `samples` samples to every question.
        template: "chat": the tokenizer's chat template, as in verl's training; "plain": only the messages' text;
            `package.module:NAME`: the Jinja chat template of that name, as in a run's `custom_chat_template`.

    Raises:
        ValueError: a value is outside its range, or samples would be equal; the message names the option.
    """

    samples: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seeds: tuple[int, ...] = (0,)
    template: str = "chat"

    def __post_init__(self) -> None:
        counts = [("samples", self.samples, 1), ("max_tokens", self.max_tokens, 1), ("top_k", self.top_k, 0)]
        for key, value, least in (*counts, *(("seed", seed, 0) for seed in self.seeds)):
            if not least <= value <= MOST[key]:
                raise ValueError(f"--{key.replace('_', '-')} {value}: must be from {least} to {MOST[key]}")
        for option, value, holds, range_ in (
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, "a number, at least 0"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]"),
            ("seed", self.seeds, len(set(self.seeds)) == len(self.seeds), "different from the other seeds"),
            (
                "template",
                self.template,
                self.template in ("chat", "plain") or ":" in self.template,
                "chat, plain or package.module:NAME",
            ),
        ):
            if not holds:
                raise ValueError(f"--{option} {value}: must be {range_}")
        if self.temperature == 0 and self.samples_per_question > 1:
            raise ValueError(
                f"--samples {self.samples} --temperature 0: greedy samples of a question are all the same; "
                "set --samples 1 and one seed, or a temperature above 0"
            )

    @property
    def samples_per_question(self) -> int:
        """The k of avg@k: samples of all seeds."""
        return self.samples * len(self.seeds)
