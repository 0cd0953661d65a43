"""Insufficient computation: small batches, tiny kernels, launches, occupancy, precision, tensor cores, alignment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from perfmodel.db.device import Device
from perfmodel.diagnose.finding import Finding
from perfmodel.diagnose.gains import Replayer, device_edit, everywhere
from perfmodel.diagnose.interruptions import interruption_spans
from perfmodel.diagnose.view import RankView, View, make_finding, most_frequent, without
from perfmodel.graph import Op
from perfmodel.kernels import price
from perfmodel.sim.intervals import Spans, union
from perfmodel.traces.explain import spans_of, to_ps
from perfmodel.traces.nccl import itemsize_bytes
from perfmodel.traces.replay import Edit
from perfmodel.traces.spans import DeviceSpan
from perfmodel.units import format_percent, format_time
from perfmodel.utilisation.families import uses_tensor_cores
from perfmodel.utilisation.levels import Work
from perfmodel.validate.timed_ops import linear_op

LEAST_IDLE_FRAC = 0.2  # of the step without device work while the host issues it
LEAST_TIME_FRAC = 0.2  # of the step in the kernels that a cause is about
TINY_S = 10e-6  # a launch costs the host about as much, and the device 2-5 us between two
LEAST_TINY = 100
SMALL_WAVES = 0.6  # mean SM activity below which kernels do not fill the device
LOW_OCCUPANCY = 0.25
GRAPH_HOST_FRAC = 0.05  # host time of a replayed graph over issuing its kernels: one launch in place of hundreds
BEST_PEAK_FRAC = 0.7  # of the datasheet's rate that large products reach (our own gemm fits on A100 and H100)
BEST_MEMORY_FRAC = 0.8
TENSOR_PIPES = ("bf16_tensor", "fp16_tensor")
POINTWISE = {
    "elementwise", "copy", "reduction", "norm", "softmax", "optimizer", "loss", "random", "fill", "index", "pool"
}  # fmt: skip
MATRIX = {"gemm", "conv", "attention"}

Piece = tuple[DeviceSpan, Work, int]


def find_computation(view: View, replayer: Replayer) -> Iterator[Finding]:
    """Findings of this group; a CPU run has none of them but precision."""
    if view.main.trace.device:
        for find in (_small_batch, _tiny_kernels, _launch_bound, _low_occupancy, _precision, _unaligned):
            yield from find(view, replayer)
    elif view.main.is_cpu:
        yield from _cpu_precision(view, replayer)


def _pieces(rank: RankView, wanted: Callable[[Work], bool] = lambda work: True) -> list[Piece]:
    """Kernels of a rank's steps, without collectives and copies; none where a rank among others recorded no device."""
    if not rank.trace.device:
        return []  # its work is that of the host, and no link has it
    return [
        (linked.span, work, number)
        for number, (linked, work) in enumerate(zip(rank.links.work, rank.work, strict=True))
        if linked.span.kind == "kernel"
        and not linked.span.is_collective
        and rank.in_step(work.start_s)
        and wanted(work)
    ]


def _time(pieces: Sequence[Piece]) -> float:
    return sum(work.time_s for _, work, _ in pieces)


def _finding(
    view: View, cause: str, evidence: str, pieces: Sequence[Piece], gain: tuple[float, str], spans: Spans | None = None
) -> Finding:
    main = view.main
    shown = union(spans_of([span for span, _, _ in pieces])) if spans is None else spans
    weighty = sorted(pieces, key=lambda piece: -piece[1].time_s)[:50]
    names = [main.name_of_op(number) or span.name[:60] for span, _, number in weighty]
    found = make_finding(view, cause, evidence, shown, names, gain)
    return replace(found, modules=most_frequent([work.module for _, work, _ in weighty]))


def _small_batch(view: View, replayer: Replayer) -> Iterator[Finding]:
    """Kernels that leave SMs without blocks; twice the batch fills them in the same time, up to one wave."""
    main = view.main
    pieces = _pieces(main, lambda work: work.sm_active_frac is not None)
    time_s = _time(pieces)
    if time_s < LEAST_IDLE_FRAC * main.step_s * main.n_steps / 2 or not pieces:
        return
    active = sum((work.sm_active_frac or 0.0) * work.time_s for _, work, _ in pieces) / time_s
    if active >= SMALL_WAVES:
        return
    doubled = [
        (span, 1.0 if (work.sm_active_frac or 1.0) <= 0.5 else 2.0 * (work.sm_active_frac or 1.0))
        for rank in view.ranks
        for span, work, _ in _pieces(rank, lambda w: w.sm_active_frac is not None)
    ]
    # Device work of twice the batch; per sample that is half of the longer step.
    longer_s = -replayer.change_s(device_edit(doubled))
    gain_s = max((main.step_s - longer_s) / 2, 0.0)
    evidence = f"kernels keep {format_percent(active)} of the SMs busy while they run"
    yield _finding(view, "small_batch", evidence, pieces, (gain_s, f"{replayer.basis}, per sample at twice the batch"))


def _tiny_kernels(view: View, replayer: Replayer) -> Iterator[Finding]:
    """Chains of pointwise kernels, each compiled into one: one read and one write of what is now read and written by each."""
    main = view.main
    pieces = _pieces(main)
    tiny = [piece for piece in pieces if piece[1].family in POINTWISE and piece[1].time_s < TINY_S]
    if len(tiny) < LEAST_TINY * main.n_steps or len(tiny) < 0.5 * len(pieces):
        return
    factors: list[tuple[DeviceSpan, float]] = []
    hosts: dict[int, Spans] = {}
    for rank in view.ranks:
        chained, saved = _chains(rank)
        factors += chained
        hosts[rank.trace.rank] = saved
    edit = Edit(host=everywhere(view, hosts, 0.0), device=device_edit(factors).device)
    gain_s = replayer.gain_s(edit)
    if gain_s < 0.02 * main.step_s:
        return
    evidence = (
        f"{len(tiny) / main.n_steps:.0f} of {len(pieces) / main.n_steps:.0f} kernels a step are pointwise and shorter than "
        f"{format_time(TINY_S)} (median {format_time(median(work.time_s for _, work, _ in tiny))})"
    )
    yield _finding(view, "tiny_kernels", evidence, tiny, (gain_s, replayer.basis))


def _chains(rank: RankView) -> tuple[list[tuple[DeviceSpan, float]], Spans]:
    """Of each chain of pointwise kernels on a stream: all but the first cost nothing, nor does issuing them."""
    factors: list[tuple[DeviceSpan, float]] = []
    saved: list[tuple[float, float]] = []
    last: dict[int, str] = {}
    for span, work, number in _pieces(rank):
        pointwise = work.family in POINTWISE - {"optimizer", "index"}
        if pointwise and last.get(span.stream) == work.phase:
            factors.append((span, 0.0))
            linked = rank.links.work[number]
            if linked.op >= 0:
                op = rank.trace.ops[linked.op]
                saved.append((op.start_s, op.end_s))
        last[span.stream] = work.phase if pointwise else ""
    return factors, union(to_ps(saved))


def _launch_bound(view: View, replayer: Replayer) -> Iterator[Finding]:
    """The device idles while the host thread issues work, outside of interruptions."""
    main = view.main
    issuing = without(main.window, union(spans_of(interruption_spans(main))))
    idle = main.idle_s(issuing)
    launches = [work for work in main.links.work if work.call >= 0 and main.in_step(work.span.start_s)]
    if idle < LEAST_IDLE_FRAC * main.step_s or len(launches) < LEAST_TINY * main.n_steps:
        return
    hosts = {r.trace.rank: without(r.window, union(spans_of(interruption_spans(r)))) for r in view.ranks}
    gain_s = replayer.gain_s(Edit(host=everywhere(view, hosts, GRAPH_HOST_FRAC)))
    if gain_s < 0.5 * LEAST_IDLE_FRAC * main.step_s:
        return  # something else holds the host back
    evidence = (
        f"the device is idle for {format_percent(idle / main.step_s)} of the step while the host issues "
        f"{len(launches) / main.n_steps:.0f} kernels and copies"
    )
    yield _finding(view, "launch_bound", evidence, _pieces(main), (gain_s, replayer.basis), main.idle)


def _low_occupancy(view: View, replayer: Replayer) -> Iterator[Finding]:
    """Memory-bound kernels that fill all SMs with few warps and stay far below the memory's rate."""
    main = view.main

    def low(work: Work) -> bool:
        return (
            work.family not in MATRIX
            and work.occupancy_frac is not None
            and work.occupancy_frac < LOW_OCCUPANCY
            and (work.sm_active_frac or 0.0) > SMALL_WAVES
            and work.time_s >= TINY_S
        )

    pieces = _pieces(main, low)
    if _time(pieces) < LEAST_TIME_FRAC * main.step_s * main.n_steps:
        return
    rate = view.device.memory_bytes_per_s * BEST_MEMORY_FRAC
    factors = [
        (span, min(work.bytes / rate / work.time_s, 1.0) if work.known and work.bytes else 1.0)
        for rank in view.ranks
        for span, work, _ in _pieces(rank, low)
    ]
    mean = sum((work.occupancy_frac or 0.0) * work.time_s for _, work, _ in pieces) / _time(pieces)
    evidence = f"{format_time(_time(pieces) / main.n_steps)} a step at {format_percent(mean)} occupancy"
    known = any(work.known for _, work, _ in pieces)
    basis = replayer.basis if known else "not predicted: the bytes of these kernels are not known"
    yield _finding(view, "low_occupancy", evidence, pieces, (replayer.gain_s(device_edit(factors)), basis))


def _precision(view: View, replayer: Replayer) -> Iterator[Finding]:
    """Products in FP64, or in FP32 where the device has tensor cores for TF32 or 16-bit types."""
    main, peak = view.main, view.device.peak_flops_per_s
    half = next((pipe for pipe in TENSOR_PIPES if pipe in peak), "")
    matrix = _pieces(main, lambda work: work.family in MATRIX)
    wide = [p for p in matrix if _pipe(p) in ("fp64", "fp32", "tf32_tensor")]
    if not half or _time(wide) < LEAST_TIME_FRAC * main.step_s * main.n_steps:
        return
    fp64 = _time([p for p in wide if _pipe(p) == "fp64"]) > 0.5 * _time(wide)
    without_tensor = _time([p for p in wide if _pipe(p) == "fp32"])
    share = _time(wide) / main.n_steps / main.step_s
    if not fp64 and "tf32_tensor" in peak and without_tensor > 0.5 * _time(wide):
        gain_s = _gain(view, replayer, "tf32_tensor", 4)
        evidence = f"{format_percent(share)} of the step is FP32 products without tensor cores"
        yield _finding(view, "unused_tensor_cores", evidence, wide, (gain_s, replayer.basis))
    gain_s = _gain(view, replayer, "fp32" if fp64 else half, 4 if fp64 else 2)
    if gain_s < 0.02 * main.step_s:
        return
    kinds = "FP64" if fp64 else "FP32" if without_tensor > 0.5 * _time(wide) else "TF32"
    times = _times(peak, half, wide)
    evidence = f"{format_percent(share)} of the step is {kinds} products; the device does {times} in {half}"
    yield _finding(view, "wrong_precision", evidence, wide, (gain_s, replayer.basis))


def _times(peak: Mapping[str, float], half: str, wide: Sequence[Piece]) -> str:
    return f"{peak[half] / peak.get(_pipe(wide[0]), peak['fp32']):.0f} times as much"


def _pipe(piece: Piece) -> str:
    """The pipe that a product runs on: as known, or by its kernel's name."""
    span, work, _ = piece
    if work.pipe:
        return work.pipe
    name = span.name.lower()
    if "dgemm" in name or "double" in name:
        return "fp64"
    if any(word in name for word in ("half", "fp16", "bf16", "h884", "h1688", "s16816")):
        return "bf16_tensor"
    return "tf32_tensor" if uses_tensor_cores(name) else "fp32"


def _gain(view: View, replayer: Replayer, pipe: str, itemsize_bytes_new: int) -> float:
    return replayer.gain_s(
        device_edit(
            (piece[0], _faster(piece, view.device, pipe, itemsize_bytes_new))
            for rank in view.ranks
            for piece in _pieces(rank, lambda work: work.family in MATRIX)
        )
    )


def _faster(piece: Piece, device: Device, pipe: str, new_bytes: int) -> float:
    """Time of a product on another pipe over its time now: bound by that pipe, or by its bytes in the narrower type."""
    _, work, _ = piece
    peak, now = device.peak_flops_per_s, _pipe(piece)
    old_bytes = 8 if now == "fp64" else 4 if now in ("fp32", "tf32_tensor") else 2
    if pipe not in peak or peak[pipe] <= peak.get(now, 0.0) or old_bytes < new_bytes:
        return 1.0
    if not work.known or not work.flops:
        return max(peak.get(now, peak["fp32"]) / peak[pipe], new_bytes / old_bytes)  # no faster than its bytes
    bytes_s = work.bytes * new_bytes / old_bytes / (device.memory_bytes_per_s * BEST_MEMORY_FRAC)
    flops_s = work.flops / (peak[pipe] * BEST_PEAK_FRAC)
    return min(max(flops_s, bytes_s, device.kernel_floor_s) / work.time_s, 1.0)


def _unaligned(view: View, replayer: Replayer) -> Iterator[Finding]:
    """Products on tensor cores with a size that 16 bytes do not divide; the device's own law says what padding gains."""
    main = view.main
    found = [(span, factor, number) for rank in view.ranks for span, factor, number in _padded(rank, view.device)]
    mine = {id(span) for span, _, _ in _padded(main, view.device)}
    pieces = [piece for piece in _pieces(main) if id(piece[0]) in mine]
    if _time(pieces) < 0.25 * LEAST_TIME_FRAC * main.step_s * main.n_steps:
        return
    gain_s = replayer.gain_s(device_edit((span, factor) for span, factor, _ in found))
    evidence = f"{len(pieces) / main.n_steps:.0f} products a step have a size that is no multiple of 16 bytes"
    yield _finding(
        view, "unaligned_shapes", evidence, pieces, (gain_s, f"{replayer.basis}, with the device's gemm law")
    )


def _padded(rank: RankView, device: Device) -> list[tuple[DeviceSpan, float, int]]:
    rows: list[tuple[DeviceSpan, Op, Op, int]] = []
    for span, work, number in _pieces(rank, lambda work: work.family == "gemm"):
        sizes = _sizes(rank, number)
        if sizes is None or not (work.pipe.endswith("_tensor") or uses_tensor_cores(span.name)):
            continue
        (m, n, k), dtype = sizes
        unit = 16 // itemsize_bytes(dtype)
        if all(size % unit == 0 for size in (n, k)):
            continue
        pipe = work.pipe or "bf16_tensor"
        rows.append((span, _product(m, n, k, pipe), _product(m, _up(n, unit), _up(k, unit), pipe), number))
    if not rows:
        return []
    prices = [estimates[0].time_s for estimates in price([op for row in rows for op in row[1:3]], device)]
    scale = _law_scale(rank, device)
    return [
        (row[0], min(prices[2 * i + 1] * scale / max(row[0].duration_s, prices[2 * i]), 1.0), row[3])
        for i, row in enumerate(rows)
    ]


def _law_scale(rank: RankView, device: Device) -> float:
    """Measured over priced time of the run's own aligned products; 1 if there are none."""
    ratios = []
    found = [
        (span, _sizes(rank, number), work.pipe) for span, work, number in _pieces(rank, lambda w: w.family == "gemm")
    ]
    for span, sizes, pipe in found:
        if sizes is not None and all(size % 16 == 0 for size in sizes[0]) and pipe.endswith("_tensor"):
            ratios.append(span.duration_s / price([_product(*sizes[0], pipe)], device)[0][0].time_s)
    return median(ratios) if ratios else 1.0


def _up(size: int, unit: int) -> int:
    return math.ceil(size / unit) * unit


def _sizes(rank: RankView, number: int) -> tuple[tuple[int, int, int], str] | None:
    """(m, n, k) and dtype of the product that launched a kernel, from the last two matrices of its op."""
    op = rank.links.work[number].op
    arguments = rank.trace.ops[op].arguments if op >= 0 else None
    if arguments is None:
        return None
    shapes = [
        (s, d) for s, d in zip(arguments.shapes, arguments.dtypes, strict=False) if isinstance(s, tuple) and len(s) >= 2
    ]
    if len(shapes) < 2:
        return None
    (a, dtype), (b, _) = shapes[-2:]
    fits = all(type(x) is int and x > 0 for x in (*a[-2:], *b[-2:])) and a[-1] == b[-2] and itemsize_bytes(str(dtype))
    return ((math.prod(a[:-1]), b[-1], a[-1]), str(dtype)) if fits else None


def _product(m: int, n: int, k: int, pipe: str) -> Op:
    """x[m, k] W[n, k]^T, as a linear layer runs it on a pipe."""
    if pipe == "tf32_tensor":
        return replace(linear_op(m, n, k, "float32", bias=False), attrs={"allow_tf32": True})
    return linear_op(m, n, k, "float16" if pipe == "fp16_tensor" else "bfloat16", bias=False)


def _cpu_precision(view: View, replayer: Replayer) -> Iterator[Finding]:
    """Ops on float64 tensors of a CPU run: half the bytes and twice the lanes of a vector register in float32."""
    main = view.main
    ops = [op for op in main.trace.ops if op.kind == "op" and main.in_step(op.start_s) and op.arguments is not None]
    double = [
        op for op in ops if "double" in [str(d).casefold() for d in (op.arguments.dtypes if op.arguments else ())]
    ]
    spans = union(spans_of(double))
    if main.per_step_s(spans) < LEAST_TIME_FRAC * main.step_s:
        return
    # Lanes of a vector register: 4-byte floats are twice as many as 8-byte ones.
    gain_s = replayer.gain_s(Edit(host=everywhere(view, {main.trace.rank: spans}, 0.5)))
    evidence = f"{format_percent(main.per_step_s(spans) / main.step_s)} of the step is arithmetic on float64 tensors"
    names = [op.name for op in double]
    found = make_finding(view, "wrong_precision", evidence, spans, names, (gain_s, replayer.basis))
    yield replace(
        found,
        modules=most_frequent([main.links.op_modules[i] for i, op in enumerate(main.trace.ops) if op in double[:50]]),
    )
