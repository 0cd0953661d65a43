"""Bounds and what-ifs: the same programs with some durations scaled, or with a host or network that costs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

import numpy as np

from perfmodel.errors import GraphError
from perfmodel.sim.compile import Compiled
from perfmodel.sim.program import HOST, INPUT, KIND_CODES, IntArray, StreamKind


def scaled_durations(compiled: Compiled, factors: Mapping[StreamKind, Fraction | float]) -> IntArray:
    """Durations (ps) with those of each kind multiplied by its factor (0: free), rounded to whole picoseconds.

    Raises:
        GraphError: a factor below 0.
    """
    durations = compiled.duration_ps.copy()
    kinds = np.concatenate([compiled.kinds_of(cls) for cls in range(compiled.n_classes)])
    for kind, factor in factors.items():
        if not factor >= 0:
            raise GraphError(f"factor {factor} for {kind}; 0 or more is allowed")
        mine = kinds == KIND_CODES[kind]
        durations[mine] = np.rint(durations[mine] * float(factor)).astype(np.int64)
    return durations


def without_host(compiled: Compiled) -> Compiled:
    """The programs with host work, inputs and launch latency free: what CUDA graphs or an infinitely fast host could reach.

    Host tasks keep their order and their waits, so a blocking sync still holds back what is launched after it.
    """
    kinds = np.concatenate([compiled.kinds_of(cls) for cls in range(compiled.n_classes)])
    wiring = compiled.wiring
    owner = np.repeat(np.arange(compiled.n_tasks), np.diff(wiring.dep_ptr))
    touches_host = (kinds[wiring.dep_index] == HOST) | (kinds[owner] == HOST)
    return replace(
        compiled,
        duration_ps=np.where((kinds == HOST) | (kinds == INPUT), 0, compiled.duration_ps),
        dep_lag_ps=np.where(touches_host, 0, compiled.dep_lag_ps),
    )


def without_network(compiled: Compiled) -> Compiled:
    """The programs with communication free; ranks still wait for each other."""
    return replace(compiled, duration_ps=scaled_durations(compiled, {"comm": 0}))
