"""Causes in memory: an emptied cache, retried allocations, recomputed activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from perfmodel.diagnose.finding import Finding
from perfmodel.diagnose.gains import Replayer, everywhere, removed
from perfmodel.diagnose.view import RankView, View, make_finding, most_frequent
from perfmodel.sim.intervals import Spans, union
from perfmodel.traces.explain import spans_of
from perfmodel.traces.link import BACKWARD_PREFIX, NO_OP, ancestors
from perfmodel.traces.replay import Edit
from perfmodel.traces.spans import HostSpan
from perfmodel.units import format_percent, format_time

LEAST_FRAC = 0.02
LEAST_RECOMPUTE_FRAC = 0.08
_FREES, _ALLOCATIONS = ("cudaFree", "hipFree"), ("cudaMalloc", "hipMalloc", "cuMemCreate", "cuMemMap")
# Ops that only a model's own forward calls (they are composed of others), so in backward they recompute.
_FORWARD_ONLY = {
    "aten::linear", "aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::layer_norm", "aten::batch_norm",
    "aten::scaled_dot_product_attention", "aten::dropout", "aten::embedding", "aten::matmul",
}  # fmt: skip


def find_memory(view: View, replayer: Replayer) -> Iterator[Finding]:
    """Findings of this group."""
    yield from _allocator(view, replayer)
    yield from _recompute(view, replayer)


def _allocator(view: View, replayer: Replayer) -> Iterator[Finding]:
    """Frees of device memory in a steady step: inside an op they are retries, outside of one a flush by the program."""
    main = view.main
    if main.n_steps < 2:
        return  # the first step of a run allocates what later ones keep
    frees = _calls(main, _FREES)
    inside = [call for call, op in frees if op != NO_OP and _is_op(main, op)]
    flushed = [call for call, op in frees if op == NO_OP or not _is_op(main, op)]
    for cause, mine in (("allocation_retries", inside), ("cache_flush", flushed)):
        if len(mine) < main.n_steps / 2:
            continue
        again = [call for call, _ in _calls(main, _ALLOCATIONS)]
        spans = union(spans_of([*mine, *again]))
        cost_s = main.per_step_s(spans)
        if cost_s < LEAST_FRAC * main.step_s:
            continue
        hosts: dict[int, Spans] = {
            r.trace.rank: spans_of([call for call, _ in _calls(r, (*_FREES, *_ALLOCATIONS))]) for r in view.ranks
        }
        gain_s = replayer.gain_s(Edit(host=everywhere(view, hosts, 0.0)))
        evidence = (
            f"{len(mine) / main.n_steps:.1f} cudaFree and {len(again) / main.n_steps:.1f} cudaMalloc a step, "
            f"{format_time(cost_s)}"
        )
        ops = [main.trace.ops[op].name for _, op in _calls(main, (*_FREES, *_ALLOCATIONS)) if op != NO_OP]
        yield make_finding(view, cause, evidence, spans, ops, (gain_s, replayer.basis))


def _calls(rank: RankView, names: tuple[str, ...]) -> list[tuple[HostSpan, int]]:
    """Calls by name, with the op around each."""
    found = zip(rank.trace.calls, rank.links.call_ops, strict=True)
    plain = [(call, op) for call, op in found if call.name.startswith(names) and rank.in_step(call.start_s)]
    return [(call, op) for call, op in plain if "Async" not in call.name and "Host" not in call.name]


def _is_op(rank: RankView, op: int) -> bool:
    return any(rank.trace.ops[index].kind == "op" for index in ancestors(op, rank.links.parents))


def _recompute(view: View, replayer: Replayer) -> Iterator[Finding]:
    """Ops of the forward inside backward; their host spans on a CPU, what they launch on a device."""
    main = view.main
    picked = {rank.trace.rank: _recomputed(rank) for rank in view.ranks}
    mine = picked[main.trace.rank]
    spans = union(spans_of(mine))
    if main.trace.device:
        numbers = main.launched_in(mine)
        device_s = sum(main.links.work[n].span.duration_s for n in numbers)
        cost_s = device_s / main.n_steps
    else:
        cost_s = main.per_step_s(spans)
    if cost_s < LEAST_RECOMPUTE_FRAC * main.step_s:
        return
    gain_s = replayer.gain_s(removed(view, picked))
    share = format_percent(cost_s / main.step_s)
    evidence = f"{format_time(cost_s)} a step of forward ops run again inside backward ({share})"
    modules = [main.links.op_modules[i] for i, op in enumerate(main.trace.ops) if op in mine[:50]]
    found = make_finding(view, "recompute", evidence, spans, [op.name for op in mine], (gain_s, replayer.basis))
    yield replace(found, modules=most_frequent(modules))


def _recomputed(rank: RankView) -> list[HostSpan]:
    ops, parents = rank.trace.ops, rank.links.parents
    found = []
    for index, op in enumerate(ops):
        if op.name not in _FORWARD_ONLY or not rank.in_step(op.start_s):
            continue
        above = [ops[a].name for a in ancestors(parents[index], parents)]
        if any(name.startswith(BACKWARD_PREFIX) or name == "CheckpointFunctionBackward" for name in above) and not (
            set(above) & _FORWARD_ONLY
        ):
            found.append(op)
    return found
