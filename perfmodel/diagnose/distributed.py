"""Causes between ranks: unequal work, a slow rank, communication that nothing hides, small buckets, slow links."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from perfmodel.diagnose.finding import Finding, Interval
from perfmodel.diagnose.gains import Replayer
from perfmodel.diagnose.view import RankView, View, longest, make_finding, without
from perfmodel.sim.intervals import NO_SPANS, union
from perfmodel.traces.explain import explain_lateness, spans_of, to_ps
from perfmodel.traces.ranks import Member
from perfmodel.traces.replay import Edit
from perfmodel.traces.spans import DeviceSpan
from perfmodel.units import KIBI, MEBI, format_bytes, format_percent, format_rate, format_time

LEAST_WAIT_FRAC = 0.1  # of the step that other ranks wait, in the mean
LEAST_EXPOSED_FRAC = 0.15
UNEQUAL = 1.15  # compute of the late rank over the median of the others
BLAMED = 0.5  # share of all waiting that one rank causes
SMALL_BUCKET_BYTES = MEBI
LEAST_BUCKETS = 8
BUCKET_BYTES = 25 * MEBI  # DistributedDataParallel's default bucket_cap_mb
LARGE_BYTES = 4 * MEBI
# Bus bandwidth that a healthy machine reaches with large messages, as a share of what its devices can: of PCIe about half of
# one direction; a socketed (SXM) device has NVLink, several times PCIe (public nccl-tests tables: 135 GB/s on 8 V100,
# 230 on 8 A100, 480 on 8 H100; 8 to 20 over PCIe).
PCIE_FRAC, NVLINK_OVER_PCIE = 0.3, 3.0


def find_distributed(view: View, replayer: Replayer) -> Iterator[Finding]:
    """Findings of this group."""
    yield from _late_rank(view)
    yield from _exposed(view, replayer)
    yield from _small_buckets(view, replayer)
    yield from _slow_links(view, replayer)


def _late_rank(view: View) -> Iterator[Finding]:
    """The rank that most of the waiting is for, and whether it has more work or does the same more slowly."""
    if len(view.ranks) < 2 or not view.job.collectives:
        return
    late = explain_lateness(view.job)
    caused: dict[int, float] = {}
    for row in late:
        caused[row.rank] = caused.get(row.rank, 0.0) + row.waited_s
    total_s = sum(caused.values())
    n_steps = view.main.n_steps
    mean_wait_s = total_s / (len(view.ranks) - 1) / n_steps
    if mean_wait_s < LEAST_WAIT_FRAC * view.main.step_s:
        return
    rank = max(caused, key=lambda r: caused[r])
    if caused[rank] < BLAMED * total_s:
        rows = [row for row in late if row.waited_s > 0]
        evidence = (
            f"ranks wait {format_time(mean_wait_s)} a step for each other, for no one rank in particular "
            f"(most for rank {rank}: {format_percent(caused[rank] / total_s)})"
        )
        ops = [row.collective.info.op for row in rows]
        found = make_finding(
            view, "load_imbalance", evidence, NO_SPANS, ops, (mean_wait_s, "by the waits at collectives")
        )
        yield replace(found, intervals=_waiting(view))
        return
    mine = [row for row in late if row.rank == rank]
    gain_s = sum(_margin(row.collective.members) for row in mine) / n_steps
    cause, why = _why_late(view, rank)
    worst = max(mine, key=lambda row: row.waited_s)
    each_s = caused[rank] / (len(view.ranks) - 1) / n_steps
    evidence = (
        f"rank {rank} comes last to collectives that others wait {format_time(each_s)} a step for: {why}; most in "
        f"{worst.cause}"
    )
    ops = [row.collective.info.op for row in mine]
    basis = "arrival of the last rank less that of the one before"
    yield replace(make_finding(view, cause, evidence, NO_SPANS, ops, (gain_s, basis)), intervals=_waiting(view))


def _margin(members: Sequence[Member]) -> float:
    arrivals = sorted(member.arrive_s for member in members)
    return arrivals[-1] - arrivals[-2]


def _waiting(view: View) -> tuple[Interval, ...]:
    """The longest waits of the rank that waits most."""
    waits: dict[int, list[tuple[float, float]]] = {}
    for collective in view.job.collectives:
        for member in collective.members:
            begin = member.arrive_s - view.job.starts_s[member.rank]
            waits.setdefault(member.rank, []).append((begin, begin + collective.wait_s(member.rank)))
    rank = max(waits, key=lambda r: sum(end - begin for begin, end in waits[r]))
    return longest(rank, union(to_ps(waits[rank])))


def _why_late(view: View, rank: int) -> tuple[str, str]:
    """Cause id and words: more kernels or larger ones than the others, the same ones slower, or a late host."""
    times = {r.trace.rank: _compute(r) for r in view.ranks}
    others = [times[r] for r in times if r != rank]
    usual = median(sum(t for t, _ in kernels.values()) for kernels in others)
    own = sum(t for t, _ in times[rank].values())
    if usual <= 0 or own < UNEQUAL * usual:
        return "straggler", "its kernels take as long as those of others, so its host or its input is late"
    ratio = own / usual
    slower = _slowdowns(times[rank], others)
    if slower and min(slower) > 1 + (ratio - 1) / 2:
        return "straggler", f"the same kernels take {format_percent(ratio - 1)} longer on it, all of them"
    return "load_imbalance", f"it computes {format_percent(ratio - 1)} longer than the median of the others"


def _compute(rank: RankView) -> dict[str, tuple[float, int]]:
    """Time (s) and number of a rank's compute kernels by name."""
    found: dict[str, tuple[float, int]] = {}
    for span in rank.trace.device:
        if span.kind == "kernel" and not span.is_collective and rank.in_step(span.start_s):
            before = found.get(span.name, (0.0, 0))
            found[span.name] = (before[0] + span.duration_s, before[1] + 1)
    return found


def _slowdowns(mine: Mapping[str, tuple[float, int]], others: Sequence[Mapping[str, tuple[float, int]]]) -> list[float]:
    """Ratio of mean time for each kernel that makes up most of the time; empty if counts differ (other work)."""
    if any(mine[name][1] != other.get(name, (0.0, 0))[1] for other in others for name in mine):
        return []
    weighty = sorted(mine, key=lambda name: -mine[name][0])
    kept, covered, total_s = [], 0.0, sum(t for t, _ in mine.values())
    for name in weighty:
        if covered > 0.8 * total_s:
            break
        covered += mine[name][0]
        kept.append(mine[name][0] / max(median(other[name][0] for other in others), 1e-12))
    return kept


def _collectives(rank: RankView) -> list[DeviceSpan]:
    return [span for span in rank.trace.collectives if rank.in_step(span.start_s)]


def _transfers(view: View) -> list[tuple[DeviceSpan, float]]:
    """Collectives of the main rank with their transfer times (s): without the waits where other ranks are known."""
    rank = view.main.trace.rank
    waits = {
        round(member.arrive_s - view.job.starts_s[rank], 9): collective.wait_s(rank)
        for collective in view.job.collectives
        for member in collective.members
        if member.rank == rank
    }
    return [(s, max(s.duration_s - waits.get(round(s.start_s, 9), 0.0), 0.0)) for s in _collectives(view.main)]


def _exposed(view: View, replayer: Replayer) -> Iterator[Finding]:
    main = view.main
    moved = _transfers(view)
    spans = union(to_ps((span.end_s - time_s, span.end_s) for span, time_s in moved))
    compute = union(spans_of([s for s in main.trace.device if s.kind == "kernel" and not s.is_collective]))
    exposed = without(spans, compute)
    exposed_s = main.per_step_s(exposed)
    if exposed_s < LEAST_EXPOSED_FRAC * main.step_s:
        return
    gain_s = replayer.gain_s(Edit(collectives=0.0))
    alone = len(view.ranks) == 1 and main.trace.world_size > 1 and "perfmodel" not in main.trace.info
    caveat = "; waits for ranks without a trace are part of it" if alone else ""
    hidden = 1 - exposed_s / max(main.per_step_s(spans), 1e-12)
    evidence = (
        f"{format_time(exposed_s)} a step ({format_percent(exposed_s / main.step_s)}) with nothing beside it; "
        f"{format_percent(hidden)} of all communication is hidden{caveat}"
    )
    ops = [span.collective.op if span.collective else span.name for span, _ in moved]
    yield make_finding(
        view, "exposed_communication", evidence, exposed, ops, (gain_s, f"{replayer.basis}; at most, if all is hidden")
    )


def _small_buckets(view: View, replayer: Replayer) -> Iterator[Finding]:
    main = view.main
    reduced = [
        (span, time_s)
        for span, time_s in _transfers(view)
        if span.collective is not None and span.collective.op in ("all_reduce", "reduce_scatter")
    ]
    sizes = [span.collective.bytes for span, _ in reduced if span.collective is not None]
    n = len(reduced) / main.n_steps
    if n < LEAST_BUCKETS or median(sizes) >= SMALL_BUCKET_BYTES or sum(sizes) / main.n_steps < 64 * KIBI:
        return
    total_s = sum(time_s for _, time_s in reduced)
    if total_s < 0.03 * main.step_s * main.n_steps:
        return
    fewer = math.ceil(sum(sizes) / main.n_steps / BUCKET_BYTES)
    latency_s = min(time_s for _, time_s in reduced)  # the smallest message is all latency
    left = max(total_s - (n - fewer) * main.n_steps * latency_s, 0.05 * total_s) / total_s
    hosts = {
        r.trace.rank: [(op.start_s, op.end_s, fewer / n) for op in r.host(r.trace.ops) if op.name.startswith("nccl:")]
        for r in view.ranks
    }
    gain_s = replayer.gain_s(Edit(collectives=left, host=hosts))
    each_s = total_s / main.n_steps
    evidence = f"{n:.0f} reductions a step with a median of {format_bytes(median(sizes))}, {format_time(each_s)}"
    spans = union(spans_of([span for span, _ in reduced]))
    ops = [span.name.split("(")[0] for span, _ in reduced]
    yield make_finding(view, "small_buckets", evidence, spans, ops, (gain_s, replayer.basis))


def _slow_links(view: View, replayer: Replayer) -> Iterator[Finding]:
    device = view.device
    expected = device.host_link_bytes_per_s * PCIE_FRAC
    if "sxm" in device.name:
        expected = device.host_link_bytes_per_s * NVLINK_OVER_PCIE
    large = [
        (span, time_s, rate)
        for span, time_s in _transfers(view)
        if time_s > 0 and span.collective is not None and span.collective.bytes >= LARGE_BYTES
        and (rate := _bus_rate(span, time_s, view)) > 0
    ]  # fmt: skip
    alone = len(view.ranks) == 1 and view.main.trace.world_size > 1
    n_hosts_known = view.main.trace.world_size <= 8  # beyond one host the network bounds, which the trace does not name
    if not large or alone or not n_hosts_known or device.kind != "cuda":
        return
    rate = median(rate for _, _, rate in large)
    time_s = sum(time_s for _, time_s, _ in large)
    if rate > 0.5 * expected or time_s < 0.05 * view.main.step_s * view.main.n_steps:
        return
    gain_s = replayer.gain_s(Edit(collectives=rate / expected))
    evidence = (
        f"{len(large) / view.main.n_steps:.0f} messages of {format_bytes(LARGE_BYTES)} or more a step move "
        f"{format_rate(rate)} (bus bandwidth), where such devices reach {format_rate(expected)}"
    )
    spans = union(spans_of([span for span, _, _ in large]))
    ops = [span.collective.op for span, _, _ in large if span.collective is not None]
    yield make_finding(view, "slow_links", evidence, spans, ops, (gain_s, replayer.basis))


def _bus_rate(span: DeviceSpan, time_s: float, view: View) -> float:
    """Bus bandwidth as nccl-tests counts it (doc/PERFORMANCE.md)."""
    info = span.collective
    n = (info.group_size or view.main.trace.world_size) if info is not None else 0
    if info is None or n < 2:
        return 0.0
    factor = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0, "reduce": 1.0}.get(info.op, (n - 1) / n)
    return info.bytes * factor / time_s
