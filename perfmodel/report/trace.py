"""A simulated iteration as a Chrome trace, which Perfetto opens: a process per rank, a track per stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from perfmodel.pipeline.loader import LOADER_STREAM
from perfmodel.pipeline.run import Run
from perfmodel.pipeline.tasks import LoweredClass
from perfmodel.sim.program import COMM, COMPUTE, COPY, COPY_BACK, HOST
from perfmodel.units import PS_PER_S

PS_PER_US = PS_PER_S // 1_000_000
MAX_RANKS = 64  # tracks beyond this many ranks say nothing new: ranks of a class do the same
STREAM_NAMES = {
    HOST: "host thread", COMPUTE: "compute stream", COMM: "communication stream", COPY: "copy stream",
    COPY_BACK: "stream of copies to the host", LOADER_STREAM: "data loader",
}  # fmt: skip


def render_trace(run: Run) -> str:
    """The steady-state iteration as JSON text in the Trace Event Format; times in microseconds from its beginning."""
    events = [event for index in range(len(run.classes)) for event in _class_events(run, index)]
    return json.dumps(
        {
            "displayTimeUnit": "ns",
            "otherData": {
                "model": run.prediction.model,
                "topology": run.prediction.topology,
                "plan": run.prediction.plan,
                "iteration_time_s": run.prediction.iteration_time_s,
            },
            "traceEvents": events,
        },
        separators=(",", ":"),
    )


def _class_events(run: Run, index: int) -> Iterator[dict[str, Any]]:
    lowered = run.classes[index]
    ranks = [rank for rank in lowered.rank_class.ranks if rank < MAX_RANKS] or [lowered.rank_class.ranks[0]]
    spans = list(_spans(run, index))
    streams = sorted(set(lowered.program.stream.tolist()))
    for rank in ranks:
        name = f"rank {rank} ({lowered.device.title})"
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
        for stream in streams:
            track = {"name": STREAM_NAMES.get(stream, f"stream {stream}")}
            yield {"ph": "M", "pid": rank, "tid": stream, "name": "thread_name", "args": track}
        yield from ({**span, "pid": rank} for span in spans)


def _spans(run: Run, index: int) -> Iterator[dict[str, Any]]:
    lowered, timeline = run.classes[index], run.steady.timeline
    starts, ends, readies = timeline.starts(index), timeline.ends(index), timeline.readies(index)
    for number, stream in enumerate(lowered.program.stream.tolist()):
        start_ps, end_ps = int(starts[number]), int(ends[number])
        if end_ps == start_ps:
            continue
        span = {
            "ph": "X",
            "tid": stream,
            "ts": (start_ps - timeline.begin_ps) / PS_PER_US,
            "dur": (end_ps - start_ps) / PS_PER_US,
            **_describe(lowered, number),
        }
        waited_ps = start_ps - int(readies[number])
        if waited_ps > 0:
            span["args"]["waited_for_other_ranks_us"] = waited_ps / PS_PER_US
        yield span


def _describe(lowered: LoweredClass, number: int) -> dict[str, Any]:
    info = lowered.tasks[number]
    event = lowered.rank_class.events[info.event]
    args: dict[str, Any] = {"phase": event.phase, "source": info.estimate.source.label, "family": info.family}
    if event.op is not None:
        args |= {"module": event.op.module, "shapes": [list(spec.shape) for spec in event.op.inputs[:4]]}
    if event.collective is not None:
        args |= {"bytes": event.collective.bytes, "ranks": len(event.collective.ranks)}
    name = event.label if info.category != "sync" else f"sync {event.label}"
    if lowered.program.stream[number] == LOADER_STREAM:
        name, args = STREAM_NAMES[LOADER_STREAM], {}
    return {"name": name, "cat": info.category, "args": args}
