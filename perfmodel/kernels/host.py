"""Host time of an op: what the thread that drives the device spends to issue it."""

from __future__ import annotations

from perfmodel.db.device import Device
from perfmodel.graph import Op


def host_cost_s(op: Op, n_kernels: int, device: Device) -> float:
    """Host seconds to dispatch `op` and launch its `n_kernels` kernels on `device`."""
    dispatch_s = device.host.backward_op_s if op.phase == "backward" else device.host.op_dispatch_s
    return dispatch_s + n_kernels * device.host.launch_s
