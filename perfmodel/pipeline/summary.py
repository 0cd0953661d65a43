"""From a simulated run to a Prediction: breakdown per rank, causes on the critical path, range, coverage, top ops."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from perfmodel.estimate import Source
from perfmodel.graph import Graph
from perfmodel.kernels import work
from perfmodel.pipeline.lower import LoweredClass
from perfmodel.pipeline.prediction import Breakdown, OpShare, PathShare, Prediction, RankSummary
from perfmodel.plan import Placement
from perfmodel.sim.breakdown import breakdown, stream_busy
from perfmodel.sim.path import critical_path
from perfmodel.sim.program import HOST
from perfmodel.sim.steady import Steady
from perfmodel.sim.timeline import Timeline
from perfmodel.units import ps_to_seconds


def summarise(
    graph: Graph, plan: str, topology: str, placement: Placement, classes: Sequence[LoweredClass], steady: Steady
) -> Prediction:
    """The prediction of a steady-state run; `classes[i]` is class i of the simulator."""
    iteration_s = ps_to_seconds(float(steady.iteration_ps))
    path, spread = _path(steady.timeline, classes)
    order = _slowest_first(steady.timeline, classes)
    flops, model_flops = _flops(placement)
    return Prediction(
        model=graph.model,
        topology=topology,
        plan=plan,
        precision=graph.precision,
        n_ranks=placement.n_ranks,
        batch_per_rank=graph.batch_size,
        iteration_time_s=iteration_s,
        low_s=max(iteration_s - spread[0], 0.0),
        high_s=iteration_s + spread[1],
        ranks=tuple(_rank_summary(steady.timeline, i, classes[i]) for i in order),
        top_ops=_top_ops(classes[order[0]]),
        critical_path=path,
        coverage=_coverage(classes),
        work_flops=flops,
        model_flops=model_flops,
        notes=(*placement.notes, *_unmodelled(classes), *_convergence(steady)),
        provenance=_provenance(classes),
    )


def _slowest_first(timeline: Timeline, classes: Sequence[LoweredClass]) -> list[int]:
    """Classes by how little they wait for others: the first is the one the others wait for."""
    waits = [breakdown(timeline, i).wait_ps for i in range(len(classes))]
    return sorted(range(len(classes)), key=lambda i: (waits[i], classes[i].rank_class.ranks))


def _rank_summary(timeline: Timeline, index: int, lowered: LoweredClass) -> RankSummary:
    parts = breakdown(timeline, index)
    return RankSummary(
        ranks=lowered.rank_class.ranks,
        device=lowered.device.name,
        breakdown=Breakdown(
            compute_s=ps_to_seconds(parts.compute_ps),
            exposed_communication_s=ps_to_seconds(parts.exposed_comm_ps),
            exposed_copy_s=ps_to_seconds(parts.exposed_copy_ps),
            wait_s=ps_to_seconds(parts.wait_ps),
            host_bound_s=ps_to_seconds(parts.host_ps),
            idle_s=ps_to_seconds(parts.idle_ps),
        ),
        hidden_communication_s=ps_to_seconds(parts.hidden_comm_ps),
        host_busy_s=ps_to_seconds(stream_busy(timeline, index).get(HOST, 0)),
        memory=lowered.rank_class.memory,
        memory_capacity_bytes=lowered.device.memory_bytes,
        tables=lowered.rank_class.tables,
    )


def _path(timeline: Timeline, classes: Sequence[LoweredClass]) -> tuple[tuple[PathShare, ...], tuple[float, float]]:
    """Critical path by cause, and how far (s) below and above the time may lie.

    Errors of one family are taken as fully correlated (a law that is 5 % slow is 5 % slow everywhere), those of
    different families as independent, so their sums along the path add in quadrature.
    """
    time_ps: dict[str, int] = {}
    below: dict[str, float] = {}
    above: dict[str, float] = {}
    for segment in critical_path(timeline):
        info = classes[segment.cls].infos[segment.task]
        cause = "launch latency" if segment.lag else info.family
        time_ps[cause] = time_ps.get(cause, 0) + segment.length_ps
        if segment.lag or info.estimate.time_s <= 0:
            continue
        share = ps_to_seconds(segment.length_ps) / info.estimate.time_s
        below[cause] = below.get(cause, 0.0) + share * (info.estimate.time_s - info.estimate.low_s)
        above[cause] = above.get(cause, 0.0) + share * (info.estimate.high_s - info.estimate.time_s)
    total_ps = sum(time_ps.values()) or 1
    ordered = sorted(time_ps.items(), key=lambda item: (-item[1], item[0]))
    shares = tuple(
        PathShare(cause=cause, time_s=ps_to_seconds(spent), share_frac=spent / total_ps) for cause, spent in ordered
    )
    return shares, (math.hypot(*below.values()), math.hypot(*above.values()))


def _top_ops(lowered: LoweredClass, n_rows: int = 20) -> tuple[OpShare, ...]:
    """Device-time consumers of one rank, by op and phase, largest first."""
    time_s: dict[tuple[str, str], float] = {}
    events: dict[tuple[str, str], set[int]] = {}
    worst: dict[tuple[str, str], Source] = {}
    for info in lowered.infos:
        if info.category in ("host", "sync"):
            continue
        event = lowered.rank_class.events[info.event]
        key = (event.label if event.op is not None else info.family, event.phase)
        time_s[key] = time_s.get(key, 0.0) + info.estimate.time_s
        events.setdefault(key, set()).add(info.event)
        worst[key] = max(worst.get(key, Source.MEASURED), info.estimate.source)
    total_s = sum(time_s.values()) or 1.0
    ordered = sorted(time_s, key=lambda key: (-time_s[key], key))[:n_rows]
    return tuple(
        OpShare(
            name=name,
            phase=phase,
            calls=len(events[name, phase]),
            time_s=time_s[name, phase],
            share_frac=time_s[name, phase] / total_s,
            source=worst[name, phase].label,
        )
        for name, phase in ordered
    )


def _coverage(classes: Sequence[LoweredClass]) -> dict[str, float]:
    """Share of priced time (device and host, weighted by ranks) by source, most trusted first."""
    time_s = dict.fromkeys(Source, 0.0)
    for lowered in classes:
        for info in lowered.infos:
            time_s[info.estimate.source] += info.estimate.time_s * len(lowered.rank_class.ranks)
    total_s = sum(time_s.values()) or 1.0
    return {source.label: spent / total_s for source, spent in time_s.items() if spent > 0}


def _flops(placement: Placement) -> tuple[int, int]:
    """FLOPs of all ranks in one iteration, with and without recomputation."""
    done = model = 0
    for rank_class in placement.classes:
        for event in rank_class.events:
            if event.op is not None:
                flops = work(event.op).flops * len(rank_class.ranks)
                done += flops
                model += 0 if event.op.recompute else flops
    return done, model


def _unmodelled(classes: Sequence[LoweredClass]) -> list[str]:
    names = {
        lowered.rank_class.events[info.event].label
        for lowered in classes
        for info in lowered.infos
        if info.estimate.source is Source.UNMODELLED
    }
    return [f"no rule for {name}: priced from its bytes" for name in sorted(names)]


def _convergence(steady: Steady) -> list[str]:
    if steady.converged:
        return []
    return [f"the iteration time had not settled after {steady.n_iterations} iterations; a mean is given"]


def _provenance(classes: Sequence[LoweredClass]) -> Mapping[str, str]:
    """Fit or datasheet behind each kernel family used, by `device/family`."""
    found: dict[str, str] = {}
    for lowered in classes:
        for info in lowered.infos:
            if info.category in ("host", "sync", "collective"):
                continue
            fit = lowered.device.fits.get(info.family)
            origin = fit.provenance.get("source", fit.law) if fit else "datasheet roofline"
            found[f"{lowered.device.name}/{info.family}"] = origin
        found[f"{lowered.device.name}/host"] = lowered.device.host.source
    return dict(sorted(found.items()))
