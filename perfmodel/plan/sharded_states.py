"""Model states divided over data-parallel ranks: ZeRO stages 1 and 2, and fully sharded parameters as torch's FSDP.

ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 7): stages 1 and 2 reduce-scatter the gradients and all-gather the
updated parameters, as much as one all-reduce moves; stage 3 gathers the parameters in forward and again in backward, half as
much more. FSDP2 (`torch.distributed.fsdp.fully_shard` of each block and of the rest) gathers a block just before its forward,
frees it, gathers it again during the backward of the block after it, and scatters its gradients when they are complete.
FSDP1 (`FullyShardedDataParallel`; Zhao et al. 2023, arXiv:2304.11277) does so with one flat tensor a unit. Hybrid sharding
(ibid., section 3.2.2) divides states within a group and reduces the shards of gradients between groups.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from perfmodel.config.plan_fsdp import Fsdp
from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import Graph, Op, Parameter, TensorSpec
from perfmodel.plan.events import Collective, CollectiveOp, Event, op_event
from perfmodel.plan.layout import Shard, local_spec
from perfmodel.plan.runs import NO_INSTANCE
from perfmodel.plan.segments import START, Groups
from perfmodel.plan.stages import find_blocks

UNIT_STORAGE = 1 << 45  # storages of gathered parameters: this plus the unit's number
GRADIENT_STORAGE = 1 << 46  # and of gradients on their way to their shards
ANEW_STORAGE = 1 << 54  # and of what a CPU copies them to
SHARD_STORAGE = ANEW_STORAGE + (1 << 51)  # of a CPU's shards of gradients: this plus the storage of the whole gradient

Inserted = dict[int, list[Event]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters gathered together: those of the module at `path`, or the rest (root).

    `first` and `backward` are the first ops that need them in forward and in backward (START: they are there from the
    beginning), `complete` the op after which all their gradients are. `group` names the ranks that its states are divided
    over: `shard`, or `experts` for a part of a layer's experts.
    """

    number: int
    path: str
    parameters: tuple[Parameter, ...]
    first: int
    backward: int
    complete: int
    is_root: bool
    group: str = "shard"

    @property
    def bytes(self) -> int:
        """Bytes of the whole parameters."""
        return sum(p.tensor.bytes for p in self.parameters)

    @property
    def dtype(self) -> str:
        """Their element type."""
        return self.parameters[0].tensor.dtype


def units_of(
    graph: Graph, wrap: Sequence[str] = (), experts: Collection[str] = (), *, divides: bool = True
) -> tuple[Unit, ...]:
    """The units of a model in forward order, then the rest: its blocks, or the modules whose paths end as `wrap` says.

    The modules of the parameters named in `experts` are units of their own, as torchtitan's parallelisation of experts makes.
    A part of a model that has no blocks is one unit: it does not divide.

    Raises InfeasiblePlanError if it has no numbered blocks, or a pattern finds no module.
    """
    of_path: dict[str, list[Parameter]] = {}
    rest: list[Parameter] = []
    apart = {name.rpartition(".")[0] for name in experts}
    blocks = (_wrapped(graph, wrap) if wrap else _block_paths(graph)) if divides else set()
    paths = blocks | apart
    for parameter in graph.parameters:
        path = next((p for p in _ancestors(parameter.name) if p in paths), None)
        (rest if path is None else of_path.setdefault(path, [])).append(parameter)
    first = {phase: _first_ops(graph, phase, of_path) for phase in ("forward", "backward")}
    order = sorted(of_path, key=lambda path: first["forward"].get(path, START))
    units = [
        Unit(
            number=number,
            path=path,
            parameters=tuple(of_path[path]),
            first=first["forward"].get(path, START),
            backward=first["backward"].get(path, START),
            complete=_complete(of_path[path]),
            is_root=False,
            group="experts" if path in apart else "shard",
        )
        for number, path in enumerate(order)
    ]
    if rest:
        units.append(
            Unit(
                number=len(units), path="", parameters=tuple(rest), first=START, backward=START,
                complete=_complete(rest), is_root=True,
            )
        )  # fmt: skip
    return tuple(units)


def _block_paths(graph: Graph) -> set[str]:
    path, _ = find_blocks(graph)
    pattern = re.compile(rf"{re.escape(path)}\.\d+(?=\.|$)")
    return {found[0] for p in graph.parameters if (found := pattern.match(p.name))}


def _wrapped(graph: Graph, wrap: Sequence[str]) -> set[str]:
    """Paths of modules with parameters below them that a pattern names."""
    modules = {path for p in graph.parameters for path in _ancestors(p.name)}
    found: set[str] = set()
    for pattern in wrap:
        matching = {m for m in modules if fnmatchcase(m, pattern) or fnmatchcase(m, f"*.{pattern}")}
        if not matching:
            known = sorted({_unnumbered(path) for path in modules if "." in path})
            raise InfeasiblePlanError(
                f"fsdp.wrap: no module with parameters has a path that ends in {pattern!r}; "
                f"the model has {', '.join(known[:12])}"
            )
        found |= matching
    return found


def _unnumbered(path: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _ancestors(name: str) -> list[str]:
    """Paths of the modules round a parameter or module, innermost first."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]


def _first_ops(graph: Graph, phase: str, paths: Collection[str]) -> dict[str, int]:
    """The first op of a phase inside each path."""
    first: dict[str, int] = {}  # by module
    for op in graph.ops:
        if op.phase == phase and op.module not in first:
            first[op.module] = op.id
    found: dict[str, int] = {}
    for module, number in first.items():
        path = next((p for p in (module, *_ancestors(module)) if p in paths), None)
        if path is not None:
            found.setdefault(path, number)
    return found


def _complete(parameters: Iterable[Parameter]) -> int:
    return max((p.grad_op for p in parameters if p.grad_op is not None), default=START)


def forward_gathers(units: Sequence[Unit], groups: Groups, plan: Fsdp) -> Inserted:
    """Events to insert before forward ops (by the id of the op, START for the beginning): the rest first, then each unit."""
    inserted: dict[int, list[Event]] = {}
    ahead = START
    for unit in sorted(units, key=lambda u: not u.is_root):
        ask, use = _gather(unit, groups, plan, "forward")
        if unit.is_root:
            ask = [op_event(flat_op("aten.mul", unit, len(groups.of["shard"]), "forward")), *ask]
        inserted.setdefault(ahead if plan.forward_prefetch else unit.first, []).extend(ask)
        inserted.setdefault(unit.first, []).extend(use)
        ahead = unit.first
    return inserted


def backward_gathers(units: Sequence[Unit], groups: Groups, plan: Fsdp) -> tuple[Inserted, Inserted]:
    """Events to insert before and after backward ops: units freed after forward are gathered again."""
    before: Inserted = {}
    after: Inserted = {}
    if not plan.reshard_after_forward:
        return before, after
    parts = sorted((unit for unit in units if not unit.is_root), key=lambda unit: unit.backward)
    for unit, behind in zip(parts, [None, *parts[:-1]], strict=True):
        ask, use = _gather(unit, groups, plan, "backward")
        if behind is None or plan.backward_prefetch == "none":
            before.setdefault(START if behind is None else unit.backward, []).extend(ask)
        elif plan.backward_prefetch == "pre":
            before.setdefault(behind.backward, []).extend(ask)
        else:
            after.setdefault(behind.complete, []).extend(ask)
        before.setdefault(unit.backward, []).extend(use)
    return before, after


def _gather(unit: Unit, groups: Groups, plan: Fsdp, phase: str) -> tuple[list[Event], list[Event]]:
    """The all-gather, and what the compute stream does with it: copies out of its buffer, or with version 1 only waits."""
    storage = frozenset({UNIT_STORAGE + unit.number})
    ask = replace(unit_collective("all_gather", unit, groups, (phase, "parameters")), writes=storage)
    name = "aten.copy_" if plan.version == 2 else "aten.view"
    return [ask], [op_event(flat_op(name, unit, 1, phase), storage, frozenset())]


def words_of(unit: Unit) -> str:
    """A unit's name in what is said of its collectives."""
    if unit.is_root:
        return "the rest"
    number = unit.path.rpartition(".")[2]
    return f"block {number}" if number.isdigit() else unit.path


def unit_collective(op: CollectiveOp, unit: Unit, groups: Groups, what: tuple[str, str]) -> Event:
    """A collective on a unit; `what` are the phase and what it carries, in words."""
    phase, purpose = what
    collective = Collective(
        op=op,
        bytes=unit.bytes,
        ranks=groups.of[unit.group],
        dtype=unit.dtype,
        instance=NO_INSTANCE,
        purpose=f"{purpose} of {words_of(unit)}",
        siblings=groups.siblings[unit.group],
    )
    return Event(stream="comm", phase=phase, collective=collective)  # type: ignore[arg-type]  # forward or backward


def flat_op(name: str, unit: Unit, part: int, phase: str) -> Op:
    """An op on `1 / part` of a unit's elements as one flat tensor."""
    n_elems = -(-sum(p.tensor.n_elems for p in unit.parameters) // part)
    ids = (UNIT_STORAGE + unit.number, GRADIENT_STORAGE + unit.number)
    source, target = (TensorSpec(id=i, shape=(n_elems,), dtype=unit.dtype, strides=(1,), storage=i) for i in ids)
    inputs, names = ((target, source), ("self", "src")) if name == "aten.copy_" else ((source,), ("self",))
    return Op(id=-1, name=name, inputs=inputs, input_names=names, outputs=(target,), phase=phase)  # type: ignore[arg-type]


def shard_optimizer(ops: Iterable[Op], n_ranks: int, *, dtensor: bool = False, moved: Collection[int] = ()) -> list[Op]:
    """The optimizer on a rank's shard: a part of every tensor's first dimension; `dtensor`: these are DTensors.

    `moved`: storages of gradients whose shards lie elsewhere, where `shard_storage` says.
    """
    ops = list(ops)
    parts: dict[int, TensorSpec] = {}  # by identity: an optimizer's ops touch each tensor many times

    def part(spec: TensorSpec) -> TensorSpec:
        known = parts.get(id(spec))
        if known is None:
            local = _part(spec, n_ranks)
            known = parts[id(spec)] = shard_storage(local) if spec.storage in moved else local
        return known

    def attrs(op: Op) -> dict[str, Any]:
        return {**op.attrs, "dtensor": True} if dtensor and any(s.n_elems > 1 for s in op.inputs) else dict(op.attrs)

    return [
        replace(op, inputs=tuple(map(part, op.inputs)), outputs=tuple(map(part, op.outputs)), attrs=attrs(op))
        for op in ops
    ]


def shard_storage(gradient: TensorSpec) -> TensorSpec:
    """The tensor in the memory where the shard of a whole gradient is kept."""
    return replace(gradient, id=SHARD_STORAGE + gradient.storage, storage=SHARD_STORAGE + gradient.storage)


def _part(spec: TensorSpec, n_ranks: int) -> TensorSpec:
    if spec.n_elems == 1:
        return spec
    return local_spec(spec, Shard(dim=0, full=spec.shape[0], local=-(-spec.shape[0] // n_ranks)))
