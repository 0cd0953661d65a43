"""What the host does around the all-to-alls of table-wise parallelism: one flat tensor to send, pieces put together again.

Indices, pooled rows and gradients of several tables travel in one tensor (`distributed_forward` of facebookresearch/dlrm
concatenates so too), and what arrives is ordered by sender where an owner needs it by table. Of a job on GPUs batched
operators read most of it as it comes (`sharded`), and copies within device memory are short: this is for CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from perfmodel.graph import Op, Phase, TensorSpec
from perfmodel.plan.events import Event, op_event

SENT_STORAGE = 1 << 52  # storages of tensors to send: this plus the number of the exchange
RECEIVED_STORAGE = 1 << 53  # of received ones


def flat(dtype: str, n_elems: int, storage: int) -> TensorSpec:
    """A row of elements."""
    return TensorSpec(id=storage, shape=(n_elems,), dtype=dtype, strides=(1,), storage=storage)


def packed(sources: Sequence[TensorSpec], n_slices: int, number: int, phase: Phase) -> Event:
    """One tensor to send out of `n_slices` slices of each source (one an addressee)."""
    parts = tuple(flat(spec.dtype, spec.n_elems // n_slices, spec.storage) for spec in sources for _ in range(n_slices))
    dtype = sources[0].dtype if sources else "float32"
    out = flat(dtype, sum(spec.n_elems for spec in sources), SENT_STORAGE + number)
    return _cat(parts, out, phase)


def unpacked(outputs: Sequence[TensorSpec], n_senders: int, number: int, phase: Phase) -> list[Event]:
    """Each table's tensor out of one piece of a received tensor for every sender."""
    return [
        _cat(
            (flat(spec.dtype, spec.n_elems // n_senders, RECEIVED_STORAGE + number),) * n_senders,
            replace(spec, shape=(spec.n_elems,), strides=(1,)),
            phase,
        )
        for spec in outputs
    ]


def offsets_of(lengths: TensorSpec, n_senders: int, phase: Phase) -> list[Event]:
    """Offsets of the global batch's bags from every sender's lengths: put together, then a running sum and a difference.

    The running sum counts as an addition.
    """
    piece = flat(lengths.dtype, lengths.n_elems // n_senders, lengths.storage)
    whole = flat(lengths.dtype, lengths.n_elems, lengths.storage)
    names, inputs = ("self", "other"), (whole, whole)
    ops = [
        Op(id=-1, name=f"aten.{name}", inputs=inputs, input_names=names, outputs=(whole,), phase=phase, overload="out")
        for name in ("add", "sub")
    ]
    return [_cat((piece,) * n_senders, whole, phase), *map(op_event, ops)]


def _cat(parts: Sequence[TensorSpec], out: TensorSpec, phase: Phase) -> Event:
    names = ("tensors",) * len(parts)
    return op_event(Op(id=-1, name="aten.cat", inputs=tuple(parts), input_names=names, outputs=(out,), phase=phase))
