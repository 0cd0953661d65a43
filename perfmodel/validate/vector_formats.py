"""Public formats of measured vector kernels: NeuSight's fp32 sweeps and Vidur's fp16 layers.

Sources, licences and how each was measured: the data's own PROVENANCE. NeuSight times one eager call with events, so its
values include what the host takes: `max(minimum, floor + device time)`, both by operator: `<op>.measurement_floor_s` and
`<op>.measurement_minimum_s` of the fit. Vidur's are kernel durations from profiler traces of vLLM's layers, rounded to
a microsecond: its norm, activation and rotary kernels are vLLM's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from perfmodel.graph import Op, TensorSpec
from perfmodel.units import MS_PER_S
from perfmodel.validate.kernel_rows import EAGER_FLOOR, Format, KernelRow, Row, tensor

# Operator behind each of NeuSight's names: aten name, number of tensor operands.
_NEUSIGHT: Mapping[str, tuple[str, int]] = {
    "add": ("aten.add", 2),
    "mul": ("aten.mul", 2),
    "div": ("aten.div", 2),
    "pow": ("aten.pow", 2),
    "addu": ("aten.add", 1),
    "mulu": ("aten.mul", 1),
    "divu": ("aten.div", 1),
    "powu": ("aten.pow", 1),
    "relu": ("aten.relu", 1),
    "gelu": ("aten.gelu", 1),
    "tanh": ("aten.tanh", 1),
}
_FAMILIES = {"ln": "layer norm fp32", "softmax": "softmax fp32"}


def layer_norm_op(rows: int, cols: int, dtype: str) -> Op:
    """Layer norm with weight and bias over the last dimension."""
    x, out = (tensor(i, (rows, cols), dtype) for i in (0, 3))
    weight, bias = (tensor(i, (cols,), dtype) for i in (1, 2))
    mean, rstd = (tensor(i, (rows, 1), "float32") for i in (4, 5))
    return Op(
        id=0,
        name="aten.native_layer_norm",
        inputs=(x, weight, bias),
        input_names=("input", "weight", "bias"),
        outputs=(out, mean, rstd),
        attrs={"normalized_shape": [cols], "eps": 1e-5},
    )


def _one(name: str, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], **attrs: object) -> Op:
    names = tuple(f"arg{i}" for i in range(len(inputs)))
    return Op(id=0, name=name, inputs=inputs, input_names=names, outputs=outputs, attrs=attrs)


def _neusight_op(op: str, rows: int, cols: int) -> Op:
    if op == "ln":
        return layer_norm_op(rows, cols, "float32")
    x, out = tensor(0, (rows, cols), "float32"), tensor(9, (rows, cols), "float32")
    if op == "softmax":
        return _one("aten._softmax", (x,), (out,), dim=-1, half_to_float=False)
    name, n_operands = _NEUSIGHT[op]
    operands = tuple(tensor(i, (rows, cols), "float32") for i in range(n_operands))
    return _one(name, operands, (out,))


def _read_neusight_vector(file: str, row: Row) -> Iterator[KernelRow]:
    op, rows, cols = row["op"], int(row["rows"]), int(row["cols"])
    if rows <= 0 or cols <= 0 or (op not in _NEUSIGHT and op not in _FAMILIES):
        raise ValueError(op)
    yield KernelRow(
        device=row["device"],
        family=_FAMILIES.get(op, "elementwise fp32"),
        ops=(_neusight_op(op, rows, cols),),
        measured_s=float(row["latency_ms"]) / MS_PER_S,
        key=f"{op} {rows} {cols}",
        floor=EAGER_FLOOR,
        subset=row["split"],
        timed=op,
    )


HALF = "float16"


def _vidur_add(tokens: int, width: int, row: Row) -> tuple[Op, ...]:
    operands, out = tuple(tensor(i, (tokens, width), HALF) for i in (0, 1)), tensor(2, (tokens, width), HALF)
    add = _one("aten.add", operands, (out,))
    # Phi-2's block is parallel: attention and MLP are both added to the residual.
    return (add, add) if "phi" in row["model"] else (add,)


def _vidur_norm(tokens: int, width: int, row: Row) -> tuple[Op, ...]:
    if "phi" in row["model"]:
        return (layer_norm_op(tokens, width, HALF),)
    x, weight, out = tensor(0, (tokens, width), HALF), tensor(1, (width,), HALF), tensor(2, (tokens, width), HALF)
    return (
        Op(
            id=0,
            name="vllm.rms_norm",
            inputs=(x, weight),
            input_names=("input", "weight"),
            outputs=(out,),
            attrs={"normalized_shape": [width]},
        ),
    )


def _vidur_act(tokens: int, width: int, row: Row) -> tuple[Op, ...]:
    shard = int(float(row["n_expanded"])) // int(row["tp"])
    out = tensor(1, (tokens, shard), HALF)
    if float(row["gated"]) == 1:
        return (_one("vllm.silu_and_mul", (tensor(0, (tokens, 2 * shard), HALF),), (out,)),)
    return (_one("vllm.gelu_new", (tensor(0, (tokens, shard), HALF),), (out,)),)


def _vidur_emb(tokens: int, width: int, row: Row) -> tuple[Op, ...]:
    vocabulary = VOCABULARY // int(row["tp"])
    return (
        Op(
            id=0,
            name="aten.embedding",
            inputs=(tensor(0, (vocabulary, width), HALF), tensor(1, (tokens,), "int64")),
            input_names=("weight", "indices"),
            outputs=(tensor(2, (tokens, width), HALF),),
        ),
    )


VOCABULARY = 32_000  # Llama 2; rows of the others differ, and with few tokens no row repeats
_VIDUR = {
    "add": ("elementwise fp16", _vidur_add),
    "input_layernorm": ("norm fp16 (vLLM)", _vidur_norm),
    "post_attention_layernorm": ("norm fp16 (vLLM)", _vidur_norm),
    "mlp_act": ("activation fp16 (vLLM)", _vidur_act),
    "emb": ("embedding fp16", _vidur_emb),
}
_VIDUR_GEMMS = frozenset({"attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj"})


def _read_vidur_mlp(file: str, row: Row) -> Iterator[KernelRow]:
    op, tokens, width = row["op"], int(row["num_tokens"]), int(float(row["n_embd"]))
    if op not in _VIDUR:
        yield from _vidur_gemm(op, row)
        return
    family, make = _VIDUR[op]
    yield KernelRow(
        device=row["gpu"],
        family=family,
        ops=make(tokens, width, row),
        measured_s=float(row["ms_median"]) / MS_PER_S,
        timed=op,
        key=f"{op} {row['model'] if 'phi' in row['model'] else ''} {tokens} {width} {_shard(op, row)}",
    )


def _shard(op: str, row: Row) -> str:
    return f"{row['n_expanded']}/{row['tp']}" if op == "mlp_act" else ""


def _vidur_gemm(op: str, row: Row) -> Iterator[KernelRow]:
    """A linear layer without bias; rotary embeddings depend on key-value heads, which the table does not name: skipped."""
    if op == "attn_rope":
        return
    if op not in _VIDUR_GEMMS:
        raise ValueError(op)
    m, n, k = (int(float(row[name])) for name in ("gemm_m", "gemm_n", "gemm_k"))
    x, weight, out = tensor(0, (m, k), HALF), tensor(1, (k, n), HALF, transposed=True), tensor(2, (m, n), HALF)
    yield KernelRow(
        device=row["gpu"],
        family="gemm fp16",
        ops=(Op(id=0, name="aten.mm", inputs=(x, weight), input_names=("self", "mat2"), outputs=(out,)),),
        measured_s=float(row["ms_median"]) / MS_PER_S,
        timed=op,
        key=f"gemm {m} {n} {k}",
    )


VECTOR_FORMATS = (
    Format(
        "neusight_vector",
        frozenset({"op", "device", "split", "rows", "cols", "latency_ms"}),
        "",
        _read_neusight_vector,
    ),
    Format(
        "vidur_mlp_ops",
        frozenset({"gpu", "model", "op", "num_tokens", "tp", "n_embd", "n_expanded", "gated", "gemm_m", "ms_median"}),
        "",
        _read_vidur_mlp,
    ),
)
