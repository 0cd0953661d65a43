"""Single events of a Kineto trace: their categories, their arguments, and the spans they become."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perfmodel.traces.nccl import UNKNOWN, collective_op, itemsize_bytes, parse_kernel_name
from perfmodel.traces.spans import (
    CollectiveInfo,
    DeviceKind,
    DeviceSpan,
    HostKind,
    HostSpan,
    KernelWork,
    LaunchShape,
    MemoryEvent,
    OpArguments,
    SyncRecord,
)
from perfmodel.units import US_PER_S

# Categories as Kineto spells them, and as the reduced public sample of the TensorBoard plugin does (lower case).
DEVICE_KINDS: Mapping[str, DeviceKind] = {
    "kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset", "memcpy": "memcpy", "memset": "memset",
    "concurrent_kernel": "kernel",
}  # fmt: skip
CALLS = frozenset({"cuda_runtime", "cuda_driver", "runtime", "hip_runtime", "xpu_runtime", "privateuse1_runtime"})
OPS = frozenset({"cpu_op", "user_annotation", "operator"})
SYNCS = frozenset({"cuda_sync"})
PYTHON = frozenset({"python_function"})
MEMORY_EVENT = "[memory]"
STEP_PREFIX = "ProfilerStep"
_ANNOTATION = "user_annotation"
_PERCENT = 100
_CPU_DEVICE = 0  # DeviceType::CPU in c10/core/DeviceType.h


@dataclass(frozen=True, slots=True)
class Details:
    """Arguments of an event, read once and shared between equal ones where that saves memory."""

    correlation: int = 0
    external_id: int = 0
    stream: int = -1
    device: int = 0
    bytes: int = 0
    graph_node: int = 0
    launch: LaunchShape | None = None
    warps_per_sm: float = 0.0
    arguments: OpArguments | None = None
    more: tuple[
        Any, ...
    ] = ()  # of an op: sequence, forward thread, module; of a kernel: collective, work; of a sync: all


# start (us), duration (us), name, category in lower case, process, thread, details
Raw = tuple[float, float, str, str, str, str, Details]

_NOTHING = Details()


class Interned:
    """Texts, launch shapes and op arguments that occurred before, so that equal ones are stored once."""

    def __init__(self) -> None:
        self._texts: dict[Any, str] = {}
        self._arguments: dict[str, OpArguments] = {}
        self._launches: dict[tuple[Any, ...], LaunchShape] = {}

    def text(self, value: Any) -> str:
        """`str(value)`."""
        try:
            found = self._texts.get(value)
        except TypeError:  # not hashable: no name of anything
            return str(value)
        if found is None:
            found = self._texts[value] = str(value)
        return found

    def details(self, category: str, event: Mapping[str, Any]) -> Details:
        """The arguments of an event of a category."""
        args = event.get("args")
        if not isinstance(args, dict):
            args = {}
        if category in OPS:
            return self._op(args)
        if category in CALLS:
            return Details(_int(args.get("correlation")), _external(args))
        if category in DEVICE_KINDS:
            return self._device(event, args, category)
        if category in SYNCS:
            more = tuple(
                _int(args.get(key), -1) for key in ("stream", "wait_on_stream", "wait_on_cuda_event_record_corr_id")
            )
            return Details(correlation=_int(args.get("correlation")), more=more)
        if category == MEMORY_EVENT:
            keys = ("Bytes", "Total Allocated", "Total Reserved", "Device Type")
            return Details(more=tuple(_int(args.get(key)) for key in keys))
        return _NOTHING

    def _op(self, args: Mapping[str, Any]) -> Details:
        if not args:
            return _NOTHING
        shapes = args.get("Input Dims", args.get("Input dims"))
        arguments = None
        if shapes:
            values, strides = args.get("Concrete Inputs"), args.get("Input Strides")
            dtypes = args.get("Input type")
            key = f"{shapes}{dtypes}{values}{strides}"
            arguments = self._arguments.get(key)
            if arguments is None:
                parts = [_frozen(part) for part in (shapes, dtypes, values, strides)]
                arguments = self._arguments[key] = OpArguments(
                    shapes=parts[0], dtypes=parts[1], values=parts[2], strides=parts[3]
                )
        more: tuple[Any, ...] = ()
        if "Sequence number" in args or "Module Hierarchy" in args:
            module = args.get("Module Hierarchy")
            more = (
                _int(args.get("Sequence number"), -1),
                _int(args.get("Fwd thread id")),
                self.text(module) if module else "",
            )
        return Details(external_id=_external(args), arguments=arguments, more=more)

    def _device(self, event: Mapping[str, Any], args: Mapping[str, Any], category: str) -> Details:
        more: tuple[Any, ...] = ()
        name = event.get("name")
        if isinstance(name, str) and "ccl" in name.lower():
            more = (collective_info(name, args), None)
        if "perfmodel" in args:
            more = (more[0] if more else None, _work(args["perfmodel"]))
        return Details(
            _int(args.get("correlation")),
            _external(args),
            _int(args.get("stream"), _int(event.get("tid"))),
            _int(args.get("device")),
            _int(args.get("bytes")),
            _int(args.get("graph node id")),
            self._launch(args) if category == "kernel" else None,
            _float(args.get("warps per SM")),
            None,
            more,
        )

    def _launch(self, args: Mapping[str, Any]) -> LaunchShape | None:
        grid, block = args.get("grid"), args.get("block")
        if not isinstance(grid, list) or not isinstance(block, list):
            return None
        key = (
            tuple(_int(part) for part in grid),
            tuple(_int(part) for part in block),
            _int(args.get("registers per thread")),
            _int(args.get("shared memory")),
            _float(args.get("blocks per SM")),
            _float(args.get("est. achieved occupancy %")),
        )
        found = self._launches.get(key)
        if found is None:
            found = self._launches[key] = LaunchShape(
                grid=key[0],
                block=key[1],
                registers=key[2],
                shared_bytes=key[3],
                blocks_per_sm=key[4],
                occupancy_frac=key[5] / _PERCENT,
            )
        return found


def us_to_s(time_us: float) -> float:
    """Microseconds of a trace's clock in seconds."""
    return time_us / US_PER_S


def host_span(raw: Raw, origin_us: float) -> HostSpan:
    """The host span of an event."""
    ts, dur, name, category, _, thread, details = raw
    start, more = ts - origin_us, details.more
    return HostSpan(
        name=name,
        thread=thread,
        start_s=start / US_PER_S,
        end_s=(start + dur) / US_PER_S,
        correlation=details.correlation,
        kind=_host_kind(name, category),
        external_id=details.external_id,
        sequence=more[0] if more else -1,
        forward_thread=more[1] if more else 0,
        module=more[2] if more else "",
        arguments=details.arguments,
    )


def _host_kind(name: str, category: str) -> HostKind:
    if category in CALLS:
        return "call"
    if category in PYTHON:
        return "module"
    return "annotation" if category == _ANNOTATION or name.startswith(("enumerate(", "Optimizer.")) else "op"


def device_span(raw: Raw, origin_us: float) -> DeviceSpan:
    """The device span of an event."""
    ts, dur, name, category, _, _, details = raw
    start, more = ts - origin_us, details.more
    return DeviceSpan(
        name=name,
        kind=DEVICE_KINDS[category],
        stream=details.stream,
        start_s=start / US_PER_S,
        end_s=(start + dur) / US_PER_S,
        correlation=details.correlation,
        bytes=details.bytes,
        warps_per_sm=details.warps_per_sm,
        device=details.device,
        external_id=details.external_id,
        graph_node=details.graph_node,
        launch=details.launch,
        collective=more[0] if more else None,
        work=more[1] if more else None,
    )


def sync_record(raw: Raw) -> SyncRecord:
    """The record of a synchronising call."""
    stream, on_stream, record = raw[6].more
    return SyncRecord(
        kind=raw[2], correlation=raw[6].correlation, stream=stream, on_stream=on_stream, record_correlation=record
    )


def memory_event(raw: Raw, at_s: float) -> MemoryEvent:
    """The allocation or free of an event."""
    n_bytes, allocated, reserved, device = raw[6].more
    return MemoryEvent(
        at_s=at_s,
        bytes=n_bytes,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        on_device=device != _CPU_DEVICE,
    )


def collective_info(name: str, args: Mapping[str, Any]) -> CollectiveInfo:
    """What a communication kernel's name and arguments say; the arguments (torch 2.2 on) win over the name."""
    op = collective_op(str(args.get("Collective name", "")))
    if op == UNKNOWN:
        op = parse_kernel_name(name).op
    dtype = str(args.get("dtype", ""))
    sent, received = _int(args.get("In msg nelems")), _int(args.get("Out msg nelems"))
    n_elems = received if op == "all_gather" else sent  # nccl-tests: total received of an all_gather, else what is sent
    return CollectiveInfo(
        op=op,
        bytes=n_elems * itemsize_bytes(dtype),
        dtype=dtype,
        group=str(args.get("Process Group Name", "")),
        group_size=_int(args.get("Group size")),
        ranks=_int_list(args.get("Process Group Ranks")),
        in_split=_int_list(args.get("In split size")),
        out_split=_int_list(args.get("Out split size")),
    )


def _work(body: Any) -> KernelWork | None:
    if not isinstance(body, dict):
        return None
    text = {key: str(body.get(key, "")) for key in ("family", "pipe", "phase", "module")}
    return KernelWork(flops=_int(body.get("flops")), bytes=_int(body.get("bytes")), **text)


def _int_list(value: Any) -> tuple[int, ...]:
    """A list of numbers, as JSON or as the text that PyTorch writes (`"[0, 1]"`; longer lists end in `...`)."""
    if isinstance(value, str):
        parts = value.strip().strip("[]").split(",")
        value = [int(part) for part in (p.strip() for p in parts) if part.isdecimal() and len(part) < 10]
    return tuple(_int(part) for part in value) if isinstance(value, list) else ()


def _external(args: Mapping[str, Any]) -> int:
    return _int(args.get("External id", args.get("external id")))


def _int(value: Any, default: int = 0) -> int:
    if type(value) is int:
        return value if -(2**63) <= value < 2**63 else default
    if type(value) is float and value == value and abs(value) < 2**63:  # noqa: PLR0124 -- NaN
        return int(value)
    return default


def _float(value: Any) -> float:
    return float(value) if type(value) in (int, float) and -1e18 < value < 1e18 else 0.0


def _frozen(value: Any) -> tuple[Any, ...]:
    return tuple(_frozen(part) if isinstance(part, list) else part for part in value) if isinstance(value, list) else ()
