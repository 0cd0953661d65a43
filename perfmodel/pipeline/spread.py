"""Stragglers and jitter: ranks that are slower than their class, and percentiles of the iteration time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from perfmodel.errors import ConfigError
from perfmodel.metrics import percentile
from perfmodel.pipeline.pricebook import IntArray
from perfmodel.pipeline.settings import RunSettings
from perfmodel.pipeline.tasks import CATEGORIES, LoweredClass
from perfmodel.pipeline.whatif import with_times
from perfmodel.plan import Collective
from perfmodel.plan.columns import collective_of
from perfmodel.sim.compile import Compiled, compile_programs
from perfmodel.sim.perturb import FloatArray, Jitter, perturbed_durations
from perfmodel.sim.program import COMM, NO_GROUP, ArrayProgram
from perfmodel.sim.slowest import slowest_durations, stretches_of
from perfmodel.sim.steady import CarryDep, Steady, release_after, seam_of
from perfmodel.sim.sweep import Sweeper, warm_up
from perfmodel.units import ps_to_seconds

PERCENTILES: Mapping[str, float] = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
MAX_SAMPLED_RANKS = 256  # ranks that are simulated one by one; of more, each class by its slowest rank
MAX_FACTORS = 16  # of speed, of the ranks of one class
WARM_UP_ITERATIONS = 8  # drawn before the first that counts, so that delays have built up
WARM_UP_FROM_TASKS = 2_000_000  # simulated tasks over all samples from which loading the compiled loop pays


def split_stragglers(classes: Sequence[LoweredClass], stragglers: Mapping[int, float]) -> tuple[LoweredClass, ...]:
    """Stragglers in classes of their own, their kernels, copies and host work stretched; collectives keep their time.

    Ranks that are as slow as each other share a class. Of more than `MAX_FACTORS` factors in a class, those in between count
    as the next slower one that is kept: of ranks that meet in the same collectives the slowest alone sets the pace.

    Raises:
        ConfigError: a rank that does not exist.
    """
    known = {rank for lowered in classes for rank in lowered.rank_class.ranks}
    strange = sorted(set(stragglers) - known)
    if strange:
        raise ConfigError([f"stragglers: found rank {rank}, allowed 0 to {max(known)}" for rank in strange])
    found: list[LoweredClass] = []
    for lowered in classes:
        ranks = lowered.rank_class.ranks
        factors = np.array([stragglers.get(rank, 1.0) for rank in ranks])
        kept = _kept(np.unique(factors))
        parts: dict[float, list[int]] = {1.0: []}
        for rank, factor in zip(ranks, kept[np.searchsorted(kept, factors)].tolist(), strict=True):
            parts.setdefault(factor, []).append(rank)
        found += [_part(lowered, tuple(members), factor, len(found)) for factor, members in parts.items() if members]
    return tuple(found)


def _kept(factors: FloatArray) -> FloatArray:
    """At most MAX_FACTORS of different factors (ascending), evenly by their number, the largest among them."""
    places = np.linspace(0, len(factors) - 1, min(len(factors), MAX_FACTORS))
    found: FloatArray = factors[np.ceil(places).astype(np.int64)]
    return found


def _part(lowered: LoweredClass, ranks: tuple[int, ...], factor: float, cls: int) -> LoweredClass:
    part = replace(
        lowered,
        rank_class=replace(lowered.rank_class, ranks=ranks),
        program=replace(lowered.program, n_ranks=len(ranks)),
        carry=tuple(replace(dep, cls=cls) for dep in lowered.carry),
    )
    if factor == 1.0:
        return part
    is_collective = lowered.tasks.category == CATEGORIES.index("collective")
    return with_times(part, np.where(is_collective, 1.0, factor))


def sample_percentiles(
    classes: Sequence[LoweredClass], steady: Steady, carry: Sequence[CarryDep], settings: RunSettings
) -> dict[str, float]:
    """Iteration times (s) by percentile over seeded iterations that follow each other from the steady one on.

    What one iteration is late by, the next begins with. Up to `MAX_SAMPLED_RANKS` ranks draw their own durations one by one;
    of more, each class draws those of its slowest rank (`sim.slowest`). A collective draws once for all its ranks.
    """
    n_ranks = sum(len(lowered.rank_class.ranks) for lowered in classes)
    compiled, carried, ends = steady.timeline.compiled, carry, steady.timeline.end_ps
    durations = steady.timeline.duration_ps
    jitter = Jitter(**{f"{kind}_frac": spread for kind, spread in settings.jitter.items()})
    rng = np.random.default_rng(settings.seed)
    if n_ranks <= MAX_SAMPLED_RANKS:
        compiled, carried, ends = _every_rank(classes, steady, carry)

        def draw() -> IntArray:
            seed = int(rng.integers(2**32))
            return _one_draw_per_group(compiled, perturbed_durations(compiled, jitter=jitter, seed=seed))

    else:
        stretches = stretches_of(compiled, durations, _meeting(classes, compiled), jitter)

        def draw() -> IntArray:
            drawn = slowest_durations(compiled, durations, stretches, jitter, rng)
            return _one_draw_per_group(compiled, drawn)

    n_iterations = settings.n_samples + WARM_UP_ITERATIONS
    if compiled.n_tasks * n_iterations > WARM_UP_FROM_TASKS:
        warm_up()
    times_s = follow(compiled, carried, ends, draw, n_iterations)[WARM_UP_ITERATIONS:]
    return {name: percentile(times_s, fraction) for name, fraction in PERCENTILES.items()}


def follow(
    compiled: Compiled, carry: Sequence[CarryDep], ends: IntArray, draw: Callable[[], IntArray], n_iterations: int
) -> list[float]:
    """Times (s) of iterations in a row whose durations are drawn, after one whose tasks ended at `ends` (ps).

    Between the ends of two iterations, so that together they take as long as the whole run.
    """
    seam = seam_of(compiled, carry)
    depth = int(seam.distance.max()) if len(seam.distance) else 1
    past = [ends]
    times_s = []
    for _ in range(n_iterations):
        _, _, end_ps = Sweeper(compiled, draw()).run(release_after(seam, past, compiled.n_tasks))
        times_s.append(ps_to_seconds(int(end_ps.max()) - int(past[-1].max())))
        past = [*past[-(depth - 1) :], end_ps] if depth > 1 else [end_ps]
    return times_s


def _meeting(classes: Sequence[LoweredClass], compiled: Compiled) -> IntArray:
    """How many ranks of its class meet at each task: those in one group of its collective; 0 of tasks that meet nobody."""
    found = np.zeros(compiled.n_tasks, dtype=np.int64)
    for cls, lowered in enumerate(classes):
        mine = frozenset(lowered.rank_class.ranks)
        counts: dict[tuple[int, ...], int] = {}
        for ranks in {id(c.ranks): c.ranks for c in _collectives(lowered)}.values():
            counts[ranks] = len(mine.intersection(ranks)) if len(ranks) > 1 else 0
        columns = lowered.prices.columns
        sizes = np.zeros(columns.size, dtype=np.int64)
        sizes[columns.collective_at] = [counts[c.ranks] for c in _collectives(lowered)]
        tasks = compiled.tasks_of(cls)
        comm = np.flatnonzero(compiled.kinds_of(cls) == COMM)
        found[tasks.start + comm] = sizes[lowered.tasks.event[comm]]
    return found


def _collectives(lowered: LoweredClass) -> list[Collective]:
    return [collective_of(event) for event in lowered.prices.columns.collectives]


def _every_rank(
    classes: Sequence[LoweredClass], steady: Steady, carry: Sequence[CarryDep]
) -> tuple[Compiled, list[CarryDep], IntArray]:
    """The programs with one class a rank, what they wait for across iterations, and when tasks of the steady one ended.

    A rank meets the ranks of its own group, not all that its class meets: a mesh has many groups that do the same.
    """
    timeline = steady.timeline
    source = timeline.compiled
    n_ranks = sum(len(lowered.rank_class.ranks) for lowered in classes)
    programs: list[ArrayProgram] = []
    ends: list[IntArray] = []
    carried: list[CarryDep] = []
    for cls, lowered in enumerate(classes):
        tasks = source.tasks_of(cls)
        arrays = replace(source.programs[cls].arrays(), duration_ps=timeline.duration_ps[tasks], n_ranks=1)
        mine = [dep for dep in carry if dep.cls == cls]
        for firsts in _first_members(lowered):
            carried += [replace(dep, cls=len(programs)) for dep in mine]
            own = np.where(arrays.group == NO_GROUP, NO_GROUP, arrays.group * n_ranks + firsts[lowered.tasks.event])
            programs.append(replace(arrays, group=own))
            ends.append(timeline.end_ps[tasks])
    return compile_programs(programs), carried, np.concatenate(ends)


def _first_members(lowered: LoweredClass) -> IntArray:
    """For each rank of a class and each event the first rank of the group that this rank meets there: [ranks, events].

    Of groups that a collective does not list (tied embeddings on the first and the last stage), those of the other ranks of a
    class lie as its own does, further on.
    """
    ranks, columns = lowered.rank_class.ranks, lowered.prices.columns
    found = np.zeros((len(ranks), columns.size), dtype=np.int64)
    known: dict[tuple[int, int], IntArray] = {}
    for at, collective in zip(columns.collective_at.tolist(), _collectives(lowered), strict=True):
        key = id(collective.ranks), id(collective.siblings)
        if key not in known:
            groups = (collective.ranks, *collective.siblings)
            first_of = {rank: min(group) for group in groups for rank in group}
            further_on = min(collective.ranks) - ranks[0]
            known[key] = np.array([first_of.get(rank, rank + further_on) for rank in ranks])
        found[:, at] = known[key]
    return found


def _one_draw_per_group(compiled: Compiled, durations_ps: IntArray) -> IntArray:
    wiring = compiled.wiring
    first = np.arange(compiled.n_tasks)
    in_group = wiring.group >= 0
    first[in_group] = wiring.group_member[wiring.group_ptr[wiring.group[in_group]]]
    return durations_ps[first]
