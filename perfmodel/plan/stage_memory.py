"""Peak device memory of the ranks of one pipeline stage, with what the plan divides, keeps in flight and gathers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import accumulate
from math import ceil

from perfmodel.graph import ITEMSIZE_BYTES, Graph, Parameter
from perfmodel.plan.events import MemoryUse
from perfmodel.plan.gradient_shards import WIDE
from perfmodel.plan.holding import Holding
from perfmodel.plan.host_memory import HostPasses
from perfmodel.plan.memory import Part, dense_memory
from perfmodel.plan.segments import START
from perfmodel.plan.sharded_states import Unit
from perfmodel.plan.spread import REPLICAS, Chunk, Spread, units_in
from perfmodel.plan.torch_stages import as_torch_holds, is_torch, makes_gradients

GATHERED_UNITS = 2  # of FSDP: one runs while the next is gathered


def stage_memory(spread: Spread, stage: int) -> MemoryUse:
    """Peak of a rank at a stage: in the passes where the schedule has most activations, or in the optimizer's step."""
    return max(_in_passes(spread, stage), _in_optimizer(spread, stage), key=lambda memory: memory.total_bytes)


def _in_passes(spread: Spread, stage: int) -> MemoryUse:
    if _is_on_host(spread):
        return _on_cpu(spread, stage)
    total = _divided(spread, _of_chunks(spread, stage, "passes"), stage)
    activations, summed = stage_holding(spread, stage).peak()
    whole = 0 if makes_gradients(spread) else total.gradients_bytes
    return replace(
        total,
        gradients_bytes=whole + summed,
        activations_bytes=activations,
        communication_bytes=_buffers(spread, stage),
    )


def _is_on_host(spread: Spread) -> bool:
    """Whether every copy of a pass is followed: FSDP2 on CPUs, of one batch, in the parameters' own type."""
    plan = spread.plan
    whole = spread.n_stages == 1 and plan.n_micro == 1 and spread.n_shards == spread.mesh.size(*REPLICAS)
    states = plan.data_parallel.shard == "parameters" and spread.n_shards > 1 and not plan.data_parallel.offload
    own = plan.fsdp.version == 2 and plan.fsdp.reduce_dtype == "own" and not spread.experts
    return spread.local.target == "cpu" and whole and states and own


def _on_cpu(spread: Spread, stage: int) -> MemoryUse:
    total = _of_chunks(spread, stage, "passes")
    over, units, fsdp = _shards_of_all(spread, stage), spread.units(stage), spread.plan.fsdp
    (chunk,) = spread.chunks(stage)
    passes = HostPasses(
        graph=chunk.graph,
        units=units,
        n_shards=spread.n_shards,
        stays=not fsdp.reshard_after_forward,
        fetches=fsdp.backward_prefetch == "pre",
    )
    held = passes.peak()
    return replace(
        total,
        parameters_bytes=_share(total.parameters_bytes, over) + sum(u.bytes for u in units if u.is_root),
        optimizer_bytes=_share(total.optimizer_bytes, over),
        gradients_bytes=held.gradients_bytes,
        activations_bytes=held.activations_bytes,
        communication_bytes=held.communication_bytes,
    )


def _in_optimizer(spread: Spread, stage: int) -> MemoryUse:
    """States and gradients, and what the optimizer makes of a rank's part of them."""
    whole = _of_chunks(spread, stage, "optimizer")
    total = _divided(spread, whole, stage)
    ddp = spread.plan.data_parallel
    made = whole.activations_bytes
    if ddp.shard != "nothing" and spread.n_shards > 1:
        made = 0 if ddp.offload else _share(made, _shards_of_all(spread, stage))
    if is_torch(spread):
        holding = stage_holding(spread, stage)
        made += holding.always_bytes + holding.joined_bytes  # as many bytes as the outputs that are not joined
    lasting = ddp.shard in ("nothing", "optimizer")
    return replace(total, activations_bytes=made, communication_bytes=_buffers(spread, stage) if lasting else 0)


def _of_chunks(spread: Spread, stage: int, part: Part) -> MemoryUse:
    """States of all chunks, their gradients, and activations of this part of an iteration."""
    total = MemoryUse()
    for chunk in spread.chunks(stage):
        total = _sum(total, dense_memory(chunk.facts, frozenset(), spread.plan.n_micro, part))
    return total


def stage_holding(spread: Spread, stage: int) -> Holding:
    """What the activations of a rank at a stage hold over its schedule.

    A micro-batch keeps what its forward leaves for its backward; a pass also needs what a pass of one micro-batch alone has
    at its peak beyond that. Where gradients of FSDP are scattered after several micro-batches a chunk sums them, whole.
    """
    kept, above, summed = [], [], []
    for chunk in spread.chunks(stage):
        one = dense_memory(chunk.facts, frozenset(), spread.plan.n_micro, "passes")
        left = chunk.facts.derived("kept", partial(kept_bytes, chunk.graph))
        above.append(max(_pass_bytes(spread, chunk, one) - left, 0))
        kept.append(left if spread.plan.pipeline.deallocate_outputs else left + chunk.stage.forward_bytes)
        summed.append(_as_reduced(spread, one.gradients_bytes, chunk.graph.parameters))
    whole = _sums_whole(spread)
    holding = Holding(
        steps=spread.steps(stage),
        kept_bytes=tuple(kept),
        above_bytes=tuple(above),
        summed_bytes=tuple(summed) if whole else (),
        sum_group=spread.plan.sum_group if whole else None,
    )
    return as_torch_holds(holding, spread, stage) if is_torch(spread) else holding


def _pass_bytes(spread: Spread, chunk: Chunk, one: MemoryUse) -> int:
    """Activations of a micro-batch alone at their peak; with sums in fp32, gradients of a unit wait for its last one."""
    wide = _sums_whole(spread) and spread.plan.fsdp.reduce_dtype == "fp32"
    if not wide or spread.plan.n_micro == 1:
        return one.activations_bytes
    units = units_in(chunk, spread.plan.fsdp.wrap, spread.experts)
    return chunk.facts.derived(("pass", units), partial(_with_gradients, chunk.graph, units))


def _with_gradients(graph: Graph, units: Sequence[Unit]) -> int:
    """Peak of activations and of gradients from when they are made until their unit's are summed (FSDP2's post-backward)."""
    until = {p.tensor.id: unit.complete for unit in units for p in unit.parameters}
    position = {op.id: number for number, op in enumerate(graph.ops)}
    start = next((i for i, op in enumerate(graph.ops) if op.phase == "optimizer"), len(graph.ops))
    change = [0] * (start + 1)

    def lives(size: int, born: int, dies: int) -> None:
        change[max(born, 0)] += size
        change[min(dies + 1, start)] -= size

    for storage in graph.storages:
        if storage.kind in ("activation", "input") and storage.born < start:
            lives(storage.bytes, storage.born, storage.dies)
    for parameter in graph.parameters:
        end = until.get(parameter.tensor.id, START)
        if parameter.grad_op is not None and end in position:
            lives(parameter.tensor.bytes, position[parameter.grad_op], position[end])
    return max(accumulate(change), default=0)


def _as_reduced(spread: Spread, size_bytes: int, parameters: Sequence[Parameter]) -> int:
    """Bytes of gradients of the parameters' type in the type in which FSDP sums and scatters them."""
    if spread.plan.fsdp.reduce_dtype == "own" or not parameters:
        return size_bytes
    return size_bytes // parameters[0].tensor.itemsize_bytes * ITEMSIZE_BYTES[WIDE]


def _sums_whole(spread: Spread) -> bool:
    """Whether gradients are divided after they were summed over several micro-batches."""
    plan = spread.plan
    several = spread.n_stages > 1 or plan.n_micro > 1
    return (
        plan.data_parallel.shard == "parameters" and spread.n_shards > 1 and plan.scatter != "micro_batch" and several
    )


def _divided(spread: Spread, total: MemoryUse, stage: int) -> MemoryUse:
    """With the shares that replicas keep of what is divided between them (each tensor by its first dimension)."""
    shard, n = spread.plan.data_parallel.shard, spread.n_shards
    if shard == "nothing" or n == 1:
        return total
    over = _shards_of_all(spread, stage)
    total = replace(total, optimizer_bytes=_share(total.optimizer_bytes, over))
    if shard != "optimizer":
        total = replace(total, gradients_bytes=_share(total.gradients_bytes, over))
    if shard == "parameters":
        units = spread.units(stage)
        stays = not spread.plan.fsdp.reshard_after_forward
        whole = sum(unit.bytes for unit in units if unit.is_root or stays)
        share = _share(total.parameters_bytes, over)
        total = replace(total, parameters_bytes=whole + share)
        if spread.plan.data_parallel.offload:
            total = replace(total, parameters_bytes=whole, host_bytes=share)
    return _on_host(spread, stage, total, over) if spread.plan.data_parallel.offload else total


def _on_host(spread: Spread, stage: int, total: MemoryUse, over: Fraction) -> MemoryUse:
    """With optimizer states and a rank's part of the gradients in the host's memory (see `plan/offload.py`).

    Gradients that are divided leave the device as they come.
    """
    parameters = [p for chunk in spread.chunks(stage) for p in chunk.graph.parameters]
    gradients = _share(sum(p.tensor.bytes for p in parameters if p.grad_op is not None), over)
    return replace(
        total,
        gradients_bytes=0 if spread.plan.data_parallel.shard == "parameters" else total.gradients_bytes,
        optimizer_bytes=0,
        host_bytes=total.host_bytes + total.optimizer_bytes + gradients,
    )


def _shards_of_all(spread: Spread, stage: int) -> Fraction:
    """Over how many ranks states are divided; the harmonic mean by bytes where experts' are over fewer."""
    n, n_experts = spread.n_shards, spread.n_expert_shards
    if n == n_experts:
        return Fraction(n)
    parameters = [p for chunk in spread.chunks(stage) for p in chunk.graph.parameters]
    size = sum(p.tensor.bytes for p in parameters)
    experts = sum(p.tensor.bytes for p in parameters if p.name in spread.experts)
    return size / (Fraction(experts, n_experts) + Fraction(size - experts, n))


def _share(size_bytes: int, n: Fraction) -> int:
    return ceil(size_bytes / n)


def _buffers(spread: Spread, stage: int) -> int:
    """Gradient buckets or flat gradients; gathered units and gradients on their way of FSDP."""
    ddp = spread.plan.data_parallel
    if spread.mesh.size(*REPLICAS) == 1 or ddp.reduce != "buckets":
        return 0
    total = sum(c.facts.parameters_bytes for c in spread.chunks(stage))
    if ddp.shard == "parameters":
        largest = max((u.bytes for u in spread.units(stage) if not u.is_root), default=0)
        widest = _as_reduced(spread, largest, spread.chunks(stage)[0].graph.parameters)
        if spread.n_stages > 1 and not spread.plan.fsdp.reshard_after_forward:
            return widest  # units that stay are gathered before the passes that hold the most; one is on its way to be reduced
        if spread.plan.fsdp.reduce_dtype == "fp32":  # of the two one is gathered, one on its way to be reduced
            return min(total, largest) + widest
        return min(total, GATHERED_UNITS * largest)
    trained = sum(c.facts.trained_bytes for c in spread.chunks(stage))
    if ddp.shard == "gradients":
        return min(trained, 2 * ddp.bucket_cap)
    compressed = 0
    if ddp.compression != "none":  # each bucket has its narrow copy while it travels: one in flight, one behind it
        compressed = min(trained, 2 * ddp.bucket_cap) // 2
    return compressed + (0 if ddp.gradient_as_bucket_view else trained)


def _sum(first: MemoryUse, second: MemoryUse) -> MemoryUse:
    return MemoryUse(
        parameters_bytes=first.parameters_bytes + second.parameters_bytes,
        gradients_bytes=first.gradients_bytes + second.gradients_bytes,
        optimizer_bytes=first.optimizer_bytes + second.optimizer_bytes,
        activations_bytes=first.activations_bytes + second.activations_bytes,
        buffers_bytes=first.buffers_bytes + second.buffers_bytes,
    )


def kept_bytes(graph: Graph) -> int:
    """Bytes of activations and inputs that forward leaves for backward."""
    end = next((number for number, op in enumerate(graph.ops) if op.phase == "backward"), len(graph.ops))
    return sum(
        s.bytes for s in graph.storages if s.kind in ("activation", "input") and s.born < end <= s.dies
    )  # fmt: skip
