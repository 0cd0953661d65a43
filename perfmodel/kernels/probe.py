"""Asks the laws of a device about typical ops and looks for answers that cannot be: the part of `db check` that needs laws.

Problems: a time that is not positive and finite; FLOPs or bytes faster than the device's own peaks. Remarks: a time that falls
by more than 10 % as one size of the op doubles (tiles and protocol switches do that).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from perfmodel.db.device import Device
from perfmodel.estimate import Estimate, Source
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.pricing import calls_of, price
from perfmodel.kernels.registry import KernelCall
from perfmodel.kernels.roofline import peak_flops_per_s

PEAK_SLACK = 1.05  # boost clocks above the datasheet's, and its rounding
# Winograd F(4x4, 3x3) does 4 times fewer multiplications than the FLOPs counted, F(2x2, 3x3) 2.25 times fewer (Lavin and
# Gray, arXiv:1509.09308); cuDNN uses both for fp32, and the transforms eat part of it.
WINOGRAD_GAIN = 4.0
FALL_FRAC = 0.9
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Ops of growing work along one size: `label` names the op, the size and the dtype."""

    label: str
    ops: Sequence[Op]


def tensor(id: int, shape: tuple[int, ...], dtype: str) -> TensorSpec:
    """A contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return TensorSpec(id=id, shape=shape, dtype=dtype, strides=tuple(reversed(strides)), storage=id)


Shape = tuple[int, ...]
Maker = Callable[[int, str], Op]


def _op(name: str, inputs: Mapping[str, Shape], outputs: Sequence[Shape], dtype: str, **attrs: object) -> Op:
    return Op(
        id=0,
        name=name,
        inputs=tuple(tensor(i, shape, dtype) for i, shape in enumerate(inputs.values())),
        input_names=tuple(inputs),
        outputs=tuple(tensor(100 + i, shape, dtype) for i, shape in enumerate(outputs)),
        attrs=attrs,
    )


def _makers() -> Mapping[str, Maker]:
    return {
        "mm, n": lambda n, d: _op("aten.mm", {"self": (2048, 1024), "mat2": (1024, n)}, [(2048, n)], d),
        "mm, k": lambda k, d: _op("aten.mm", {"self": (2048, k), "mat2": (k, 2048)}, [(2048, 2048)], d),
        "bmm, batch": lambda b, d: _op("aten.bmm", {"self": (b, 128, 64), "mat2": (b, 64, 128)}, [(b, 128, 128)], d),
        "add, rows": lambda r, d: _op("aten.add", {"self": (r, 1024), "other": (r, 1024)}, [(r, 1024)], d),
        "clone, rows": lambda r, d: _op("aten.clone", {"self": (r, 1024)}, [(r, 1024)], d),
        "sum, rows": lambda r, d: _op("aten.sum", {"self": (r, 1024)}, [(r,)], d, dim=[1]),
        "_softmax, rows": lambda r, d: _op("aten._softmax", {"self": (r, 1024)}, [(r, 1024)], d, dim=-1),
        "native_layer_norm, rows": lambda r, d: _op(
            "aten.native_layer_norm",
            {"input": (r, 1024), "weight": (1024,), "bias": (1024,)},
            [(r, 1024), (r, 1), (r, 1)],
            d,
            normalized_shape=[1024],
        ),
        "convolution, channels": lambda c, d: _op(
            "aten.convolution",
            {"input": (32, 64, 56, 56), "weight": (c, 64, 3, 3)},
            [(32, c, 56, 56)],
            d,
            stride=[1, 1],
            padding=[1, 1],
            dilation=[1, 1],
            transposed=False,
            output_padding=[0, 0],
            groups=1,
        ),
    }


SIZES = tuple(2**power for power in range(6, 15))


def probes() -> tuple[Probe, ...]:
    """All probes: every op over sizes 64 to 16384 in each dtype."""
    return tuple(
        Probe(label=f"{label} in {dtype}", ops=tuple(make(size, dtype) for size in SIZES))
        for label, make in _makers().items()
        for dtype in DTYPES
    )


def check_prices(device: Device, asked: Sequence[Probe] | None = None) -> tuple[list[str], list[str]]:
    """Problems and remarks of the device's prices for `asked` (default: all probes)."""
    problems: list[str] = []
    remarks: list[str] = []
    for probe in probes() if asked is None else asked:
        priced = price(probe.ops, device)
        for op, size, estimates in zip(probe.ops, SIZES, priced, strict=False):
            for call, estimate in zip(calls_of(op), estimates, strict=True):
                problems += [
                    f"{device.name}: {probe.label} = {size}: {fault}" for fault in faults(call, estimate, device)
                ]
        totals = [sum(estimate.time_s for estimate in estimates) for estimates in priced]
        remarks += [f"{device.name}: {probe.label}: {line}" for line in _falls(totals)]
    return problems, remarks


def faults(call: KernelCall, estimate: Estimate, device: Device) -> Iterator[str]:
    """Why `estimate` cannot be the time of `call` on `device`."""
    time_s = estimate.time_s
    if not (math.isfinite(time_s) and time_s > 0):
        yield f"{call.family}: {time_s} s is no time"
        return
    if estimate.source >= Source.ROOFLINE:
        return
    peak = peak_flops_per_s(device, call.pipe) * (WINOGRAD_GAIN if call.family == "conv" else 1.0)
    if call.work.flops / time_s > PEAK_SLACK * peak:
        yield f"{call.family}: {call.work.flops / time_s:.3g} FLOP/s is above the device's peak of {peak:.3g}"
    fastest = max(device.memory_bytes_per_s, device.l2_bytes_per_s)
    if call.work.bytes / time_s > PEAK_SLACK * fastest:
        yield f"{call.family}: {call.work.bytes / time_s:.3g} B/s is above memory and L2 at {fastest:.3g}"


def _falls(times_s: Sequence[float]) -> Iterator[str]:
    for size, before_s, after_s in zip(SIZES, times_s, times_s[1:], strict=False):
        if after_s < FALL_FRAC * before_s:
            yield f"{size} -> {2 * size} takes {before_s:.3g} -> {after_s:.3g} s"
