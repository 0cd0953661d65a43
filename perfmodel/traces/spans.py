"""What a trace is made of: spans on host threads and device streams, steps, and what reading it had to drop or guess.

Times are seconds from the earliest event of the trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

DeviceKind = Literal["kernel", "memcpy", "memset"]
HostKind = Literal["op", "annotation", "call", "module"]
NoteKind = Literal["dropped", "guessed", "missing"]

_COLLECTIVE_PREFIXES = ("nccl", "rccl", "msccl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something that reading a trace dropped, guessed or did not find: what, in words, and how often."""

    kind: NoteKind
    text: str
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OpArguments:
    """Arguments of an op as the profiler recorded them: shapes (nested for lists of tensors), dtypes, scalar values."""

    shapes: tuple[Any, ...] = ()
    dtypes: tuple[Any, ...] = ()
    values: tuple[Any, ...] = ()
    strides: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpan:
    """An op, annotation, module or runtime call on a host thread.

    `correlation` and `external_id` are 0 where the trace gives none; `sequence` (-1: none) joins a backward op to the
    forward op of thread `forward_thread` that made it. `module` is the path the profiler recorded, where it did.
    """

    name: str
    thread: str
    start_s: float
    end_s: float
    correlation: int = 0
    kind: HostKind = "op"
    external_id: int = 0
    sequence: int = -1
    forward_thread: int = 0
    module: str = ""
    arguments: OpArguments | None = None

    @property
    def duration_s(self) -> float:
        """Length."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchShape:
    """How a kernel was launched: blocks, threads a block, registers a thread, shared memory a block (bytes).

    `occupancy_frac` is the profiler's estimate of achieved occupancy; 0 where the trace has none.
    """

    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    registers: int = 0
    shared_bytes: int = 0
    blocks_per_sm: float = 0.0
    occupancy_frac: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveInfo:
    """What a trace says of a collective: `op` as this project names it, message `bytes` (nccl-tests convention), ranks.

    `dtype`, `group` (name of the process group) and the split sizes are empty where the trace has none; `group_size` 0.
    """

    op: str
    bytes: int = 0
    dtype: str = ""
    group: str = ""
    group_size: int = 0
    ranks: tuple[int, ...] = ()
    in_split: tuple[int, ...] = ()
    out_split: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelWork:
    """What a kernel does, where a trace says so (ours do): family, FLOPs, bytes, and the pipe that bounds the FLOPs."""

    family: str
    flops: int = 0
    bytes: int = 0
    pipe: str = ""
    phase: str = ""
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpan:
    """A kernel, copy or fill on a device stream.

    `bytes` of a copy or fill, `warps_per_sm` (all warps of a kernel's grid over all SMs), 0 where the trace has none.
    """

    name: str
    kind: DeviceKind
    stream: int
    start_s: float
    end_s: float
    correlation: int
    bytes: int = 0
    warps_per_sm: float = 0.0
    device: int = 0
    external_id: int = 0
    graph_node: int = 0
    launch: LaunchShape | None = None
    collective: CollectiveInfo | None = None
    work: KernelWork | None = None

    @property
    def duration_s(self) -> float:
        """Length."""
        return self.end_s - self.start_s

    @property
    def is_collective(self) -> bool:
        """True for a communication kernel of NCCL (or RCCL)."""
        return self.name.lower().startswith(_COLLECTIVE_PREFIXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRecord:
    """What a synchronising call waited for, in traces taken with CUDA sync events on.

    `kind` as the trace says (`Stream Wait Event`, `Stream Sync`, ...); `stream` waits or is waited for by the host;
    `on_stream` is where the event was recorded, by the call with id `record_correlation` (-1: not given).
    """

    kind: str
    correlation: int
    stream: int
    on_stream: int = -1
    record_correlation: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEvent:
    """An allocation or free (negative bytes) that the profiler saw on a device, and what is allocated and reserved after."""

    at_s: float
    bytes: int
    allocated_bytes: int
    reserved_bytes: int
    on_device: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step as the profiler marks it on the host."""

    name: str
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Length."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """The device a trace was taken on, as the profiler reports it."""

    name: str = ""
    n_sms: int = 0
    memory_bytes: int = 0
    max_threads_per_sm: int = 0
    registers_per_sm: int = 0
    shared_per_sm_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KinetoTrace:
    """One rank's trace; every tuple is in order of start. `origin_us` is the clock of the earliest event.

    `modules` holds the spans of nn.Modules, in traces taken with stacks; `notes` says what was dropped or guessed.
    """

    path: str
    rank: int
    world_size: int
    origin_us: float
    ops: tuple[HostSpan, ...]
    calls: tuple[HostSpan, ...]
    device: tuple[DeviceSpan, ...]
    steps: tuple[Step, ...]
    syncs: tuple[SyncRecord, ...] = ()
    modules: tuple[HostSpan, ...] = ()
    memory: tuple[MemoryEvent, ...] = ()
    facts: DeviceFacts = field(default_factory=DeviceFacts)
    n_events: int = 0
    notes: tuple[Note, ...] = ()
    info: Mapping[str, str] = field(default_factory=dict)

    @property
    def launched(self) -> dict[int, DeviceSpan]:
        """Device work by the correlation id of the call that launched it (the first, where a graph launched many)."""
        found: dict[int, DeviceSpan] = {}
        for span in self.device:
            found.setdefault(span.correlation, span)
        return found

    @property
    def collectives(self) -> tuple[DeviceSpan, ...]:
        """Communication kernels in order of start."""
        return tuple(span for span in self.device if span.is_collective)

    @property
    def end_s(self) -> float:
        """When the last span ends."""
        ends = [spans[-1].end_s for spans in (self.ops, self.calls, self.device) if spans]
        return max([*(s.end_s for s in self.device[-64:]), *(s.end_s for s in self.steps), *ends], default=0.0)
