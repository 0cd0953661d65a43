"""What a collective takes from the kernels beside it on a GPU, and they from it: multiprocessors and memory bandwidth.

Each channel of NCCL is a thread block that keeps a multiprocessor busy while the collective runs, so compute kernels are left
with a share 1 - channels / SMs of their pace. A byte that a collective passes on crosses device memory several times (read
from the input, written into a buffer by the neighbour, read from there, written to the output). Where that traffic and a
kernel together want more than the memory gives, both get less: of two that want shares 1 and b of the memory each runs at
1 / (1 + b) of its pace, so that b / (1 + b) is lost, times how much of the kernel's time is bound by memory.

    lost by a kernel     = scale * (channels / SMs + memory_frac * b / (1 + b))
    lost by a collective = scale * memory_frac * b / (1 + b)

`scale` (`Device.overlap`) is measured: what kernels lost in two traces of A100 over what the law says they lose. It is carried
over to other GPUs as derived. Kernels whose blocks fill whole waves lose a wave or nothing; the law is their mean.

Kernels beside collectives, and the law without its scale (`traces.overlap`): SendRecv on 8 channels 1.07 times as long
(law 1.08), on 24 channels 1.28 (1.29), all_reduce of 181 MB on 24 channels 2.5 (1.3 to 2.1), all_reduce on 8 channels
over PCIe 1.26 (1.08). Others: compute 19 % slower on average, 40 % at most, in training on A100 and H100 and two AMD GPUs
(arXiv 2507.03114); a matrix product of one wave on H100 beside 24 channels at 47 % instead of 80 % of the peak (NVIDIA
developer forum, thread 337991).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from perfmodel.collectives import CollectiveEstimate
from perfmodel.collectives.candidates import narrow
from perfmodel.collectives.group import group_of
from perfmodel.collectives.regime import PAIRWISE_OPS
from perfmodel.db.device import Device
from perfmodel.pipeline.prediction import Prediction
from perfmodel.pipeline.pricebook import FloatArray, IntArray
from perfmodel.pipeline.tasks import LoweredClass
from perfmodel.plan.columns import collective_of
from perfmodel.plan.events import Collective
from perfmodel.sim.compile import Compiled
from perfmodel.sim.overlap_loop import FULL_PACE, MOST_LOST
from perfmodel.sim.program import COMM, COMPUTE
from perfmodel.sim.rivals import OverlapModel
from perfmodel.sim.steady_slowed import Slowed
from perfmodel.topology import Topology
from perfmodel.units import format_time, ps_to_seconds

# Times that a byte passed on crosses the memory of the rank that passes it on (NCCL's device code, primitives of the Simple
# protocol). Rings and trees: read from the own buffer or input, written by the neighbour, read or written at the output.
RING_CROSSINGS = 3.0
# Pairs: read and sent; written by the peer, read, and written to the output.
PAIR_CROSSINGS = 4.0
# NVLink SHARP: the switch reads and writes each byte of an all_reduce once, for 2 (n - 1) / n bytes of bus bandwidth.
NVLS_CROSSINGS = 1.0
NETWORK_PAIR_CHANNELS = 2  # of a send or receive between hosts (NCCL_NCHANNELS_PER_NET_PEER: NVIDIA/nccl issue 1424)

# (held, traffic) by device, operation, ranks, algorithm and channels; ranks by identity: to hash thousands costs more
Known = dict[tuple[str, str, int, str, int], tuple[int, int]]
MEASURED = "shares of multiprocessors and memory, scaled by traces of this device"
DERIVED = "shares of multiprocessors and memory, scaled by traces of A100"


def overlap_model(
    classes: Sequence[LoweredClass],
    compiled: Compiled,
    collectives: Mapping[int, CollectiveEstimate],
    topology: Topology,
) -> OverlapModel | None:
    """The shares of all tasks of `compiled`, the programs of `classes`; None where nothing slows anything."""
    if all(lowered.device.kind != "cuda" for lowered in classes):
        return None
    held, traffic, memory = (np.zeros(compiled.n_tasks, dtype=np.int64) for _ in range(3))
    known: Known = {}
    for cls, lowered in enumerate(classes):
        if lowered.device.kind != "cuda":
            continue
        tasks, kinds = compiled.tasks_of(cls), compiled.kinds_of(cls)
        comm, compute = np.flatnonzero(kinds == COMM), np.flatnonzero(kinds == COMPUTE)
        of_events = _loads(lowered, collectives, topology, known)[:, lowered.tasks.event[comm]]
        held[tasks.start + comm], traffic[tasks.start + comm] = of_events
        memory[tasks.start + compute] = _permille(lowered.tasks.memory_frac[compute])
    return OverlapModel(held=held, traffic=traffic, memory=memory) if held.any() or traffic.any() else None


def with_slowdown(prediction: Prediction, classes: Sequence[LoweredClass], slowed: Slowed) -> Prediction:
    """The prediction with the range of its slowdown in its own, its origin, and a note where it was not measured."""
    lost_s = ps_to_seconds(float(slowed.steady.iteration_ps - slowed.plain_ps))
    devices = {lowered.device.name: lowered.device for lowered in classes if lowered.device.kind == "cuda"}
    if lost_s <= 0 or not devices:
        return prediction
    time_s = prediction.iteration_time_s
    below_s = lost_s * max(1 - device.overlap.low_frac for device in devices.values())
    above_s = lost_s * max(device.overlap.high_frac - 1 for device in devices.values())
    origins = {
        f"{name}/overlap": MEASURED if device.overlap.is_measured else DERIVED for name, device in devices.items()
    }
    carried = sorted(name for name, device in devices.items() if not device.overlap.is_measured)
    note = (
        f"{', '.join(carried)}: how much compute and communication slow each other is derived from A100; it adds "
        f"{format_time(lost_s)} here"
    )
    return replace(
        prediction,
        low_s=max(time_s - math.hypot(time_s - prediction.low_s, below_s), 0.0),
        high_s=time_s + math.hypot(prediction.high_s - time_s, above_s),
        provenance=dict(sorted({**prediction.provenance, **origins}.items())),
        notes=(*prediction.notes, *([note] if carried else [])),
    )


def _loads(
    lowered: LoweredClass, collectives: Mapping[int, CollectiveEstimate], topology: Topology, known: Known
) -> IntArray:
    """Rows `held` and `traffic` (permille) with a column an event; what does not change with prices is found once."""
    derived, key = lowered.prices.derived, ("loads", topology.fingerprint)
    if key not in derived:
        columns = lowered.prices.columns
        found = np.zeros((2, columns.size), dtype=np.int64)
        for number, instance, event in zip(
            columns.collective_at.tolist(), columns.instance.tolist(), columns.collectives, strict=True
        ):
            collective, estimate = collective_of(event), collectives[instance]
            same = lowered.device.name, collective.op, id(collective.ranks), estimate.algorithm, estimate.n_channels
            if same not in known:
                known[same] = shares(collective, estimate, topology, lowered.device)
            found[:, number] = known[same]
        derived[key] = found
    loads: IntArray = derived[key]
    return loads


def shares(collective: Collective, estimate: CollectiveEstimate, topology: Topology, device: Device) -> tuple[int, int]:
    """(held, traffic) of one collective in permille.

    They depend on the group and the algorithm alone: while bytes move they move at the rate of the group's narrowest lane.
    """
    if len(collective.ranks) == 1:
        return 0, 0
    group = group_of(topology, collective.ranks)
    pairs = collective.op in PAIRWISE_OPS
    channels = estimate.n_channels
    if collective.op == "send_recv" and group.n_units > 1:
        channels = min(channels, NETWORK_PAIR_CHANNELS)
    crossings = PAIR_CROSSINGS if pairs else RING_CROSSINGS
    if estimate.algorithm.startswith("nvls"):
        crossings = NVLS_CROSSINGS
    wanted = crossings * narrow(group).bus_bytes_per_s / device.memory_bytes_per_s
    scale = device.overlap.scale
    held, traffic = _permille(scale * np.array([channels / device.n_sms, wanted / (1 + wanted)]), MOST_LOST).tolist()
    return held, traffic


def _permille(share: FloatArray, most: int = FULL_PACE) -> IntArray:
    return np.minimum(np.rint(share * FULL_PACE), most).astype(np.int64)
