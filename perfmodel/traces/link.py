"""Who did what in a trace: op -> launch -> kernel, phase and module of each kernel, the main host thread, the steps.

A launch belongs to the shortest op on its thread that covers its start; device work whose launch is missing belongs to
the op with the same external id. The phase follows from the ops and annotations around the op, the module from module
spans (traces taken with `with_modules` or `with_stack`) or the profiler's own `Module Hierarchy`; a backward op has the
module of the forward op with its sequence number.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from perfmodel.graph import Phase
from perfmodel.traces.spans import DeviceSpan, HostSpan, KinetoTrace, Step

BACKWARD_PREFIX = "autograd::engine::evaluate_function"
OPTIMIZER_PREFIX = "Optimizer."
LOADING_PREFIX = "enumerate(DataLoader)"
MODULE_PREFIX = "nn.Module: "
NO_OP = -1
_BACKWARD = re.compile(r"Backward\d*$")  # autograd nodes, as profilers before torch 1.10 show them


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedWork:
    """Device work with the index of its call and of its op (-1: none), and the phase and module it belongs to."""

    span: DeviceSpan
    call: int
    op: int
    phase: Phase
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The nesting of a trace.

    Attributes:
        parents: for each op the index of the op around it, -1 for none.
        call_ops: for each call the index of the shortest op around it, -1 for none.
        work: for each device span who launched it.
        main_thread: the thread that runs the steps.
        op_modules: for each op its module's path; empty where unknown.
    """

    parents: tuple[int, ...]
    call_ops: tuple[int, ...]
    work: tuple[LinkedWork, ...]
    main_thread: str
    op_modules: tuple[str, ...]


def link(trace: KinetoTrace) -> Links:
    """Finds the nesting of a trace."""
    parents = nest(trace.ops)
    call_ops = tuple(_covering(trace.ops, trace.calls))
    modules = _modules(trace, parents)
    phases = [_own_phase(op) for op in trace.ops]
    by_correlation: dict[int, int] = {}
    for index, made in enumerate(trace.calls):
        if made.correlation:
            by_correlation.setdefault(made.correlation, index)
    by_external: dict[int, int] = {op.external_id: index for index, op in enumerate(trace.ops) if op.external_id}
    work = []
    for span in trace.device:
        call = by_correlation.get(span.correlation, NO_OP) if span.correlation else NO_OP
        op = call_ops[call] if call >= 0 else by_external.get(span.external_id, NO_OP)
        given = span.work
        phase = _phase(op, parents, phases)
        work.append(
            LinkedWork(
                span=span,
                call=call,
                op=op,
                phase=_checked(given.phase, phase) if given else phase,
                module=given.module if given else modules[op] if op >= 0 else "",
            )
        )
    return Links(
        parents=parents,
        call_ops=call_ops,
        work=tuple(work),
        main_thread=main_thread(trace),
        op_modules=modules,
    )


def nest(spans: Sequence[HostSpan]) -> tuple[int, ...]:
    """For each span (ascending starts) the index of the shortest earlier span on its thread that covers it, -1 for none."""
    stacks: dict[str, list[int]] = {}
    parents = []
    for index, span in enumerate(spans):
        stack = stacks.setdefault(span.thread, [])
        while stack and (spans[stack[-1]].end_s <= span.start_s or spans[stack[-1]].end_s < span.end_s):
            stack.pop()
        parents.append(stack[-1] if stack else NO_OP)
        stack.append(index)
    return tuple(parents)


def ancestors(index: int, parents: Sequence[int]) -> Iterator[int]:
    """An op's index and those of the ops around it, from the inside out."""
    while index >= 0:
        yield index
        index = parents[index]


def outermost(index: int, parents: Sequence[int], ops: Sequence[HostSpan]) -> int:
    """The outermost op (not annotation) around an op: the one that a user's code called."""
    found = index
    for above in ancestors(index, parents):
        if ops[above].kind == "op" and not ops[above].name.startswith(BACKWARD_PREFIX):
            found = above
    return found


def innermost_ops(trace: KinetoTrace, calls: Sequence[HostSpan]) -> list[HostSpan | None]:
    """For each call (ascending starts), the shortest op on its thread that covers it, or None."""
    return [trace.ops[index] if index >= 0 else None for index in _covering(trace.ops, calls)]


def _covering(ops: Sequence[HostSpan], calls: Sequence[HostSpan]) -> list[int]:
    stacks: dict[str, list[int]] = {}
    found: list[int] = []
    at = 0
    for call in calls:
        while at < len(ops) and ops[at].start_s <= call.start_s:
            stack = stacks.setdefault(ops[at].thread, [])
            while stack and ops[stack[-1]].end_s <= ops[at].start_s:
                stack.pop()
            stack.append(at)
            at += 1
        stack = stacks.get(call.thread, [])
        while stack and ops[stack[-1]].end_s <= call.start_s:
            stack.pop()
        found.append(stack[-1] if stack else NO_OP)
    return found


def main_thread(trace: KinetoTrace) -> str:
    """The thread that the profiler's step marks, else the optimizer, else most ops, are on."""
    marked = Counter(op.thread for op in trace.ops if op.name.startswith(OPTIMIZER_PREFIX))
    counted = (
        marked or Counter(op.thread for op in trace.ops if op.kind == "op") or Counter(c.thread for c in trace.calls)
    )
    return counted.most_common(1)[0][0] if counted else ""


def find_steps(trace: KinetoTrace) -> tuple[tuple[Step, ...], str]:
    """The steps of a trace, and in words how they were found if the profiler marked none.

    Steps are guessed from the ends of the optimizer's steps; if there are fewer than two, the whole trace is one.
    """
    if trace.steps:
        return trace.steps, ""
    ends = _optimizer_ends(trace)
    if len(ends) > 1:
        steps = tuple(
            Step(name=f"step {number + 1}", start_s=before, end_s=after)
            for number, (before, after) in enumerate(pairwise(ends))
        )
        return steps, "steps guessed from the ends of the optimizer's steps"
    return (Step(name="whole trace", start_s=0.0, end_s=trace.end_s),), "no step marks: the whole trace is one step"


def _optimizer_ends(trace: KinetoTrace) -> list[float]:
    steps = [op for op in trace.ops if op.name.startswith("Optimizer.step")]
    names = Counter(op.name for op in steps)
    last = steps[-1].name if steps else ""
    return sorted({op.end_s for op in steps if op.name == last}) if names else []


def _own_phase(op: HostSpan) -> Phase | None:
    if op.name.startswith(BACKWARD_PREFIX) or _BACKWARD.search(op.name):
        return "backward"
    if op.name.startswith(OPTIMIZER_PREFIX):
        return "optimizer"
    return "input" if op.name.startswith(LOADING_PREFIX) else None


def _phase(op: int, parents: Sequence[int], phases: Sequence[Phase | None]) -> Phase:
    found: Phase = "forward"
    for index in ancestors(op, parents):
        own = phases[index]
        if own is not None:
            found = own
            break
    return found


def _checked(name: str, otherwise: Phase) -> Phase:
    known: dict[str, Phase] = {
        "input": "input", "forward": "forward", "loss": "loss", "backward": "backward", "optimizer": "optimizer"
    }  # fmt: skip
    return known.get(name, otherwise)


def _modules(trace: KinetoTrace, parents: Sequence[int]) -> tuple[str, ...]:
    """Module path of each op."""
    names = [op.module for op in trace.ops]
    if trace.modules:
        above = nest(trace.modules)
        for index, inside in enumerate(_covering(trace.modules, trace.ops)):
            path = [trace.modules[m].name.removeprefix(MODULE_PREFIX) for m in ancestors(inside, above)]
            names[index] = names[index] or ".".join(reversed(path))
    forward: dict[int, str] = {}
    for op, name in zip(trace.ops, names, strict=True):
        if name and op.sequence >= 0 and not op.forward_thread:
            forward.setdefault(op.sequence, name)
    if not forward:
        return tuple(names)
    for index, op in enumerate(trace.ops):
        if not names[index] and op.sequence >= 0:
            names[index] = forward.get(op.sequence, "")
        if not names[index] and parents[index] >= 0:
            names[index] = names[parents[index]]
    return tuple(names)
