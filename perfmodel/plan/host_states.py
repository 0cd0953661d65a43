"""FSDP2 on a CPU: what `fully_shard` runs there beside its collectives, what it allocates, what its hooks cost the thread.

Read from torch 2.13 (`_fsdp_collectives.py`, `_fsdp_param_group.py`, `ProcessGroupGloo.cpp`). Gathers and reductions are
called without `async_op`, so nothing runs beside them. A gather copies the shards of a unit into their place of a new flat
tensor and, after the collective, every parameter out of it into memory of its own (`all_gather_copy_in`,
`split_with_sizes_copy`); in forward the flat tensor lives until the next unit has been gathered, in backward until it has been
copied out. Parameters that are freed leave with the end of the unit's pass (`reshard`). A reduction frees the gradients as
soon as they are laid side by side by rank (`_chunk_cat`); gloo reduces a copy of that tensor, divides all of it by the number
of ranks (`ReduceOp.AVG`), and each rank keeps its part. The tensor itself stays until the next unit's reduction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from perfmodel.graph import Graph, Op, Parameter, Phase, TensorSpec
from perfmodel.plan.events import Event, op_event
from perfmodel.plan.segments import START
from perfmodel.plan.sharded_states import ANEW_STORAGE, GRADIENT_STORAGE, UNIT_STORAGE, Inserted, Unit, shard_storage

# Time of the calling thread in FSDP2's hooks for a unit, and for each of its parameters, in plain ops of 3.5 us (see
# `kernels.host`). Measured 2026-11-30, torch 2.13, one thread, machine left alone: steps of nets of 2 to 8 blocks of 2, 8 and
# 16 parameters of 8 x 2, under `fully_shard` on a fake group of two ranks, less the same steps without; least of four medians
# of 40 steps. Forward 376 us a unit and 18 us a parameter, backward 445 and 21, divided among its parts as timers inside the
# hooks say; what the copies and the collective's call cost, which are events of their own, is taken off.
GATHER_OPS, GATHER_PARAMETER_OPS = 34.0, 1.5  # `unshard` and `wait_for_unshard`
FORWARD_OPS, FORWARD_PARAMETER_OPS = 61.0, 2.3  # `pre_forward` and `post_forward`
BACKWARD_OPS, BACKWARD_PARAMETER_OPS = 67.0, 3.1  # `pre_backward`, `post_backward` and `foreach_reduce`

_KINDS = 5  # of new tensors of a unit: flat and parameters in forward, the same in backward, gradients by rank
_FLAT, _WHOLE, _BY_RANK = 0, 1, 4
_PARAMETERS = 1 << 20  # more than a unit has: places of its parameters' storages
_TAKEN_APART = ANEW_STORAGE + (1 << 50)  # storages of whole parameters, and of the copy that gloo reduces


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStates:
    """Units of a model whose states are divided over `n_shards` ranks.

    `stays`: forward frees none; `is_flat`: FSDP1, whose collectives are waited for and which is left as it is otherwise.
    """

    graph: Graph
    units: Sequence[Unit]
    n_shards: int
    is_flat: bool
    stays: bool

    def forward(self, gathers: Inserted) -> Inserted:
        """The events of forward's gathers as a CPU runs them."""
        if self.is_flat:
            return _waiting(gathers)
        found: Inserted = {}
        before: Unit | None = None
        for at in sorted(gathers):
            found[at] = []
            for event in gathers[at]:
                unit = self._gathered(event)
                if event.collective is not None and unit is not None:
                    if before is not None:
                        found[at] += self._freed(before)
                    found[at] += [_hooks(unit, FORWARD_OPS, FORWARD_PARAMETER_OPS, "forward")]
                    found[at] += self._gather(unit, event)
                    if before is not None:
                        found[at].append(last_use(_new(before, "forward", _FLAT), "forward"))
                    before = unit
                else:
                    found[at] += self._as_on_host(event, unit)
        return found

    def backward(self, before: Inserted, after: Inserted) -> tuple[Inserted, Inserted]:
        """The events before and after backward's ops."""
        if self.is_flat:
            return _waiting(before), _waiting(after)
        found: tuple[Inserted, Inserted] = ({}, {})
        again = {u.number for events in before.values() for e in events if (u := self._gathered(e)) is not None}
        again |= {u.number for events in after.values() for e in events if (u := self._gathered(e)) is not None}
        found[0][START] = list(self._left_by_forward(again))
        packed: Unit | None = None
        order = sorted([(at, 0) for at in before] + [(at, 1) for at in after])
        for at, side in order:
            events = found[side].setdefault(at, [])
            for event in (before, after)[side][at]:
                unit = self._packed(event)
                if unit is None:
                    events += self._as_on_host(event, self._gathered(event))
                    continue
                if packed is not None:
                    events.append(last_use(_new(packed, "backward", _BY_RANK), "backward"))
                events += self._reduction(unit, event, "backward" if unit.number in again else "forward")
                packed = unit
        return found

    def _left_by_forward(self, again: Collection[int]) -> Iterator[Event]:
        """What the last unit of forward leaves, which no further gather makes it free."""
        parts = [unit for unit in self.units if not unit.is_root]
        if parts and parts[-1].number in again:
            yield from (last_use(spec, "backward") for spec in _wholes(parts[-1], "forward"))
            yield last_use(_new(parts[-1], "forward", _FLAT), "backward")

    def _gathered(self, event: Event) -> Unit | None:
        """The unit that the event gathers or copies out of its flat tensor."""
        for storage in event.reads | event.writes:
            if 0 <= storage - UNIT_STORAGE < len(self.units):
                return self.units[storage - UNIT_STORAGE]
        return None

    def _packed(self, event: Event) -> Unit | None:
        """The unit whose gradients the event packs to be reduced in their own type."""
        op = event.op
        if op is None or op.name != "aten.copy_" or len(event.writes) != 1 or len({s.dtype for s in op.inputs}) > 1:
            return None
        place = next(iter(event.writes)) - GRADIENT_STORAGE
        unit = self.units[place] if 0 <= place < len(self.units) else None
        return unit if unit is not None and op.inputs[0].dtype == unit.dtype else None

    def _as_on_host(self, event: Event, unit: Unit | None) -> list[Event]:
        if event.collective is not None:
            return waited_for(event) if unit is None else self._gather(unit, event)
        if unit is not None and event.op is not None and event.op.name == "aten.copy_" and not event.writes:
            return self._copies_out(unit, event)
        return [event]

    def _gather(self, unit: Unit, event: Event) -> list[Event]:
        """The hook's own work, the copy of the shards into place, the collective that is waited for."""
        flat = _new(unit, event.phase, _FLAT)
        sizes = [-(-p.tensor.n_elems // self.n_shards) for p in unit.parameters]
        shards = [_flat(p.tensor, size) for p, size in zip(unit.parameters, sizes, strict=True)]
        put = _op("aten.cat", shards, [_flat(flat, sum(sizes))], event.phase)
        whole = _op("aten.empty", [], [flat], event.phase)
        hooks = _hooks(unit, GATHER_OPS, GATHER_PARAMETER_OPS, event.phase)
        return [hooks, _alone(put), _alone(whole), *waited_for(event)]

    def _copies_out(self, unit: Unit, event: Event) -> list[Event]:
        """Every parameter into memory of its own, which in backward is the flat tensor's last use."""
        flat = _new(unit, event.phase, _FLAT)
        copies = [
            _op("aten.clone", [_flat(flat, whole.n_elems)], [whole], event.phase)
            for whole in _wholes(unit, event.phase)
        ]
        return [op_event(op, event.reads, frozenset()) for op in copies]

    def _freed(self, unit: Unit) -> Iterator[Event]:
        """The parameters that a unit gives back at the end of its forward: none if it stays."""
        if not (unit.is_root or self.stays):
            yield from (last_use(whole, "forward") for whole in _wholes(unit, "forward"))

    def _reduction(self, unit: Unit, event: Event, gathered: Phase) -> list[Event]:
        """Parameters freed, gradients laid side by side and freed, gloo's copy of them divided, the shard that is left."""
        freed = [last_use(whole, "backward") for whole in _wholes(unit, gathered)]
        gradients = list(gradients_of(self.graph, unit.parameters))
        by_rank = _new(unit, "backward", _BY_RANK)
        sizes = [-(-spec.n_elems // self.n_shards) for spec in gradients]
        sides = [_rows(spec, self.n_shards, size) for spec, size in zip(gradients, sizes, strict=True)]
        laid = _op("aten.cat", sides, [_rows(by_rank, self.n_shards, sum(sizes))], "backward")
        reduced = replace(by_rank, id=_TAKEN_APART + unit.number, storage=_TAKEN_APART + unit.number)
        kept = [_flat(shard_storage(spec), size) for spec, size in zip(gradients, sizes, strict=True)]
        return [
            *freed,
            _hooks(unit, BACKWARD_OPS, BACKWARD_PARAMETER_OPS, "backward"),
            op_event(laid, frozenset(), event.writes),
            _alone(_op("aten.empty", [], [*kept, reduced], "backward")),
            _alone(_op("aten.div_", [reduced], [reduced], "backward")),
        ]


def _waiting(events: Inserted) -> Inserted:
    return {
        at: [e for event in of for e in (waited_for(event) if event.collective else [event])]
        for at, of in events.items()
    }


def gradient_storages(graph: Graph) -> frozenset[int]:
    """Storages of the whole gradients of a graph's parameters."""
    return frozenset(spec.storage for spec in gradients_of(graph, graph.parameters))


def gradients_of(graph: Graph, parameters: Iterable[Parameter]) -> Iterator[TensorSpec]:
    """Gradients of parameters as the ops after which they are complete write them."""
    for parameter in parameters:
        if parameter.grad_op is not None and graph.ops[parameter.grad_op].outputs:
            yield graph.ops[parameter.grad_op].outputs[0]


def waited_for(event: Event) -> list[Event]:
    """A collective that the compute stream waits for where it is asked for."""
    (storage,) = event.writes
    spec = TensorSpec(id=storage, shape=(1,), dtype="float32", strides=(1,), storage=storage)
    touched = frozenset({storage})
    op = _op("aten.view", [spec], [spec], event.phase)
    return [op_event(op, touched, touched), event, op_event(op, touched, touched)]


def last_use(spec: TensorSpec, phase: Phase) -> Event:
    """Something that costs nothing and needs a tensor until now."""
    here = replace(spec, shape=(1,), strides=(1,))
    return _alone(_op("aten.view", [here], [here], phase))


def _hooks(unit: Unit, n_ops: float, n_parameter_ops: float, phase: Phase) -> Event:
    """What Python does for a unit, in plain ops."""
    worth = n_ops + n_parameter_ops * len(unit.parameters)
    op = _op("aten.empty", [], [], phase)
    return _alone(replace(op, attrs={"host_ops": worth}))


def _alone(op: Op) -> Event:
    """An op's event that touches nothing other streams know."""
    return op_event(op, frozenset(), frozenset())


def _op(name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], phase: Phase) -> Op:
    names = {"aten.cat": ("tensors",) * len(inputs)}.get(name, ("self", "other")[: len(inputs)])
    return Op(id=-1, name=name, inputs=tuple(inputs), input_names=names, outputs=tuple(outputs), phase=phase)


def _new(unit: Unit, phase: Phase, kind: int) -> TensorSpec:
    """A flat tensor of a unit's elements in memory of its own."""
    place = kind if kind == _BY_RANK or phase == "forward" else kind + 2
    at = ANEW_STORAGE + _KINDS * unit.number + place
    n_elems = sum(p.tensor.n_elems for p in unit.parameters)
    return TensorSpec(id=at, shape=(n_elems,), dtype=unit.dtype, strides=(1,), storage=at)


def _wholes(unit: Unit, phase: Phase) -> list[TensorSpec]:
    """The gathered parameters, each in memory of its own."""
    begin = _TAKEN_APART + _PARAMETERS * (2 * unit.number + 2 + (phase == "backward"))
    return [
        replace(_flat(p.tensor, p.tensor.n_elems), id=begin + number, storage=begin + number)
        for number, p in enumerate(unit.parameters)
    ]


def _flat(spec: TensorSpec, n_elems: int) -> TensorSpec:
    return replace(spec, shape=(n_elems,), strides=(1,))


def _rows(spec: TensorSpec, n_rows: int, n_columns: int) -> TensorSpec:
    return replace(spec, shape=(n_rows, n_columns), strides=(n_columns, 1))
