"""Compile mode: chains of pointwise ops and reductions become one kernel each. A function from Graph to Graph.

The rule, after torch.compile's inductor (torch/_inductor/scheduler.py), in forward, loss and backward:

1. *Fusable* are ops of one kernel that is pointwise, a copy or cast, a dropout, or a reduction, norm or softmax. Matrix
   products, convolutions, attention, lookups and ops of several kernels stay as they are, as inductor calls libraries for
   them; so do batch norms, which go over their input twice; the optimizer is not compiled.
2. An op joins the chain that wrote one of its inputs if both go over the same number of elements (a reduction: those it
   reads), nothing the op needs depends on the chain by another way, and the chain does not already reduce by another
   shape. Chains live within one phase.
3. Products of 16-bit numbers whose sizes are not multiples of 16 bytes are padded to such (`shape_padding`, on by default:
   fx_passes/pad_mm.py, which measures whether it pays; here it always does). The copies into padded operands are priced.
4. A chain reads each outside tensor once and writes what is used outside it; tensors used only inside are never stored.
   Views cost nothing.

Left out: recomputation of cheap forward work in backward (min-cut partitioner), templates that fuse into products, fusion of
ops that only share an input.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from perfmodel.graph import Graph, Op, Storage, TensorSpec
from perfmodel.kernels import calls_of, work
from perfmodel.kernels.gemm import PADDED

PHASES = ("forward", "loss", "backward")
PADDABLE = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"})
PADDED_ITEM_BYTES = 2
POINTWISE = frozenset({"elementwise", "copy", "random", "transpose"})
REDUCING = frozenset({"reduction", "norm", "softmax"})
REWRITE = "compile: pointwise chains and reductions fused"


@dataclass(slots=True, eq=False)
class _Unit:
    """Ops that become one: a lone op, or a chain. `depth` exceeds that of everything it waits for."""

    ops: list[Op]
    space: int  # elements its loop goes over; 0: not fusable
    depth: int
    reduces: int = 0  # elements of the reduced shape, 0: none
    before: set[int] = field(default_factory=set)


def fuse_graph(graph: Graph, elsewhere: Collection[int] = ()) -> Graph:
    """The graph as compiled code runs it; see the module's rule. Storages used `elsewhere` are written, too."""
    units = _units(graph.ops)
    order = _in_order(units)
    used = _outside_uses(graph, units, elsewhere)
    ops: list[Op] = []
    position: dict[int, int] = {}
    unstored: set[int] = set()
    for number in order:
        unit = units[number]
        read = {spec.storage for op in unit.ops for spec in op.inputs}
        if read and read <= unstored and not calls_of(unit.ops[0]):
            position[unit.ops[0].id] = len(ops) - 1  # a view of what is never stored; its chain stands before it
            continue
        op = _with_padding(unit.ops[0]) if len(unit.ops) == 1 else _fused(unit, used)
        unstored |= _written(unit.ops) - _written([op])
        for member in unit.ops:
            position[member.id] = len(ops)
        ops.append(replace(op, id=len(ops)))
    parameters = tuple(replace(p, grad_op=None if p.grad_op is None else position[p.grad_op]) for p in graph.parameters)
    return replace(
        graph,
        ops=tuple(ops),
        parameters=parameters,
        storages=tuple(_moved(graph, ops, position)),
        rewrites=(*graph.rewrites, REWRITE),
    )


def _with_padding(op: Op) -> Op:
    if (
        op.phase not in PHASES
        or op.name not in PADDABLE
        or any(s.itemsize_bytes != PADDED_ITEM_BYTES for s in op.inputs)
    ):
        return op
    return replace(op, attrs={**op.attrs, PADDED: True})


def _written(ops: Iterable[Op]) -> set[int]:
    return {spec.storage for op in ops for spec in op.outputs}


def _space(op: Op) -> tuple[int, int]:
    """(elements the op's loop goes over, elements of the shape it reduces to); (0, 0) for one that is not fused."""
    calls = calls_of(op)
    stays = op.host_sync or "batch_norm" in op.name
    if op.phase not in PHASES or op.stream != "compute" or stays or len(calls) != 1:
        return 0, 0
    family = calls[0].family
    if family in POINTWISE:
        return max((spec.n_elems for spec in op.outputs), default=0), 0
    if family in REDUCING:
        read = max((spec.n_elems for spec in op.inputs), default=0)
        return read, _rows(op, read)
    return 0, 0


def _rows(op: Op, read: int) -> int:
    """Elements of the reduced shape: of a norm or softmax, the rows that it normalises."""
    smallest = min((spec.n_elems for spec in op.outputs), default=1)
    if smallest < read:
        return smallest
    return read // max(op.outputs[0].shape[-1], 1) if op.outputs and op.outputs[0].shape else 1


def _units(ops: Sequence[Op]) -> list[_Unit]:
    """Every op in a unit, greedily in program order."""
    units: list[_Unit] = []
    writer: dict[int, int] = {}
    readers: dict[int, set[int]] = {}
    for op in ops:
        is_view = not calls_of(op)
        reads = {spec.storage for spec in op.inputs}
        writes = set() if is_view else {spec.storage for spec in op.outputs}
        producers = {writer[s] for s in reads | writes if s in writer}
        hazards = {r for s in writes for r in readers.get(s, ())}
        number = _joins(units, op, (producers, producers | hazards))
        if number is None:
            space, reduces = _space(op)
            depth = 1 + max((units[i].depth for i in producers | hazards), default=0)
            number = len(units)
            units.append(_Unit(ops=[], space=space, depth=depth, reduces=reduces))
        unit = units[number]
        unit.ops.append(op)
        unit.before |= (producers | hazards) - {number}
        for storage in reads:
            readers.setdefault(storage, set()).add(number)
        for storage in writes:
            writer[storage] = number
            readers[storage] = set()
    return units


def _joins(units: Sequence[_Unit], op: Op, waits: tuple[set[int], set[int]]) -> int | None:
    """The chain that `op` joins, if one of its producers is such and nothing stands in the way."""
    space, reduces = _space(op)
    if not space:
        return None
    producers, needed = waits
    for number in sorted(producers, key=lambda i: -units[i].depth):
        unit = units[number]
        fits = unit.space == space and unit.ops[0].phase == op.phase
        same_shape = not (unit.reduces and reduces) or unit.reduces == reduces
        # What is no deeper than the chain cannot depend on it; what is as deep could not run before it.
        free = all(units[i].depth < unit.depth for i in needed if i != number)
        if fits and same_shape and free:
            unit.reduces = unit.reduces or reduces
            return number
    return None


def _in_order(units: Sequence[_Unit]) -> list[int]:
    """Units after all they wait for, otherwise by their first op."""
    missing = [len(unit.before) for unit in units]
    after: dict[int, list[int]] = {}
    for number, unit in enumerate(units):
        for i in unit.before:
            after.setdefault(i, []).append(number)
    ready = [(units[i].ops[0].id, i) for i, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(number)
        for i in after.get(number, ()):
            missing[i] -= 1
            if missing[i] == 0:
                heapq.heappush(ready, (units[i].ops[0].id, i))
    if len(order) != len(units):
        raise RuntimeError("fused units wait for each other in a circle")
    return order


def _outside_uses(graph: Graph, units: Sequence[_Unit], elsewhere: Collection[int]) -> Mapping[int, set[int]]:
    """For each storage the units that touch it by an op with kernels; -1 among them if it outlives the step or the graph."""
    used: dict[int, set[int]] = {storage: {-1} for storage in elsewhere}
    for number, unit in enumerate(units):
        for op in unit.ops:
            if calls_of(op):
                for spec in (*op.inputs, *op.outputs):
                    used.setdefault(spec.storage, set()).add(number)
    n_ops = len(graph.ops)
    for storage in graph.storages:
        if storage.dies >= n_ops or storage.kind != "activation":
            used.setdefault(storage.id, set()).add(-1)
    return used


def _fused(unit: _Unit, used: Mapping[int, set[int]]) -> Op:
    """One op that reads what the chain reads from outside and writes what is used outside."""
    made: set[int] = set()
    inputs: dict[tuple[int, tuple[int, ...], tuple[int, ...]], TensorSpec] = {}
    outputs: dict[int, TensorSpec] = {}
    for op in unit.ops:
        for spec in op.inputs:
            if spec.storage not in made:
                inputs.setdefault((spec.storage, spec.shape, spec.strides), spec)
        for spec in op.outputs:
            made.add(spec.storage)
            outputs[spec.storage] = spec
    kept = [spec for storage, spec in outputs.items() if len(used.get(storage, ())) > 1]
    written = kept or [unit.ops[-1].outputs[0]]
    flops = sum(work(op).flops for op in unit.ops)
    n_written = max(spec.n_elems for spec in written)
    last = unit.ops[-1]
    attrs: dict[str, object] = {"chain": [op.name.removeprefix("aten.") for op in unit.ops]}
    reduces = n_written < unit.space and bool(inputs)
    if reduces:
        attrs |= {"flops": flops, "inner": _reduces_inner(unit)}
    else:
        attrs |= {"flops_per_elem": -(-flops // max(n_written, 1))}
    return Op(
        id=last.id,
        name="perfmodel.fused_reduction" if reduces else "perfmodel.fused_pointwise",
        inputs=tuple(inputs.values()),
        input_names=("inputs",) * len(inputs),
        outputs=tuple(written),
        attrs=attrs,
        module=last.module,
        phase=last.phase,
        recompute=all(op.recompute for op in unit.ops),
    )


def _reduces_inner(unit: _Unit) -> bool:
    return any(call.features.get("inner", 1.0) > 0 for op in unit.ops for call in calls_of(op))


def _moved(graph: Graph, ops: Sequence[Op], position: Mapping[int, int]) -> Iterable[Storage]:
    """Lifetimes in the new order; storages that nothing stores any more are left out."""
    touched: dict[int, list[int]] = {}
    for op in ops:
        for spec in (*op.inputs, *op.outputs):
            touched.setdefault(spec.storage, []).append(op.id)
    n_old, n_new = len(graph.ops), len(ops)
    for storage in graph.storages:
        uses = touched.get(storage.id)
        if uses is None and storage.born >= 0 and storage.kind == "activation":
            continue
        born = position[storage.born] if storage.born >= 0 else -1
        dies = n_new if storage.dies >= n_old else max(position[storage.dies], *(uses or (born,)))
        yield replace(storage, born=born, dies=max(dies, born))
