"""Host time of a plain op from profiler traces: `python -m calibrate.fit_host TRACE...`; op-level data, no iteration time.

A plain op (one pointwise kernel) costs its own span in the trace and the mean gap to what the thread runs next, less what the
profiler itself adds: `EVENT_S` for each recorded op and `CALL_S` for each recorded runtime call. One figure for the forward
thread (Python, dispatcher, autograd's bookkeeping), one for the thread of autograd's engine, and the launch call.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median

from perfmodel.traces.kineto import HostSpan, KinetoTrace, read_kineto
from perfmodel.units import US_PER_S

# What recording adds. Measured 2026-11-29 on the project's CPU (3.65 GHz Zen 4, torch 2.13; 40 layers with and without the
# profiler): 0.50 us an op, 0.70 us with shapes. Hosts of the traces are about half as fast, their profilers older.
EVENT_S = 1.2 / US_PER_S
CALL_S = 1.5 / US_PER_S
LONGEST_GAP_S = 200 / US_PER_S  # beyond it the thread waits for something
FORWARD = frozenset({"aten::add", "aten::mul", "aten::sub", "aten::relu", "aten::sigmoid", "aten::tanh"})
NODE = "autograd::engine::evaluate_function: "
BACKWARD = frozenset(NODE + name for name in ("ReluBackward0", "SigmoidBackward0", "TanhBackward0", "MulBackward0"))
LAUNCH = "cudaLaunchKernel"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFigures:
    """Seconds of a plain op forward and backward, and of a launch, in one trace; `n_ops` counts what they rest on."""

    op_s: float
    backward_op_s: float
    launch_s: float
    n_ops: int


@dataclass(slots=True)
class _Top:
    span: HostSpan
    n_events: int
    calls: list[HostSpan]


def figures(trace: KinetoTrace) -> HostFigures:
    """The figures of one trace. Raises `ValueError` if it has no plain op of either kind."""
    launch_s = median(call.duration_s for call in trace.calls if call.name == LAUNCH) - CALL_S
    ops: dict[str, list[HostSpan]] = defaultdict(list)
    for span in trace.ops:
        if "::" in span.name:  # annotations wrap whole phases
            ops[span.thread].append(span)
    calls: dict[str, list[HostSpan]] = defaultdict(list)
    for call in trace.calls:
        calls[call.thread].append(call)
    forward: list[float] = []
    backward: list[float] = []
    for thread, spans in ops.items():
        tops = _tops(spans, calls[thread])
        gap_s = _mean_gap_s(tops)
        forward += _plain(tops, FORWARD, gap_s, launch_s)
        backward += _plain(tops, BACKWARD, gap_s, launch_s)
    if not forward or not backward:
        raise ValueError(f"{trace.path}: no plain op in forward or in backward")
    return HostFigures(
        op_s=median(forward), backward_op_s=median(backward), launch_s=launch_s, n_ops=len(forward) + len(backward)
    )


def _tops(spans: Iterable[HostSpan], calls: Sequence[HostSpan]) -> list[_Top]:
    tops: list[_Top] = []
    for span in sorted(spans, key=lambda s: (s.start_s, -s.end_s)):
        if not tops or span.start_s >= tops[-1].span.end_s:
            tops.append(_Top(span, 1, []))
        else:
            tops[-1].n_events += 1
    starts = [top.span.start_s for top in tops]
    for call in calls:
        at = bisect_right(starts, call.start_s) - 1
        if at >= 0 and call.end_s <= tops[at].span.end_s:
            tops[at].calls.append(call)
    return tops


def _mean_gap_s(tops: Sequence[_Top]) -> float:
    gaps = [after.span.start_s - before.span.end_s for before, after in pairwise(tops)]
    return mean([gap for gap in gaps if gap < LONGEST_GAP_S] or [0.0])


def _plain(tops: Iterable[_Top], names: frozenset[str], gap_s: float, launch_s: float) -> list[float]:
    """Seconds per kernel, launches apart, of each occurrence."""
    found = []
    for top in tops:
        n_launches = sum(call.name == LAUNCH for call in top.calls)
        if top.span.name in names and n_launches:
            added_s = EVENT_S * top.n_events + CALL_S * len(top.calls)
            found.append((top.span.duration_s + gap_s - added_s) / n_launches - launch_s)
    return found


def held_out(found: Mapping[str, HostFigures]) -> dict[str, float]:
    """Relative error of each trace's forward and backward host time if the mean of the others is taken for it."""
    errors = {}
    for name, own in found.items():
        others = [figure for other, figure in found.items() if other != name]
        if others:
            guess = mean(o.op_s + o.backward_op_s for o in others)
            errors[name] = guess / (own.op_s + own.backward_op_s) - 1
    return errors


if __name__ == "__main__":
    results = {path: figures(read_kineto(path)) for path in sys.argv[1:]}
    errors = held_out(results)
    for path, f in results.items():
        us = [f"{value * US_PER_S:.1f}" for value in (f.op_s, f.backward_op_s, f.launch_s)]
        sys.stdout.write(
            f"{path}: op {us[0]} us, backward {us[1]} us, launch {us[2]} us ({f.n_ops} ops); "
            f"from the others {errors.get(path, 0.0):+.1%}\n"
        )
