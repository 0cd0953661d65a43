"""How many tasks an event becomes, and the host's time for it, by device and mode of execution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.db.device import Device
from perfmodel.graph import PHASES
from perfmodel.kernels.host import NO_GRAD_WEIGHT
from perfmodel.pipeline.capture import Capture, captured
from perfmodel.pipeline.pricebook import FloatArray, IntArray, Prices
from perfmodel.pipeline.settings import RunSettings
from perfmodel.sim.program import COMM, COMPUTE, COPY, COPY_BACK
from perfmodel.units import PS_PER_S, US_PER_S

_INPUT = PHASES.index("input")
# Host time of a kernel launched by inductor's generated code beyond the driver's launch call (6.8 less 3.0 us), and of
# entering a compiled graph: guards, arguments, checks (44.3 less 6.8 us). meta-pytorch/tritonbench pull request 1017, GB200.
COMPILED_KERNEL_S = 3.8 / US_PER_S
COMPILED_GRAPH_S = 37.5 / US_PER_S

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Tasks of each event, in this order: `head` host tasks, kernels (each after its own host task if `eager`), `sync`.

    `host_ps` is host time of the event without its kernels after the first, and without syncs.
    """

    head: IntArray
    n_kernels: IntArray
    eager: BoolArray
    sync: IntArray
    host_ps: IntArray
    launch_ps: IntArray
    sync_ps: IntArray

    @property
    def counts(self) -> IntArray:
        """Tasks of each event."""
        return self.head + self.n_kernels * (1 + self.eager) + self.sync


def cuda_layout(prices: Prices, device: Device, settings: RunSettings, first_event: IntArray) -> Layout:
    """Tasks of the events of classes that begin at `first_event` on a CUDA device.

    Raises ConfigError for a mode that the model does not allow.
    """
    n_kernels = ints(prices.of_events("n_kernels"))
    dispatch_s = floats(prices.of_events("dispatch_s"))
    if not settings.gradients:
        dispatch_s = dispatch_s * NO_GRAD_WEIGHT
    sync = ints(prices.of_events("host_sync"))
    sync_s = np.where(sync > 0, device.host.sync_s, 0.0)
    # A copy from pageable memory is itself the wait; no call of its own.
    sync = sync | (input_copies(prices, pinned=False) & (n_kernels > 0) & (sync == 0))
    capture: Capture | None = None
    if settings.mode == "cuda_graph":
        capture = captured(_kept_out(prices), n_kernels, sync > 0, input_copies(prices), first_event)
        dispatch_s = np.where(capture.member, 0.0, dispatch_s) + capture.replay_s
    elif settings.mode == "compile":
        dispatch_s = _compiled_dispatch(prices, n_kernels, dispatch_s, first_event)
    member = np.zeros(len(n_kernels), dtype=bool) if capture is None else capture.member
    launch_s = np.where(member, 0.0, device.host.launch_s)
    return Layout(
        head=np.zeros_like(n_kernels) if capture is None else (capture.replay_s > 0).astype(np.int64),
        n_kernels=n_kernels,
        eager=~member,
        sync=sync,
        host_ps=_ps(dispatch_s) + np.where(n_kernels > 0, _ps(launch_s), 0),
        launch_ps=_ps(launch_s),
        sync_ps=_ps(sync_s),
    )


def _kept_out(prices: Prices) -> BoolArray:
    """Events that the loop keeps out of captured graphs."""
    columns = prices.columns
    found = np.zeros(columns.size, dtype=bool)
    found[columns.op_at] = [bool(op.attrs.get("uncaptured")) for op in columns.ops]
    return found


def _compiled_dispatch(
    prices: Prices, n_kernels: IntArray, dispatch_s: FloatArray, first_event: IntArray
) -> FloatArray:
    """Host time beyond launches where compiled code issues the ops: all but inputs, the optimizer and collectives.

    Each kernel costs its launcher; the compiled forward and the compiled backward each cost their entry once.
    """
    phase, is_op = prices.of_events("phase"), prices.of_events("stream") == COMPUTE
    backward = (phase == PHASES.index("backward")) & is_op
    forward = np.isin(phase, [PHASES.index("forward"), PHASES.index("loss")]) & is_op
    found = np.where(forward | backward, n_kernels * COMPILED_KERNEL_S, dispatch_s)
    for part in (forward, backward):
        at = np.flatnonzero(part)
        found[at[np.unique(np.searchsorted(first_event, at, side="right"), return_index=True)[1]]] += COMPILED_GRAPH_S
    return found


def input_copies(prices: Prices, **attributes: bool) -> BoolArray:
    """Which events copy a step's inputs to the device, in such a way (`graph.INPUT_COPIES`)."""
    copies: BoolArray = (prices.of_events("phase") == _INPUT) & (prices.of_events("stream") == COPY)
    if attributes and copies.any():
        columns, wanted = prices.columns, attributes.items()
        ops, places = list(columns.ops), np.flatnonzero(copies[columns.op_at])
        alike = [wanted <= ops[place].attrs.items() for place in places.tolist()]
        copies[columns.op_at[places]] = alike
    return copies


def cpu_layout(prices: Prices) -> Layout:
    """Tasks of events on a CPU: one an op."""
    n_kernels = ints(prices.of_events("n_kernels"))
    is_collective = is_communication(ints(prices.of_events("stream")))
    zeros = np.zeros_like(n_kernels)
    return Layout(
        head=np.zeros_like(n_kernels),
        n_kernels=np.ones_like(n_kernels),
        eager=is_collective,
        sync=np.zeros_like(n_kernels),
        host_ps=_ps(floats(prices.of_events("dispatch_s"))),
        launch_ps=zeros,
        sync_ps=zeros,
    )


def is_communication(streams: IntArray) -> BoolArray:
    """Which of these stream numbers carry communication."""
    found: BoolArray = (streams == COMM) | ((streams > COPY) & (streams != COPY_BACK))
    return found


def ints(values: NDArray[np.generic]) -> IntArray:
    """The same values as int64."""
    return values.astype(np.int64, copy=False)


def floats(values: NDArray[np.generic]) -> FloatArray:
    """The same values as float64."""
    return values.astype(np.float64, copy=False)


def _ps(time_s: FloatArray) -> IntArray:
    """Whole picoseconds: host times add up across events, so they are rounded before they are summed."""
    return np.rint(time_s * PS_PER_S).astype(np.int64)
