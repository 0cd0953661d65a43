"""Predictions in the form of profiler traces: a Kineto document per rank class, read by whatever reads Kineto traces.

Host tasks become ops with their launch calls, device tasks kernels and copies, collectives NCCL kernels with the arguments
PyTorch gives them. A kernel runs from when it could start; a collective from when its rank has reached it. On a CPU ops are
on the thread that runs them. The iteration is repeated so that steps in the middle are whole, as work of one iteration
reaches into the next. What we know beyond a profiler (family, FLOPs, bytes, pipe, phase, module) stands in `args.perfmodel`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from perfmodel.estimate import Work
from perfmodel.kernels import calls_of
from perfmodel.pipeline.run import Run
from perfmodel.pipeline.tasks import LoweredClass
from perfmodel.plan.events import Collective, Event
from perfmodel.sim.program import HOST
from perfmodel.traces.json_stream import ItemList
from perfmodel.traces.kineto import LIST_KEYS, traces_of_events
from perfmodel.traces.ranks import Job, make_job
from perfmodel.traces.spans import KinetoTrace
from perfmodel.units import PS_PER_S, US_PER_S

PS_PER_US = PS_PER_S // US_PER_S
N_STEPS = 3
TILE, TILE_THREADS = 128, 256
LOOP_THREADS, LOOP_ELEMS = 128, 4
_HOST_PID, _THREAD = 1, 1
# PyTorch's name of each collective and the kernel that NCCL runs for it.
_NAMES = {
    "all_reduce": ("allreduce", "AllReduce_Sum"),
    "all_gather": ("allgather", "AllGather"),
    "broadcast": ("broadcast", "Broadcast"),
    "reduce_scatter": ("reduce_scatter", "ReduceScatter_Sum"),
    "reduce": ("reduce", "Reduce_Sum"),
    "barrier": ("barrier", "AllReduce"),
    "all_to_all": ("all_to_all", "SendRecv"),
    "all_to_all_v": ("all_to_allv", "SendRecv"),
    "send_recv": ("send", "SendRecv"),
}
_DTYPES = {
    "float32": "Float",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float64": "Double",
    "int64": "Long",
    "int32": "Int",
}
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "int64": 8, "int32": 4}


def kineto_documents(run: Run, n_steps: int = N_STEPS) -> list[dict[str, Any]]:
    """A Kineto document (plain values, ready for JSON) for the first rank of each class of a prediction."""
    return [_document(run, index, n_steps) for index in range(len(run.classes))]


def traces_of_run(run: Run, n_steps: int = N_STEPS) -> tuple[KinetoTrace, ...]:
    """The traces that reading `kineto_documents` would give."""
    found: list[KinetoTrace] = []
    for document in kineto_documents(run, n_steps):
        header = {key: value for key, value in document.items() if key not in LIST_KEYS}
        found += traces_of_events("prediction", ItemList(document[LIST_KEYS[0]], LIST_KEYS[0], header))
    return tuple(found)


def job_of_run(run: Run, n_steps: int = N_STEPS) -> Job:
    """A prediction as a job of one rank per class."""
    return make_job(traces_of_run(run, n_steps))


def kineto_json(document: dict[str, Any]) -> str:
    """A document as JSON text."""
    return json.dumps(document, separators=(",", ":"))


def _document(run: Run, index: int, n_steps: int) -> dict[str, Any]:
    lowered, prediction = run.classes[index], run.prediction
    device = lowered.device
    rank = lowered.rank_class.representative
    properties = {
        "id": 0,
        "name": device.title,
        "numSms": device.n_sms,
        "totalGlobalMem": device.memory_bytes,
        "sharedMemPerMultiprocessor": device.smem_per_sm_bytes,
    }
    return {
        "schemaVersion": 1,
        "perfmodel": f"ranks {','.join(map(str, lowered.rank_class.ranks))}",
        "model": prediction.model,
        "deviceProperties": [properties] if device.kind == "cuda" else [],
        "distributedInfo": {
            "backend": "nccl" if device.kind == "cuda" else "gloo",
            "rank": rank,
            "world_size": prediction.n_ranks,
        },
        "record_shapes": 1,
        LIST_KEYS[0]: list(_events(run, index, n_steps)),
    }


def _events(run: Run, index: int, n_steps: int) -> Iterator[dict[str, Any]]:
    timeline, lowered = run.steady.timeline, run.classes[index]
    period_us = timeline.makespan_ps / PS_PER_US
    # Work of the first step may begin before it: times are from the first instant that anything happens.
    starts = timeline.starts(index)
    shift_ps = min(int(starts.min()) if len(starts) else timeline.begin_ps, timeline.begin_ps)
    begin_us = (timeline.begin_ps - shift_ps) / PS_PER_US
    body = list(_iteration(run, index, shift_ps))
    for step in range(n_steps):
        at = begin_us + step * period_us
        name = f"ProfilerStep#{step}"
        yield _span("user_annotation", name, (at, at + period_us), (_HOST_PID, _THREAD), {})
        for event in body:
            args = dict(event["args"])
            for key in ("correlation", "External id"):
                if key in args:
                    args[key] += step * (len(lowered.tasks) + 1)
            yield {**event, "ts": event["ts"] + step * period_us, "args": args}


def _span(
    cat: str, name: str, window_us: tuple[float, float], place: tuple[int, int], args: dict[str, Any]
) -> dict[str, Any]:
    begin, end = window_us
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": place[0],
        "tid": place[1],
        "ts": begin,
        "dur": end - begin,
        "args": args,
    }


def _iteration(run: Run, index: int, shift_ps: int) -> Iterator[dict[str, Any]]:
    lowered, timeline = run.classes[index], run.steady.timeline
    starts = (timeline.starts(index) - shift_ps) / PS_PER_US
    ends = (timeline.ends(index) - shift_ps) / PS_PER_US
    readies = (timeline.readies(index) - shift_ps) / PS_PER_US
    is_cpu = lowered.device.kind == "cpu"
    launch_us = lowered.device.host.launch_s * US_PER_S
    kernels = _kernel_numbers(lowered)
    launched = _launched(lowered)
    for task in range(len(lowered.tasks)):
        info = lowered.tasks[task]
        event = lowered.rank_class.events[info.event]
        window = (float(starts[task]), float(ends[task]))
        stream = int(lowered.program.stream[task])
        if stream == HOST:
            yield from _host_task(event, info.category, window, (launched.get(task, ()), launch_us))
        elif event.collective is not None:
            arrived = (min(float(readies[task]), window[0]), window[1])
            yield _collective(event.collective, event, arrived, (stream, task + 1), cpu=is_cpu)
        elif is_cpu:
            args = {"perfmodel": _work(lowered, event, kernels[task], info.family), **_shapes(event)}
            yield _span("cpu_op", _op_name(event), window, (_HOST_PID, _THREAD), args)
        else:
            args = {
                "stream": stream,
                "device": 0,
                "correlation": task + 1,
                "perfmodel": _work(lowered, event, kernels[task], info.family),
            }
            is_copy = info.category == "copy"
            if not is_copy:
                args |= _launch_shape(event, kernels[task])
            if is_copy:
                args["bytes"] = sum(spec.bytes for spec in (event.op.outputs if event.op else ()))
            name = "Memcpy HtoD (Pinned -> Device)" if is_copy else f"{info.family} ({event.label})"
            yield _span("gpu_memcpy" if is_copy else "kernel", name, window, (0, stream), args)


def _launched(lowered: LoweredClass) -> dict[int, tuple[int, ...]]:
    """Device tasks by the host task that launches them."""
    program = lowered.program
    found: dict[int, tuple[int, ...]] = {}
    at = 0
    for task, count in enumerate(program.dep_count.tolist()):
        for dep in program.dep_index[at : at + count].tolist():
            if program.stream[task] != HOST and program.stream[dep] == HOST:
                found[dep] = (*found.get(dep, ()), task)
        at += count
    return found


def _kernel_numbers(lowered: LoweredClass) -> list[int]:
    """Of each device task, which kernel of its event it is."""
    seen: dict[int, int] = {}
    numbers = []
    for event, stream in zip(lowered.tasks.event.tolist(), lowered.program.stream.tolist(), strict=True):
        number = seen.get(event, 0)
        numbers.append(number)
        if stream != HOST:
            seen[event] = number + 1
    return numbers


def _host_task(
    event: Event, category: str, window: tuple[float, float], launches: tuple[tuple[int, ...], float]
) -> Iterator[dict[str, Any]]:
    tasks, launch_us = launches
    begin, end = window
    place = (_HOST_PID, _THREAD)
    yield _span("cpu_op", _op_name(event), window, place, _shapes(event))
    if category == "sync":
        yield _span("cuda_runtime", "cudaStreamSynchronize", window, place, {})
    call = (max(end - launch_us, begin), end)
    name = "cudaLaunchKernel" if len(tasks) == 1 else "cudaGraphLaunch"
    for task in tasks:
        yield _span("cuda_runtime", name, call, place, {"correlation": task + 1})


def _op_name(event: Event) -> str:
    if event.collective is not None:
        return f"c10d::{_NAMES[event.collective.op][0]}_"
    return event.label.replace(".", "::", 1)


def _shapes(event: Event) -> dict[str, Any]:
    if event.op is None or not event.op.inputs:
        return {}
    inputs = event.op.inputs
    return {
        "Input Dims": [list(s.shape) for s in inputs],
        "Input type": [_DTYPES.get(s.dtype, s.dtype) for s in inputs],
    }


def _work(lowered: LoweredClass, event: Event, number: int, family: str) -> dict[str, Any]:
    """What a kernel does; on a CPU an op is all its kernels."""
    op = event.op
    body: dict[str, Any] = {"family": family, "phase": event.phase, "module": op.module if op is not None else ""}
    calls = calls_of(op) if op is not None else ()
    mine = calls if lowered.device.kind == "cpu" else calls[number : number + 1]
    if mine:
        work = sum((call.work for call in mine), Work())
        body |= {"flops": int(work.flops), "bytes": int(work.bytes), "pipe": mine[0].pipe}
    return body


def _launch_shape(event: Event, number: int) -> dict[str, Any]:
    """The launch that the libraries usually choose for a kernel; registers and shared memory as such kernels have them.

    Products run 128 x 128 tiles of 256 threads (CUTLASS's default), everything else 128 threads of 4 elements each
    (PyTorch's vectorised loops, aten/src/ATen/native/cuda/thread_constants.h).
    """
    calls = calls_of(event.op) if event.op is not None else ()
    if number >= len(calls):
        return {}
    call = calls[number]
    sizes = call.features
    if call.family == "gemm" and {"m", "n"} <= set(sizes):
        tiles = math.ceil(sizes["m"] / TILE) * math.ceil(sizes["n"] / TILE) * max(sizes.get("batch", 1.0), 1.0)
        return {
            "grid": [int(tiles), 1, 1],
            "block": [TILE_THREADS, 1, 1],
            "registers per thread": 128,
            "shared memory": 32768,
        }
    n_elems = max(call.work.write_bytes, 1) / _ITEM_BYTES.get(call.dtype, 4)
    blocks = math.ceil(n_elems / (LOOP_THREADS * LOOP_ELEMS))
    return {"grid": [blocks, 1, 1], "block": [LOOP_THREADS, 1, 1], "registers per thread": 32, "shared memory": 0}


def _collective(
    collective: Collective, event: Event, window: tuple[float, float], place: tuple[int, int], *, cpu: bool
) -> dict[str, Any]:
    stream, correlation = place
    name, kernel = _NAMES[collective.op]
    n_elems = collective.bytes // _ITEM_BYTES.get(collective.dtype, 1)
    known = collective.dtype in _ITEM_BYTES
    args = {
        "stream": stream,
        "device": 0,
        "correlation": correlation,
        "Collective name": name,
        "In msg nelems": n_elems if collective.op != "all_gather" else n_elems // len(collective.ranks),
        "Out msg nelems": n_elems if collective.op != "reduce_scatter" else n_elems // len(collective.ranks),
        "dtype": _DTYPES[collective.dtype] if known else "Byte",
        "Group size": len(collective.ranks),
        "Process Group Ranks": list(collective.ranks),
        "perfmodel": {"family": collective.op, "phase": event.phase, "bytes": collective.bytes},
    }
    if cpu:
        return _span("user_annotation", f"gloo:{collective.op}", window, (_HOST_PID, _THREAD + stream), args)
    return _span("kernel", f"ncclDevKernel_{kernel}", window, (0, stream), args)
