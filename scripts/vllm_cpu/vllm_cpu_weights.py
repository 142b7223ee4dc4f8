"""A vLLM plugin: on the CPU, layers compute with the weights that verl can replace."""


def keep_weights_replaceable() -> None:
    """Switch oneDNN off for the linear layers that are not quantized.

    With it vLLM packs each weight into a copy when the model is loaded, and empties the parameter. verl sends new
    weights into the parameters after every update: the first time would never end. vLLM asks for this name when it
    chooses how a layer is computed, and then uses torch's own function on the parameter itself.
    """
    from vllm import _custom_ops

    if not isinstance(getattr(_custom_ops, "_supports_onednn", None), bool):
        raise RuntimeError(
            "vllm._custom_ops._supports_onednn is not there: this version of vLLM chooses its CPU kernels in another "
            "way; install the version that scripts/setup_vllm_cpu.sh names"
        )
    _custom_ops._supports_onednn = False
