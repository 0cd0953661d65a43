"""Where the time of traced steps goes, and which rank keeps the others waiting and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perfmodel.sim.intervals import NO_SPANS, Spans, clip, divide, total, union
from perfmodel.traces.link import LOADING_PREFIX, find_steps, main_thread, nest
from perfmodel.traces.ranks import Job, SharedCollective
from perfmodel.traces.spans import DeviceSpan, HostSpan, KinetoTrace, Step
from perfmodel.units import PS_PER_S, ps_to_seconds

# Parts of a step, in order of priority: each instant belongs to the first that holds.
COMPUTE, TRANSFER, COPY, WAIT = "compute", "communication", "copies", "waiting for ranks"
LOADING, SYNC, OPS, PYTHON = "data loading", "synchronisation", "host ops", "outside ops"
PARTS = (COMPUTE, TRANSFER, COPY, WAIT, LOADING, SYNC, OPS, PYTHON)
SYNC_CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "hipStreamSynchronize")
BEFORE_STEP = "work before its step began (the end of the step before, data loading)"
BETWEEN = "outside annotated phases"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """One step of a rank (s). `parts` add up to the duration; `device_known` is False where device records are missing."""

    rank: int
    step: Step
    parts: Mapping[str, float]
    busy_s: float
    device_known: bool

    @property
    def busy_frac(self) -> float:
        """Share of the step in which anything runs on the device."""
        return self.busy_s / self.step.duration_s if self.step.duration_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """Why a collective ended late: its last rank, how long the others waited in all (s), and what delayed it by how much."""

    collective: SharedCollective
    step: str
    rank: int
    waited_s: float
    cause: str
    cause_s: float


def to_ps(pairs: Iterable[tuple[float, float]]) -> Spans:
    """Spans in seconds on the integer clock."""
    rows = np.array(list(pairs), dtype=np.float64).reshape(-1, 2)
    if not len(rows):
        return NO_SPANS
    clock = np.rint(rows * PS_PER_S).astype(np.int64)
    return clock[:, 0], clock[:, 1]


def spans_of(spans: Iterable[HostSpan] | Iterable[DeviceSpan]) -> Spans:
    """Starts and ends on the integer clock."""
    return to_ps((span.start_s, span.end_s) for span in spans)


def explain_steps(job: Job) -> list[StepParts]:
    """Every step of every rank, divided."""
    waits = _waits(job)
    return [row for trace in job.traces for row in _rank_steps(trace, waits.get(trace.rank, {}))]


def _waits(job: Job) -> dict[int, dict[float, float]]:
    """For each rank, how long its collective that starts at a time (on its own clock) waited."""
    found: dict[int, dict[float, float]] = {}
    for collective in job.collectives:
        for member in collective.members:
            local = round(member.arrive_s - job.starts_s[member.rank], 9)
            found.setdefault(member.rank, {})[local] = collective.wait_s(member.rank)
    return found


def _rank_steps(trace: KinetoTrace, waits: Mapping[float, float]) -> list[StepParts]:
    layers = step_layers(trace, waits)
    busy = union(_joined([spans_of(trace.device)]))
    known = bool(trace.device) or not any("launch" in call.name.lower() for call in trace.calls)
    rows = []
    for step in find_steps(trace)[0]:
        begin, end = (round(at * PS_PER_S) for at in (step.start_s, step.end_s))
        shares = divide(layers, begin, end)
        parts = {name: ps_to_seconds(total(share)) for name, share in zip(PARTS, shares, strict=True)}
        inside = clip(busy, begin, end) if trace.device else clip(layers[0], begin, end)
        rows.append(
            StepParts(rank=trace.rank, step=step, parts=parts, busy_s=ps_to_seconds(total(inside)), device_known=known)
        )
    return rows


def step_layers(trace: KinetoTrace, waits: Mapping[float, float] | None = None) -> list[Spans]:
    """Spans (ps) of every part but the last, in order of priority; on a CPU ops are what computes."""
    waits = waits or {}
    kernels: list[tuple[float, float]] = []
    transfers: list[tuple[float, float]] = []
    copies: list[tuple[float, float]] = []
    waiting: list[tuple[float, float]] = []
    for span in trace.device:
        if span.is_collective:
            arrived = span.start_s + min(waits.get(round(span.start_s, 9), 0.0), span.duration_s)
            waiting.append((span.start_s, arrived))
            transfers.append((arrived, span.end_s))
        else:
            (kernels if span.kind == "kernel" else copies).append((span.start_s, span.end_s))
    thread = main_thread(trace)
    ops = [op for op in trace.ops if op.kind == "op"]
    loading = [op for op in trace.ops if op.thread == thread and op.name.startswith(LOADING_PREFIX)]
    syncs = [call for call in trace.calls if call.name.startswith(SYNC_CALLS)]
    if not trace.device and not trace.calls:  # a CPU run: ops compute, but for those that fetch data
        return [
            _without(spans_of(ops), spans_of(loading)), NO_SPANS, NO_SPANS, NO_SPANS, spans_of(loading), NO_SPANS, NO_SPANS
        ]  # fmt: skip
    return [*map(to_ps, (kernels, transfers, copies, waiting)), spans_of(loading), spans_of(syncs), spans_of(ops)]


def _without(spans: Spans, holes: Spans) -> Spans:
    if not len(spans[0]) or not len(holes[0]):
        return spans
    begin, end = int(spans[0].min()), int(spans[1].max())
    return divide([union(holes), union(spans)], begin, end)[1]


def _joined(layers: Sequence[Spans]) -> Spans:
    return np.concatenate([layer[0] for layer in layers]), np.concatenate([layer[1] for layer in layers])


def explain_lateness(job: Job, least_s: float = 0.0) -> list[Lateness]:
    """For each collective whose last rank made the others wait `least_s` or more in all: who was late and why.

    Ranks leave the collective before together (or, before the first, begin at the earliest step), so what the late rank
    did from there to its arrival is compared with the mean of the others, phase by phase of its annotations; the phase
    that took longest over them is the cause.
    """
    found = []
    before: dict[int, float] = {}
    begin = min((job.starts_s[t.rank] + find_steps(t)[0][0].start_s for t in job.traces), default=0.0)
    for collective in job.collectives:
        last = collective.last_rank
        waited = sum(collective.wait_s(member.rank) for member in collective.members)
        if waited >= least_s and waited > 0:
            shares = {
                member.rank: _phase_times(job, member.rank, before.get(member.rank, begin), member.arrive_s)
                for member in collective.members
            }
            cause, cause_s = _largest_excess(shares, last)
            found.append(
                Lateness(
                    collective=collective,
                    step=_step_at(job, last, max(m.end_s for m in collective.members)),
                    rank=last,
                    waited_s=waited,
                    cause=cause,
                    cause_s=cause_s,
                )
            )
        before |= {member.rank: member.end_s for member in collective.members}
    return found


def _trace_of(job: Job, rank: int) -> KinetoTrace:
    return next(trace for trace in job.traces if trace.rank == rank)


def _step_at(job: Job, rank: int, at_s: float) -> str:
    trace = _trace_of(job, rank)
    local = at_s - job.starts_s[rank]
    return next((step.name for step in trace.steps if step.start_s <= local <= step.end_s), "")


def _phase_times(job: Job, rank: int, begin_s: float, end_s: float) -> dict[str, float]:
    """Seconds of each outermost annotation of the main thread between two times of the job's clock."""
    trace, shift = _trace_of(job, rank), job.starts_s[rank]
    steps = find_steps(trace)[0]
    window = (round((begin_s - shift) * PS_PER_S), round((end_s - shift) * PS_PER_S))
    found: dict[str, float] = {}
    for name, spans in _phases(trace).items():
        found[name] = ps_to_seconds(total(clip(spans, *window)))
    outside = (min(window[0], round(steps[0].start_s * PS_PER_S)), round(steps[0].start_s * PS_PER_S))
    found[BEFORE_STEP] = ps_to_seconds(max(min(outside[1], window[1]) - window[0], 0))
    found[BETWEEN] = ps_to_seconds(max(window[1] - window[0], 0)) - sum(found.values())
    return found


def _phases(trace: KinetoTrace) -> dict[str, Spans]:
    """Outermost annotations of the main thread by name, or its outermost ops where there are none."""
    thread = main_thread(trace)
    mine = [op for op in trace.ops if op.thread == thread and (op.kind == "annotation" or op.name.startswith("##"))]
    mine = mine or [op for op in trace.ops if op.thread == thread]
    named: dict[str, list[HostSpan]] = {}
    for span, parent in zip(mine, nest(mine), strict=True):
        if parent < 0:
            named.setdefault(span.name, []).append(span)
    return {name: spans_of(spans) for name, spans in named.items()}


def _largest_excess(shares: Mapping[int, Mapping[str, float]], late: int) -> tuple[str, float]:
    others = [times for rank, times in shares.items() if rank != late]
    excess = {
        name: shares[late].get(name, 0.0) - sum(times.get(name, 0.0) for times in others) / max(len(others), 1)
        for name in sorted({name for times in shares.values() for name in times})
    }
    cause = max(excess, key=lambda name: excess[name])
    return cause, excess[cause]
