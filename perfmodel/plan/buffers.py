"""Events by which DistributedDataParallel keeps buffers equal: rank 0 broadcasts them before a step's first forward pass.

`_sync_buffers` of torch/nn/parallel/distributed.py, with `broadcast_buffers` (its default): buffers of one element type
are made one flat tensor, broadcast, and copied back where they were (`broadcast_coalesced`, torch/csrc/distributed/c10d/
comm.cpp). The step waits for it. Later micro-batches under `no_sync` do without.
"""

from __future__ import annotations

from collections.abc import Mapping

from perfmodel.graph import ITEMSIZE_BYTES, Graph, Op, TensorSpec
from perfmodel.plan.events import Collective, Event, op_event
from perfmodel.plan.facts import GraphFacts

FIRST_INSTANCE = 1 << 29  # instance numbers of broadcasts: this plus a number for each element type
FLAT_STORAGE = 1 << 51  # storages of flat tensors: this plus a number for each element type
_DTYPE = "float32"  # of buffers that no op touches


def buffer_events(facts: GraphFacts, ranks: tuple[int, ...]) -> list[Event]:
    """Broadcasts of a graph's buffers among `ranks`: for each element type a concatenation, a broadcast, copies back."""
    return facts.derived(("buffers", ranks), lambda: _events(facts.graph, ranks))


def _events(graph: Graph, ranks: tuple[int, ...]) -> list[Event]:
    groups: dict[str, list[TensorSpec]] = {}
    for spec in _buffers(graph):
        groups.setdefault(spec.dtype, []).append(spec)
    events: list[Event] = []
    for number, (dtype, buffers) in enumerate(sorted(groups.items())):
        events += _broadcast(number, dtype, buffers, ranks)
    return events


def _buffers(graph: Graph) -> list[TensorSpec]:
    """Each buffer as a row of elements."""
    dtypes = _dtypes(graph)
    found = []
    for storage in graph.storages:
        if storage.kind == "buffer" and storage.bytes:
            dtype = dtypes.get(storage.id, _DTYPE)
            shape = (max(storage.bytes // ITEMSIZE_BYTES[dtype], 1),)
            found.append(TensorSpec(id=storage.id, shape=shape, dtype=dtype, strides=(1,), storage=storage.id))
    return found


def _dtypes(graph: Graph) -> Mapping[int, str]:
    return {spec.storage: spec.dtype for op in graph.ops for spec in (*op.inputs, *op.outputs)}


def _broadcast(number: int, dtype: str, buffers: list[TensorSpec], ranks: tuple[int, ...]) -> list[Event]:
    storage = FLAT_STORAGE + number
    n_elems = sum(spec.n_elems for spec in buffers)
    flat = TensorSpec(id=storage, shape=(n_elems,), dtype=dtype, strides=(1,), storage=storage)
    names = ("tensors",) * len(buffers)
    gather = Op(id=-1, name="aten.cat", inputs=tuple(buffers), input_names=names, outputs=(flat,), phase="forward")
    collective = Collective(
        op="broadcast",
        bytes=flat.bytes,
        ranks=ranks,
        dtype=dtype,
        instance=FIRST_INSTANCE + number,
        purpose="buffers",
    )
    travels = frozenset({storage})
    sent = Event(stream="comm", phase="forward", collective=collective, reads=travels, writes=travels)
    return [op_event(gather), sent, *(op_event(_copy_back(spec, flat)) for spec in buffers)]


def _copy_back(buffer: TensorSpec, flat: TensorSpec) -> Op:
    return Op(
        id=-1,
        name="aten.copy_",
        inputs=(buffer, flat),
        input_names=("self", "src"),
        outputs=(buffer,),
        phase="forward",
    )
