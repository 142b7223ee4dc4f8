"""How a number in a table is computed: which checkpoints are used, and how they are sampled."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Protocol:
    """An evaluation protocol. Users may override its sampling settings, except the temperature of "greedy"."""

    name: str
    temperature: float
    samples: int
    last: int | None
    """How many of a run's latest checkpoints are used; None for all."""


GREEDY = Protocol("greedy", 0.0, 1, 1)
SAMPLED = Protocol("sampled", 1.0, 8, 1)
# AR-Lopti: the mean over a run's last three checkpoints.
MEAN_OF_LAST_THREE = Protocol("mean-of-last-three", 0.0, 1, 3)
# ACPO's Table 1: the best checkpoint of a run, chosen on the questions that are reported, which is optimistic.
BEST_VALIDATION = Protocol("best-validation", 1.0, 4, None)
PROTOCOLS = {protocol.name: protocol for protocol in (GREEDY, SAMPLED, MEAN_OF_LAST_THREE, BEST_VALIDATION)}


def choose_checkpoints(protocol: Protocol, steps: list[int]) -> list[int]:
    """Return the training steps whose checkpoints are used.

    Raises:
        ValueError: there are fewer checkpoints than the protocol asks for.
    """
    ordered = sorted(steps)
    wanted = ordered[-protocol.last :] if protocol.last else ordered
    if len(wanted) < max(1, protocol.last or 1):
        raise ValueError(
            f"--protocol {protocol.name} needs {protocol.last or 1} checkpoints, found steps {ordered}: "
            "save more often (trainer.save_freq, trainer.max_actor_ckpt_to_keep) or choose another protocol"
        )
    return wanted
