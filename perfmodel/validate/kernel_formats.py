"""The public formats of measured kernel times: columns, units and which op each row timed.

Sources, licences and how each was measured: the data's own PROVENANCE (NeuSight, aiconfigurator, Vidur).
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from perfmodel.graph import Op, TensorSpec
from perfmodel.units import MS_PER_S, US_PER_S
from perfmodel.validate.kernel_rows import Format, KernelRow, Row, tensor

EAGER_FLOOR = "measurement_floor_s"  # CUDA events around one eager call include its launch

_GEMM_FILE = "aic_gemm_bf16_"


def _int(row: Row, name: str) -> int:
    value = int(float(row[name]))
    if value <= 0:
        raise ValueError(name)
    return value


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


def _read_aic_gemm(file: str, row: Row) -> Iterator[KernelRow]:
    name = file.split(".", maxsplit=1)[0]
    if not name.startswith(_GEMM_FILE):
        raise ValueError(f"the device is read from a file name {_GEMM_FILE}<device>.csv")
    times = [float(value) for key, value in row.items() if key.startswith("us_") and value]
    m, n, k = _int(row, "m"), _int(row, "n"), _int(row, "k")
    yield KernelRow(
        device=name.removeprefix(_GEMM_FILE),
        family="gemm bf16",
        ops=(linear_op(m, n, k, "bfloat16", bias=False),),
        measured_s=median(times) / US_PER_S,
        key=f"gemm {m} {n} {k}",
    )


def _read_neusight_gemm(file: str, row: Row) -> Iterator[KernelRow]:
    batch, m, n, k = (_int(row, name) for name in ("b", "m", "n_out", "k_reduce"))
    if row["op"] == "bmm":
        op = bmm_op(batch, m, n, k, "float32")
    elif row["op"] == "linear":
        op = linear_op(batch * m, n, k, "float32", bias=True)
    else:
        raise ValueError("op")
    yield KernelRow(
        device=row["device"],
        family=f"{row['op']} fp32",
        ops=(op,),
        measured_s=float(row["latency_ms"]) / MS_PER_S,
        key=f"{row['op']} {batch} {m} {n} {k}",
        floor=EAGER_FLOOR,
        subset=row["split"],
        timed=row["op"],
    )


def _read_neusight_conv(file: str, row: Row) -> Iterator[KernelRow]:
    batch, c_in, c_out, taps, size, stride = (
        _int(row, name) for name in ("batch", "c_in", "c_out", "kernel_size", "in_hw", "stride")
    )
    padding = int(float(row["padding"]))
    out = (size + 2 * padding - taps) // stride + 1
    op = Op(
        id=0,
        name="aten.convolution",
        inputs=(tensor(0, (batch, c_in, size, size), "float32"), tensor(1, (c_out, c_in, taps, taps), "float32")),
        input_names=("input", "weight"),
        outputs=(tensor(2, (batch, c_out, out, out), "float32"),),
        attrs={"stride": [stride, stride], "padding": [padding, padding], "dilation": [1, 1], "groups": 1},
    )
    yield KernelRow(
        device=row["device"],
        family="conv fp32",
        ops=(op,),
        measured_s=float(row["latency_ms"]) / MS_PER_S,
        key=f"conv {batch} {c_in} {c_out} {taps} {size} {stride} {padding}",
        floor=EAGER_FLOOR,
        subset=row["split"],
    )


# The kernel behind each `kernel_source` of the attention tables; sglang names its flash kernels differently by release.
_FLASH = {
    ("vllm", "vllm_flash_attn"): "flash2",
    ("vllm", "vllm_flash_attn_fa2"): "flash2",
    ("vllm", "vllm_vit_flash_attn_fa2"): "flash2",
    ("vllm", "vllm_flash_attn_fa3"): "flash3",
    ("vllm", "vllm_vit_flash_attn_fa3"): "flash3",
    ("sglang", "flash_attention"): "sglang_flash2",
    ("sglang", "fa3"): "sglang_flash3",
    ("sglang", "flash_attention_v3"): "sglang_flash3",
    ("sglang", "flashinfer"): "flashinfer",
    ("sglang", "triton"): "triton",
    ("trtllm", "torch_flow"): "trtllm",
}


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


def _read_aic_attention(file: str, row: Row) -> Iterator[KernelRow]:
    names = ("batch", "num_heads", "num_kv_heads", "seq_len", "head_dim")
    batch, heads, kv_heads, length, dim = (_int(row, name) for name in names)
    causal = _int_or_zero(row["causal"]) == 1
    framework = row["source"].split("/", maxsplit=1)[0]
    implementation = _FLASH.get((framework, row["kernel_source"]), "auto")
    yield KernelRow(
        device=row["system"],
        family="attention bf16",
        ops=(attention_op((batch, heads, kv_heads, length, dim), causal=causal, implementation=implementation),),
        measured_s=float(row["us"]) / US_PER_S,
        key=f"attention {batch} {heads} {kv_heads} {length} {dim} {causal}",
        subset=implementation,
    )


def _int_or_zero(text: str) -> int:
    return int(float(text))


def _read_neusight_vector(file: str, row: Row) -> Iterator[KernelRow]:
    rows, cols, name = _int(row, "rows"), _int(row, "cols"), row["op"]
    op, family = vector_op(name, rows, cols)
    yield KernelRow(
        device=row["device"],
        family=f"{family} fp32",
        ops=(op,),
        measured_s=float(row["latency_ms"]) / MS_PER_S,
        key=f"{name} {rows} {cols}",
        floor=EAGER_FLOOR,
        subset=row["split"],
        timed=name,
    )


def _read_vidur(file: str, row: Row) -> Iterator[KernelRow]:
    found = vidur_op(row)
    if found is None:
        return
    op, family, key = found
    yield KernelRow(
        device=row["gpu"],
        family=f"{family} fp16",
        ops=(op,),
        measured_s=float(row["ms_median"]) / MS_PER_S,
        key=key,
        timed=row["op"],
    )


def vidur_op(row: Row) -> tuple[Op, str, str] | None:
    """The op, family and key of a Vidur row; None for kernels that PyTorch does not have (rotary embedding of vLLM)."""
    tokens, width = _int(row, "num_tokens"), _int(row, "n_embd")
    if row["gemm_m"]:
        m, n, k = (_int(row, name) for name in ("gemm_m", "gemm_n", "gemm_k"))
        return linear_op(m, n, k, "float16", bias=False), "gemm", f"gemm {m} {n} {k}"
    x, out = tensor(0, (tokens, width), "float16"), tensor(1, (tokens, width), "float16")
    key = f"{row['op']} {tokens} {width}"
    if row["op"] == "add":
        other = tensor(2, (tokens, width), "float16")
        op = Op(id=0, name="aten.add", inputs=(x, other), input_names=("self", "other"), outputs=(out,))
        return op, "elementwise", key
    if row["op"] == "mlp_act" and row["gated"] == "1":
        inner = _int(row, "n_expanded") // _int(row, "tp")
        gates = tensor(0, (tokens, 2 * inner), "float16")
        op = Op(
            id=0,
            name="perfmodel.fused_pointwise",
            inputs=(gates,),
            input_names=("self",),
            outputs=(tensor(1, (tokens, inner), "float16"),),
            attrs={"flops_per_elem": 6},
        )
        return op, "gated activation", f"{row['op']} {tokens} {inner}"
    return None


_BINARY = {"add": "aten.add", "mul": "aten.mul", "div": "aten.div", "pow": "aten.pow"}
_UNARY = {"relu": "aten.relu", "gelu": "aten.gelu", "tanh": "aten.tanh"}


def vector_op(name: str, rows: int, cols: int) -> tuple[Op, str]:
    """The op of a NeuSight vector row and the family it counts to; raises ValueError for another name."""
    x, out = tensor(0, (rows, cols), "float32"), tensor(1, (rows, cols), "float32")
    if name in _BINARY:
        other = tensor(2, (rows, cols), "float32")
        return Op(
            id=0, name=_BINARY[name], inputs=(x, other), input_names=("self", "other"), outputs=(out,)
        ), "elementwise"
    if name.removesuffix("u") in _BINARY:
        attrs = {"exponent" if name == "powu" else "other": 2.5}
        base = _BINARY[name.removesuffix("u")]
        return Op(id=0, name=base, inputs=(x,), input_names=("self",), outputs=(out,), attrs=attrs), "elementwise"
    if name in _UNARY:
        return Op(id=0, name=_UNARY[name], inputs=(x,), input_names=("self",), outputs=(out,)), "elementwise"
    if name == "softmax":
        op = Op(id=0, name="aten._softmax", inputs=(x,), input_names=("self",), outputs=(out,), attrs={"dim": -1})
        return op, "softmax"
    if name != "ln":
        raise ValueError("op")
    return layer_norm_op(x), "layer norm"


def layer_norm_op(x: TensorSpec) -> Op:
    """Layer norm over the last dimension of `x`, with weight and bias."""
    cols = x.shape[-1]
    weight, bias = tensor(2, (cols,), x.dtype), tensor(3, (cols,), x.dtype)
    statistics = tuple(tensor(i, (*x.shape[:-1], 1), "float32") for i in (4, 5))
    return Op(
        id=0,
        name="aten.native_layer_norm",
        inputs=(x, weight, bias),
        input_names=("input", "weight", "bias"),
        outputs=(tensor(1, x.shape, x.dtype), *statistics),
        attrs={"normalized_shape": [cols], "eps": 1e-5},
    )


FORMATS = (
    Format(
        "aic_attention",
        frozenset({"system", "source", "causal", "kernel_source", "batch", "seq_len", "num_heads", "num_kv_heads"})
        | {"head_dim", "us"},
        "",
        _read_aic_attention,
    ),
    Format("aic_gemm", frozenset({"m", "n", "k"}), "us_", _read_aic_gemm),
    Format(
        "neusight_gemm",
        frozenset({"op", "device", "split", "b", "m", "n_out", "k_reduce", "latency_ms"}),
        "",
        _read_neusight_gemm,
    ),
    Format(
        "neusight_conv",
        frozenset(
            {"device", "split", "batch", "c_in", "c_out", "kernel_size", "in_hw", "stride", "padding", "latency_ms"}
        ),
        "",
        _read_neusight_conv,
    ),
    Format(
        "neusight_vector",
        frozenset({"op", "device", "split", "rows", "cols", "latency_ms"}),
        "",
        _read_neusight_vector,
    ),
    Format(
        "vidur_mlp",
        frozenset({"gpu", "op", "num_tokens", "tp", "n_embd", "n_expanded", "gated", "gemm_m", "ms_median"}),
        "",
        _read_vidur,
    ),
)
