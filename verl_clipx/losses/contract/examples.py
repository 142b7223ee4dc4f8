"""Mini-batches that a loss is tried on: usual ones, and every kind of value that a training can have."""

from collections.abc import Iterator

import torch
from torch import Tensor

from verl_clipx.losses.methods import Bounds, Method

# The shape of the usual mini-batch, and the number of tokens that each of its sequences has.
SEQUENCES = 6
LENGTH = 9
LENGTHS = torch.tensor([LENGTH, 7, 5, 3, 1, 0])

# What `extreme_sequences` combines: the log-ratio, the log-probability under the likelier of the two policies, and A.
EXTREMES = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4, -1.0, 1.0]).double()
LIKELIER = torch.tensor([0.0, -1e-9, -1.0, -30.0, -1e4]).double()
ADVANTAGES = torch.tensor([0.0, 1.0, -1.0, 1e-3, -1e-3, 1e3, -1e3]).double()

# How many ratios `make_tokens_at_bounds` takes at most. Bounds that differ from token to token would give more than a
# loss can take that compares each token with each other one.
MOST_RATIOS = 40


def example(dtype: torch.dtype = torch.float64, seed: int = 0, spread: float = 0.5) -> dict[str, Tensor]:
    """Draw sequences of different lengths with ratios on both sides of any usual bound. The last one has no token.

    Args:
        dtype: of log-probabilities, advantages and entropies.
        seed: of what is drawn.
        spread: the standard deviation of the log-ratios.

    Returns:
        The fields of `Inputs` that a method may ask for, (SEQUENCES, LENGTH).
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


def make_tokens(log_ratio: Tensor, likelier: Tensor, advantages: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Make tokens that are all inside the mask, with probabilities of at most 1.

    Args:
        log_ratio: of the current to the old policy, float64, (sequences, length).
        likelier: the log-probability under the policy, current or old, that is likelier to choose the token;
            broadcastable.
        advantages: those of the tokens; broadcastable.
        dtype: of log-probabilities, advantages and entropies.

    Returns:
        The fields of `Inputs` that a method may ask for, (sequences, length).
    """
    log_prob = likelier + log_ratio.clamp(max=0)
    old_log_prob = likelier - log_ratio.clamp(min=0)
    # Entropies, each of five sequences in turn: near 0, two usual ones, and one near that of a whole vocabulary. They
    # are made smaller where the token has almost all probability.
    nats = torch.tensor([0.01, 0.5, 3.0, 11.0]).double()[torch.arange(len(log_ratio)) // 5 % 4, None]
    tensors = {
        "old_log_prob": old_log_prob,
        "log_prob": log_prob,
        "advantages": advantages.expand_as(log_ratio).clone(),
        "rollout_log_prob": old_log_prob.clone(),
        "entropy": -nats * torch.expm1(log_prob),
    }
    converted = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    converted["mask"] = torch.ones_like(log_ratio, dtype=torch.bool)
    converted["group"] = torch.arange(len(log_ratio)) // 2
    return converted


def every_ratio(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Make sequences of one token with ratios from exp(-20) to exp(20) and beyond, each with both signs of A.

    Neighbouring ratios between 1/e and e differ by 0.1 %, others by 1.5 %. More sequences would be too many for a loss
    that compares each with each other one. In every other pair of tokens, log-probabilities, sizes of A and entropies
    take a few values in turn. In the pairs between, they are drawn, so that no band between the few is left out.

    Args:
        dtype: of log-probabilities, advantages and entropies.

    Returns:
        The fields of `Inputs` that a method may ask for, (sequences, 1).
    """
    far = torch.linspace(1, 20, 1268)
    log_ratio = torch.cat([torch.linspace(-1, 1, 2001), far, -far, torch.tensor([25.0, 40.0, 100.0, 1e4, -1e4])])
    log_ratio = log_ratio.double()
    pair = torch.arange(len(log_ratio))
    generator = torch.Generator().manual_seed(3)

    def mix_with_drawn(in_turn: Tensor, low: float, high: float) -> Tensor:
        """Return the given values and, in every other pair of tokens, drawn ones whose logarithms are uniform.

        Args:
            in_turn: a value for each pair of tokens, (pairs,).
            low: the smallest value that is drawn, above 0.
            high: the largest value that is drawn.

        Returns:
            (2 * pairs, 1).
        """
        uniform = torch.rand(len(pair), generator=generator, dtype=torch.float64)
        drawn = low * (high / low) ** uniform
        return torch.where(pair % 2 == 1, drawn, in_turn).repeat_interleave(2)[:, None]

    likelier_in_turn = torch.tensor([1e-3, 0.5, 2.0, 8.0, 60.0]).double()[pair % 5]
    likelier = -mix_with_drawn(likelier_in_turn, low=1e-4, high=100.0)
    size_in_turn = torch.tensor([2.0, 0.3, 1e3, 1e-3]).double()[pair // 20 % 4]
    size = mix_with_drawn(size_in_turn, low=1e-3, high=1e3)
    sign = torch.tensor([1.0, -1.0]).double().repeat(len(pair))[:, None]
    tensors = make_tokens(log_ratio.repeat_interleave(2)[:, None], likelier, size * sign, torch.float64)
    nats_in_turn = torch.tensor([0.01, 0.5, 3.0, 11.0]).double()[pair * 2 // 5 % 4]
    nats = mix_with_drawn(nats_in_turn, low=0.01, high=11.0)
    tensors["entropy"] = -nats * torch.expm1(tensors["log_prob"])
    for name, values in tensors.items():
        if values.is_floating_point():
            tensors[name] = values.to(dtype)
    return tensors


def make_tokens_at_bounds(bounds: Bounds, dtype: torch.dtype) -> dict[str, Tensor]:
    """Make sequences of one token whose ratio is a bound or 1, or next to it, each with both signs of A.

    A weight that changes at a bound shows there what belongs to it: the bound itself, or only what lies beyond. Ratio 1
    is where every update starts, and where many weights change with the sign of the log-ratio.

    Args:
        bounds: numbers, or tensors of any shape. Of different ratios the MOST_RATIOS smallest are taken.
        dtype: of log-probabilities, advantages and entropies.

    Returns:
        The fields of `Inputs` that a method may ask for, (sequences, 1).
    """
    candidates = torch.cat([torch.as_tensor(bound).double().reshape(-1) for bound in (1.0, *bounds)])
    # Rounded as the loss would round them, and widened again for the arithmetic below.
    ratios = candidates.to(dtype).double()
    is_ratio = (ratios > 0) & ratios.isfinite()
    log_of_ratio = ratios[is_ratio].unique()[:MOST_RATIOS].log()
    eps = torch.finfo(dtype).eps
    # Relative to the log-ratio: no step, a thousandth, and one and two roundings to either side. At ratio 1, whose
    # logarithm is 0, every step leads to ratio 1.
    steps = torch.tensor([0.0, 1e-3, -1e-3, -2 * eps, -eps, eps, 2 * eps]).double()
    log_ratio = (log_of_ratio[:, None] * (1 + steps)).reshape(-1, 1).repeat_interleave(2, 0)
    advantages = torch.tensor([1.0, -1.0]).double().repeat(len(log_ratio) // 2)[:, None]
    # The likelier policy is sure of the token. Its log-probability is 0, so the difference of both is exact.
    likelier = torch.tensor(0.0).double()
    return make_tokens(log_ratio, likelier, advantages, dtype)


def extreme_sequences(dtype: torch.dtype) -> dict[str, Tensor]:
    """Make sequences of equal tokens with every combination of EXTREMES, LIKELIER and ADVANTAGES.

    The sampler is the old policy in half of the sequences. In a quarter of them it is sure of the tokens, and in
    another quarter it would never choose them.

    Args:
        dtype: of log-probabilities, advantages and entropies.

    Returns:
        The fields of `Inputs` that a method may ask for, (sequences, LENGTH). Sequences have up to two masked tokens.
    """
    combinations = torch.cartesian_prod(EXTREMES, LIKELIER, ADVANTAGES)
    # A column for each of the three, (sequences, 1).
    log_ratio, likelier, advantages = combinations[:, None].unbind(-1)
    tensors = make_tokens(log_ratio.expand(-1, LENGTH), likelier, advantages, dtype)
    row = torch.arange(len(combinations))[:, None]
    other_sampler = torch.where(row % 4 == 1, -1e4, 0.0).to(dtype)
    tensors["rollout_log_prob"] = torch.where(row % 4 < 2, other_sampler, tensors["rollout_log_prob"])
    tensors["mask"] = torch.arange(LENGTH) < LENGTH - row % 3
    return tensors


def extreme_tokens(dtype: torch.dtype) -> dict[str, Tensor]:
    """Make the usual sequences of `example`, but with extreme tokens in every other one.

    An extreme token is one of `extreme_sequences`, so that the tokens of one sequence differ in everything. Those of
    the other sequences differ only as usual ones do: they share an advantage, for example.

    Args:
        dtype: of log-probabilities, advantages and entropies.

    Returns:
        The fields of `Inputs` that a method may ask for, (SEQUENCES, LENGTH).
    """
    tensors = example(dtype)
    extreme = extreme_sequences(dtype)
    # For each token, the number of the extreme sequence whose first token takes its place.
    order = torch.randperm(len(extreme["mask"]), generator=torch.Generator().manual_seed(0))
    drawn = order[: SEQUENCES * LENGTH].view(SEQUENCES, LENGTH)
    is_replaced = torch.arange(SEQUENCES)[:, None] % 2 == 1
    for name in tensors.keys() - {"mask", "group"}:
        tensors[name] = torch.where(is_replaced, extreme[name][drawn, 0], tensors[name])
    return tensors


def mini_batches(dtype: torch.dtype) -> dict[str, dict[str, Tensor]]:
    """Return mini-batches by their names, which say what they hold.

    Args:
        dtype: of log-probabilities, advantages and entropies.

    Returns:
        From a name to the fields of `Inputs` that a method may ask for.
    """
    usual = example(dtype)
    extreme = extreme_sequences(dtype)
    # All extreme sequences of one ratio follow each other, so that equal parts of them have one ratio each.
    of_equal_ratio: dict[str, dict[str, Tensor]] = {}
    rows_of_ratio = torch.arange(len(extreme["mask"])).chunk(len(EXTREMES))
    for log_ratio, rows in zip(EXTREMES, rows_of_ratio, strict=True):
        part = {name: tensor[rows] for name, tensor in extreme.items()}
        of_equal_ratio[f"ratios that are all exp({float(log_ratio):g})"] = part
    single_token = torch.zeros_like(usual["mask"])
    single_token[1, 2] = True
    long_log_ratio = torch.sin(torch.arange(3000.0).double()).repeat(2, 1) / 2
    return {
        "tokens with extreme values": extreme_tokens(dtype),
        "usual tokens": usual,
        "an update that moves little": example(dtype, spread=0.05),
        "an update that moves far": example(dtype, spread=3.0),
        "every ratio": every_ratio(dtype),
        "extreme sequences": extreme,
        **of_equal_ratio,
        "long sequences": make_tokens(long_log_ratio, torch.tensor(-1.0), torch.tensor([[1.0], [-1.0]]), dtype),
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
    """Return the same tensors with NaN and infinity outside the mask."""
    junk = {name: torch.where(tensors["mask"], tensors[name], value) for name, value in JUNK.items()}
    return {**tensors, **junk}


# Sequence and position of the token that `spoiled` spoils. It is inside the mask.
SPOILED = (1, 2)


def spoiled(method: Method, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the example with NaN or an infinity in one token of one input, for each input that the method uses.

    Yields:
        A label such as "log_prob=nan", and the tensors.
    """
    for name in ("log_prob", "old_log_prob", "advantages", *method.asks_for):
        for value in (float("nan"), float("inf"), -float("inf")):
            tensors = example(dtype)
            if tensors[name].is_floating_point():
                tensors[name][SPOILED] = value
                yield f"{name}={value}", tensors
