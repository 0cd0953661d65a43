"""Reads a Kineto trace (PyTorch profiler, Chrome JSON, plain or gzip): host ops, runtime calls, device work, steps.

Times are seconds from the earliest event of the trace. A runtime call and the device work it launched share a
correlation id; the op that made the call is found by nesting on its thread (External id where the trace has it).
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from perfmodel.errors import ConfigError
from perfmodel.units import US_PER_S

DeviceKind = Literal["kernel", "memcpy", "memset"]

# Categories as Kineto spells them, and as the reduced public sample of the TensorBoard plugin does.
_DEVICE_CATEGORIES: Mapping[str, DeviceKind] = {
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "gpu_memset": "memset",
    "memcpy": "memcpy",
    "memset": "memset",
}
_CALL_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver", "runtime"})
_OP_CATEGORIES = frozenset({"cpu_op", "user_annotation", "operator"})
_SYNC_CATEGORY = "cuda_sync"
_STEP_PREFIX = "ProfilerStep"
_COLLECTIVE_PREFIX = "nccl"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpan:
    """An op, annotation or runtime call on a host thread. `correlation` is 0 where the trace gives none."""

    name: str
    thread: str
    start_s: float
    end_s: float
    correlation: int = 0

    @property
    def duration_s(self) -> float:
        """Length."""
        return self.end_s - self.start_s


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

    @property
    def duration_s(self) -> float:
        """Length."""
        return self.end_s - self.start_s

    @property
    def is_collective(self) -> bool:
        """True for a communication kernel of NCCL."""
        return self.name.lower().startswith(_COLLECTIVE_PREFIX)


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
class KinetoTrace:
    """One rank's trace; every tuple is in order of start. `origin_us` is the clock of the earliest event."""

    path: str
    rank: int
    world_size: int
    origin_us: float
    ops: tuple[HostSpan, ...]
    calls: tuple[HostSpan, ...]
    device: tuple[DeviceSpan, ...]
    steps: tuple[Step, ...]
    syncs: tuple[SyncRecord, ...] = ()

    @property
    def launched(self) -> dict[int, DeviceSpan]:
        """Device work by the correlation id of the call that launched it."""
        return {span.correlation: span for span in self.device}

    @property
    def collectives(self) -> tuple[DeviceSpan, ...]:
        """Communication kernels in order of start."""
        return tuple(span for span in self.device if span.is_collective)


def read_kineto(path: str | Path) -> KinetoTrace:
    """Reads one rank's trace.

    Raises:
        ConfigError: the file is missing, not JSON (or a cut-off gzip), has no `traceEvents`, or an event lacks a field.
    """
    body = _load(Path(path))
    events = body.get("traceEvents")
    if not isinstance(events, list):
        raise ConfigError(f"{path}: traceEvents: not found; a PyTorch profiler trace has this list")
    spans = []
    for number, event in enumerate(events):
        if isinstance(event, Mapping) and event.get("ph") == "X" and str(event.get("cat", "")).lower() in _KNOWN:
            spans.append(_checked(path, number, event))
    if not spans:
        raise ConfigError(f"{path}: traceEvents: no host or device spans among {len(events)} events")
    spans.sort(key=lambda event: _us(event, "ts"))
    origin = _us(spans[0], "ts")
    info = body.get("distributedInfo")
    info = info if isinstance(info, Mapping) else {}
    host = [_host_span(event, origin) for event in spans if _category(event) in _OP_CATEGORIES]
    return KinetoTrace(
        path=str(path),
        rank=int(info.get("rank", 0)),
        world_size=int(info.get("world_size", 1)),
        origin_us=origin,
        ops=tuple(span for span in host if not span.name.startswith(_STEP_PREFIX)),
        calls=tuple(_host_span(event, origin) for event in spans if _category(event) in _CALL_CATEGORIES),
        device=tuple(_device_span(event, origin) for event in spans if _category(event) in _DEVICE_CATEGORIES),
        steps=tuple(
            Step(name=s.name, start_s=s.start_s, end_s=s.end_s) for s in host if s.name.startswith(_STEP_PREFIX)
        ),
        syncs=tuple(_sync_record(event) for event in spans if _category(event) == _SYNC_CATEGORY),
    )


_KNOWN = _OP_CATEGORIES | _CALL_CATEGORIES | frozenset({*_DEVICE_CATEGORIES, _SYNC_CATEGORY})


def _load(path: Path) -> Mapping[str, object]:
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        body = json.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: gzip data cut off or damaged: {error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(body, Mapping):
        raise ConfigError(f"{path}: found a JSON {type(body).__name__}; a trace is an object with traceEvents")
    return body


def _checked(path: str | Path, number: int, event: Mapping[str, object]) -> Mapping[str, object]:
    for key in ("ts", "dur"):
        value = event.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:  # noqa: PLR0124 -- NaN
            raise ConfigError(f"{path}: traceEvents[{number}].{key}: found {value!r}; microseconds are needed")
    if not isinstance(event.get("name"), str):
        raise ConfigError(f"{path}: traceEvents[{number}].name: found {event.get('name')!r}; text is needed")
    return event


def _category(event: Mapping[str, object]) -> str:
    return str(event["cat"]).lower()


def _us(event: Mapping[str, object], key: str) -> float:
    value = event[key]
    if not isinstance(value, int | float):
        raise RuntimeError("events are checked before they are read")
    return float(value)


def _clock(event: Mapping[str, object], origin: float) -> tuple[float, float]:
    start = _us(event, "ts") - origin
    return start / US_PER_S, (start + _us(event, "dur")) / US_PER_S


def _args(event: Mapping[str, object]) -> Mapping[str, object]:
    args = event.get("args")
    return args if isinstance(args, Mapping) else {}


def _number(value: object, default: int = 0) -> int:
    return int(value) if isinstance(value, int | float) else default


def _host_span(event: Mapping[str, object], origin: float) -> HostSpan:
    start, end = _clock(event, origin)
    return HostSpan(
        name=str(event["name"]),
        thread=str(event.get("tid")),
        start_s=start,
        end_s=end,
        correlation=_number(_args(event).get("correlation")),
    )


def _device_span(event: Mapping[str, object], origin: float) -> DeviceSpan:
    start, end = _clock(event, origin)
    args = _args(event)
    return DeviceSpan(
        name=str(event["name"]),
        kind=_DEVICE_CATEGORIES[_category(event)],
        stream=_number(args.get("stream"), _number(event.get("tid"))),
        start_s=start,
        end_s=end,
        correlation=_number(args.get("correlation")),
        bytes=_number(args.get("bytes")),
        warps_per_sm=float(warps) if isinstance(warps := args.get("warps per SM"), int | float) else 0.0,
    )


def _sync_record(event: Mapping[str, object]) -> SyncRecord:
    args = _args(event)
    return SyncRecord(
        kind=str(event["name"]),
        correlation=_number(args.get("correlation")),
        stream=_number(args.get("stream"), -1),
        on_stream=_number(args.get("wait_on_stream"), -1),
        record_correlation=_number(args.get("wait_on_cuda_event_record_corr_id"), -1),
    )


def innermost_ops(trace: KinetoTrace, calls: Sequence[HostSpan]) -> list[HostSpan | None]:
    """For each call (ascending starts), the shortest op on its thread that covers it, or None."""
    stacks: dict[str, list[HostSpan]] = {}
    found: list[HostSpan | None] = []
    at = 0
    for call in calls:
        while at < len(trace.ops) and trace.ops[at].start_s <= call.start_s:
            op = trace.ops[at]
            stack = stacks.setdefault(op.thread, [])
            while stack and stack[-1].end_s <= op.start_s:
                stack.pop()
            stack.append(op)
            at += 1
        stack = stacks.get(call.thread, [])
        while stack and stack[-1].end_s <= call.start_s:
            stack.pop()
        found.append(stack[-1] if stack else None)
    return found
