"""Samples tokens and their log-probabilities from logits, with separate settings for each row."""

import hashlib

import numpy as np
import torch

LOG_PROB_MODES = ("processed_logprobs", "raw_logprobs")


def draw_uniforms(seed: int, start: int, count: int) -> np.ndarray:
    """Return uniform random numbers of consecutive positions: number ``p`` depends only on ``seed`` and ``p``.

    A response that is interrupted and continued, or that shares its batch with others, therefore draws the same
    numbers.

    Args:
        seed: non-negative integer below 2**128.
        start: position of the first number, at least 0.
        count: how many numbers to draw, of the positions from ``start`` on.

    Returns:
        ``[count]`` float64 in [0, 1).
    """
    # Philox computes four numbers from the seed and a counter, without any earlier state. The counter is the position,
    # and the first of its four numbers is used.
    generator = np.random.Generator(np.random.Philox(key=seed, counter=start))
    numbers = generator.random(4 * count)
    return numbers[::4]


def derive_seed(*parts: object) -> int:
    """Derive a 128-bit seed from the representations of objects; it is the same in every process."""
    # Joined by a character that the representation of a text never contains, so that other parts give another text.
    text = "\x1f".join(repr(part) for part in parts)
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:16], "little")


def truncate(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set the logits of unlikely tokens to minus infinity: those outside top-k, then those outside top-p of the rest.

    Args:
        logits: ``[rows, vocabulary]`` float32.
        top_k: ``[rows]`` int64; 0 keeps all. Tokens as likely as the k-th are kept too.
        top_p: ``[rows]`` float32 in (0, 1], of the distribution that top-k leaves.

    Returns:
        ``[rows, vocabulary]`` float32. The most likely token always stays.
    """
    vocabulary = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    kept_count = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
    kth_logit = ordered.gather(-1, (kept_count - 1).unsqueeze(-1))
    ordered = ordered.masked_fill(ordered < kth_logit, -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    # A token is kept unless the tokens before it reach p together.
    before = probabilities.cumsum(dim=-1) - probabilities
    # At p = 1 all are kept, although rounding may let the tokens before the last ones sum to 1.
    is_dropped = (before >= top_p.unsqueeze(-1)) & (top_p < 1).unsqueeze(-1)
    is_dropped[:, 0] = False
    ordered = ordered.masked_fill(is_dropped, -torch.inf)
    # Back to the places that the logits had before they were sorted.
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def invert_distribution(log_probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Sample a token for each row by inverting its cumulative distribution.

    Args:
        log_probs: ``[rows, vocabulary]``, normalised; minus infinity for tokens that must not be drawn.
        uniforms: ``[rows]`` float64 in [0, 1).

    Returns:
        ``[rows]`` int64 tokens.
    """
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    # 1 but for rounding.
    total = cumulative[:, -1:]
    # The first token whose cumulative probability is above the uniform number.
    tokens = torch.searchsorted(cumulative, uniforms.unsqueeze(-1) * total, right=True)
    # Rounding may make that number the total, above which none is. The last token with any probability is then drawn.
    last_possible = (cumulative < total).sum(dim=-1, keepdim=True)
    return torch.minimum(tokens, last_possible).squeeze(-1)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniforms: torch.Tensor,
    log_prob_mode: str = "processed_logprobs",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row, and return its log-probability.

    Log-probabilities are defined as in vLLM, which verl's metrics expect. ``processed_logprobs`` are those of the
    distribution that was sampled from, after temperature and truncation; without truncation they equal the actor's
    ``log_prob``. ``raw_logprobs`` are the log-softmax of the raw logits. Greedy rows report the untruncated
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
    is_greedy = temperature == 0
    scaled = logits / torch.where(is_greedy, 1.0, temperature).unsqueeze(-1)
    is_truncated = ~is_greedy & ((top_k > 0) | (top_p < 1))
    if is_truncated.any():
        # Only these rows, because truncation sorts the whole vocabulary.
        scaled[is_truncated] = truncate(scaled[is_truncated], top_k[is_truncated], top_p[is_truncated])
    log_probs = scaled.log_softmax(dim=-1)
    tokens = torch.where(is_greedy, logits.argmax(dim=-1), invert_distribution(log_probs, uniforms))
    reported = log_probs if log_prob_mode == "processed_logprobs" else logits.log_softmax(dim=-1)
    return tokens, reported.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
