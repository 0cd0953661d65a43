"""Gradients on the way to their shards: summed over micro-batches, packed, scattered, added to what came before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from perfmodel.config.plan_fsdp import Fsdp
from perfmodel.graph import ITEMSIZE_BYTES, Op, Parameter, TensorSpec
from perfmodel.plan.events import Collective, Event, op_event
from perfmodel.plan.runs import NO_INSTANCE
from perfmodel.plan.segments import START, Groups
from perfmodel.plan.sharded_states import GRADIENT_STORAGE, Inserted, Unit, flat_op, unit_collective, words_of

WIDE = "float32"  # the type of sums with `reduce_dtype: fp32`
WIDE_STORAGE = 1 << 55  # storages of those sums: this plus the parameter's tensor id
SUM_STORAGE = WIDE_STORAGE + (1 << 54)  # storage of shards of gradients that are added up
MAX_SUMS = 8192  # parameters whose sums are remembered: the same op object is priced once


def gradient_scatters(units: Sequence[Unit], groups: Groups, plan: Fsdp, *, summed: bool = False) -> Inserted:
    """Events to insert after backward ops: each unit's gradients packed and scattered once complete.

    With copies of the shards (hybrid sharding) the ranks that hold the same shard then reduce it. `summed`: gradients were
    added up over micro-batches, in the type in which they are reduced.
    """
    inserted: Inserted = {}
    for unit in units:
        if unit.complete == START:
            continue
        storage = frozenset({GRADIENT_STORAGE + unit.number})
        wide = plan.reduce_dtype == "fp32"
        packed = _wide_copy(unit, summed=summed) if wide else flat_op("aten.copy_", unit, 1, "backward")
        events = [op_event(packed, frozenset(), storage)]
        if plan.version == 1:  # divided by the number of ranks on the stream that reduces
            divided = flat_op("aten.div_", unit, 1, "backward")
            divided = _wider(divided) if wide else divided
            events.append(op_event(replace(divided, stream="copy"), storage, storage))
        scatter = _reduced_wide(unit_collective("reduce_scatter", unit, groups, ("backward", "gradients")), wide)
        events.append(replace(scatter, reads=storage, writes=storage))
        if len(groups.of["copies"]) > 1 and unit.group == "shard":
            events.append(replace(_reduced_wide(_reduce_copies(unit, groups), wide), reads=storage, writes=storage))
        inserted.setdefault(unit.complete, []).extend(events)
    return inserted


def _wide_copy(unit: Unit, *, summed: bool) -> Op:
    """Gradients packed as fp32, from their own type or from sums that are fp32 already."""
    op = flat_op("aten.copy_", unit, 1, "backward")
    return _wider(op, parts=("self", "src") if summed else ("self",))


def _wider(op: Op, parts: Sequence[str] = ("self",)) -> Op:
    """The op with these inputs and its outputs in fp32."""
    specs = zip(op.inputs, op.input_names, strict=True)
    inputs = tuple(replace(spec, dtype=WIDE) if name in parts else spec for spec, name in specs)
    return replace(op, inputs=inputs, outputs=tuple(replace(spec, dtype=WIDE) for spec in op.outputs))


def _reduced_wide(event: Event, wide: bool) -> Event:
    """The collective in fp32 if `wide`."""
    collective = event.collective
    if not wide or collective is None:
        return event
    size = collective.bytes // ITEMSIZE_BYTES[collective.dtype] * ITEMSIZE_BYTES[WIDE]
    return replace(event, collective=replace(collective, bytes=size, dtype=WIDE))


def sums_wide(parameters: Iterable[Parameter], *, first: bool) -> Inserted:
    """Events to insert after backward ops: gradients cast to fp32 in the first micro-batch, added to those sums in others.

    FSDP2's `to_accumulated_grad_if_needed` and `accumulate_unsharded_grad_if_needed`.
    """
    inserted: Inserted = {}
    for p in parameters:
        if p.grad_op is not None:
            inserted.setdefault(p.grad_op, []).append(op_event(_sum_wide(p, first=first)))
    return inserted


@lru_cache(maxsize=MAX_SUMS)
def _sum_wide(parameter: Parameter, *, first: bool) -> Op:
    at = WIDE_STORAGE + parameter.tensor.id
    own = replace(parameter.tensor, id=at + 1, storage=at + 1)
    total = replace(own, id=at, storage=at, dtype=WIDE)
    name, inputs = ("aten._to_copy", (own,)) if first else ("aten.add_", (total, own))
    return Op(
        id=-1, name=name, overload="" if first else "Tensor", inputs=inputs, input_names=("self", "other")[: len(inputs)],
        outputs=(total,), module=parameter.name.rpartition(".")[0], phase="backward",
    )  # fmt: skip


def shards_added(scatters: Inserted, units: Sequence[Unit], version: int) -> Inserted:
    """With what came of an earlier micro-batch added to each shard of gradients, on the stream that reduces.

    FSDP2's `foreach_reduce` adds parameter by parameter, FSDP1's `_accumulate_sharded_grad` the flat shard.
    """
    of = {GRADIENT_STORAGE + unit.number: unit for unit in units}
    found: Inserted = {}
    for at, events in scatters.items():
        found[at] = []
        for event, following in zip(events, [*events[1:], None], strict=True):
            found[at].append(event)
            storage = next(iter(event.writes), None)
            ends = following is None or following.writes != event.writes
            if event.collective is None or not ends or storage not in of:
                continue
            n = _n_parts(events, event)
            sizes = [p.tensor.n_elems for p in of[storage].parameters if p.grad_op is not None]
            sizes = sizes if version == 2 else [sum(sizes)]
            found[at] += [_added(event, -(-size // n)) for size in sizes]
    return found


def _n_parts(events: Sequence[Event], last: Event) -> int:
    """Over how many ranks what a reduction ends with was scattered."""
    scatters = (e.collective for e in events if e.collective is not None and e.writes == last.writes)
    return next((len(c.ranks) for c in scatters if c.op == "reduce_scatter"), 1)


def shards_summed(events: Sequence[Event]) -> list[Event]:
    """With what came of an earlier micro-batch added to each bucket's shard, as DeepSpeed's and Megatron-FSDP's ZeRO 2 do."""
    found: list[Event] = []
    for event in events:
        found.append(event)
        collective = event.collective
        if collective is not None and collective.op == "reduce_scatter":
            n_elems = collective.bytes // ITEMSIZE_BYTES[collective.dtype]
            found.append(_added(event, -(-n_elems // len(collective.ranks))))
    return found


def _added(reduced: Event, n_elems: int) -> Event:
    collective = reduced.collective
    if collective is None:
        raise RuntimeError("gradients are reduced by a collective")
    return op_event(_shard_sum(n_elems, collective.dtype), reduced.writes, reduced.writes)


@lru_cache(maxsize=MAX_SUMS)
def _shard_sum(n_elems: int, dtype: str) -> Op:
    new, total = (
        TensorSpec(id=i, shape=(n_elems,), dtype=dtype, strides=(1,), storage=i)
        for i in (GRADIENT_STORAGE, SUM_STORAGE)
    )
    return Op(
        id=-1, name="aten.add_", overload="Tensor", inputs=(total, new), input_names=("self", "other"), outputs=(total,),
        phase="backward", stream="copy",
    )  # fmt: skip


def _reduce_copies(unit: Unit, groups: Groups) -> Event:
    n_shards = len(groups.of["shard"])
    collective = Collective(
        op="all_reduce",
        bytes=-(-unit.bytes // n_shards),
        ranks=groups.of["copies"],
        dtype=unit.dtype,
        instance=NO_INSTANCE,
        purpose=f"shards of gradients of {words_of(unit)}",
        siblings=groups.siblings["copies"],
    )
    return Event(stream="copies", phase="backward", collective=collective)


def wait_for_gradients(units: Sequence[Unit]) -> Event:
    """What makes the optimizer wait for all shards of gradients."""
    spec = TensorSpec(id=GRADIENT_STORAGE, shape=(1,), dtype="float32", strides=(1,), storage=GRADIENT_STORAGE)
    op = Op(id=-1, name="aten.view", inputs=(spec,), input_names=("self",), outputs=(spec,), phase="backward")
    return op_event(op, frozenset(GRADIENT_STORAGE + unit.number for unit in units), frozenset())
