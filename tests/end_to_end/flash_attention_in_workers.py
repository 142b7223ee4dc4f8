"""For VERL_USE_EXTERNAL_MODULES, so that attn_implementation=flash_attention_2 runs in all of verl's processes here."""

from wrapt import when_imported

from .flash_attention import put_beneath_transformers

when_imported("transformers.modeling_utils")(lambda _: put_beneath_transformers())
