"""From a simulated run to a Prediction: breakdown per rank, causes on the critical path, range, coverage, top ops."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perfmodel.estimate import Source
from perfmodel.graph import PHASES, Graph
from perfmodel.kernels.substitutes import substitutes
from perfmodel.pipeline import ranges
from perfmodel.pipeline.joined import by_name, joined, sizes
from perfmodel.pipeline.layout import ints
from perfmodel.pipeline.prediction import Breakdown, OpShare, PathShare, Prediction, RankSummary
from perfmodel.pipeline.settings import RunSettings
from perfmodel.pipeline.tasks import CATEGORIES, HOST_FAMILY, LoweredClass
from perfmodel.plan import Placement
from perfmodel.sim import breakdown as sim_breakdown
from perfmodel.sim.path import critical_rows
from perfmodel.sim.program import HOST
from perfmodel.sim.steady import Steady
from perfmodel.sim.timeline import Timeline
from perfmodel.units import format_percent, ps_to_seconds

LAUNCH_LATENCY = "launch latency"
SEVERAL = "repeating pattern"  # cause of what one iteration of a pattern of several differs from their mean
N_TOP_OPS = 20
_IS_DEVICE = np.array([category in ("kernel", "copy", "collective") for category in CATEGORIES])
_IS_KERNEL = np.array([category in ("kernel", "copy") for category in CATEGORIES])


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What was predicted: the graph, the names of plan and topology, and the settings."""

    graph: Graph
    plan: str
    topology: str
    settings: RunSettings


def summarise(subject: Subject, placement: Placement, classes: Sequence[LoweredClass], steady: Steady) -> Prediction:
    """The prediction of a steady-state run; `classes[i]` is class i of the simulator."""
    iteration_s = ps_to_seconds(float(steady.iteration_ps))
    path, spread = _path(steady, classes)
    above_s = math.hypot(spread[1], placement.n_micro * ranges.feeding_s(subject.graph, classes))
    parts = sim_breakdown.breakdowns(steady.timeline)
    host_busy_s = _host_busy_s(steady.timeline)
    # The class that waits least for others is the one the others wait for.
    order = sorted(range(len(classes)), key=lambda i: (parts[i].wait_ps, classes[i].rank_class.ranks))
    flops, model_flops = _flops(classes)
    graph = subject.graph
    return Prediction(
        model=graph.model,
        topology=subject.topology,
        plan=subject.plan,
        precision=graph.precision,
        n_ranks=placement.n_ranks,
        batch_per_rank=graph.batch_size * placement.n_micro,
        n_replicas=placement.n_replicas,
        iteration_time_s=iteration_s,
        low_s=max(iteration_s - spread[0], 0.0),
        high_s=max(iteration_s + above_s, ranges.slow_host_s(classes, host_busy_s)),
        ranks=tuple(_rank_summary(classes[i], parts[i], host_busy_s[i]) for i in order),
        top_ops=_top_ops(classes[order[0]]),
        critical_path=path,
        coverage=_coverage(classes),
        work_flops=flops,
        model_flops=model_flops,
        notes=(
            *placement.notes,
            *_unmodelled(classes),
            *_substitutes(classes),
            *_convergence(steady),
        ),
        provenance=_provenance(classes),
        mode=subject.settings.mode,
        conditions=_conditions(subject.settings),
    )


def _rank_summary(lowered: LoweredClass, parts: sim_breakdown.Breakdown, host_busy_s: float) -> RankSummary:
    return RankSummary(
        ranks=lowered.rank_class.ranks,
        device=lowered.device.name,
        breakdown=Breakdown(
            compute_s=ps_to_seconds(parts.compute_ps),
            exposed_communication_s=ps_to_seconds(parts.exposed_comm_ps),
            exposed_copy_s=ps_to_seconds(parts.exposed_copy_ps),
            wait_s=ps_to_seconds(parts.wait_ps),
            host_bound_s=ps_to_seconds(parts.host_ps),
            input_s=ps_to_seconds(parts.input_ps),
            idle_s=ps_to_seconds(parts.idle_ps),
        ),
        hidden_communication_s=ps_to_seconds(parts.hidden_comm_ps),
        host_busy_s=host_busy_s,
        memory=lowered.rank_class.memory,
        memory_capacity_bytes=lowered.device.memory_bytes,
        tables=lowered.rank_class.tables,
    )


def _host_busy_s(timeline: Timeline) -> list[float]:
    """Time (s) in which the host works, by class."""
    compiled = timeline.compiled
    busy_ps = (timeline.end_ps - timeline.start_ps) * (compiled.stream == HOST)
    before = np.concatenate([[0], np.cumsum(busy_ps)])[compiled.wiring.offsets]
    return [ps_to_seconds(spent) for spent in np.diff(before).tolist()]


def _path(steady: Steady, classes: Sequence[LoweredClass]) -> tuple[tuple[PathShare, ...], tuple[float, float]]:
    """Critical path by cause, and how far (s) below and above the time may lie.

    Which errors add up and which in quadrature: see `ranges`.
    """
    task, start_ps, end_ps, _, lag = critical_rows(steady.timeline).T
    length_ps = end_ps - start_ps
    names = _Names()
    cause = by_name(classes, "family", names.number)[task]
    cause[lag == 1] = names.number(LAUNCH_LATENCY)
    time_ps = np.bincount(cause, weights=length_ps, minlength=len(names.names))
    is_priced = cause != names.number(LAUNCH_LATENCY)
    sides = ("low_s", "high_s")
    away = [is_priced * ranges.away_s(classes, task, length_ps, side) for side in sides]
    below, above = (np.bincount(cause, weights=distances_s) for distances_s in away)
    total = float(steady.iteration_ps)
    parts = {name: float(spent) for name, spent in zip(names.names, time_ps.tolist(), strict=True) if spent > 0}
    if sum(parts.values()) != total:
        parts[SEVERAL] = total - sum(parts.values())
    ordered = sorted(parts.items(), key=lambda item: (-item[1], item[0]))
    reach = {name: (low, high) for name, low, high in zip(names.names, below.tolist(), above.tolist(), strict=False)}
    shares = tuple(
        PathShare(
            cause=name,
            time_s=ps_to_seconds(spent),
            share_frac=spent / (total or 1.0),
            below_s=reach.get(name, (0.0, 0.0))[0],
            above_s=reach.get(name, (0.0, 0.0))[1],
        )
        for name, spent in ordered
    )
    error = ranges.shared_causes(classes, task, cause)
    limits = [
        ranges.together_s(error, cause, (distances_s, ranges.chip_s(length_ps, side)), ps_to_seconds(total) * fraction)
        for side, distances_s, fraction in zip(sides, away, ranges.machine_frac(classes), strict=True)
    ]
    return shares, (limits[0], limits[1])


class _Names:
    """Numbers for names across classes, whose own numbering may differ."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {LAUNCH_LATENCY: 0}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._numbers)

    def number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))


def _top_ops(lowered: LoweredClass) -> tuple[OpShare, ...]:
    """Device-time consumers of one rank, by op and phase, largest first."""
    tasks, prices = lowered.tasks, lowered.prices
    device = np.flatnonzero(_IS_DEVICE[tasks.category])
    event = tasks.event[device]
    label = prices.of_events("label")[event].astype(np.int64)
    phase = prices.of_events("phase")[event].astype(np.int64)
    key = label * len(PHASES) + phase
    keys = np.flatnonzero(np.bincount(key))
    place = np.searchsorted(keys, key)
    time_s = np.bincount(place, weights=tasks.time_s[device], minlength=len(keys))
    worst = np.zeros(len(keys), dtype=np.int64)
    np.maximum.at(worst, place, tasks.source[device])
    starts = np.concatenate([[True], event[1:] != event[:-1]]) if len(event) else np.zeros(0, dtype=bool)
    calls = np.bincount(place[starts], minlength=len(keys))
    # In the order of the tasks: that of the labels depends on what was priced before, and with it the last digit of a sum.
    total_s = float(tasks.time_s[device].sum()) or 1.0
    names = [(prices.names[key // len(PHASES)], PHASES[key % len(PHASES)]) for key in keys.tolist()]
    order = sorted(range(len(names)), key=lambda i: (-time_s[i], *names[i]))
    return tuple(
        OpShare(
            name=names[i][0],
            phase=names[i][1],
            calls=int(calls[i]),
            time_s=float(time_s[i]),
            share_frac=float(time_s[i]) / total_s,
            source=Source(int(worst[i])).label,
        )
        for i in order[:N_TOP_OPS]
    )


def _coverage(classes: Sequence[LoweredClass]) -> dict[str, float]:
    """Share of priced time (device and host, weighted by ranks) by source, most trusted first."""
    time_s = np.zeros(len(Source))
    bins = np.repeat(np.arange(len(classes)) * len(Source), sizes(classes)) + ints(joined(classes, "source"))
    each = np.bincount(bins, weights=joined(classes, "time_s"), minlength=len(classes) * len(Source))
    for lowered, spent in zip(classes, each.reshape(len(classes), -1), strict=True):
        time_s += spent * len(lowered.rank_class.ranks)
    total_s = float(time_s.sum()) or 1.0
    return {source.label: float(time_s[source]) / total_s for source in Source if time_s[source] > 0}


def _flops(classes: Sequence[LoweredClass]) -> tuple[int, int]:
    """FLOPs of all ranks in one iteration, with and without recomputation."""
    done = model = 0
    for lowered in classes:
        flops = lowered.prices.of_events("flops")
        again = lowered.prices.of_events("recompute").astype(bool)
        done += int(flops.sum()) * len(lowered.rank_class.ranks)
        model += int(flops[~again].sum()) * len(lowered.rank_class.ranks)
    return done, model


def _conditions(settings: RunSettings) -> tuple[str, ...]:
    """What was asked for beside the usual, in words."""
    found = [f"what if {text}" for text in settings.what_if]
    if settings.input_copies:
        found.append(f"inputs {settings.input_copies}")
    found += [f"rank {rank} takes {factor:g} times as long" for rank, factor in sorted(settings.stragglers.items())]
    found += [f"{kind} times vary by {format_percent(spread)}" for kind, spread in sorted(settings.jitter.items())]
    return tuple(found)


def _unmodelled(classes: Sequence[LoweredClass]) -> list[str]:
    names: set[str] = set()
    for lowered in classes if (joined(classes, "source") == Source.UNMODELLED).any() else ():
        events = np.unique(lowered.tasks.event[lowered.tasks.source == Source.UNMODELLED])
        names |= {lowered.rank_class.events[i].label for i in events.tolist()}
    return [f"no rule for {name}: priced from its bytes" for name in sorted(names)]


def _substitutes(classes: Sequence[LoweredClass]) -> list[str]:
    """What each device runs in place of a kernel it lacks."""
    found: dict[str, None] = {}
    for lowered in classes:
        derived = lowered.prices.derived
        if "substitutes" not in derived:
            derived["substitutes"] = tuple(substitutes(lowered.prices.columns.ops, lowered.device))
        found |= dict.fromkeys(derived["substitutes"])
    return list(found)


def _convergence(steady: Steady) -> list[str]:
    if steady.converged:
        return []
    return [f"the iteration time had not settled after {steady.n_iterations} iterations; a mean is given"]


def _provenance(classes: Iterable[LoweredClass]) -> Mapping[str, str]:
    """Fit or datasheet behind each kernel family used, by `device/family`."""
    found: dict[str, str] = {}
    for lowered in classes:
        families = np.flatnonzero(np.bincount(lowered.tasks.family[_IS_KERNEL[lowered.tasks.category]]))
        for name in (lowered.tasks.names[i] for i in families.tolist()):
            fit = lowered.device.fits.get(name)
            origin = fit.provenance.get("source", fit.law) if fit else "datasheet roofline"
            found[f"{lowered.device.name}/{name}"] = origin
        found[f"{lowered.device.name}/{HOST_FAMILY}"] = lowered.device.host.source
    return dict(sorted(found.items()))
