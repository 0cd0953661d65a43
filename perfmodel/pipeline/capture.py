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
    events: Sequence[Event], n_kernels: NDArray[np.int64], syncs: BoolArray, input_copies: BoolArray
) -> Capture:
    """Stretches between host syncs.

    Input copies (new addresses every step), what syncs, and an optimizer that the loop keeps out stay eager.

    Raises:
        ConfigError: every kernel lies at a host sync, so that nothing can be captured.
    """
    kept_out = np.array(
        [event.op is not None and bool(event.op.attrs.get("uncaptured")) for event in events], dtype=bool
    )
    member = ~(syncs | input_copies | kept_out)
    opens = member & ~np.concatenate([[False], member[:-1]])
    stretch = np.cumsum(opens) - 1
    nodes = np.bincount(stretch[member], weights=n_kernels[member], minlength=int(opens.sum()))
    if not nodes.sum():
        raise ConfigError("mode cuda_graph: nothing can be captured, every kernel waits for the host")
    replay_s = np.zeros(len(events))
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
