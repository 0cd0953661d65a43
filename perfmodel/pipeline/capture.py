"""CUDA-graph mode: which stretches of a rank's events are captured, and what a replay costs the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import ConfigError
from perfmodel.plan.events import Event
from perfmodel.units import NS_PER_S, US_PER_S

# Host time of one cudaGraphLaunch: 2 us and 200 ns a node up to CUDA 11.8; straight-line graphs take a near constant 2.5 us
# since 12.6 (NVIDIA technical blog, Constant Time Launch for Straight-Line CUDA Graphs, September 2024). Graphs of two or
# more streams, as those of a step that communicates, are no straight lines: the older figure stands.
REPLAY_S = 2 / US_PER_S
REPLAY_NODE_S = 200 / NS_PER_S

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Capture:
    """Which events are captured, and the host seconds of a replay at the first event of each captured stretch."""

    member: BoolArray
    replay_s: FloatArray


def captured(
    kept_out: BoolArray,
    n_kernels: NDArray[np.int64],
    syncs: BoolArray,
    input_copies: BoolArray,
    first_event: NDArray[np.int64],
) -> Capture:
    """Stretches between host syncs of the events of classes that begin at `first_event`.

    Input copies (new addresses every step), what syncs, and what the loop keeps out (an optimizer) stay eager.

    Raises:
        ConfigError: every kernel lies at a host sync, so that nothing can be captured.
    """
    member = ~(syncs | input_copies | kept_out)
    follows = np.concatenate([[False], member[:-1]])
    follows[first_event[:-1]] = False
    opens = member & ~follows
    stretch = np.cumsum(opens) - 1
    nodes = np.bincount(stretch[member], weights=n_kernels[member], minlength=int(opens.sum()))
    has = np.concatenate([[0.0], np.cumsum(member * n_kernels)])[first_event]
    if not np.diff(has).all():
        raise ConfigError("mode cuda_graph: nothing can be captured, every kernel waits for the host")
    replay_s = np.zeros(len(member))
    # A stretch without kernels has nothing to replay.
    replay_s[opens] = np.where(nodes > 0, REPLAY_S + REPLAY_NODE_S * nodes, 0.0)
    return Capture(member=member, replay_s=replay_s)


def capture_notes(events: Sequence[Event]) -> list[str]:
    """What stays outside the captured graphs, in words."""
    names = sorted(
        {event.label for event in events if event.host_waits or (event.op is not None and event.op.host_sync)}
    )
    if not names:
        return []
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return [f"cuda_graph: not captured, the host waits there: {shown}"]
