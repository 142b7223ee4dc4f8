"""The kernel beneath transformers' flash attention, in plain torch, so that a CPU runs it in any precision.

With this module loaded, by VERL_USE_EXTERNAL_MODULES in all of verl's processes, attn_implementation=flash_attention_2
runs on a CPU. Only the two functions of the package flash_attn are made here; what cuts a batch into sequences is
transformers' own, and verl's for Ulysses.
"""

import torch
from torch import Tensor
from wrapt import when_imported


def flash_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p=0.0, softmax_scale=None, causal=False) -> Tensor:
    """Attention within each row, (rows, length, heads, head size); the arguments are those of the package."""
    assert dropout_p == 0.0
    heads_first = (states.transpose(1, 2) for states in (q, k, v))
    attended = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, is_causal=causal, scale=softmax_scale, enable_gqa=True
    )
    return attended.transpose(1, 2)


def flash_attention_of_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, **options):
    """Attention within each of the sequences that lie one behind the other, (tokens, heads, head size)."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    sizes = cu_seqlens_q.diff().tolist()
    sequences = zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
    return torch.cat(
        [flash_attention(queries[None], keys[None], values[None], **options)[0] for queries, keys, values in sequences]
    )


@when_imported("transformers.modeling_utils")
def put_beneath_transformers(modeling_utils) -> None:
    from transformers import modeling_flash_attention_utils

    modeling_utils.PreTrainedModel._flash_attn_can_dispatch = lambda self, *args, **kwargs: True
    modeling_flash_attention_utils._lazy_imports = lambda *args, **kwargs: (
        flash_attention,
        flash_attention_of_packed,
        None,
        modeling_flash_attention_utils._pad_input,
        modeling_flash_attention_utils._unpad_input,
    )
