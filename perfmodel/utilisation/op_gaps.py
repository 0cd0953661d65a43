"""Where a prediction and a trace of the same run differ: device time a step by the operator that launched it."""

from __future__ import annotations

from collections import defaultdict

from perfmodel.pipeline.run import Run
from perfmodel.traces.export import traces_of_run
from perfmodel.traces.link import link
from perfmodel.traces.ranks import Job
from perfmodel.traces.spans import DeviceSpan, HostSpan, KinetoTrace
from perfmodel.validate.attribute import OpGap, pair_up


def op_gaps(run: Run, job: Job) -> tuple[OpGap, ...]:
    """Predicted beside measured device time (s a step) by operator, the largest difference first.

    Kernels and copies are counted under the innermost operator that launched them, collectives under their own name; both
    sides are means over steps and over the ranks (of a prediction, the classes of ranks) there are traces of.
    """
    return pair_up(_by_operator(traces_of_run(run)), _by_operator(job.traces))


def _by_operator(traces: tuple[KinetoTrace, ...]) -> dict[str, tuple[float, float]]:
    """Seconds and calls a step."""
    time_s: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    n_steps = sum(max(len(trace.steps), 1) for trace in traces) or 1
    for trace in traces:
        for work in link(trace).work:
            name = _name(work.span, trace.ops, work.op)
            time_s[name] += work.span.duration_s
            calls[name] += 1
    return {name: (time_s[name] / n_steps, calls[name] / n_steps) for name in time_s}


def _name(span: DeviceSpan, ops: tuple[HostSpan, ...], op: int) -> str:
    if span.collective is not None:
        return span.collective.op
    return ops[op].name.replace("::", ".", 1) if op >= 0 else span.name
