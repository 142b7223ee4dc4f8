"""How a number is computed: which checkpoints are used, and how responses are sampled."""

from collections.abc import Sequence
from dataclasses import dataclass

from verl_clipx.papers.evaluation.checkpoints import Checkpoint


@dataclass(frozen=True)
class Protocol:
    """An evaluation protocol. Users may override its sampling settings, except the temperature of "greedy"."""

    name: str
    temperature: float
    samples: int
    last: int
    """How many of a run's latest checkpoints are used."""

    def choose(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Return those of a run's checkpoints, at least one and in training order, that are used.

        Raises:
            ValueError: there are fewer than the protocol asks for.
        """
        if len(checkpoints) < self.last:
            labels = [checkpoint.label for checkpoint in checkpoints]
            raise ValueError(
                f"--protocol {self.name} needs {self.last} checkpoints, found {labels}: "
                "save more often (trainer.save_freq, trainer.max_actor_ckpt_to_keep) or choose another protocol"
            )
        return list(checkpoints[-self.last :])


GREEDY = Protocol(name="greedy", temperature=0.0, samples=1, last=1)
SAMPLED = Protocol(name="sampled", temperature=1.0, samples=8, last=1)
# AR-Lopti: the mean over a run's last three checkpoints.
MEAN_OF_LAST_THREE = Protocol(name="mean-of-last-three", temperature=0.0, samples=1, last=3)
PROTOCOLS = {protocol.name: protocol for protocol in (GREEDY, SAMPLED, MEAN_OF_LAST_THREE)}


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are sampled. The command line has the ranges.

    Args:
        samples: samples per question and seed.
        max_tokens: longest response in tokens. A response that has not ended by then counts as truncated.
        temperature: divisor of the logits; 0 takes the most likely token.
        top_p: keep the smallest set of most likely tokens whose probability reaches this.
        seeds: seeds of the samples. Each adds `samples` samples to every question.
        template: "chat": the tokenizer's chat template, as in verl's training; "plain": only the messages' text;
            `package.module:NAME`: the Jinja chat template of that name, as in a run's `custom_chat_template`.

    Raises:
        ValueError: samples would be equal; the message names the options.
    """

    samples: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seeds: tuple[int, ...] = (0,)
    template: str = "chat"

    def __post_init__(self) -> None:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"--seed {self.seeds}: must differ from each other")
        if self.temperature == 0 and self.samples_per_question > 1:
            raise ValueError(
                f"--samples {self.samples} --temperature 0: greedy samples of a question are all the same; "
                "set --samples 1 and one seed, or a temperature above 0"
            )

    @property
    def samples_per_question(self) -> int:
        """The k of avg@k: samples of all seeds."""
        return self.samples * len(self.seeds)
