"""The ops that public tables time, from the sizes they name."""

from __future__ import annotations

from perfmodel.graph import Op
from perfmodel.validate.kernel_rows import tensor


def linear_op(m: int, n: int, k: int, dtype: str, *, bias: bool) -> Op:
    """The op of a linear layer's forward: x[m, k] W[n, k]^T, plus a bias vector."""
    x, weight = tensor(0, (m, k), dtype), tensor(1, (k, n), dtype, transposed=True)
    out = tensor(3, (m, n), dtype)
    if bias:
        return Op(
            id=0,
            name="aten.addmm",
            inputs=(tensor(2, (n,), dtype), x, weight),
            input_names=("self", "mat1", "mat2"),
            outputs=(out,),
        )
    return Op(id=0, name="aten.mm", inputs=(x, weight), input_names=("self", "mat2"), outputs=(out,))


def bmm_op(batch: int, m: int, n: int, k: int, dtype: str) -> Op:
    """The op of a batch of row-major products."""
    a, b, out = tensor(0, (batch, m, k), dtype), tensor(1, (batch, k, n), dtype), tensor(2, (batch, m, n), dtype)
    return Op(id=0, name="aten.bmm", inputs=(a, b), input_names=("self", "mat2"), outputs=(out,))


def attention_op(shape: tuple[int, int, int, int, int], *, causal: bool, implementation: str = "auto") -> Op:
    """One bf16 flash attention forward; `shape` is batch, heads, key-value heads, length, head dimension."""
    batch, heads, kv_heads, length, dim = shape
    query = tensor(0, (batch, heads, length, dim), "bfloat16")
    key, value = (tensor(i, (batch, kv_heads, length, dim), "bfloat16") for i in (1, 2))
    return Op(
        id=0,
        name="aten._scaled_dot_product_flash_attention",
        inputs=(query, key, value),
        input_names=("query", "key", "value"),
        outputs=(tensor(3, query.shape, "bfloat16"),),
        attrs={"is_causal": causal, "implementation": implementation},
    )
