"""The pace of a segmented plan: its segments replayed, one iteration after the other, until the clocks grow evenly.

Every launch and kernel takes its place, read from the rows that its segment was made once (`pipeline.rows`); no program of the
whole iteration is ever made. A host thread that is `depth` launches ahead of a stream waits for its kernels (`sim.launch`).

Kernels and collectives slow each other by the law of `sim.overlap`, in the order of the steps: a kernel runs from one start or
end of a collective on its rank to the next, at the pace that those who run then leave it. A collective that comes later in
that order, but began before such a kernel ended, is expected where it ran in the iteration before, as far behind as the last
known one of its stream; and it is as slow itself as it was beside the kernels of the iteration before, the slowest of its
members counting. So an iteration is one step of a search for the steady state, which ends when iterations repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from perfmodel.pipeline import rows
from perfmodel.pipeline.pricebook import IntArray
from perfmodel.pipeline.replay_data import Plan, State
from perfmodel.pipeline.replay_loop import HELPERS, LATER, NEVER, replay_loop
from perfmodel.pipeline.rows import N_CLOCKS, N_STREAMS, RowArrays
from perfmodel.pipeline.script import MEMBER_WIDTH, STEP_WIDTH, Script, live_clocks
from perfmodel.sim.loops import compiled_loop, has_numba
from perfmodel.sim.program import COMPUTE, COPY, COPY_BACK, HOST
from perfmodel.sim.steady import cycle_of

MAX_ITERATIONS = 64
# Under slowdown iterations repeat if their time changes by no more than this share of it (the simulator of all tasks ends
# by a like rule), and the growth of any clock by no more than that.
EVEN_FRAC = 2e-5
EVEN_CLOCKS_FRAC = 5e-4
# Or if clocks do not come to rest, but the longest and the shortest of so many iterations differ by no more than this.
NEARLY_EVEN = 8
NEARLY_FRAC = 5e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Iteration time (ps), and by class the times (ps) of the last iteration that `replay_loop.WORKED` and so on number."""

    iteration_ps: Fraction
    spent_ps: IntArray


def replay(script: Script, table: RowArrays, lag_ps: Sequence[int], depth: int) -> Replayed | None:
    """The steady state behind queues of `depth` launches a stream; None if it does not settle in MAX_ITERATIONS."""
    plan = _plan(script, table, lag_ps)
    state = _state(script, plan)
    live = live_clocks(script)
    kept = _kept(plan.kernel_ptr, depth)
    loop = replay_loop
    if has_numba():
        loop = compiled_loop(replay_loop, *HELPERS)
    else:
        plan = Plan(*(array.tolist() for array in plan))
        state = State(*(array.tolist() for array in state))
    states: list[IntArray] = []
    period = 0
    for number in range(MAX_ITERATIONS):
        loop(plan, state, (depth, number, period, script.slows))
        ends = np.asarray(state.now, dtype=np.int64)[kept]
        clocks = np.asarray(state.clocks, dtype=np.int64).reshape(-1)[live]
        last = max(int(clocks.max()), int(ends.max(initial=NEVER)))
        period = last - int(states[-1][-1]) if states else last
        states.append(np.concatenate([clocks, ends, [last]]))
        cycle = (even_cycle(states) if script.slows else 0) or cycle_of(states, 1)
        if cycle:
            growth = int(states[-1][-1] - states[-1 - cycle][-1])
            return Replayed(iteration_ps=Fraction(growth, cycle), spent_ps=np.asarray(state.spent))
    return None


def even_cycle(states: Sequence[IntArray]) -> int:
    """As `sim.steady.cycle_of`, where growths are equal but for `EVEN_FRAC` of the iteration's.

    Where clocks go to and fro by little it is the iterations whose mean counts.
    """
    if len(states) < 3:  # two growths
        return 0
    step, before = states[-1] - states[-2], states[-2] - states[-3]
    limit, wide = EVEN_FRAC * float(step[-1]), EVEN_CLOCKS_FRAC * float(step[-1])
    if abs(step[-1] - before[-1]) <= limit and step.max() - step[-1] <= wide and np.abs(step - before).max() <= wide:
        return 1
    if len(states) <= NEARLY_EVEN + 1:
        return 0
    lengths = np.diff([state[-1] for state in states[-NEARLY_EVEN - 1 :]])
    return NEARLY_EVEN if np.ptp(lengths) <= NEARLY_FRAC * lengths[-1] else 0


def _plan(script: Script, table: RowArrays, lag_ps: Sequence[int]) -> Plan:
    counts = np.zeros((script.n_classes, N_STREAMS), dtype=np.int64)
    for (cls, stream), count in script.n_kernels.items():
        counts[cls, stream] = count
    communicates = (counts > 0) & ~np.isin(np.arange(N_STREAMS), (HOST, COMPUTE, COPY, COPY_BACK))
    columns = table.rows
    return Plan(
        steps=np.array(script.steps, dtype=np.int64).reshape(-1, STEP_WIDTH),
        members=np.array(script.members, dtype=np.int64).reshape(-1, MEMBER_WIDTH),
        stream=columns[rows.STREAM],
        host=columns[rows.HOST_PS],
        work=columns[rows.WORK_PS],
        memory=columns[rows.MEMORY],
        holds=columns[rows.HELD],
        moves=columns[rows.TRAFFIC],
        first_dep=columns[rows.FIRST_DEP],
        end_dep=columns[rows.END_DEP],
        end_run=columns[rows.END_RUN],
        run_host=columns[rows.RUN_HOST],
        work_sum=columns[rows.WORK_SUM],
        area_sum=columns[rows.AREA_SUM],
        before=table.waits[0],
        lag=table.waits[1],
        segments=table.segments,
        held=table.held,
        latency=np.array(lag_ps, dtype=np.int64),
        kernel_ptr=_pointers(counts.reshape(-1)),
        lane_ptr=_pointers(communicates.sum(axis=1)),
        lanes=np.flatnonzero(communicates),
    )


def _pointers(counts: IntArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _state(script: Script, plan: Plan) -> State:
    n_kernels, n_classes = int(plan.kernel_ptr[-1]), script.n_classes
    n_lanes = n_classes * N_STREAMS

    def zeros(*shape: int) -> IntArray:
        return np.zeros(shape, dtype=np.int64)

    return State(
        clocks=zeros(n_classes, N_CLOCKS),
        slots=zeros(max(script.n_slots, 1)),
        pending=zeros(n_classes),
        opened=zeros(n_classes),
        last=zeros(n_classes),
        held=zeros(n_classes),
        traffic=zeros(n_classes),
        until=zeros(n_classes),
        area=np.zeros(n_classes),
        spent=zeros(n_classes, 4),
        count=zeros(n_lanes),
        place=zeros(n_lanes),
        running=np.full(n_lanes, -1),
        shift=zeros(n_lanes),
        now=np.full(n_kernels, NEVER),
        then=np.full(n_kernels, NEVER),
        begin=np.full(n_kernels, LATER),
        began=np.full(n_kernels, NEVER),
        holds=zeros(n_kernels),
        moves=zeros(n_kernels),
        early=zeros(n_kernels),
        soon=np.repeat(plan.kernel_ptr[1:], np.diff(plan.kernel_ptr)),
        soonest=zeros(n_kernels),
        latest=zeros(n_kernels),
        met=np.zeros(n_kernels),
        lost=np.zeros(n_kernels),
        ends=zeros(2 * script.n_rows + 2),
        ended=zeros(N_CLOCKS),
    )


def _kept(kernel_ptr: IntArray, depth: int) -> IntArray:
    """The kernels of an iteration that launches of the next one may wait for."""
    number = np.arange(int(kernel_ptr[-1]))
    sizes = np.diff(kernel_ptr)
    left = np.repeat(kernel_ptr[1:], sizes) - number  # with itself, kernels to the end of its stream
    return number[left <= depth]
