"""Stragglers and jitter: the same programs with durations stretched by given or seeded random factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import GraphError
from perfmodel.metrics import percentile
from perfmodel.sim.compile import Compiled
from perfmodel.sim.engine import simulate_compiled
from perfmodel.sim.program import COMM, KIND_CODES, IntArray, StreamKind

FloatArray = NDArray[np.float64]
JITTERS = (*(kind for kind in KIND_CODES if kind != "input"), "rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """Random spread of task durations: log-normal with mean 1, the given coefficient of variation by stream kind.

    `rank_frac` is that of a factor which all tasks of a rank but its communication share in an iteration.
    """

    host_frac: float = 0.0
    compute_frac: float = 0.0
    comm_frac: float = 0.0
    copy_frac: float = 0.0
    rank_frac: float = 0.0

    def of(self, kind: StreamKind) -> float:
        """Coefficient of variation of a stream kind; what makes inputs varies as the host does."""
        of_kind = {"host": self.host_frac, "compute": self.compute_frac, "comm": self.comm_frac, "copy": self.copy_frac}
        return of_kind["host" if kind == "input" else kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Makespans of several seeded runs, ascending, in ps."""

    makespans_ps: tuple[int, ...]

    def percentile_ps(self, fraction: float) -> float:
        """Makespan that `fraction` (0 to 1) of the runs do not pass."""
        return percentile(self.makespans_ps, fraction)


def perturbed_durations(
    compiled: Compiled, *, slowdowns: Mapping[int, float] | None = None, jitter: Jitter | None = None, seed: int = 0
) -> IntArray:
    """Durations with the classes in `slowdowns` stretched (1.1: ten percent slower; not their communication), and jitter.

    The same seed gives the same durations. A straggler of a class of several ranks must be split off as its own class.

    Raises:
        GraphError: a class that does not exist, or a factor that is not positive.
    """
    factor = np.ones(compiled.n_tasks)
    kinds = np.concatenate([compiled.kinds_of(cls) for cls in range(compiled.n_classes)])
    for cls, slowdown in (slowdowns or {}).items():
        if not 0 <= cls < compiled.n_classes or not slowdown > 0:
            raise GraphError(
                f"slowdown {slowdown} of class {cls}: classes are 0 to {compiled.n_classes - 1}, factors above 0"
            )
        tasks = compiled.tasks_of(cls)
        factor[tasks] = np.where(kinds[tasks] == COMM, 1.0, slowdown)
    if jitter is not None:
        rng = np.random.default_rng(seed)
        factor *= lognormal(variation_of(kinds, jitter), rng.standard_normal(compiled.n_tasks))
        if jitter.rank_frac:
            of_rank = lognormal(np.array(jitter.rank_frac), rng.standard_normal(compiled.n_classes))
            factor *= np.where(kinds == COMM, 1.0, np.repeat(of_rank, np.diff(compiled.wiring.offsets)))
    return np.rint(compiled.duration_ps * factor).astype(np.int64)


def variation_of(kinds: IntArray, jitter: Jitter) -> FloatArray:
    """Coefficient of variation of tasks of these kinds."""
    variation = np.zeros(len(kinds))
    for kind, code in KIND_CODES.items():
        variation[kinds == code] = jitter.of(kind)
    return variation


def lognormal(variation: FloatArray, normal: FloatArray) -> FloatArray:
    """Factors of mean 1 and a coefficient of variation, from standard normal numbers."""
    sigma = np.sqrt(np.log1p(variation**2))
    factors: FloatArray = np.exp(normal * sigma - sigma**2 / 2)
    return factors


def spread(
    compiled: Compiled, jitter: Jitter, *, seeds: Sequence[int], slowdowns: Mapping[int, float] | None = None
) -> Spread:
    """Makespans under one jitter for several seeds."""
    runs = [
        simulate_compiled(compiled, perturbed_durations(compiled, slowdowns=slowdowns, jitter=jitter, seed=seed))
        for seed in seeds
    ]
    return Spread(makespans_ps=tuple(sorted(run.makespan_ps for run in runs)))
