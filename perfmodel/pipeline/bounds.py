"""Lower bounds of an iteration: with a network, a host, or all but the datasheet's peak rates taken away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from perfmodel.pipeline.prediction import Bounds
from perfmodel.pipeline.tasks import LoweredClass
from perfmodel.sim.compile import Compiled
from perfmodel.sim.rivals import OverlapModel
from perfmodel.sim.steady import CarryDep, simulate_steady_compiled
from perfmodel.sim.steady_slowed import SlowedPrograms
from perfmodel.sim.whatif import without_host, without_network
from perfmodel.units import PS_PER_S, ps_to_seconds


def find_bounds(
    classes: Sequence[LoweredClass],
    compiled: Compiled,
    carry: Sequence[CarryDep],
    model: OverlapModel | None,
    predicted_s: float,
) -> Bounds:
    """Bounds of the programs `compiled` of `classes`; on a CPU the host's part of an op stays with the op.

    `model` says how compute and communication slow each other. No bound is above `predicted_s`, the iteration itself: a
    collective that a host without cost issues earlier may slow more work, but it could also wait until it was issued before.
    """
    hostless = without_host(compiled)
    free = without_network(hostless)
    ideal_s = np.concatenate([lowered.tasks.ideal_s for lowered in classes])
    ideal = replace(free, duration_ps=np.minimum(np.rint(ideal_s * PS_PER_S).astype(np.int64), free.duration_ps))
    return Bounds(
        infinite_network_s=min(predicted_s, _iteration_s(without_network(compiled), carry)),
        infinite_host_s=min(predicted_s, _iteration_s(hostless, carry, model)),
        roofline_s=min(predicted_s, _iteration_s(ideal, carry)),
    )


def _iteration_s(compiled: Compiled, carry: Sequence[CarryDep], model: OverlapModel | None = None) -> float:
    slows = SlowedPrograms(compiled, carry, model) if model else None
    steady = slows.run() if slows else simulate_steady_compiled(compiled, carry_deps=carry)
    return ps_to_seconds(float(steady.iteration_ps))
