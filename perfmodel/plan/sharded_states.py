"""Model states divided over data-parallel ranks: ZeRO stages 1 and 2, and fully sharded parameters as torch's FSDP2.

ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 7): stages 1 and 2 reduce-scatter the gradients and all-gather the
updated parameters, as much as one all-reduce moves; stage 3 gathers the parameters in forward and again in backward, half as
much more. FSDP2 (`torch.distributed.fsdp.fully_shard` of each block and of the rest) gathers a block just before its forward,
frees it, gathers it again during the backward of the block after it, and scatters its gradients when they are complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from perfmodel.graph import Graph, Op, Parameter, TensorSpec
from perfmodel.plan.events import Collective, CollectiveOp, Event, op_event
from perfmodel.plan.layout import Shard, local_spec
from perfmodel.plan.runs import NO_INSTANCE
from perfmodel.plan.segments import START, Groups
from perfmodel.plan.stages import find_blocks

UNIT_STORAGE = 1 << 45  # storages of gathered parameters: this plus the unit's number
GRADIENT_STORAGE = 1 << 46  # and of gradients on their way to their shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters gathered together.

    `first` and `backward` are the first ops that need them in forward and in backward (START: they are there from the
    beginning), `complete` the op after which all their gradients are.
    """

    number: int
    parameters: tuple[Parameter, ...]
    first: int
    backward: int
    complete: int
    is_root: bool

    @property
    def bytes(self) -> int:
        """Bytes of the whole parameters."""
        return sum(p.tensor.bytes for p in self.parameters)

    @property
    def dtype(self) -> str:
        """Their element type."""
        return self.parameters[0].tensor.dtype


def units_of(graph: Graph) -> tuple[Unit, ...]:
    """The blocks of a model in forward order, then the rest. Raises InfeasiblePlanError if it has no numbered blocks."""
    path, _ = find_blocks(graph)
    pattern = re.compile(rf"{re.escape(path)}\.(\d+)(?:\.|$)")
    blocks: dict[int, list[Parameter]] = {}
    rest: list[Parameter] = []
    for parameter in graph.parameters:
        found = pattern.match(parameter.name)
        (blocks.setdefault(int(found[1]), []) if found else rest).append(parameter)
    units = [_unit(graph, pattern, number, blocks[number]) for number in sorted(blocks)]
    root = Unit(
        number=len(units), parameters=tuple(rest), first=START, backward=START, complete=_complete(rest), is_root=True
    )
    return (*units, root) if rest else tuple(units)


def _unit(graph: Graph, pattern: re.Pattern[str], number: int, parameters: Sequence[Parameter]) -> Unit:
    def first(phase: str) -> int:
        for op in graph.ops:
            found = pattern.match(op.module)
            if op.phase == phase and found and int(found[1]) == number:
                return op.id
        return START

    return Unit(
        number=number,
        parameters=tuple(parameters),
        first=first("forward"),
        backward=first("backward"),
        complete=_complete(parameters),
        is_root=False,
    )


def _complete(parameters: Iterable[Parameter]) -> int:
    return max((p.grad_op for p in parameters if p.grad_op is not None), default=START)


def forward_gathers(units: Sequence[Unit], groups: Groups) -> dict[int, list[Event]]:
    """Events to insert before forward ops (by the id of the op, START for the beginning): the rest first, then each block."""
    inserted: dict[int, list[Event]] = {}
    for unit in sorted(units, key=lambda u: not u.is_root):
        events = _gather(unit, groups, "forward")
        if unit.is_root:
            events = [op_event(_flat_op("aten.mul", unit, len(groups.of["dp"]), "forward")), *events]
        inserted.setdefault(unit.first, []).extend(events)
    return inserted


def backward_gathers(units: Sequence[Unit], groups: Groups) -> dict[int, list[Event]]:
    """Events to insert before backward ops: a block's parameters are asked for before the block behind it begins."""
    blocks = [unit for unit in units if not unit.is_root]
    inserted: dict[int, list[Event]] = {}
    for unit, behind in zip(blocks, [*blocks[1:], None], strict=True):
        ask, copy = _gather(unit, groups, "backward")
        inserted.setdefault(START if behind is None else behind.backward, []).append(ask)
        inserted.setdefault(unit.backward, []).append(copy)
    return inserted


def gradient_scatters(units: Sequence[Unit], groups: Groups) -> dict[int, list[Event]]:
    """Events to insert after backward ops: each unit's gradients packed and scattered once complete."""
    inserted: dict[int, list[Event]] = {}
    for unit in units:
        if unit.complete == START:
            continue
        storage = frozenset({GRADIENT_STORAGE + unit.number})
        pack = op_event(_flat_op("aten.copy_", unit, 1, "backward"), frozenset(), storage)
        scatter = _collective("reduce_scatter", unit, groups, ("backward", "gradients"))
        inserted.setdefault(unit.complete, []).extend([pack, replace(scatter, reads=storage, writes=storage)])
    return inserted


def wait_for_gradients(units: Sequence[Unit]) -> Event:
    """What makes the optimizer wait for all shards of gradients."""
    spec = TensorSpec(id=GRADIENT_STORAGE, shape=(1,), dtype="float32", strides=(1,), storage=GRADIENT_STORAGE)
    op = Op(id=-1, name="aten.view", inputs=(spec,), input_names=("self",), outputs=(spec,), phase="backward")
    return op_event(op, frozenset(GRADIENT_STORAGE + unit.number for unit in units), frozenset())


def _gather(unit: Unit, groups: Groups, phase: str) -> list[Event]:
    """The all-gather, and the copy out of its buffer on the compute stream."""
    storage = frozenset({UNIT_STORAGE + unit.number})
    ask = replace(_collective("all_gather", unit, groups, (phase, "parameters")), writes=storage)
    return [ask, op_event(_flat_op("aten.copy_", unit, 1, phase), storage, frozenset())]


def _collective(op: CollectiveOp, unit: Unit, groups: Groups, what: tuple[str, str]) -> Event:
    phase, purpose = what
    collective = Collective(
        op=op,
        bytes=unit.bytes,
        ranks=groups.of["dp"],
        dtype=unit.dtype,
        instance=NO_INSTANCE,
        purpose=f"{purpose} of {'the rest' if unit.is_root else f'block {unit.number}'}",
        siblings=groups.siblings["dp"],
    )
    return Event(stream="comm", phase=phase, collective=collective)  # type: ignore[arg-type]  # forward or backward


def _flat_op(name: str, unit: Unit, part: int, phase: str) -> Op:
    """An op on `1 / part` of a unit's elements as one flat tensor."""
    n_elems = -(-sum(p.tensor.n_elems for p in unit.parameters) // part)
    ids = (UNIT_STORAGE + unit.number, GRADIENT_STORAGE + unit.number)
    source, target = (TensorSpec(id=i, shape=(n_elems,), dtype=unit.dtype, strides=(1,), storage=i) for i in ids)
    inputs, names = ((target, source), ("self", "src")) if name == "aten.copy_" else ((source,), ("self",))
    return Op(id=-1, name=name, inputs=inputs, input_names=names, outputs=(target,), phase=phase)  # type: ignore[arg-type]


def shard_optimizer(ops: Iterable[Op], n_ranks: int) -> list[Op]:
    """The optimizer on a rank's shard: of every tensor a part of its first dimension."""

    def part(spec: TensorSpec) -> TensorSpec:
        if spec.n_elems == 1:
            return spec
        return local_spec(spec, Shard(dim=0, full=spec.shape[0], local=-(-spec.shape[0] // n_ranks)))

    return [replace(op, inputs=tuple(map(part, op.inputs)), outputs=tuple(map(part, op.outputs))) for op in ops]
