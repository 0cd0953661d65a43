"""What the loop of `pipeline.replay_loop` reads and what it changes, as arrays for numba or as lists."""

from __future__ import annotations

from typing import Any, NamedTuple


class Plan(NamedTuple):
    """What the loop reads, as int64 arrays or lists: steps and members (`Script`), rows and segments (`RowArrays`).

    `latency` is a class's launch latency. A lane is a class times N_STREAMS plus a stream: its kernels stand in arrays by
    kernel from kernel_ptr[lane]. `lanes` are those of communication, of each class from lane_ptr.
    """

    steps: Any
    members: Any
    stream: Any
    host: Any
    work: Any
    memory: Any
    holds: Any
    moves: Any
    first_dep: Any
    end_dep: Any
    end_run: Any
    run_host: Any
    work_sum: Any
    area_sum: Any
    before: Any
    lag: Any
    segments: Any
    held: Any
    latency: Any
    kernel_ptr: Any
    lane_ptr: Any
    lanes: Any


class State(NamedTuple):
    """What changes; `ends` and `ended` are workspace.

    By class: `clocks`; host time `pending`; where compute stood when the iteration `opened`, and when its last kernel ended
    (`last`); what collectives beside it hold and move (`held`, `traffic`, permille) and `until` when, and the memory that
    its kernels have wanted meanwhile (`area`, permille times ps); the times `spent`. Times by slot: `slots`.

    By lane: how many kernels it has launched (`count`); of collectives the `place` of the first that has not ended (from
    those of the iteration before on, negative), the one `running` beside kernels now (-1: none), and by how much those
    to come are later than expected (`shift`).

    By kernel: its end in this iteration (`now`, NEVER: not known yet) and in the one before (`then`). By kernel that is a
    collective: where it begins (`begin`, `began`), what it `holds` and `moves`, whether kernels ran beside it before it was
    known (`early`) and the next such one of its lane (`soon`), when it is expected to begin and end after the iteration
    opens (`soonest`, `latest`), what kernels beside it wanted of memory (`met`), and the share of its pace `lost`.
    """

    clocks: Any
    slots: Any
    pending: Any
    opened: Any
    last: Any
    held: Any
    traffic: Any
    until: Any
    area: Any
    spent: Any
    count: Any
    place: Any
    running: Any
    shift: Any
    now: Any
    then: Any
    begin: Any
    began: Any
    holds: Any
    moves: Any
    early: Any
    soon: Any
    soonest: Any
    latest: Any
    met: Any
    lost: Any
    ends: Any
    ended: Any
