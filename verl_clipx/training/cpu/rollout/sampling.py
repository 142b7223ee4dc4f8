"""Samples tokens and their log-probabilities from logits, with separate settings for each row."""

import hashlib

import numpy as np
import torch

LOG_PROB_MODES = ("processed_logprobs", "raw_logprobs")


def uniform_stream(seed: int, start: int, count: int) -> np.ndarray:
    """Return uniform random numbers addressed by position: number ``p`` depends only on ``seed`` and ``p``.

    A response that is interrupted and continued, or that shares its batch with others, therefore draws the same
    numbers.

    Args:
        seed: non-negative integer below 2**128.
        start: position of the first number, at least 0.

    Returns:
        ``[count]`` float64 in [0, 1).
    """
    # Philox is counter based; every counter value gives four 64-bit words, of which one is used.
    bits = np.random.Philox(key=seed, counter=start)
    return np.random.Generator(bits).random(4 * count)[::4]


def derive_seed(*parts: object) -> int:
    """Derive a 128-bit seed from anything printable; it is the same in every process."""
    digest = hashlib.sha256("\x1f".join(map(repr, parts)).encode()).digest()
    return int.from_bytes(digest[:16], "little")


def truncate(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set the logits outside each row's top-k and then top-p set to minus infinity.

    Args:
        logits: ``[rows, vocabulary]`` float32.
        top_k: ``[rows]`` int64; 0 keeps all. Tokens as likely as the k-th are kept too.
        top_p: ``[rows]`` float32 in (0, 1], of the distribution that top-k leaves.

    Returns:
        ``[rows, vocabulary]`` float32. The most likely token always stays.
    """
    size = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    kept = torch.where(top_k > 0, top_k, size).clamp(max=size)
    threshold = ordered.gather(-1, (kept - 1).unsqueeze(-1))
    ordered = ordered.masked_fill(ordered < threshold, -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    # A token stays as long as the ones before it have not reached p; at p = 1 rounding must not remove any.
    before = probabilities.cumsum(dim=-1) - probabilities
    outside = (before >= top_p.unsqueeze(-1)) & (top_p < 1).unsqueeze(-1)
    outside[:, 0] = False
    ordered = ordered.masked_fill(outside, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def invert_distribution(log_probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Sample by inverting each row's cumulative distribution.

    Args:
        log_probs: ``[rows, vocabulary]``, normalised; minus infinity for tokens that must not be drawn.
        uniforms: ``[rows]`` float64 in [0, 1).

    Returns:
        ``[rows]`` int64 tokens.
    """
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    total = cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, uniforms.unsqueeze(-1) * total, right=True)
    # u * total may round up to total; in that case the last token with any probability is drawn.
    last = (cumulative < total).sum(dim=-1, keepdim=True)
    return torch.minimum(tokens, last).squeeze(-1)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniforms: torch.Tensor,
    log_prob_mode: str = "processed_logprobs",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row, and return its log-probability.

    Log-probabilities are defined as in vLLM, which verl's metrics expect. ``processed_logprobs`` refers to the
    distribution that was sampled from, after temperature and truncation (without truncation it equals the actor's
    ``log_prob``); ``raw_logprobs`` is the log-softmax of the raw logits. Greedy rows report the untruncated
    distribution at temperature 1.

    Args:
        logits: ``[rows, vocabulary]`` float32.
        temperature: ``[rows]`` float32; 0 takes the most likely token.
        top_k: ``[rows]`` int64; 0 for no limit.
        top_p: ``[rows]`` float32 in (0, 1].
        uniforms: ``[rows]`` float64 in [0, 1).
        log_prob_mode: one of `LOG_PROB_MODES`.

    Returns:
        Tokens ``[rows]`` int64 and log-probabilities ``[rows]`` float32.
    """
    greedy = temperature == 0
    scaled = logits / torch.where(greedy, 1.0, temperature).unsqueeze(-1)
    cut = ~greedy & ((top_k > 0) | (top_p < 1))
    if cut.any():
        scaled[cut] = truncate(scaled[cut], top_k[cut], top_p[cut])
    log_probs = scaled.log_softmax(dim=-1)
    tokens = torch.where(greedy, logits.argmax(dim=-1), invert_distribution(log_probs, uniforms))
    reported = log_probs if log_prob_mode == "processed_logprobs" else logits.log_softmax(dim=-1)
    return tokens, reported.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
