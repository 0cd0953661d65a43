"""Calls in a trace that launch, wait or order, and the latencies between host and device that they show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from perfmodel.errors import ConfigError
from perfmodel.traces.spans import DeviceSpan, HostSpan, KinetoTrace

AnchorKind = Literal["launch", "blocking copy", "stream sync", "device sync", "event sync", "wait event", "mark"]

_SYNCS: Mapping[str, AnchorKind] = {
    "cudaStreamSynchronize": "stream sync",
    "cudaDeviceSynchronize": "device sync",
    "cudaEventSynchronize": "event sync",
    "cudaStreamWaitEvent": "wait event",
}
# A copy to pageable host memory returns when it is done (CUDA runtime API, "API synchronization behavior").
BLOCKING_COPY = "Device -> Pageable"
# Clock ticks of older traces are whole microseconds: an end and a start this close may be one instant.
TICK_S = 2e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Medians over one trace, in seconds.

    `launch_s`, `copy_launch_s`: from the call's start to the start of a kernel, or a copy or fill, on an idle stream.
    `queued_gap_s`: between two kernels of a stream when the second was launched long before. `return_s`: from the end
    of the work a blocking call waits for to the call's end. `sync_s`: such a call when there is nothing to wait for.
    """

    launch_s: float
    copy_launch_s: float
    queued_gap_s: float
    return_s: float
    sync_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """One such call; `work` is what it launched, `mark` calls are the ends of steps."""

    kind: AnchorKind
    call: HostSpan
    work: DeviceSpan | None = None


def find_anchors(trace: KinetoTrace) -> list[Anchor]:
    """Calls that launch, wait or order, and the marks of the steps, in host order."""
    launched = trace.launched
    found: list[Anchor] = []
    for call in trace.calls:
        work = launched.get(call.correlation)
        if work is not None:
            blocks = work.kind == "memcpy" and BLOCKING_COPY in work.name
            found.append(Anchor(kind="blocking copy" if blocks else "launch", call=call, work=work))
        elif call.name in _SYNCS:
            found.append(Anchor(kind=_SYNCS[call.name], call=call))
    for step in trace.steps:
        for at in (step.start_s, step.end_s):
            mark = HostSpan(name=step.name, thread="", start_s=at, end_s=at)
            found.append(Anchor(kind="mark", call=mark))
    if not any(anchor.work for anchor in found):
        raise ConfigError(f"{trace.path}: no call launches device work; a trace with CUDA activity is needed")
    return sorted(found, key=lambda anchor: (anchor.call.start_s, anchor.call.end_s))


def measure_latencies(anchors: Sequence[Anchor]) -> Latencies:
    """Medians over the launches and syncs that show each latency alone; 0 where a trace shows none."""
    idle: dict[bool, list[float]] = {True: [], False: []}
    gaps, returns, syncs = [], [], []
    busy_until: dict[int, float] = {}
    last_of_thread: dict[str, DeviceSpan] = {}
    waiting: set[str] = set()  # threads whose next work may wait for another stream, and so shows no latency
    for anchor in anchors:
        call, work = anchor.call, anchor.work
        if anchor.kind == "wait event":
            waiting.add(call.thread)
        if work is not None:
            free = busy_until.get(work.stream, 0.0)
            if call.thread in waiting:
                waiting.discard(call.thread)
            elif free <= call.start_s:
                idle[work.kind == "kernel"].append(work.start_s - call.start_s)
            elif call.end_s + 10 * TICK_S < free <= work.start_s:
                gaps.append(work.start_s - free)
            busy_until[work.stream] = work.end_s
            last_of_thread[call.thread] = work
        waited = work if anchor.kind == "blocking copy" else last_of_thread.get(call.thread)
        if anchor.kind in ("stream sync", "blocking copy") and waited is not None:
            if waited.end_s > call.start_s:
                returns.append(call.end_s - waited.end_s)
            else:
                syncs.append(call.duration_s)
    return Latencies(
        launch_s=_median(idle[True]),
        copy_launch_s=_median(idle[False]),
        queued_gap_s=_median(gaps),
        return_s=_median(returns),
        sync_s=_median(syncs),
    )


def _median(values: Sequence[float]) -> float:
    return max(median(values), 0.0) if values else 0.0
