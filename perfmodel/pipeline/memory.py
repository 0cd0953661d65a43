"""Memory of a rank as PyTorch's caching allocator sees it: what it reserves beyond live tensors, and the curve over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from perfmodel.db.device import Device
from perfmodel.graph import Graph
from perfmodel.pipeline.tasks import LoweredClass
from perfmodel.plan.events import Event, MemoryUse, Placement
from perfmodel.plan.facts import facts_of
from perfmodel.plan.memory import table_storages
from perfmodel.sim.memory import EXACT, PYTORCH, Allocation, MemoryCurve, memory_over_time, reserved_bytes
from perfmodel.sim.timeline import Timeline
from perfmodel.units import format_bytes

NOT_FITTING = "predicted as if it fitted"  # ends the note of a plan that is not refused for want of memory


def allocator_overhead(graph: Graph, sharded: frozenset[str]) -> tuple[int, int]:
    """Bytes that the allocator reserves beyond the live peak, and that peak, of everything but the tables `sharded`.

    Rounding of requests, segments cut for them, and fragments that no later request fits.
    """
    allocations = _allocations(graph, sharded, range(len(graph.ops)), len(graph.ops))
    peak = _peak_bytes(allocations, len(graph.ops))
    return max(reserved_bytes(allocations, PYTORCH) - peak, 0), peak


def with_overhead(memory: MemoryUse, overhead: tuple[int, int]) -> MemoryUse:
    """A rank's memory with the allocator's part: that of the graph, or the same share where the rank holds less than it."""
    extra, peak = overhead
    share = extra / peak if peak else 0.0
    return replace(memory, allocator_bytes=min(extra, round(share * memory.total_bytes)))


def with_allocator(
    placement: Placement,
    graph: Graph,
    overhead_of: Callable[[Graph, frozenset[str]], tuple[int, int]],
    devices: Mapping[str, Device],
) -> Placement:
    """The placement with what PyTorch's allocator reserves on CUDA devices; `overhead_of` is `allocator_overhead`, kept.

    Live tensors fit, or the plan would have been refused. What the allocator keeps besides, it gives back when memory runs
    out, at the price of a stall, if fragments allow it: said in a note.
    """
    if graph.target != "cuda":
        return placement
    sharded = frozenset(name for rank_class in placement.classes for name in rank_class.tables)
    overhead = overhead_of(graph, sharded)
    classes = tuple(replace(c, memory=with_overhead(c.memory, overhead)) for c in placement.classes)
    full = [c for c in classes if c.memory.total_bytes > devices[c.device].memory_bytes]
    notes = placement.notes
    if full:
        worst = max(full, key=lambda c: c.memory.total_bytes)
        live_bytes = worst.memory.total_bytes - worst.memory.allocator_bytes
        device = devices[worst.device]
        if live_bytes > device.memory_bytes:
            return replace(
                placement, classes=classes, notes=(*notes, _does_not_fit(worst.ranks[0], live_bytes, device))
            )
        notes += (
            f"the tensors of rank {worst.ranks[0]} fit, but not with what the allocator keeps besides "
            f"({format_bytes(worst.memory.allocator_bytes)}): expect stalls of the allocator, or memory to run out",
        )
    return replace(placement, classes=classes, notes=notes)


def _does_not_fit(rank: int, live_bytes: int, device: Device) -> str:
    return (
        f"rank {rank} needs {format_bytes(live_bytes)} by the memory model, its device has "
        f"{format_bytes(device.memory_bytes)}: {NOT_FITTING}"
    )


def memory_curve(
    lowered: LoweredClass, cls: int, timeline: Timeline, graph: Graph, sharded: frozenset[str]
) -> MemoryCurve:
    """Bytes in use over the simulated iteration on a rank of class `cls`, what the plan itself adds left out.

    A storage lives from the first task of the event of the op that makes it to the last task of the event it dies after.
    """
    first_task = _first_tasks(lowered)
    n_tasks = len(lowered.tasks)
    place = _tasks_of_ops(lowered.rank_class.events, first_task, len(graph.ops), n_tasks)
    return memory_over_time(timeline, cls, _allocations(graph, sharded, place, n_tasks), PYTORCH)


def schedule_curve(lowered: LoweredClass, cls: int, timeline: Timeline) -> MemoryCurve:
    """The same of a rank that works through a schedule of micro-batches: activations by step, states left out.

    What a micro-batch keeps lives from the first task of its forward to the last of its backward; what a pass needs beyond
    that, while the pass runs.
    """
    holding, spans = lowered.rank_class.holding, lowered.rank_class.spans
    if holding is None:
        raise RuntimeError("a curve by steps needs a rank class with a schedule")
    first_task = [*_first_tasks(lowered), len(lowered.tasks)]
    allocations = [
        Allocation(
            bytes=size,
            born=min(first_task[spans[begin][0]], len(lowered.tasks) - 1),
            dies=max(first_task[spans[end][1]] - 1, first_task[spans[begin][0]]),
        )
        for size, begin, end in holding.lifetimes()
    ]
    return memory_over_time(timeline, cls, allocations, EXACT)


def _allocations(graph: Graph, sharded: frozenset[str], place: Sequence[int], end: int) -> list[Allocation]:
    """Lifetimes of the graph's storages, op i standing at `place[i]` of `end` places."""
    gone = table_storages(facts_of(graph), sharded)
    n_ops, found = len(graph.ops), []
    for storage in graph.storages:
        if storage.id in gone:
            continue
        born = place[storage.born] if storage.born >= 0 else -1
        dies = None if storage.dies >= n_ops else max(place[storage.dies], born, 0)
        found.append(Allocation(bytes=storage.bytes, born=min(born, end - 1), dies=dies))
    return found


def _peak_bytes(allocations: Sequence[Allocation], n_places: int) -> int:
    change = [0] * (n_places + 2)
    for a in allocations:
        change[a.born + 1] += a.bytes
        if a.dies is not None:
            change[a.dies + 2] -= a.bytes
    peak = live = 0
    for delta in change:
        live += delta
        peak = max(peak, live)
    return peak


def _first_tasks(lowered: LoweredClass) -> list[int]:
    """First task of each event, or of the next event that has one."""
    first = [len(lowered.tasks) - 1] * len(lowered.rank_class.events)
    for task, event in reversed(list(enumerate(lowered.tasks.event.tolist()))):
        first[event] = task
    for number in range(len(first) - 2, -1, -1):
        first[number] = min(first[number], first[number + 1])
    return first


def _tasks_of_ops(events: Sequence[Event], first_task: Sequence[int], n_ops: int, n_tasks: int) -> list[int]:
    """For each op of the graph the task of its event; an op that the rank does not run stands with the next it does."""
    place = [-1] * n_ops
    for number, event in enumerate(events):
        if event.op is not None and event.op.id >= 0:
            place[event.op.id] = first_task[number]
    following = n_tasks - 1
    for op in range(n_ops - 1, -1, -1):
        following = place[op] = place[op] if place[op] >= 0 else following
    return place
