"""States in host memory: what travels over the host link, and the optimizer step as work of the host.

With shard `parameters` as FSDP2's `CPUOffloadPolicy` does (torch.distributed.fsdp, `_fsdp_param.all_gather_inputs` and
`foreach_reduce`): shards of parameters are copied to the device before every all-gather, shards of gradients to pinned host
memory after their reduce-scatter; a later micro-batch's are copied while the host waits, which adds them there. With shard
`optimizer` or `gradients` as ZeRO-Offload does (Ren et al. 2021, arXiv:2101.06840, section 4): shards of gradients go to the
host bucket by bucket, updated parameters come back before they are gathered. The host waits for all gradients before it
updates its shard, and does nothing else meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from perfmodel.graph import ITEMSIZE_BYTES, Op, Phase, TensorSpec
from perfmodel.plan.events import Event, op_event
from perfmodel.plan.sharded_states import GRADIENT_STORAGE, UNIT_STORAGE, Inserted

# Bytes a second of an optimizer that is not fused over those of one that is: every pass of torch's AdamW allocates what it
# gives; 84 bytes a parameter in 23.8 ns against 32 in 2.60, the machine of `DataParallel.host_memory`.
UNFUSED_FRAC = 0.29
HOST_STORAGE = 1 << 48  # storages on the host of what travels: this plus that of its buffer
MAX_COPIES = 8192  # copies that are remembered: the same op object is priced once
TO_DEVICE, TO_HOST, UPDATE = "perfmodel.host_to_device_copy", "perfmodel.device_to_host_copy", "perfmodel.host_update"


def fetched(inserted: Inserted) -> Inserted:
    """With the copy of a rank's shards before each all-gather of parameters."""
    return {at: [one for event in events for one in _fetch(event)] for at, events in inserted.items()}


def _fetch(event: Event) -> list[Event]:
    collective = event.collective
    if collective is None or collective.op != "all_gather":
        return [event]
    (storage,) = event.writes
    return [to_device(collective.bytes, len(collective.ranks), collective.dtype, storage, event.phase), event]


def returned(inserted: Inserted, *, adds_bytes_per_s: float = 0.0) -> Inserted:
    """With the copy of a rank's shard of gradients after what reduces it last.

    `adds_bytes_per_s`: the host waits for each copy and adds it to what is there, at this rate; 0 for the first micro-batch.
    """
    return {at: _returned(events, adds_bytes_per_s) for at, events in inserted.items()}


def _returned(events: Sequence[Event], adds_bytes_per_s: float) -> list[Event]:
    found = []
    for number, event in enumerate(events):
        found.append(event)
        following = events[number + 1] if number + 1 < len(events) else None
        again = following is not None and following.collective is not None and following.writes == event.writes
        if event.collective is not None and event.collective.op in ("reduce_scatter", "all_reduce") and not again:
            found += _give_back(event, adds_bytes_per_s)
    return found


def _give_back(event: Event, adds_bytes_per_s: float) -> list[Event]:
    collective = event.collective
    if collective is None:
        raise RuntimeError("gradients are reduced by a collective")
    n_parts = len(collective.ranks) if collective.op == "reduce_scatter" else 1  # copies reduce a shard
    (storage,) = event.writes
    n_bytes = -(-collective.bytes // n_parts)
    waits = adds_bytes_per_s > 0
    op = _copy(TO_HOST, n_bytes // ITEMSIZE_BYTES[collective.dtype], collective.dtype, "backward", waits=waits)
    copy = op_event(op, frozenset({storage}), frozenset({HOST_STORAGE + storage}))
    if not waits:
        return [copy]
    return [copy, op_event(host_update(3 * n_bytes, adds_bytes_per_s, "backward"))]  # read twice, written once


def to_device(n_bytes: int, n_parts: int, dtype: str, storage: int, phase: Phase) -> Event:
    """The copy of `1 / n_parts` of `n_bytes` into a buffer on the device."""
    op = _copy(TO_DEVICE, -(-n_bytes // n_parts) // ITEMSIZE_BYTES[dtype], dtype, phase)
    return replace(op_event(op, frozenset(), frozenset({storage})), stream="copy")


@lru_cache(maxsize=MAX_COPIES)
def _copy(name: str, n_elems: int, dtype: str, phase: Phase, *, waits: bool = False) -> Op:
    """A copy over the host link; a device has an engine for each direction, so that both run side by side."""
    spec = TensorSpec(id=HOST_STORAGE, shape=(n_elems,), dtype=dtype, strides=(1,), storage=HOST_STORAGE)
    return Op(
        id=-1, name=name, inputs=(spec,), input_names=("self",), outputs=(spec,), attrs={"pinned": True}, phase=phase,
        stream="copy_back" if name == TO_HOST else "copy", host_sync=waits,
    )  # fmt: skip


@lru_cache(maxsize=MAX_COPIES)
def host_update(n_bytes: int, bytes_per_s: float, phase: Phase) -> Op:
    """Work of the host's thread that reads and writes `n_bytes` of its memory."""
    return Op(
        id=-1, name=UPDATE, attrs={"host_bytes": n_bytes, "host_bytes_per_s": bytes_per_s}, phase=phase
    )  # fmt: skip


def arrived(is_parameters: bool) -> Event:
    """What makes the host wait for all copies that it asked for."""
    home = GRADIENT_STORAGE if is_parameters else UNIT_STORAGE
    op = _copy(TO_HOST, 0, "uint8", "backward", waits=True)
    return op_event(op, frozenset({HOST_STORAGE + home}), frozenset())


def optimizer_on_host(ops: Sequence[Op], bytes_per_s: float) -> list[Op]:
    """The optimizer's ops as host work: each reads its inputs from the host's memory and writes its outputs there."""
    rates = (bytes_per_s * (1.0 if "fused" in op.name else UNFUSED_FRAC) for op in ops)
    return [
        host_update(sum(spec.bytes for spec in (*op.inputs, *op.outputs)), rate, "optimizer")
        for op, rate in zip(ops, rates, strict=True)
    ]
