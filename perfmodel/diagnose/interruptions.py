"""Interruptions by work that is not the device's: loading, preprocessing, copies, waits, logging, saving, the optimizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from perfmodel.diagnose.finding import Finding
from perfmodel.diagnose.gains import Replayer, everywhere, removed
from perfmodel.diagnose.view import RankView, View, holds, make_finding
from perfmodel.kernels.host import PER_TENSOR_WEIGHT
from perfmodel.kernels.view import ALLOCATIONS, METADATA, VIEWS
from perfmodel.sim.intervals import Spans, union
from perfmodel.traces.anchors import BLOCKING_COPY
from perfmodel.traces.explain import SYNC_CALLS, spans_of
from perfmodel.traces.link import LOADING_PREFIX, OPTIMIZER_PREFIX, ancestors, nest
from perfmodel.traces.replay import Edit
from perfmodel.traces.spans import HostSpan
from perfmodel.units import format_bytes, format_percent, format_time

LEAST_FRAC = 0.05  # of the step: what costs less is not worth a change
LEAST_SYNC_FRAC = 0.03
WORKERS = 4
PINNED_FRAC = 0.8  # of the link's rate, which copies from pinned memory reach (CUDA samples' bandwidthTest on PCIe)
EVALUATION_RARER = 0.1
_NAMED: Sequence[tuple[str, re.Pattern[str]]] = (
    ("checkpointing", re.compile(r"torch\.save|save_checkpoint|checkpoint(?!function)|\bsave\b|async_save", re.IGNORECASE)),
    ("evaluation", re.compile(r"\beval|validat|\btest_(?:step|epoch)", re.IGNORECASE)),
    ("logging", re.compile(r"\blog(?:ging)?\b|tensorboard|wandb|mlflow|\bprint\b|add_scalar|\bmetrics?\b", re.IGNORECASE)),
    ("preprocessing", re.compile(r"preprocess|augment|transform\b|collate|tokeni[sz]e|decode_(?:image|jpeg)", re.IGNORECASE)),
)  # fmt: skip
_OPTIMIZER_STEP = OPTIMIZER_PREFIX + "step"
# A fused optimizer's list ops pass each parameter about five times (gradients, two moments, parameters, steps).
_LISTS_OF_TENSORS = 5
# Bytes of fused Adam over those of its ops one by one: reads p, g, m, v and writes p, m, v (7), where lerp_, mul_, addcmul_,
# sqrt, div, add_ and addcdiv_ read 12 and write 7 tensors.
FUSED_BYTES_FRAC = 7 / 19


def find_interruptions(view: View, replayer: Replayer) -> Iterator[Finding]:
    """Findings of this group."""
    for find in (_loading, _named, _unnamed_preprocessing, _pageable, _synchronisation, _optimizer):
        yield from find(view, replayer)


def interruption_spans(rank: RankView) -> list[HostSpan]:
    """Host spans of a rank that these causes explain: loading, and annotations named after them."""
    return [span for span in rank.host(rank.trace.ops) if span.name.startswith(LOADING_PREFIX) or _kind(span)]


def _kind(span: HostSpan) -> str:
    if span.kind != "annotation" or span.name.startswith((OPTIMIZER_PREFIX, LOADING_PREFIX, "nccl:", "gloo:")):
        return ""
    return next((cause for cause, words in _NAMED if words.search(span.name)), "")


def _picked(view: View, pick: Callable[[HostSpan], bool]) -> dict[int, list[HostSpan]]:
    """Outermost host spans of each rank's main thread that `pick` accepts."""
    found = {}
    for rank in view.ranks:
        mine = [span for span in rank.host(rank.trace.ops) if pick(span)]
        found[rank.trace.rank] = [s for s, above in zip(mine, nest(mine), strict=True) if above < 0]
    return found


def _loading(view: View, replayer: Replayer) -> Iterator[Finding]:
    picked = _picked(view, lambda span: span.name.startswith(LOADING_PREFIX))
    yield from _prefetchable(view, replayer, "data_loading", picked)


def _prefetchable(view: View, replayer: Replayer, cause: str, picked: dict[int, list[HostSpan]]) -> Iterator[Finding]:
    """Work that workers can do during the step before: what is left of it is what they cannot keep up with."""
    main = view.main
    mine = picked[main.trace.rank]
    spans = union(spans_of(mine))
    cost_s, exposed_s = main.per_step_s(spans), main.idle_s(spans)
    if exposed_s < LEAST_FRAC * main.step_s:
        return
    workers = 1 if main.is_cpu else WORKERS  # on a CPU workers take cores that training uses
    left_s = max(cost_s / workers - (main.step_s - cost_s), 0.0)
    edit = Edit(host=everywhere(view, {r: spans_of(s) for r, s in picked.items()}, left_s / cost_s))
    gain_s = replayer.gain_s(edit)
    single = any("SingleProcess" in span.name for span in mine)
    more = " by the training process itself (num_workers=0)" if single else ""
    evidence = (
        f"{format_time(cost_s)} a step{more}, {format_percent(exposed_s / main.step_s)} of the step with "
        f"{'no op running' if main.is_cpu else 'the device idle'}"
    )
    yield make_finding(view, cause, evidence, spans, [s.name for s in mine], (gain_s, replayer.basis))


def _named(view: View, replayer: Replayer) -> Iterator[Finding]:
    """Spans that a program or the profiling runner annotated."""
    for cause, _ in _NAMED:
        picked = _picked(view, lambda span, cause=cause: _kind(span) == cause)  # type: ignore[misc] # bound now
        if cause == "preprocessing":
            yield from _prefetchable(view, replayer, cause, picked)
            continue
        mine = picked[view.main.trace.rank]
        spans = union(spans_of(mine))
        cost_s = view.main.per_step_s(spans)
        if cost_s < LEAST_FRAC * view.main.step_s:
            continue
        factor = EVALUATION_RARER if cause == "evaluation" else 0.0
        gain_s = replayer.gain_s(removed(view, picked, factor))
        evidence = f"{len(mine)} times in {view.main.n_steps} steps, {format_time(cost_s)} a step"
        yield make_finding(view, cause, evidence, spans, [s.name for s in mine], (gain_s, replayer.basis))


def _unnamed_preprocessing(view: View, replayer: Replayer) -> Iterator[Finding]:
    """Ops of the main thread's forward that launch nothing while the device is idle: they compute on the CPU."""
    if view.main.is_cpu or not view.main.trace.device or "perfmodel" in view.main.trace.info:
        return
    picked = {}
    for rank in view.ranks:
        launching = {
            above for op in {op for op in rank.links.call_ops if op >= 0} for above in ancestors(op, rank.links.parents)
        }
        ops = rank.trace.ops
        picked[rank.trace.rank] = [
            op
            for index, op in enumerate(ops)
            if op.kind == "op" and op.name not in _NO_WORK and op.thread == rank.links.main_thread and rank.in_step(op.start_s)
            and index not in launching and op.duration_s > _CPU_OP_S
            and not any(_kind(ops[a]) or ops[a].name.startswith((LOADING_PREFIX, OPTIMIZER_PREFIX))
                        for a in ancestors(index, rank.links.parents))
        ]  # fmt: skip
    yield from _prefetchable(view, replayer, "preprocessing", picked)


# Ops that compute nothing however long the host takes over them.
_NO_WORK = {name.replace(".", "::", 1) for name in (*VIEWS, *METADATA, *ALLOCATIONS)} | {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::flatten_dense_tensors", "aten::unflatten_dense_tensors",
    "aten::narrow", "aten::view", "aten::reshape", "aten::resize_", "aten::record_stream",
}  # fmt: skip
_CPU_OP_S = 100e-6  # dispatch alone takes less (20-60 us in public traces): such an op computes on the CPU


def _pageable(view: View, replayer: Replayer) -> Iterator[Finding]:
    main = view.main
    found = [(w, number) for number, w in enumerate(main.links.work) if "Pageable -> Device" in w.span.name]
    mine = [(w, number) for w, number in found if w.call >= 0 and main.in_step(w.span.start_s)]
    calls = [main.trace.calls[w.call] for w, _ in mine]
    spans = union(spans_of(calls))
    cost_s = main.per_step_s(spans)
    if cost_s < LEAST_SYNC_FRAC * main.step_s:
        return
    factors: dict[int, float] = {}
    waits = set()
    hosts: dict[int, Spans] = {}
    for rank in view.ranks:
        picked = [w for w in rank.links.work if "Pageable -> Device" in w.span.name and w.call >= 0]
        for work in picked:
            best_s = work.span.bytes / (view.device.host_link_bytes_per_s * PINNED_FRAC)
            factors[id(work.span)] = (
                min(best_s / work.span.duration_s, 1.0) if work.span.bytes and work.span.duration_s else 1.0
            )
            waits.add((rank.trace.rank, rank.trace.calls[work.call].start_s))
        hosts[rank.trace.rank] = spans_of([rank.trace.calls[work.call] for work in picked])
    edit = Edit(host=everywhere(view, hosts, 0.0), device=lambda s: factors.get(id(s), 1.0), no_wait=frozenset(waits))
    n_bytes = sum(w.span.bytes for w, _ in mine)
    evidence = (
        f"{len(mine) / main.n_steps:.0f} copies a step from pageable memory block the host for {format_time(cost_s)}"
    )
    evidence += f" ({format_bytes(n_bytes // main.n_steps)})" if n_bytes else ""
    names = [main.name_of_op(number) for _, number in mine]
    yield make_finding(view, "pageable_copies", evidence, spans, names, (replayer.gain_s(edit), replayer.basis))


def _synchronisation(view: View, replayer: Replayer) -> Iterator[Finding]:
    """Calls that wait for the device and leave it without work afterwards: worth what removing the wait gains."""
    waits: set[tuple[int, float]] = set()
    for rank in view.ranks:
        covered = union(spans_of(interruption_spans(rank)))
        launched = rank.trace.launched
        for call in rank.trace.calls:
            work = launched.get(call.correlation)
            blocks = work is not None and work.kind == "memcpy" and BLOCKING_COPY in work.name
            if (blocks or call.name.startswith(SYNC_CALLS)) and rank.in_step(call.start_s) and not _in(covered, call):
                waits.add((rank.trace.rank, call.start_s))
    main = view.main
    mine = [c for c in main.trace.calls if (main.trace.rank, c.start_s) in waits]
    spans = union(spans_of(mine))
    if not mine or main.is_cpu:
        return
    gain_s = replayer.gain_s(Edit(no_wait=frozenset(waits)))
    if gain_s < LEAST_SYNC_FRAC * main.step_s:
        return
    ops = [
        main.trace.ops[op].name
        for call, op in zip(main.trace.calls, main.links.call_ops, strict=True)
        if op >= 0 and (main.trace.rank, call.start_s) in waits
    ]
    evidence = f"{len(mine) / main.n_steps:.1f} waits a step, {format_time(main.per_step_s(spans))} a step"
    yield make_finding(view, "synchronisation", evidence, spans, ops, (gain_s, replayer.basis))


def _in(spans: Spans, call: HostSpan) -> bool:
    return len(spans[0]) > 0 and holds(spans, call.start_s)


def _optimizer(view: View, replayer: Replayer) -> Iterator[Finding]:
    """An optimizer that runs op by op: the host cannot issue its ops as fast as the device runs them, or runs them itself."""
    main = view.main
    picked = _picked(view, lambda span: span.name.startswith(_OPTIMIZER_STEP))
    mine = picked[main.trace.rank]
    spans = union(spans_of(mine))
    exposed_s = main.idle_s(spans)
    inner = _ops_in(main, mine)
    fused = [op for op in inner if "_fused_" in op.name or "_foreach_" in op.name]
    if exposed_s < LEAST_FRAC * main.step_s or not inner or fused or len(inner) < 8 * main.n_steps:
        return
    factor = FUSED_BYTES_FRAC if main.is_cpu else _fused_host_frac(len(inner) / max(len(mine), 1))
    gain_s = replayer.gain_s(removed(view, picked, factor))
    where = "on the CPU" if main.is_cpu or not main.launched_in(mine) else "one op at a time"
    evidence = (
        f"{format_time(main.per_step_s(spans))} a step {where}: {len(inner) / main.n_steps:.0f} ops, "
        f"{format_percent(exposed_s / main.step_s)} of the step"
    )
    yield make_finding(view, "host_optimizer", evidence, spans, [op.name for op in inner], (gain_s, replayer.basis))


def _ops_in(rank: RankView, spans: Sequence[HostSpan]) -> list[HostSpan]:
    """Outermost ops inside spans."""
    names = {id(span) for span in spans}
    ops, parents = rank.trace.ops, rank.links.parents
    return [op for op, parent in zip(ops, parents, strict=True) if parent >= 0 and id(ops[parent]) in names]


def _fused_host_frac(n_ops: float) -> float:
    """Host time of a fused step over that of `n_ops` ops: one op and a share for every tensor in its lists."""
    n_tensors = n_ops / _OPS_A_TENSOR
    return min((1.0 + PER_TENSOR_WEIGHT * _LISTS_OF_TENSORS * n_tensors) / n_ops, 1.0)


_OPS_A_TENSOR = 5  # ops of Adagrad or Adam on one parameter, at least (torch.optim, single-tensor path)
