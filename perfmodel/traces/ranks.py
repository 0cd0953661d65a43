"""Traces of several ranks of one job on one clock: aligned by the ends of their collectives, waits split from transfers.

All members of a collective end together (measured: within 7 us over 8 V100, while starts differ by up to 7.6 ms), so the
median difference of ends is the difference of clocks. Every member's kernel runs from its own arrival to the common end;
the shortest of them, that of the last to arrive, is the transfer, and the rest of the others is waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from perfmodel.errors import ConfigError
from perfmodel.traces.kineto import read_processes
from perfmodel.traces.link import NO_OP, ancestors, link
from perfmodel.traces.nccl import UNKNOWN, collective_op, itemsize_bytes, parse_kernel_name
from perfmodel.traces.spans import CollectiveInfo, DeviceSpan, KinetoTrace, Note
from perfmodel.units import US_PER_S

_GROUP_SLACK_S = 1e-3  # ends that still differ by more after alignment are said to
_Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank's part of a collective, on the job's clock (s)."""

    rank: int
    arrive_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCollective:
    """One collective of several ranks: who came when, and how long the transfer took once the last had come."""

    info: CollectiveInfo
    members: tuple[Member, ...]

    @property
    def transfer_s(self) -> float:
        """From the last arrival to the end: the shortest kernel."""
        return min(member.end_s - member.arrive_s for member in self.members)

    @property
    def last_rank(self) -> int:
        """The rank that came last."""
        return max(self.members, key=lambda member: (member.arrive_s, -member.rank)).rank

    def wait_s(self, rank: int) -> float:
        """How long a rank waited for others."""
        mine = next(member for member in self.members if member.rank == rank)
        return max(mine.end_s - mine.arrive_s - self.transfer_s, 0.0)

    @property
    def lateness_s(self) -> float:
        """How much later the last rank came than the first."""
        arrivals = [member.arrive_s for member in self.members]
        return max(arrivals) - min(arrivals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Traces of the ranks of one run. `skew_s[rank]` was subtracted from a rank's clock; `starts_s` are where traces begin."""

    traces: tuple[KinetoTrace, ...]
    skew_s: Mapping[int, float]
    starts_s: Mapping[int, float]
    collectives: tuple[SharedCollective, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks there are traces of."""
        return tuple(trace.rank for trace in self.traces)


def load_job(paths: Sequence[str | Path], *, salvage: bool = False) -> Job:
    """Reads trace files, one or several ranks in each, as one job.

    Raises:
        ConfigError: a file cannot be read; one line for each.
    """
    traces: list[KinetoTrace] = []
    problems: list[str] = []
    for path in paths:
        try:
            traces += read_processes(path, salvage=salvage)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return make_job(traces)


def make_job(traces: Sequence[KinetoTrace]) -> Job:
    """Puts traces of several ranks on one clock, that of the lowest rank."""
    notes: list[Note] = []
    ranked = _distinct_ranks(sorted(traces, key=lambda trace: trace.rank), notes)
    _note_missing_ranks(ranked, notes)
    completed = [complete_collectives(trace) for trace in ranked]
    matched = _match(completed, notes) if len(ranked) > 1 else []
    skew = _skew(completed, matched)
    first = min(trace.origin_us / US_PER_S - skew[trace.rank] for trace in completed)
    starts = {trace.rank: (trace.origin_us / US_PER_S - first) - skew[trace.rank] for trace in completed}
    shared = [_shared(members, completed, starts) for members in matched]
    apart = [c for c in shared if max(m.end_s for m in c.members) - min(m.end_s for m in c.members) > _GROUP_SLACK_S]
    if apart:
        text = "collectives whose ends differ by more than 1 ms after alignment: matched wrongly, or clocks that drift"
        notes.append(Note(kind="guessed", text=text, count=len(apart)))
    ordered = sorted(shared, key=lambda c: max(member.end_s for member in c.members))
    return Job(traces=tuple(completed), skew_s=skew, starts_s=starts, collectives=tuple(ordered), notes=tuple(notes))


def complete_collectives(trace: KinetoTrace) -> KinetoTrace:
    """The trace with what the ops around a collective's launch say of it: kind, dtype and elements of `nccl:` annotations."""
    if not trace.collectives:
        return trace
    links = link(trace)
    spans = []
    for work in links.work:
        span = work.span
        if span.is_collective and (
            span.collective is None or not span.collective.bytes or span.collective.op == UNKNOWN
        ):
            span = replace(span, collective=_from_ops(trace, work.op, links.parents, span))
        spans.append(span)
    return replace(trace, device=tuple(spans))


def _from_ops(trace: KinetoTrace, op: int, parents: Sequence[int], span: DeviceSpan) -> CollectiveInfo:
    info = span.collective or CollectiveInfo(op=parse_kernel_name(span.name).op)
    for index in ancestors(op, parents) if op != NO_OP else ():
        host = trace.ops[index]
        if not host.name.startswith(("nccl:", "c10d::")):
            continue
        named = collective_op(host.name)
        if named != UNKNOWN:
            info = replace(info, op=named if info.op in (UNKNOWN, "send_recv") else info.op)
        if info.bytes == 0 and host.arguments is not None and named != UNKNOWN:
            n_bytes, dtype = _message(host.arguments.shapes, host.arguments.dtypes)
            info = replace(info, bytes=n_bytes, dtype=dtype or info.dtype)
    return info


def _message(shapes: Sequence[object], dtypes: Sequence[object]) -> tuple[int, str]:
    """Bytes and dtype of the first tensor argument that has both."""
    for shape, dtype in zip(shapes, dtypes, strict=False):
        size = itemsize_bytes(str(dtype))
        if size and isinstance(shape, tuple) and all(type(part) is int for part in shape):
            n_elems = 1
            for part in shape:
                n_elems *= part
            return n_elems * size, str(dtype)
    return 0, ""


def _distinct_ranks(traces: Sequence[KinetoTrace], notes: list[Note]) -> list[KinetoTrace]:
    """The traces with a rank each; those whose rank is taken get the next free one."""
    taken: set[int] = set()
    found = []
    for trace in traces:
        rank = trace.rank
        while rank in taken:
            rank += 1
        if rank != trace.rank:
            notes.append(
                Note(kind="guessed", text=f"rank {rank} for {trace.path}, as another trace is rank {trace.rank}")
            )
        taken.add(rank)
        found.append(replace(trace, rank=rank))
    return sorted(found, key=lambda trace: trace.rank)


def _note_missing_ranks(traces: Sequence[KinetoTrace], notes: list[Note]) -> None:
    if all("perfmodel" in trace.info for trace in traces):
        return  # our own: one rank stands for its class, and waits are known
    world = max(trace.world_size for trace in traces)
    missing = sorted(set(range(world)) - {trace.rank for trace in traces})
    if missing:
        listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        text = f"ranks of {world} without a trace ({listed}): waits for them look like transfers"
        notes.append(Note(kind="missing", text=text, count=len(missing)))


def _match(traces: Sequence[KinetoTrace], notes: list[Note]) -> list[dict[int, DeviceSpan]]:
    """Collectives by their members: the k-th of a kind and group on each rank, in order of launch."""
    queues: dict[_Key, dict[int, list[DeviceSpan]]] = {}
    for trace in traces:
        for span in trace.collectives:
            queues.setdefault(_key(span), {}).setdefault(trace.rank, []).append(span)
    found = []
    for key, by_rank in queues.items():
        n = min(len(spans) for spans in by_rank.values())
        over = sum(len(spans) - n for spans in by_rank.values())
        if over:
            text = f"{key[0]} without a partner on other ranks (other steps, or a lost record); the last of each rank match"
            notes.append(Note(kind="guessed", text=text, count=over))
        if len(by_rank) < 2:
            continue
        tails = {rank: spans[len(spans) - n :] for rank, spans in by_rank.items()}
        found += [{rank: spans[i] for rank, spans in tails.items()} for i in range(n)]
    return found


def _key(span: DeviceSpan) -> _Key:
    info = span.collective or CollectiveInfo(op=parse_kernel_name(span.name).op)
    uneven = info.op in ("all_to_all", "all_to_all_v", "send_recv")  # each rank's own size, and sometimes its own name
    group = ",".join(map(str, info.ranks)) or info.group
    return ("all_to_all" if uneven and info.op != "send_recv" else info.op, group, 0 if uneven else info.bytes)


def _skew(traces: Sequence[KinetoTrace], matched: Sequence[Mapping[int, DeviceSpan]]) -> dict[int, float]:
    """Clock of each rank less that of the reference, by the median over collectives they share, directly or by others."""
    origin = {trace.rank: trace.origin_us / US_PER_S for trace in traces}
    reference = traces[0].rank
    skew = {reference: 0.0}
    waiting = [trace.rank for trace in traces[1:]]
    while waiting:
        rank, offset = next(
            ((r, d) for r in waiting if (d := _offset(r, skew, origin, matched)) is not None), (waiting[0], 0.0)
        )
        skew[rank] = offset
        waiting.remove(rank)
    return {trace.rank: skew[trace.rank] for trace in traces}


def _offset(
    rank: int, skew: Mapping[int, float], origin: Mapping[int, float], matched: Sequence[Mapping[int, DeviceSpan]]
) -> float | None:
    differences = []
    for members in matched:
        if rank in members:
            known = [other for other in members if other in skew]
            for other in known[:1]:
                ends = (members[rank].end_s - members[other].end_s) + (origin[rank] - origin[other])
                differences.append(ends + skew[other])
    return median(differences) if differences else None


def _shared(
    members: Mapping[int, DeviceSpan], traces: Sequence[KinetoTrace], starts: Mapping[int, float]
) -> SharedCollective:
    infos = [span.collective for span in members.values() if span.collective is not None]
    best = max(infos, key=lambda info: info.bytes, default=CollectiveInfo(op=UNKNOWN))
    return SharedCollective(
        info=best,
        members=tuple(
            Member(rank=rank, arrive_s=span.start_s + starts[rank], end_s=span.end_s + starts[rank])
            for rank, span in sorted(members.items())
        ),
    )
