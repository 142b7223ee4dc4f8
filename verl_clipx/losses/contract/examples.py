"""Mini-batches that a loss is tried on: usual ones, and every kind of value that a training can have."""

from collections.abc import Iterator

import torch
from torch import Tensor

from verl_clipx.losses.methods import Bounds, Method

SEQUENCES = 6
LENGTH = 9
LENGTHS = torch.tensor([LENGTH, 7, 5, 3, 1, 0])

# Log-ratios, one for each column, log-probabilities of the policy that a token is likelier under, and advantages.
EXTREMES = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4, -1.0, 1.0]).double()
LIKELIER = torch.tensor([0.0, -1e-9, -1.0, -30.0, -1e4]).double()
ADVANTAGES = torch.tensor([0.0, 1.0, -1.0, 1e-3, -1e-3, 1e3, -1e3]).double()


def example(dtype: torch.dtype = torch.float64, seed: int = 0, spread: float = 0.5) -> dict[str, Tensor]:
    """Draws sequences of different lengths with ratios on both sides of any usual bound, the last one without a token.

    Args:
        dtype: of log-probabilities and advantages.
        spread: the standard deviation of the log-ratios.

    Returns:
        The fields of `Inputs` that a method may ask for.
    """
    generator = torch.Generator().manual_seed(seed)
    old_log_prob = -torch.rand(SEQUENCES, LENGTH, generator=generator, dtype=torch.float64) * 3
    drift = torch.randn(SEQUENCES, LENGTH, generator=generator, dtype=torch.float64) * spread
    advantages = torch.randn(SEQUENCES, 1, generator=generator, dtype=torch.float64).expand(-1, LENGTH)
    return {
        "old_log_prob": old_log_prob.to(dtype),
        "log_prob": (old_log_prob + drift).clamp(max=0).to(dtype),
        "advantages": advantages.clone().to(dtype),
        "mask": torch.arange(LENGTH) < LENGTHS[:, None],
        "rollout_log_prob": (old_log_prob + drift / 10).clamp(max=0).to(dtype),
        "entropy": (drift.abs() + 0.1).to(dtype),
        "group": torch.tensor([7, 3, 7, 3, 7, 3]),
    }


def of_tokens(log_ratio: Tensor, likelier: Tensor, advantages: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Makes, as `example`, tokens that are all inside the mask, with probabilities of at most 1.

    Args:
        log_ratio: of the current to the old policy, float64, (sequences, length).
        likelier: the log-probability under the one of the two that is likelier to choose the token; broadcasts.
        advantages: those of the tokens; broadcasts.
        dtype: of log-probabilities, advantages and entropies.
    """
    log_prob = likelier + log_ratio.clamp(max=0)
    old_log_prob = likelier - log_ratio.clamp(min=0)
    # In turn: near 0, usual, and near that of a vocabulary; less where one token has almost all probability.
    nats = torch.tensor([0.01, 0.5, 3.0, 11.0]).double()[torch.arange(len(log_ratio)) // 5 % 4, None]
    tensors = {
        "old_log_prob": old_log_prob,
        "log_prob": log_prob,
        "advantages": advantages.expand_as(log_ratio).clone(),
        "rollout_log_prob": old_log_prob.clone(),
        "entropy": -nats * torch.expm1(log_prob),
    }
    mask = torch.ones_like(log_ratio, dtype=torch.bool)
    group = torch.arange(len(log_ratio)) // 2
    return {name: tensor.to(dtype) for name, tensor in tensors.items()} | {"mask": mask, "group": group}


def every_ratio(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Makes, as `example`, sequences of one token: ratios from exp(-20) to exp(20) and beyond, with both signs of A.

    Likelihoods, sizes of A and entropies follow each other in turn, and every other one is drawn, so that no band
    between them is left out. Between ratios of 1/e and e the steps are of 0.1 %, elsewhere of 1.5 %. More sequences
    would be too many for a loss that compares each with each.
    """
    far = torch.linspace(1, 20, 1268)
    log_ratio = torch.cat([torch.linspace(-1, 1, 2001), far, -far, torch.tensor([25.0, 40.0, 100.0, 1e4, -1e4])])
    log_ratio = log_ratio.double()
    pair = torch.arange(len(log_ratio))
    generator = torch.Generator().manual_seed(3)

    def mixed(in_turn: Tensor, low: float, high: float) -> Tensor:
        """Return values in turn and, in every other pair of tokens, drawn ones whose logarithms are uniform."""
        uniform = torch.rand(len(pair), generator=generator, dtype=torch.float64)
        drawn = low * (high / low) ** uniform
        return torch.where(pair % 2 == 1, drawn, in_turn).repeat_interleave(2)[:, None]

    likelier = -mixed(torch.tensor([1e-3, 0.5, 2.0, 8.0, 60.0]).double()[pair % 5], low=1e-4, high=100.0)
    size = mixed(torch.tensor([2.0, 0.3, 1e3, 1e-3]).double()[pair // 20 % 4], low=1e-3, high=1e3)
    sign = torch.tensor([1.0, -1.0]).double().repeat(len(pair))[:, None]
    tensors = of_tokens(log_ratio.repeat_interleave(2)[:, None], likelier, size * sign, torch.float64)
    nats = mixed(torch.tensor([0.01, 0.5, 3.0, 11.0]).double()[pair * 2 // 5 % 4], low=0.01, high=11.0)
    tensors["entropy"] = -nats * torch.expm1(tensors["log_prob"])
    for name, values in tensors.items():
        if values.is_floating_point():
            tensors[name] = values.to(dtype)
    return tensors


def at_bounds(bounds: Bounds, dtype: torch.dtype) -> dict[str, Tensor]:
    """Makes, as `every_ratio`, tokens at ratios that are exactly the bounds, and at their nearest neighbours."""
    ratios = torch.cat([torch.as_tensor(bound).double().reshape(-1) for bound in (1.0, *bounds)])
    ratios = ratios.to(dtype).double()
    logs = ratios[(ratios > 0) & ratios.isfinite()].unique()[:40].log()
    steps = torch.tensor([0.0, 1e-3, -1e-3, *(k * torch.finfo(dtype).eps for k in (-2, -1, 1, 2))]).double()
    log_ratio = (logs[:, None] * (1 + steps)).reshape(-1, 1).repeat_interleave(2, 0)
    # One of the two policies is sure of the token, so that the log-ratio is not rounded.
    advantages = torch.tensor([1.0, -1.0]).double().repeat(len(log_ratio) // 2)[:, None]
    return of_tokens(log_ratio, torch.tensor(0.0).double(), advantages, dtype)


def extreme_sequences(dtype: torch.dtype) -> dict[str, Tensor]:
    """Makes sequences of equal tokens with every combination of extremes; the sampler may be far from both policies."""
    log_ratio, likelier, advantages = torch.cartesian_prod(EXTREMES, LIKELIER, ADVANTAGES).T[:, :, None]
    tensors = of_tokens(log_ratio.expand(-1, LENGTH), likelier, advantages, dtype)
    row = torch.arange(len(log_ratio))[:, None]
    far = torch.where(row % 4 == 1, -1e4, 0.0).to(dtype)
    tensors["rollout_log_prob"] = torch.where(row % 4 < 2, far, tensors["rollout_log_prob"])
    return tensors | {"mask": torch.arange(LENGTH) < LENGTH - row % 3}


def extreme_tokens(dtype: torch.dtype) -> dict[str, Tensor]:
    """Makes, as `example`, sequences of which every other one has tokens that differ in everything.

    The tokens of the other sequences differ only as usual ones do: they share an advantage, for example.
    """
    tensors = example(dtype)
    extreme = extreme_sequences(dtype)
    # For each token, the number of the extreme sequence whose first token takes its place.
    drawn = torch.randperm(len(extreme["mask"]), generator=torch.Generator().manual_seed(0))
    drawn = drawn[: SEQUENCES * LENGTH].view(SEQUENCES, LENGTH)
    # In the other sequences the tokens stay usual ones.
    replaced = torch.arange(SEQUENCES)[:, None] % 2 == 1
    for name in tensors.keys() - {"mask", "group"}:
        tensors[name] = torch.where(replaced, extreme[name][drawn, 0], tensors[name])
    return tensors


def mini_batches(dtype: torch.dtype) -> dict[str, dict[str, Tensor]]:
    """Returns mini-batches by name."""
    usual = example(dtype)
    extreme = extreme_sequences(dtype)
    # The extreme sequences are ordered by their ratio, so that each of these has one ratio alone.
    by_ratio: list[dict[str, Tensor]] = [{} for _ in EXTREMES]
    for name, tensor in extreme.items():
        for part, rows in zip(by_ratio, tensor.chunk(len(EXTREMES)), strict=True):
            part[name] = rows
    single_token = torch.zeros_like(usual["mask"])
    single_token[1, 2] = True
    long = torch.sin(torch.arange(3000.0).double()).repeat(2, 1) / 2
    return {
        "tokens with extreme values": extreme_tokens(dtype),
        "usual tokens": usual,
        "an update that moves little": example(dtype, spread=0.05),
        "an update that moves far": example(dtype, spread=3.0),
        "every ratio": every_ratio(dtype),
        "extreme sequences": extreme,
        **{f"ratios that are all exp({float(x):g})": part for x, part in zip(EXTREMES, by_ratio, strict=True)},
        "long sequences": of_tokens(long, torch.tensor(-1.0), torch.tensor([[1.0], [-1.0]]), dtype),
        "A = 0 everywhere": usual | {"advantages": torch.zeros_like(usual["advantages"])},
        "a single token": usual | {"mask": single_token},
        "no token at all": usual | {"mask": torch.zeros_like(single_token)},
    }


# What `with_junk` puts outside the mask.
JUNK = {
    "old_log_prob": float("nan"),
    "log_prob": float("inf"),
    "advantages": float("nan"),
    "rollout_log_prob": float("nan"),
    "entropy": -float("inf"),
}


def with_junk(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the same tensors with NaN and infinity outside the mask."""
    junk = {name: torch.where(tensors["mask"], tensors[name], value) for name, value in JUNK.items()}
    return {**tensors, **junk}


# The token that is spoiled. It is inside the mask.
SPOILED = (1, 2)


def spoiled(method: Method, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yields the example with NaN or infinity in one token of an input, for each that the method uses, with a label."""
    for name in ("log_prob", "old_log_prob", "advantages", *method.asks_for):
        for value in (float("nan"), float("inf"), -float("inf")):
            tensors = example(dtype)
            if tensors[name].is_floating_point():
                tensors[name][SPOILED] = value
                yield f"{name}={value}", tensors
