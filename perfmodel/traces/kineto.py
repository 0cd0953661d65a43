"""Reads Kineto traces (PyTorch profiler, Chrome JSON, plain or gzip): host ops, runtime calls, device work, steps.

A runtime call and the device work it launched share a correlation id; the op that made the call is found by nesting on
its thread (`perfmodel.traces.link`). Events that cannot be used are dropped and counted; what is guessed is counted too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from perfmodel.errors import ConfigError
from perfmodel.traces.json_stream import ItemList, ItemStream
from perfmodel.traces.kineto_events import (
    CALLS,
    DEVICE_KINDS,
    MEMORY_EVENT,
    OPS,
    PYTHON,
    STEP_PREFIX,
    SYNCS,
    Interned,
    Raw,
    device_span,
    host_span,
    memory_event,
    sync_record,
    us_to_s,
)
from perfmodel.traces.spans import DeviceFacts, HostSpan, KinetoTrace, Note, NoteKind, Step

LIST_KEYS = ("traceEvents",)
_KNOWN = OPS | CALLS | SYNCS | PYTHON | DEVICE_KINDS.keys()
# Kineto's own marks and links, which say nothing that spans do not.
_SILENT = frozenset({"trace", "overhead", "ac2g", "fwdbwd", "async_cpu_to_gpu", "gpu_user_annotation", "activitytype"})
_MODULE_PREFIX = "nn.Module: "

MAX_SPREAD_US = 2.6e12  # 30 days; an integer clock in picoseconds holds 106

Counts = Counter[tuple[NoteKind, str]]


def read_kineto(path: str | Path, *, salvage: bool = False) -> KinetoTrace:
    """Reads a trace of one process; of a file with several, the process that launches most work.

    Raises:
        ConfigError: the file is missing, is no JSON or is cut off (`salvage` keeps whole events), or holds no event of use.
    """
    found = read_processes(path, salvage=salvage)
    return max(found, key=lambda trace: len(trace.device) + len(trace.calls)) if len(found) > 1 else found[0]


def read_processes(path: str | Path, *, salvage: bool = False) -> tuple[KinetoTrace, ...]:
    """Reads a trace file: one trace for each process in it that ran ops or launched work, in order of rank, then of id.

    Raises:
        ConfigError: as `read_kineto`.
    """
    stream = ItemStream(Path(path), LIST_KEYS, salvage=salvage)
    return traces_of_events(path, stream)


def traces_of_events(path: str | Path, stream: ItemStream | ItemList) -> tuple[KinetoTrace, ...]:
    """As `read_processes`, of an open stream."""
    counts: Counts = Counter()
    raws: list[Raw] = []
    n_events = _collect(stream, raws, counts)
    if not stream.list_key and not stream.is_list:
        raise ConfigError([f"{path}: traceEvents: not found; a PyTorch profiler trace has this list", *stream.lost])
    if raws:
        raws.sort(key=lambda raw: raw[0])
        raws = _near(raws, counts)
    if not any(raw[3] not in SYNCS for raw in raws):
        why = ", ".join(f"{count} {text}" for (_, text), count in counts.items()) or "only metadata"
        raise ConfigError(f"{path}: traceEvents: no host or device spans among {n_events} events ({why})")
    notes = [Note(kind="dropped", text=f"lost with the damage: {line}") for line in stream.lost]
    if stream.n_replaced:
        counts["guessed", "characters that are no UTF-8, replaced"] += stream.n_replaced
    processes = _by_process(raws, counts)
    made = []
    for number, (pid, mine) in enumerate(processes.items()):
        made.append(_trace(str(path), stream.header, mine, (number, len(processes))))
        if len(processes) > 1:
            made[-1] = replace(made[-1], info={**made[-1].info, "process": str(pid)})
    every = (*notes, *(Note(kind=kind, text=text, count=count) for (kind, text), count in sorted(counts.items())))
    return tuple(replace(trace, n_events=n_events, notes=(*every, *trace.notes)) for trace in made)


def _collect(stream: ItemStream | ItemList, raws: list[Raw], counts: Counts) -> int:
    """Appends the events of use as raw rows; returns how many events there were. The hot loop of reading."""
    n_events = 0
    known, silent = _KNOWN, _SILENT
    lowered: dict[object, str] = {}
    interned = Interned()
    for event in stream:
        n_events += 1
        try:
            phase = event["ph"]
            if phase != "X":
                if phase == "i" and event.get("name") == MEMORY_EVENT:
                    _add(event, MEMORY_EVENT, 0.0, raws, counts, interned)
                continue
            category = event.get("cat", "")
            name = lowered.get(category)
            if name is None:
                name = lowered[category] = str(category).lower()
            if name in known:
                _add(event, name, event.get("dur"), raws, counts, interned)
            elif name not in silent:
                counts["dropped", f"of unknown category {str(category)[:40]!r}"] += 1
        except (KeyError, TypeError, AttributeError, OverflowError):
            counts["dropped", "that are no trace events"] += 1
    return n_events


def _add(
    event: Mapping[str, Any], category: str, dur: Any, raws: list[Raw], counts: Counts, interned: Interned
) -> None:
    ts: Any = event.get("ts")
    name = event.get("name")
    if not _is_time(ts):
        counts["dropped", "without a start (ts)"] += 1
        return
    if not _is_time(dur) or dur < 0:
        counts["dropped", "without a duration (dur)"] += 1
        return
    if not isinstance(name, str):
        counts["dropped", "without a name"] += 1
        return
    pid, tid = interned.text(event.get("pid")), interned.text(event.get("tid"))
    raws.append((float(ts), float(dur), interned.text(name), category, pid, tid, interned.details(category, event)))


def _near(raws: list[Raw], counts: Counts) -> list[Raw]:
    """Events whose times fit the simulator's clock: a damaged number would stretch the trace over months."""
    middle = raws[len(raws) // 2][0]
    near = [raw for raw in raws if abs(raw[0] - middle) < MAX_SPREAD_US and raw[1] < MAX_SPREAD_US]
    if len(near) < len(raws):
        counts["dropped", "whose time is a month or more from the others"] += len(raws) - len(near)
    return near


def _is_time(value: Any) -> bool:
    """A finite number whose microseconds make sense (under 10^18: 30,000 years)."""
    return type(value) in (int, float) and -1e18 < value < 1e18  # NaN compares false


def _by_process(raws: list[Raw], counts: Counts) -> dict[str, list[Raw]]:
    """Events of each host process; device work goes to the process whose calls launched it."""
    hosts = Counter(raw[4] for raw in raws if raw[3] in CALLS or raw[3] in OPS)
    launching = Counter(raw[4] for raw in raws if raw[3] in CALLS)
    mains = [pid for pid in hosts if launching[pid]] or list(hosts)
    if len(mains) <= 1:
        return {next(iter(mains), ""): raws}
    owners = {(raw[4], raw[6].correlation) for raw in raws if raw[3] in CALLS}
    votes: dict[str, Counter[str]] = {}
    for raw in raws:
        if raw[3] in DEVICE_KINDS:
            tally = votes.setdefault(raw[4], Counter())
            tally.update(pid for pid in mains if (pid, raw[6].correlation) in owners)
    found: dict[str, list[Raw]] = {pid: [] for pid in mains}
    taken: dict[str, str] = {}
    for device, tally in votes.items():
        free = [pid for pid, _ in tally.most_common() if pid not in taken.values()]
        best = free[0] if free else next(iter(tally), mains[0])
        if len(tally) > 1 and len({count for _, count in tally.most_common(2)}) == 1:
            counts["guessed", "devices given to processes by order, as correlation ids fit several"] += 1
        taken[device] = best
    for raw in raws:
        pid = taken.get(raw[4], mains[0]) if raw[3] in DEVICE_KINDS or raw[3] in SYNCS else raw[4]
        if pid in found:
            found[pid].append(raw)
        else:
            counts["dropped", "of processes that launch nothing"] += 1
    return {pid: mine for pid, mine in found.items() if mine}


def _trace(path: str, header: Mapping[str, Any], raws: list[Raw], place: tuple[int, int]) -> KinetoTrace:
    """One process's trace; `place` is its number among the file's processes and how many there are."""
    origin = raws[0][0]
    counts: Counts = Counter()
    host: list[HostSpan] = [host_span(raw, origin) for raw in raws if raw[3] in OPS]
    rank, world_size = _ranks(header, place, counts)
    trace = KinetoTrace(
        path=path,
        rank=rank,
        world_size=world_size,
        origin_us=origin,
        ops=tuple(span for span in host if not span.name.startswith(STEP_PREFIX)),
        calls=tuple(host_span(raw, origin) for raw in raws if raw[3] in CALLS),
        device=tuple(device_span(raw, origin) for raw in raws if raw[3] in DEVICE_KINDS),
        steps=tuple(
            Step(name=s.name, start_s=s.start_s, end_s=s.end_s) for s in host if s.name.startswith(STEP_PREFIX)
        ),
        syncs=tuple(sync_record(raw) for raw in raws if raw[3] in SYNCS),
        modules=tuple(host_span(raw, origin) for raw in raws if raw[3] in PYTHON and raw[2].startswith(_MODULE_PREFIX)),
        memory=tuple(memory_event(raw, us_to_s(raw[0] - origin)) for raw in raws if raw[3] == MEMORY_EVENT),
        facts=_facts(header, raws),
        info=_info(header),
    )
    _count_missing(trace, counts)
    notes = tuple(Note(kind=kind, text=text, count=count) for (kind, text), count in sorted(counts.items()))
    return replace(trace, notes=notes)


def _ranks(header: Mapping[str, Any], place: tuple[int, int], counts: Counts) -> tuple[int, int]:
    info = header.get("distributedInfo")
    number, n_processes = place
    if isinstance(info, Mapping) and type(info.get("rank")) is int and n_processes == 1:
        world = info.get("world_size")
        if type(world) is int and world > info["rank"] >= 0:
            return info["rank"], world
        if info["rank"] >= 0:
            counts["guessed", f"the number of ranks, {info['rank'] + 1}, as the trace has none"] += 1
            return info["rank"], info["rank"] + 1
    counts["guessed", f"rank {number} of {n_processes}, as the trace names none"] += 1
    return number, n_processes


def _facts(header: Mapping[str, Any], raws: list[Raw]) -> DeviceFacts:
    listed = header.get("deviceProperties")
    used = next((raw[6].device for raw in raws if raw[3] in DEVICE_KINDS), 0)
    rows = [row for row in listed if isinstance(row, Mapping)] if isinstance(listed, list) else []
    row = next((row for row in rows if row.get("id") == used), rows[0] if rows else {})
    if not row:
        return DeviceFacts(name=str(header.get("gpu", "")))

    def count(key: str) -> int:
        value = row.get(key)
        return value if type(value) is int and value >= 0 else 0

    return DeviceFacts(
        name=str(row.get("name", "")),
        n_sms=count("numSms"),
        memory_bytes=count("totalGlobalMem"),
        max_threads_per_sm=count("maxThreadsPerMultiprocessor"),
        registers_per_sm=count("regsPerMultiprocessor"),
        shared_per_sm_bytes=count("sharedMemPerMultiprocessor"),
    )


def _info(header: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    info = header.get("distributedInfo")
    if isinstance(info, Mapping):
        found |= {key: str(info[key]) for key in ("backend", "nccl_version") if key in info}
    return found | {key: str(header[key]) for key in ("source", "model", "gpu", "perfmodel") if key in header}


def _count_missing(trace: KinetoTrace, counts: Counts) -> None:
    """Counts what a complete trace would have and this one has not."""
    launches = [call for call in trace.calls if "launch" in call.name.lower()]
    if launches and not trace.device:
        counts["missing", "kernels: launches without device records (the profiler dropped them, or lacks rights)"] += (
            len(launches)
        )
    unlinked = sum(1 for span in trace.device if not span.correlation)
    if unlinked:
        counts["missing", "correlation ids: device work that no launch can be found for"] += unlinked
    known = {call.correlation for call in trace.calls}
    orphans = sum(1 for span in trace.device if span.correlation and span.correlation not in known)
    if orphans:
        counts["missing", "launch calls of device work (outside the recorded window)"] += orphans
    shapeless = not any(op.arguments for op in trace.ops)
    if trace.ops and shapeless:
        counts["missing", "shapes of ops: record_shapes was off"] += len(trace.ops)
    if not trace.steps:
        counts["missing", "step marks (ProfilerStep): schedule= and step() were not used"] += 1
