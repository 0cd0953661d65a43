"""Trace -> Programs: what a rank's host did between launches, and its device work, with every start left to the simulator.

Taken from the trace are durations and structure: the host's time between calls, call and kernel durations, which stream a
kernel ran on, who waits for whom. Not taken is any start on the device, nor how long a blocking call blocked: those the
simulator computes. Latencies (launch, return from a sync, gap between queued kernels) are one median each per trace.

Structure that Kineto does not record is inferred. Threads of a rank that launch work take turns (the autograd engine
runs while the main thread waits), so their calls form one host order. `cudaStreamWaitEvent` names neither stream nor
event: the next work the thread launches is taken to wait, on every other stream, for the latest earlier work that had
ended by the time it started. A stream synchronisation waits for the last work its thread launched. A kernel with more
warps than the device can hold at once leaves no room for others: what the trace shows to have run after it on another
stream waits for it. In these three the trace decides the order; the times are the simulator's. Traces taken with CUDA
sync events on record the first two, and then nothing of them is inferred.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from perfmodel.errors import ConfigError
from perfmodel.sim import HOST, NO_GROUP, Program, Task, Timeline
from perfmodel.sim.program import StreamKind
from perfmodel.traces.anchors import TICK_S, Anchor, Latencies, find_anchors, measure_latencies
from perfmodel.traces.spans import DeviceSpan, HostSpan, KinetoTrace, SyncRecord
from perfmodel.units import PS_PER_S, US_PER_S

# Warps an SM holds at once on compute capability 7.0, 8.0 and 9.0 (CUDA C++ Programming Guide, technical specifications).
_RESIDENT_WARPS_PER_SM = 64
_FIRST_DEVICE_STREAM = 10  # numbers of replayed device streams start here, clear of the simulator's conventional ones


def _same(span: DeviceSpan) -> float:
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change to what a trace shows, to ask what it would be worth.

    `host` multiplies host time: (start, end, factor) by rank, in the trace's own seconds, not overlapping. `device` multiplies
    the time of device work, and `collectives` of transfers. Calls in `no_wait` (rank, start) return without waiting.
    """

    host: Mapping[int, Sequence[tuple[float, float, float]]] = field(default_factory=dict)
    device: Callable[[DeviceSpan], float] = _same
    collectives: float = 1.0
    no_wait: frozenset[tuple[int, float]] = frozenset()

    def host_s(self, rank: int, start_s: float, end_s: float) -> float:
        """Host time from start to end, changed."""
        left_s = max(end_s - start_s, 0.0)
        for begin, end, factor in self.host.get(rank, ()):
            left_s -= max(min(end, end_s) - max(begin, start_s), 0.0) * (1.0 - factor)
        return max(left_s, 0.0)


AS_MEASURED = Edit()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReplay:
    """One rank's program and where its measured counterparts are.

    `device_tasks` maps a correlation id to a task index; `steps` holds the task indices of each step's two marks;
    `origin_s` is the trace's own time at the simulator's zero.
    """

    trace: KinetoTrace
    program: Program
    latencies: Latencies
    device_tasks: Mapping[int, int]
    steps: tuple[tuple[int, int], ...]
    origin_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Simulated against measured time of one step or one collective of a rank, in seconds from a common origin."""

    rank: int
    name: str
    simulated_start_s: float
    simulated_end_s: float
    measured_start_s: float
    measured_end_s: float

    @property
    def end_error_s(self) -> float:
        """Simulated minus measured end."""
        return self.simulated_end_s - self.measured_end_s

    @property
    def start_error_s(self) -> float:
        """Simulated minus measured start."""
        return self.simulated_start_s - self.measured_start_s

    @property
    def duration_error_frac(self) -> float:
        """Simulated over measured duration, minus 1."""
        return (self.simulated_end_s - self.simulated_start_s) / (self.measured_end_s - self.measured_start_s) - 1.0


def replay_programs(traces: Sequence[KinetoTrace], edit: Edit = AS_MEASURED) -> tuple[RankReplay, ...]:
    """Programs of one rank, or of all ranks of a job, ready for `simulate`, with what `edit` changes.

    With several traces the k-th collective of every rank is one group that takes as long as its fastest member was
    measured to (the last to arrive); with one trace collectives keep their measured durations.

    Raises:
        ConfigError: a trace without launches, or ranks whose collectives differ in number or kind.
    """
    first = min(trace.origin_us for trace in traces)
    origins = [-(trace.origin_us - first) / US_PER_S for trace in traces]
    transfer = _transfer_times(traces) if len(traces) > 1 else []
    return tuple(_replay_rank(trace, origin, transfer, edit) for trace, origin in zip(traces, origins, strict=True))


def compare_steps(ranks: Sequence[RankReplay], timeline: Timeline) -> list[Comparison]:
    """Each step of each rank, simulated and measured."""
    rows = []
    for cls, rank in enumerate(ranks):
        ends = timeline.ends(cls)
        for step, (begin, end) in zip(rank.trace.steps, rank.steps, strict=True):
            rows.append(_row(rank, step.name, (int(ends[begin]), int(ends[end])), (step.start_s, step.end_s)))
    return rows


def compare_collectives(ranks: Sequence[RankReplay], timeline: Timeline) -> list[Comparison]:
    """Each collective of each rank; its start is when the rank's kernel began to run or to wait for others."""
    rows = []
    for cls, rank in enumerate(ranks):
        readies, ends = timeline.readies(cls), timeline.ends(cls)
        for span in rank.trace.collectives:
            task = rank.device_tasks[span.correlation]
            rows.append(_row(rank, span.name, (int(readies[task]), int(ends[task])), (span.start_s, span.end_s)))
    return rows


def _row(rank: RankReplay, name: str, simulated_ps: tuple[int, int], measured_s: tuple[float, float]) -> Comparison:
    return Comparison(
        rank=rank.trace.rank,
        name=name,
        simulated_start_s=simulated_ps[0] / PS_PER_S,
        simulated_end_s=simulated_ps[1] / PS_PER_S,
        measured_start_s=measured_s[0] - rank.origin_s,
        measured_end_s=measured_s[1] - rank.origin_s,
    )


def _transfer_times(traces: Sequence[KinetoTrace]) -> list[float]:
    """Duration (s) of the k-th collective: its shortest kernel, that of the rank which came last."""
    counts = {trace.rank: len(trace.collectives) for trace in traces}
    if len(set(counts.values())) > 1:
        raise ConfigError(f"ranks ran different numbers of collectives: {counts}; traces of the same steps are needed")
    rows = list(zip(*(trace.collectives for trace in traces), strict=True))
    for number, row in enumerate(rows):
        if len({span.name for span in row}) > 1:
            names = sorted({span.name[:40] for span in row})
            raise ConfigError(f"collective {number} differs between ranks: {', '.join(names)}")
    return [min(span.duration_s for span in row) for row in rows]


@dataclass(slots=True, kw_only=True)
class _State:
    """What building a rank's program keeps while it walks the anchors."""

    latencies: Latencies
    edit: Edit
    tasks: list[Task] = field(default_factory=list)
    device_tasks: dict[int, int] = field(default_factory=dict)
    launched: dict[int, list[DeviceSpan]] = field(default_factory=dict)  # by stream, in launch order
    last_of_thread: dict[str, DeviceSpan] = field(default_factory=dict)
    waits: set[str] = field(default_factory=set)  # threads whose next work waits for other streams
    recorded: dict[int, SyncRecord] = field(default_factory=dict)  # by correlation id
    recorded_waits: dict[int, list[DeviceSpan]] = field(
        default_factory=dict
    )  # what the next work on a stream waits for
    marks: list[int] = field(default_factory=list)

    def add(self, stream: int, duration_s: float, deps: Sequence[tuple[int, float]] = (), group: int = NO_GROUP) -> int:
        self.tasks.append(
            Task(
                stream=stream,
                duration_ps=round(duration_s * PS_PER_S),
                deps=tuple((task, round(lag * PS_PER_S)) for task, lag in deps),
                group=group,
            )
        )
        return len(self.tasks) - 1


def _replay_rank(trace: KinetoTrace, origin_s: float, transfer_s: Sequence[float], edit: Edit) -> RankReplay:
    anchors = find_anchors(trace)
    state = _State(
        latencies=measure_latencies(anchors), edit=edit, recorded={record.correlation: record for record in trace.syncs}
    )
    groups = {span.correlation: number for number, span in enumerate(trace.collectives)} if transfer_s else {}
    free_s = origin_s
    for anchor in anchors:
        call = anchor.call
        issue = state.add(HOST, edit.host_s(trace.rank, free_s, call.start_s))
        call_s = edit.host_s(trace.rank, call.start_s, call.end_s)
        waits = (trace.rank, call.start_s) not in edit.no_wait
        free_s = max(free_s, call.end_s)
        if anchor.kind == "mark":
            state.marks.append(issue)
        elif anchor.kind == "wait event":
            _note_wait(state, anchor.call)
            state.add(HOST, call_s)
        elif anchor.work is None:
            state.add(HOST, state.latencies.sync_s, _sync_deps(state, anchor) if waits else ())
        else:
            group = groups.get(anchor.work.correlation, NO_GROUP)
            _launch(state, anchor.call, anchor.work, issue, (group, transfer_s[group]) if group >= 0 else None)
            if anchor.kind == "blocking copy" and not waits:
                state.add(HOST, min(state.latencies.copy_launch_s, call_s))
            elif anchor.kind == "blocking copy":
                done = state.device_tasks[anchor.work.correlation]
                state.add(HOST, 0.0, [(done, state.latencies.return_s)])
            else:
                state.add(HOST, call_s)
    _wait_for_room(state, trace)
    tasks, place = _in_order(state.tasks)
    marks = [place[mark] for mark in state.marks]
    streams = {stream + _FIRST_DEVICE_STREAM: _kind(spans) for stream, spans in state.launched.items()}
    return RankReplay(
        trace=trace,
        program=Program(tasks=tasks, stream_kinds=streams),
        latencies=state.latencies,
        device_tasks={correlation: place[task] for correlation, task in state.device_tasks.items()},
        steps=tuple(zip(marks[0::2], marks[1::2], strict=True)),
        origin_s=origin_s,
    )


def _wait_for_room(state: _State, trace: KinetoTrace) -> None:
    """Adds to each kernel, per other stream, a dep on the last device-filling kernel that ended before it started."""
    filling: dict[int, DeviceSpan] = {}
    by_end = sorted((s for s in trace.device if _fills(s)), key=lambda span: span.end_s)
    at = 0
    for span in trace.device:
        while at < len(by_end) and by_end[at].end_s <= span.start_s + TICK_S:
            filling[by_end[at].stream] = by_end[at]
            at += 1
        task = state.device_tasks.get(span.correlation)
        if task is None or span.kind != "kernel":
            continue
        rooms = [
            state.device_tasks[f.correlation]
            for s, f in filling.items()
            if s != span.stream and f.correlation in state.device_tasks
        ]
        old = state.tasks[task]
        state.tasks[task] = replace(old, deps=(*old.deps, *((room, 0) for room in rooms)))


def _fills(span: DeviceSpan) -> bool:
    return span.warps_per_sm > _RESIDENT_WARPS_PER_SM and not span.is_collective


def _in_order(tasks: Sequence[Task]) -> tuple[list[Task], list[int]]:
    """The tasks so that deps point backwards, streams in their given order; and where each task went."""
    blockers: list[set[int]] = [{dep for dep, _ in task.deps} for task in tasks]
    last: dict[int, int] = {}
    for index, task in enumerate(tasks):
        if task.stream in last:
            blockers[index].add(last[task.stream])
        last[task.stream] = index
    followers: list[list[int]] = [[] for _ in tasks]
    for index, before in enumerate(blockers):
        for dep in before:
            followers[dep].append(index)
    missing = [len(before) for before in blockers]
    free = [index for index, count in enumerate(missing) if count == 0]
    order: list[int] = []
    while free:
        index = heappop(free)
        order.append(index)
        for follower in followers[index]:
            missing[follower] -= 1
            if missing[follower] == 0:
                heappush(free, follower)
    if len(order) < len(tasks):
        raise ConfigError(f"the order of {len(tasks) - len(order)} calls and kernels in the trace contradicts itself")
    place = [0] * len(tasks)
    for position, index in enumerate(order):
        place[index] = position
    moved = [replace(tasks[i], deps=tuple((place[dep], lag) for dep, lag in tasks[i].deps)) for i in order]
    return moved, place


def _stream(span: DeviceSpan) -> int:
    return span.stream + _FIRST_DEVICE_STREAM


def _kind(spans: Sequence[DeviceSpan]) -> StreamKind:
    """A stream is for communication or copies if most of its time is."""
    time: dict[StreamKind, float] = {"comm": 0.0, "copy": 0.0, "compute": 0.0}
    for span in spans:
        time["comm" if span.is_collective else "compute" if span.kind == "kernel" else "copy"] += span.duration_s
    return max(time, key=time.__getitem__)


def _launch(state: _State, call: HostSpan, work: DeviceSpan, issue: int, collective: tuple[int, float] | None) -> None:
    latencies = state.latencies
    deps = [(issue, latencies.launch_s if work.kind == "kernel" else latencies.copy_launch_s)]
    before = state.launched.setdefault(work.stream, [])
    if before:
        deps.append((state.device_tasks[before[-1].correlation], latencies.queued_gap_s))
    sources = state.recorded_waits.pop(work.stream, [])
    if call.thread in state.waits:
        state.waits.discard(call.thread)
        sources = _latest_done(state, work.start_s, besides=work.stream)
    deps += [(state.device_tasks[source.correlation], latencies.queued_gap_s) for source in sources]
    group, duration = collective if collective else (NO_GROUP, work.duration_s)
    duration *= state.edit.collectives if work.is_collective else state.edit.device(work)
    state.device_tasks[work.correlation] = state.add(_stream(work), duration, deps, group)
    before.append(work)
    state.last_of_thread[call.thread] = work


def _note_wait(state: _State, call: HostSpan) -> None:
    """Remembers that a stream waits: as recorded, or, in traces without records, for the thread's next work to find out."""
    record = state.recorded.get(call.correlation)
    if record is None:
        if not state.recorded:
            state.waits.add(call.thread)
        return
    before = [s for s in state.launched.get(record.on_stream, ()) if s.correlation < record.record_correlation]
    if before:
        state.recorded_waits.setdefault(record.stream, []).append(before[-1])


def _latest_done(state: _State, by_s: float, besides: int | None = None) -> list[DeviceSpan]:
    """On each stream, the last work launched so far that the trace shows to have ended by a time."""
    found = []
    for stream, spans in state.launched.items():
        done = next((span for span in reversed(spans) if span.end_s <= by_s + TICK_S), None)
        if stream != besides and done is not None:
            found.append(done)
    return found


def _sync_deps(state: _State, anchor: Anchor) -> list[tuple[int, float]]:
    record = state.recorded.get(anchor.call.correlation)
    if record is not None and anchor.kind == "stream sync":
        targets = state.launched.get(record.stream, [])[-1:]
    elif anchor.kind == "stream sync":
        last = state.last_of_thread.get(anchor.call.thread)
        targets = [last] if last else []
    elif anchor.kind == "device sync":
        targets = [spans[-1] for spans in state.launched.values()]
    else:
        targets = _latest_done(state, anchor.call.end_s)
    lag = max(state.latencies.return_s - state.latencies.sync_s, 0.0)
    return [(state.device_tasks[target.correlation], lag) for target in targets]
