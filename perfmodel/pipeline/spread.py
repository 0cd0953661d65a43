"""Stragglers and jitter: ranks that are slower than their class, and percentiles of the iteration time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from perfmodel.errors import ConfigError
from perfmodel.metrics import percentile
from perfmodel.pipeline.pricebook import IntArray
from perfmodel.pipeline.settings import RunSettings
from perfmodel.pipeline.tasks import CATEGORIES, LoweredClass
from perfmodel.pipeline.whatif import with_times
from perfmodel.sim.compile import Compiled, compile_programs
from perfmodel.sim.perturb import Jitter, perturbed_durations
from perfmodel.sim.steady import Steady
from perfmodel.sim.sweep import Sweeper, warm_up
from perfmodel.units import ps_to_seconds

PERCENTILES: Mapping[str, float] = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
MAX_SAMPLED_RANKS = (
    256  # ranks simulated one by one; of a larger machine each class is represented by its share of them
)
WARM_UP_FROM_TASKS = 2_000_000  # simulated tasks over all samples from which loading the compiled loop pays


def split_stragglers(classes: Sequence[LoweredClass], stragglers: Mapping[int, float]) -> tuple[LoweredClass, ...]:
    """Each straggler in a class of its own, its kernels, copies and host work stretched; collectives keep their time.

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
        slow = [rank for rank in ranks if rank in stragglers]
        parts = [(tuple(rank for rank in ranks if rank not in stragglers), 1.0)]
        parts += [((rank,), stragglers[rank]) for rank in slow]
        for members, factor in parts:
            if members:
                found.append(_part(lowered, members, factor, len(found)))
    return tuple(found)


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


def sample_percentiles(steady: Steady, settings: RunSettings) -> dict[str, float]:
    """Iteration times (s) by percentile over seeded iterations that each follow the steady one.

    Every rank draws its own durations; a collective draws once for all its ranks.
    """
    compiled, release_ps = _every_rank(steady)
    jitter = Jitter(**{f"{kind}_frac": spread for kind, spread in settings.jitter.items()})
    if compiled.n_tasks * settings.n_samples > WARM_UP_FROM_TASKS:
        warm_up()
    times_s = []
    for seed in range(settings.seed, settings.seed + settings.n_samples):
        durations = _one_draw_per_group(compiled, perturbed_durations(compiled, jitter=jitter, seed=seed))
        _, _, end_ps = Sweeper(compiled, durations).run(release_ps)
        times_s.append(ps_to_seconds(int(end_ps.max()) - steady.timeline.begin_ps))
    return {name: percentile(times_s, fraction) for name, fraction in PERCENTILES.items()}


def _every_rank(steady: Steady) -> tuple[Compiled, IntArray]:
    """The programs with one class a rank, and when each task may start after the steady iteration."""
    timeline = steady.timeline
    source = timeline.compiled
    n_ranks = [program.n_ranks for program in source.programs]
    share = min(1.0, MAX_SAMPLED_RANKS / sum(n_ranks))
    programs, parts = [], []
    for cls, program in enumerate(source.programs):
        tasks = source.tasks_of(cls)
        arrays = replace(program.arrays(), duration_ps=timeline.duration_ps[tasks], n_ranks=1)
        copies = max(1, round(n_ranks[cls] * share))
        programs += [arrays] * copies
        parts += [timeline.release_ps[tasks]] * copies
    return compile_programs(programs), np.concatenate(parts)


def _one_draw_per_group(compiled: Compiled, durations_ps: IntArray) -> IntArray:
    wiring = compiled.wiring
    first = np.arange(compiled.n_tasks)
    in_group = wiring.group >= 0
    first[in_group] = wiring.group_member[wiring.group_ptr[wiring.group[in_group]]]
    return durations_ps[first]
