"""What detectors look at: each rank's steps, links, device work and idle time, worked out once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from perfmodel.db.device import Device
from perfmodel.diagnose.finding import CAUSES, Finding, Interval
from perfmodel.sim.intervals import NO_SPANS, Spans, clip, divide, total, union
from perfmodel.traces.explain import explain_steps, spans_of
from perfmodel.traces.link import Links, ancestors, find_steps, link
from perfmodel.traces.ranks import Job
from perfmodel.traces.spans import DeviceSpan, HostSpan, KinetoTrace, Step
from perfmodel.units import PS_PER_S, US_PER_S, ps_to_seconds
from perfmodel.utilisation.families import family_of
from perfmodel.utilisation.levels import Work, device_work

LONGEST = 3  # intervals, ops and modules shown


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank. `idle` is when nothing runs on its device; on a CPU, when no op runs. `work[i]` describes `links.work[i]`."""

    trace: KinetoTrace
    links: Links
    steps: tuple[Step, ...]
    work: tuple[Work, ...]
    idle: Spans
    window: Spans

    @property
    def n_steps(self) -> int:
        """Number of steps."""
        return len(self.steps)

    @property
    def step_s(self) -> float:
        """Mean step (s)."""
        return sum(step.duration_s for step in self.steps) / len(self.steps)

    @property
    def is_cpu(self) -> bool:
        """Ran on a CPU alone."""
        return not self.trace.device and not self.trace.calls

    def per_step_s(self, spans: Spans) -> float:
        """Seconds a step that spans cover."""
        return ps_to_seconds(total(inside(spans, self.window))) / self.n_steps

    def idle_s(self, spans: Spans) -> float:
        """Seconds a step in which the device is idle during spans; on a CPU their whole length."""
        return self.per_step_s(spans if self.is_cpu else inside(spans, self.idle))

    def host(self, names: Iterable[HostSpan]) -> list[HostSpan]:
        """Those of the main thread, inside steps."""
        thread = self.links.main_thread
        return [s for s in names if s.thread == thread and self.in_step(s.start_s)]

    def in_step(self, at_s: float) -> bool:
        """True for an instant inside a step."""
        return any(step.start_s <= at_s < step.end_s for step in self.steps)

    def launched_in(self, spans: Sequence[HostSpan]) -> set[int]:
        """Indices of device work whose launch is inside the spans, on their threads."""
        by_thread: dict[str, Spans] = {}
        for thread in {span.thread for span in spans}:
            by_thread[thread] = union(spans_of([span for span in spans if span.thread == thread]))
        found = set()
        for number, work in enumerate(self.links.work):
            if work.call >= 0:
                call = self.trace.calls[work.call]
                if call.thread in by_thread and holds(by_thread[call.thread], call.start_s):
                    found.add(number)
        return found

    def name_of_op(self, number: int) -> str:
        """The op that launched device work; empty if unknown."""
        op = self.links.work[number].op
        return self.trace.ops[op].name if op >= 0 else ""

    def family(self, span: DeviceSpan, op: int) -> str:
        """Family of device work."""
        return family_of(span, self.trace.ops[op].name if op >= 0 else "")

    def ops_above(self, op: int) -> list[str]:
        """Names of an op and those around it."""
        return [self.trace.ops[index].name for index in ancestors(op, self.links.parents)]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A job and its ranks; `main` is the rank that waits least for others, and so the one that decides the step."""

    job: Job
    device: Device
    ranks: tuple[RankView, ...]
    main: RankView


def make_view(job: Job, device: Device) -> View:
    """Works out the facts of a job whose ranks ran on a device."""
    parts = explain_steps(job)
    waits = Counter[int]()
    for row in parts:
        waits[row.rank] += round(row.parts["waiting for ranks"] * PS_PER_S)
    # On the job's clock, so that ranks meet in the replay as they did.
    aligned = [replace(trace, origin_us=job.starts_s[trace.rank] * US_PER_S) for trace in job.traces]
    ranks = tuple(_rank(trace, device) for trace in aligned)
    main = min(ranks, key=lambda rank: (waits[rank.trace.rank], rank.trace.rank))
    return View(job=replace(job, traces=tuple(r.trace for r in ranks)), device=device, ranks=ranks, main=main)


def _rank(trace: KinetoTrace, device: Device) -> RankView:
    steps, _ = find_steps(trace)
    steps = tuple(step for step in steps if step.duration_s > 0) or (
        Step(name="whole trace", start_s=0.0, end_s=max(trace.end_s, 1e-9)),
    )
    if "perfmodel" in trace.info and len(steps) > 2:
        steps = steps[1:-1]
    trace = replace(trace, steps=steps)
    links = link(trace)
    busy = union(spans_of(trace.device) if trace.device else spans_of([op for op in trace.ops if op.kind == "op"]))
    window = union(spans_of(_as_host(steps)))
    return RankView(
        trace=trace,
        links=links,
        steps=steps,
        work=tuple(device_work(trace, links, device)),
        idle=without(window, busy),
        window=window,
    )


def _as_host(steps: Sequence[Step]) -> list[HostSpan]:
    return [HostSpan(name=s.name, thread="", start_s=s.start_s, end_s=s.end_s) for s in steps]


def without(spans: Spans, holes: Spans) -> Spans:
    """Spans less holes."""
    if not len(spans[0]):
        return NO_SPANS
    begin, end = int(spans[0].min()), int(spans[1].max())
    return divide([union(clip(holes, begin, end)), union(spans)], begin, end)[1]


def inside(spans: Spans, within: Spans) -> Spans:
    """The parts of spans that lie in others."""
    return without(spans, without(spans, within)) if len(spans[0]) else NO_SPANS


def holds(spans: Spans, at_s: float) -> bool:
    """True if disjoint ascending spans hold an instant."""
    at = round(at_s * PS_PER_S)
    index = int(np.searchsorted(spans[0], at, side="right")) - 1
    return index >= 0 and at < int(spans[1][index])


def longest(rank: int, spans: Spans) -> tuple[Interval, ...]:
    """The longest few of spans, in order of start."""
    pairs = sorted(zip(*(part.tolist() for part in spans), strict=True), key=lambda p: p[0] - p[1])[:LONGEST]
    return tuple(
        Interval(rank=rank, start_s=ps_to_seconds(begin), end_s=ps_to_seconds(end)) for begin, end in sorted(pairs)
    )


def most_frequent(names: Iterable[str]) -> tuple[str, ...]:
    """The most frequent few of names that are not empty."""
    return tuple(name for name, _ in Counter(name for name in names if name).most_common(LONGEST))


def make_finding(
    view: View, cause: str, evidence: str, spans: Spans, ops: Iterable[str], gain: tuple[float, str]
) -> Finding:
    """A finding on the view's main rank; `gain` is what a step gets shorter by in seconds, and how that was found."""
    return Finding(
        cause=CAUSES[cause],
        evidence=evidence,
        intervals=longest(view.main.trace.rank, spans),
        ops=most_frequent(ops),
        modules=(),
        gain_s=gain[0],
        step_s=view.main.step_s,
        basis=gain[1],
    )
