"""Shapes of the language models that the papers train, and numbers that follow from a shape."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_clipx.common.files import read_json_object

# Other families have other layers, so their sizes would be wrong.
FAMILIES = ("qwen2", "llama")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense decoder with grouped-query attention and a SwiGLU feed-forward network.

    Args:
        hidden_size: width of the residual stream.
        intermediate_size: width of the feed-forward network.
        vocab_size: rows of the embedding, padding included.
        tie_word_embeddings: whether input and output embedding are one matrix.
        attention_bias: whether the query, key and value projections have a bias (Qwen2).
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    attention_bias: bool

    @property
    def attention_size(self) -> int:
        """Width of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        """Parameters of one embedding matrix."""
        return self.vocab_size * self.hidden_size

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        projections = self.hidden_size * (2 * self.attention_size + 2 * self.key_value_size)
        biases = (self.attention_size + 2 * self.key_value_size) if self.attention_bias else 0
        norms = 2 * self.hidden_size
        return projections + biases + 3 * self.hidden_size * self.intermediate_size + norms

    @property
    def parameters(self) -> int:
        """All parameters."""
        embeddings = self.embedding_parameters * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * self.layer_parameters + embeddings + self.hidden_size

    @property
    def matmul_parameters(self) -> int:
        """Parameters by which each token is multiplied: all but a separate input embedding, which is looked up."""
        return self.parameters - (0 if self.tie_word_embeddings else self.embedding_parameters)

    @property
    def key_value_bytes(self) -> int:
        """Bytes that one token takes in a KV cache of bfloat16, over all layers and heads."""
        return 2 * 2 * self.num_hidden_layers * self.key_value_size

    def forward_flops(self, length: int) -> float:
        """Return the floating-point operations of a forward pass over one sequence; causal attention counts half.

        Args:
            length: tokens in the sequence.
        """
        attention = 2 * self.num_hidden_layers * self.attention_size * length**2
        return 2.0 * self.matmul_parameters * length + attention


def _qwen2(hidden: int, intermediate: int, layers: int, heads: int, groups: int, vocab: int, tied: bool) -> ModelShape:
    return ModelShape(hidden, intermediate, layers, heads, groups, hidden // heads, vocab, tied, attention_bias=True)


QWEN_1_5B = _qwen2(1536, 8960, 28, 12, 2, 151936, tied=True)
QWEN_1_5B_UNTIED = _qwen2(1536, 8960, 28, 12, 2, 151936, tied=False)
QWEN_3B = _qwen2(2048, 11008, 36, 16, 2, 151936, tied=True)
QWEN_7B = _qwen2(3584, 18944, 28, 28, 4, 152064, tied=False)
QWEN_14B = _qwen2(5120, 13824, 48, 40, 8, 152064, tied=False)
QWEN_32B = _qwen2(5120, 27648, 64, 40, 8, 152064, tied=False)
LLAMA_3B = ModelShape(3072, 8192, 28, 24, 8, 128, 128256, tie_word_embeddings=True, attention_bias=False)

# The last part of a path or of an id on the hub, in lower case.
_NAMES = {
    QWEN_1_5B: "qwen2.5-1.5b qwen2.5-1.5b-instruct qwen2.5-math-1.5b",
    QWEN_1_5B_UNTIED: "deepseek-r1-distill-qwen-1.5b",
    QWEN_3B: "qwen2.5-3b qwen2.5-3b-instruct",
    # bp-math was never published; derived from Qwen2.5-Math (arXiv 2510.18927), so of Qwen2.5's sizes.
    QWEN_7B: "qwen2.5-7b qwen2.5-7b-instruct qwen2.5-7b-instruct-1m qwen2.5-math-7b deepseek-r1-distill-qwen-7b "
    "bp-math-7b",
    QWEN_14B: "qwen2.5-14b qwen2.5-14b-instruct deepseek-r1-distill-qwen-14b",
    QWEN_32B: "qwen2.5-32b qwen2.5-32b-instruct deepseek-r1-distill-qwen-32b bp-math-32b",
    LLAMA_3B: "llama-3.2-3b llama-3.2-3b-instruct octothinker-3b-hybrid-base octothinker-3b-hybrid-zero "
    "octothinker-3b-long-base octothinker-3b-long-zero octothinker-3b-short-base octothinker-3b-short-zero",
}
KNOWN_SHAPES = {name: shape for shape, names in _NAMES.items() for name in names.split()}


def shape_of(model: str) -> ModelShape:
    """Return a model's shape from the config.json in its folder, or by its name. Nothing is downloaded.

    Raises:
        ValueError: the shape is unknown, or the family is not supported; the message says which names are known.
    """
    config = Path(model).expanduser() / "config.json"
    if config.is_file():
        return shape_from_config(read_json_object(config))
    name = model.rstrip("/").rsplit("/", 1)[-1].lower()
    if name not in KNOWN_SHAPES:
        raise ValueError(
            f"actor_rollout_ref.model.path={model}: its shape is unknown. Name a local folder that contains the "
            f"model's config.json, or one of: {', '.join(KNOWN_SHAPES)}."
        )
    return KNOWN_SHAPES[name]


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape in a Hugging Face config.json.

    Raises:
        ValueError: the family is not a dense Qwen2 or Llama.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"config.json: model_type={family}; only {' and '.join(FAMILIES)} are supported here.")
    heads = config["num_attention_heads"]
    return ModelShape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        attention_bias=family == "qwen2",
    )
