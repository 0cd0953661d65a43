"""The public formats of measured kernel times: columns, units and which op each row timed.

Sources, licences and how each was measured: the data's own PROVENANCE (NeuSight, aiconfigurator, Vidur).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from statistics import median

from perfmodel.db.loading import resolve_device
from perfmodel.errors import ConfigError, MissingCalibrationError
from perfmodel.graph import Op
from perfmodel.units import MS_PER_S, US_PER_S
from perfmodel.validate.kernel_rows import EAGER_FLOOR, Format, KernelRow, Row, tensor
from perfmodel.validate.model_op_rows import MODEL_OPS_FORMAT
from perfmodel.validate.timed_ops import attention_op, bmm_op, linear_op
from perfmodel.validate.vector_formats import VECTOR_FORMATS

_GEMM_FILE = "aic_gemm_bf16_"


def _int(row: Row, name: str) -> int:
    value = int(float(row[name]))
    if value <= 0:
        raise ValueError(name)
    return value


@cache
def _device_of(file: str) -> str:
    """The device that a file's name says: `aic_gemm_bf16_<device>`, with whatever stands before and behind it.

    A name that no device has is returned whole, for the reader to refuse.
    """
    _, found, rest = file.split(".", maxsplit=1)[0].partition(_GEMM_FILE)
    if not found:
        raise ConfigError(
            f"file name: found {file!r}, allowed {_GEMM_FILE}<device>.csv: it names the device (or a column device)"
        )
    words = rest.split("_")
    for length in range(len(words), 0, -1):
        with suppress(MissingCalibrationError):
            return resolve_device("_".join(words[:length]))
    return rest


def _read_aic_gemm(file: str, row: Row) -> Iterator[KernelRow]:
    times = [float(value) for key, value in row.items() if key.startswith("us_") and value]
    m, n, k = _int(row, "m"), _int(row, "n"), _int(row, "k")
    yield KernelRow(
        device=row.get("device") or _device_of(file),
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
        kernel=row.get("kernel") or "",
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
        kernel=row.get("kernel") or "",
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
    *VECTOR_FORMATS,
    MODEL_OPS_FORMAT,
)
