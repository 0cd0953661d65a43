"""Fused scaled-dot-product attention: the kernels of its forward and backward and their work.

softmax(Q K^T / sqrt(d)) V without writing the scores (FlashAttention, Dao et al. 2022). The law is in `attention_law`.
Features of the family `attention`:

- `batch`, `heads`, `kv_heads` (fewer than heads: grouped queries), `q_len`, `kv_len`, `head_dim`, `v_dim`.
- `causal`: 1 if query i sees keys 0..i (top left aligned, as torch) and fully masked blocks are skipped.
- `backward`: 1 for the backward pass, which recomputes the scores: five products where forward has two
  (FlashAttention-2, Dao 2023, section 3.1: "5 matmuls in the backward pass").
- `masked`: 1 if an additive bias or mask is read. `dropout`: its probability.
- `variant`: 0 flash, 1 memory-efficient, 2 cudnn, 3 CPU.
- `implementation`: index into IMPLEMENTATIONS; 0 is what PyTorch runs for the variant.
- `itemsize_bytes`.

The unfused math path arrives as its own matrix products and softmax and never gets here.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfmodel.estimate import Work
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.gemm import math_pipe
from perfmodel.kernels.registry import KernelCall, kernel_rule

FLASH, EFFICIENT, CUDNN, CPU = 0, 1, 2, 3
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5  # FlashAttention-2 (Dao 2023), section 3.1
# Kernels that were measured apart. An op may name one in its attribute `implementation`; PyTorch's own ops do not.
IMPLEMENTATIONS = ("auto", "flash2", "flash3", "sglang_flash2", "sglang_flash3", "trtllm", "flashinfer", "triton")
STATISTIC_BYTES = 4  # one float32 log-sum-exp per query and head (FlashAttention-2, section 3.1.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Sizes of one fused attention; see the module for the meaning of each field."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_dim: int
    causal: bool = False
    masked: bool = False
    dropout: float = 0.0
    variant: int = FLASH
    implementation: str = "auto"

    @property
    def scores(self) -> int:
        """Query-key pairs that are not masked out by causality, over batch and heads."""
        pairs = self.q_len * self.kv_len
        if self.causal:
            seen = min(self.q_len, self.kv_len)
            pairs = seen * (seen + 1) // 2 + (self.q_len - seen) * self.kv_len
        return self.batch * self.heads * pairs


def attention_work(shape: AttentionShape, itemsize_bytes: int, *, backward: bool) -> Work:
    """FLOPs of the products over the pairs that causality keeps, and compulsory bytes.

    Forward: Q K^T and P V. Backward: Q K^T again, dP = dO V^T, dV = P^T dO, dQ = dS K, dK = dS^T Q. Softmax is not
    counted, as in `torch.utils.flop_counter`; for a causal mask that counter counts all pairs, this the lower triangle.
    """
    d, v = shape.head_dim, shape.v_dim
    query = shape.batch * shape.heads * shape.q_len
    keys = shape.batch * shape.kv_heads * shape.kv_len
    mask = shape.scores * itemsize_bytes // (shape.batch * shape.heads) if shape.masked else 0
    statistics = query * STATISTIC_BYTES
    inputs = (query * d + keys * (d + v)) * itemsize_bytes
    output = query * v * itemsize_bytes
    if backward:
        return Work(
            flops=shape.scores * (6 * d + 4 * v),
            read_bytes=inputs + 2 * output + statistics + mask,
            write_bytes=inputs,
        )
    return Work(flops=shape.scores * (2 * d + 2 * v), read_bytes=inputs + mask, write_bytes=output + statistics)


def attention_call(
    shape: AttentionShape, *, dtype: str, itemsize_bytes: int, backward: bool, pipe: str = ""
) -> KernelCall:
    """The kernel call of one fused attention, forward or backward."""
    return KernelCall(
        family="attention",
        work=attention_work(shape, itemsize_bytes, backward=backward),
        dtype=dtype,
        pipe=pipe or math_pipe(dtype),
        features={
            "batch": float(shape.batch),
            "heads": float(shape.heads),
            "kv_heads": float(shape.kv_heads),
            "q_len": float(shape.q_len),
            "kv_len": float(shape.kv_len),
            "head_dim": float(shape.head_dim),
            "v_dim": float(shape.v_dim),
            "causal": float(shape.causal),
            "masked": float(shape.masked),
            "dropout": shape.dropout,
            "variant": float(shape.variant),
            "implementation": float(IMPLEMENTATIONS.index(shape.implementation)),
            "backward": float(backward),
            "itemsize_bytes": float(itemsize_bytes),
        },
    )


def _variant(name: str) -> int:
    if "cpu" in name:
        return CPU
    if "cudnn" in name:
        return CUDNN
    return EFFICIENT if "efficient" in name else FLASH


def _shape_of(op: Op, query: TensorSpec, key: TensorSpec, value: TensorSpec) -> AttentionShape:
    """Sizes from tensors laid out [batch, heads, length, dim], as every aten SDPA operator takes them."""
    mask = op.arg("attn_bias") or op.arg("attn_mask")
    return AttentionShape(
        batch=query.shape[0],
        heads=query.shape[1],
        kv_heads=key.shape[1],
        q_len=query.shape[-2],
        kv_len=key.shape[-2],
        head_dim=query.shape[-1],
        v_dim=value.shape[-1],
        causal=bool(op.attrs.get("is_causal", False)),
        masked=mask is not None and mask.n_elems > 0,
        dropout=float(op.attrs.get("dropout_p") or 0.0),
        variant=_variant(op.name),
        implementation=str(op.attrs.get("implementation", "auto")),
    )


def _calls(op: Op, tensors: tuple[TensorSpec, ...], *, backward: bool) -> tuple[KernelCall, ...]:
    query, key, value = tensors
    if query.n_elems == 0 or key.n_elems == 0:
        return ()
    shape = _shape_of(op, query, key, value)
    pipe = math_pipe(query.dtype, allow_tf32=bool(op.attrs.get("allow_tf32", False)))
    return (
        attention_call(shape, dtype=query.dtype, itemsize_bytes=query.itemsize_bytes, backward=backward, pipe=pipe),
    )


@kernel_rule(
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "aten.scaled_dot_product_attention",
)
def attention_rule(op: Op) -> tuple[KernelCall, ...]:
    """One fused forward kernel."""
    query, key, value = op.inputs[:3]
    return _calls(op, (query, key, value), backward=False)


@kernel_rule(
    "aten._scaled_dot_product_flash_attention_backward",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "aten._scaled_dot_product_efficient_attention_backward",
    "aten._scaled_dot_product_cudnn_attention_backward",
    "aten._scaled_dot_product_fused_attention_overrideable_backward",
)
def attention_backward_rule(op: Op) -> tuple[KernelCall, ...]:
    """One fused backward call (its preprocessing and conversion kernels are part of the law)."""
    _, query, key, value = op.inputs[:4]
    return _calls(op, (query, key, value), backward=True)
