"""Which family a kernel of a trace belongs to, and which arithmetic pipe it uses, by its name and its op's."""

from __future__ import annotations

import re
from collections.abc import Sequence

from perfmodel.traces.spans import DeviceSpan

OTHER = "other"
# Family by words of the kernel's name or its op's, first match wins. Names are those of cuBLAS, cuDNN, CUTLASS, PyTorch,
# FBGEMM, FlashAttention, Apex and Triton in public traces.
_KERNEL_WORDS: Sequence[tuple[str, str]] = (
    ("attention", r"flash|fmha|attention|sdpa"),
    ("embedding", r"embedding|tbe|split_embed|indices_to_offsets|bounds_check_indices"),
    ("conv", r"conv|wgrad|dgrad|winograd|cudnn.*(?:nchw|nhwc)|implicit.?gemm|computeoffsetskernel|bn_?fw|fprop"),
    ("norm", r"batch_?norm|layer_?norm|group_?norm|rms_?norm|bn_[fb]w|batchnorm|gammabeta"),
    ("gemm", r"gemm|gemv|cutlass|splitkreduce|cublas|s884|s1688|s16816|wgmma|nvjet|matmul|dot_kernel"),
    ("optimizer", r"adam|sgd|lamb|adagrad|optimizer|multi_tensor_apply"),
    ("softmax", r"softmax"),
    ("loss", r"nll_loss|cross_entropy|mse_loss|bce"),
    ("pool", r"pool"),
    ("random", r"distribution_|dropout|philox|random"),
    ("index", r"index|gather|scatter|sort|radix|unique|scan|cub::"),
    ("reduction", r"reduce|sum|mean|norm"),
    ("copy", r"cat|copy|transpose|permute|fill|memset|memcpy"),
    ("elementwise", r"elementwise|vectorized|add|mul|relu|gelu|silu|triton_poi|unrolled"),
)
_COMPILED = tuple((family, re.compile(words, re.IGNORECASE)) for family, words in _KERNEL_WORDS)
_TENSOR = re.compile(
    r"tensorop|[shi]884|[shidf]1688|[shi]16816|16832|hmma|imma|wgmma|gmma|xmma.*(?:tf32|f16|bf16)|nvjet|flash|fmha",
    re.IGNORECASE,
)
# The same words as they stand in `Device.peak_flops_per_s`.
_PIPES = {"float": "fp32", "double": "fp64", "half": "fp16", "bfloat16": "bf16"}
_TENSOR_PIPES = {
    "float": "tf32_tensor",
    "double": "fp64_tensor",
    "half": "fp16_tensor",
    "bfloat16": "bf16_tensor",
}


def family_of(span: DeviceSpan, op_name: str = "") -> str:
    """The family of device work: as our own traces say, a collective's op, `transfer` for copies, or by names."""
    if span.work is not None and span.work.family:
        return span.work.family
    if span.is_collective:
        return span.collective.op if span.collective is not None else "collective"
    if span.kind != "kernel":
        return "transfer" if "HtoD" in span.name or "DtoH" in span.name else "copy"
    for name in (span.name.split("<")[0] if len(span.name) > 400 else span.name, op_name):
        for family, words in _COMPILED:
            if words.search(name):
                return family
    return OTHER


def uses_tensor_cores(kernel_name: str) -> bool:
    """True for kernels whose name says that they run on tensor cores.

    >>> uses_tensor_cores("ampere_sgemm_128x64_nn"), uses_tensor_cores("ampere_fp16_s16816gemm_fp16_64x64_nn")
    (False, True)
    """
    return _TENSOR.search(kernel_name) is not None


def pipe_of(kernel_name: str, dtype: str) -> str:
    """Entry of `Device.peak_flops_per_s` that bounds a kernel on a dtype as profilers spell it; empty if unknown."""
    plain = dtype.casefold().removeprefix("c10::")
    return (_TENSOR_PIPES if uses_tensor_cores(kernel_name) else _PIPES).get(plain, "")
