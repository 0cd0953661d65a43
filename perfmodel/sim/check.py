"""Verifies any Timeline against the rules, by vector comparisons that share no code with the engines."""

from __future__ import annotations

import numpy as np

from perfmodel.sim.breakdown import breakdown, stream_busy
from perfmodel.sim.path import critical_path
from perfmodel.sim.program import IntArray
from perfmodel.sim.timeline import Timeline


def check_timeline(timeline: Timeline) -> list[str]:
    """Every broken rule in words, one line a rule (the first place it breaks); empty if the timeline is right."""
    if not timeline.compiled.n_tasks:
        return []
    problems = [
        *_check_clock(timeline),
        *_check_streams(timeline),
        *_check_deps(timeline),
        *_check_groups(timeline),
        *_check_lengths(timeline),
        *_check_no_hidden_delay(timeline),
    ]
    return problems or [*_check_bounds(timeline), *_check_sums(timeline)]


def _first(timeline: Timeline, wrong: np.ndarray[tuple[int], np.dtype[np.bool_]], rule: str) -> list[str]:
    places = np.flatnonzero(wrong)
    return [f"{timeline.compiled.wiring.name(int(places[0]))}: {rule}"] if len(places) else []


def _check_clock(timeline: Timeline) -> list[str]:
    early = timeline.ready_ps < timeline.release_ps
    swapped = timeline.start_ps < timeline.ready_ps
    return [
        *_first(timeline, early, "ready before its release"),
        *_first(timeline, swapped, "starts before it is ready"),
    ]


def _check_streams(timeline: Timeline) -> list[str]:
    prev = timeline.compiled.wiring.prev
    wrong = (prev >= 0) & (timeline.ready_ps < timeline.end_ps[prev])
    return _first(timeline, wrong, "overlaps the task before it on its stream")


def _check_deps(timeline: Timeline) -> list[str]:
    wiring = timeline.compiled.wiring
    owner = np.repeat(np.arange(wiring.n_tasks), np.diff(wiring.dep_ptr))
    late = timeline.end_ps[wiring.dep_index] + timeline.compiled.dep_lag_ps > timeline.ready_ps[owner]
    wrong = np.zeros(wiring.n_tasks, dtype=bool)
    wrong[owner[late]] = True
    return _first(timeline, wrong, "starts before a dep has ended plus its lag")


def _check_groups(timeline: Timeline) -> list[str]:
    wiring, problems = timeline.compiled.wiring, []
    in_group = wiring.group >= 0
    first = np.zeros(wiring.n_tasks, dtype=np.int64)
    first[in_group] = wiring.group_member[wiring.group_ptr[wiring.group[in_group]]]
    for what, clock in (("start", timeline.start_ps), ("end", timeline.end_ps)):
        apart = in_group & (clock != clock[first])
        problems += _first(timeline, apart, f"does not {what} with the other members of its group")
    return problems


def _together(timeline: Timeline, values: IntArray) -> IntArray:
    """The largest of a value among a task's group, or the task's own."""
    wiring = timeline.compiled.wiring
    largest = values.copy()
    if len(wiring.group_ids):
        best = np.maximum.reduceat(values[wiring.group_member], wiring.group_ptr[:-1])
        in_group = wiring.group >= 0
        largest[in_group] = best[wiring.group[in_group]]
    return largest


def _check_lengths(timeline: Timeline) -> list[str]:
    length, due = timeline.end_ps - timeline.start_ps, _together(timeline, timeline.duration_ps)
    wrong = length < due if timeline.stretched else length != due
    return _first(timeline, wrong, "does not last as long as its duration")


def _check_no_hidden_delay(timeline: Timeline) -> list[str]:
    """Nothing but the rules may hold a task back: readiness and start are exactly what they ask for."""
    wiring = timeline.compiled.wiring
    due = timeline.release_ps.copy()
    has_prev = wiring.prev >= 0
    due[has_prev] = np.maximum(due[has_prev], timeline.end_ps[wiring.prev[has_prev]])
    owner = np.repeat(np.arange(wiring.n_tasks), np.diff(wiring.dep_ptr))
    np.maximum.at(due, owner, timeline.end_ps[wiring.dep_index] + timeline.compiled.dep_lag_ps)
    return [
        *_first(timeline, timeline.ready_ps > due, "is ready later than its stream and deps ask for"),
        *_first(timeline, timeline.start_ps > _together(timeline, timeline.ready_ps), "starts though nothing held it"),
    ]


def _check_bounds(timeline: Timeline) -> list[str]:
    problems = []
    for cls in range(timeline.compiled.n_classes):
        for stream, busy in stream_busy(timeline, cls).items():
            if busy > timeline.makespan_ps and not timeline.steady and timeline.begin_ps == 0:
                problems.append(f"class {cls} stream {stream}: busy {busy} ps of {timeline.makespan_ps} ps")
    return problems[:1]


def _check_sums(timeline: Timeline) -> list[str]:
    problems = []
    path = sum(segment.length_ps for segment in critical_path(timeline))
    if path != timeline.makespan_ps:
        problems.append(f"critical path sums to {path} ps, the makespan is {timeline.makespan_ps} ps")
    for cls in range(timeline.compiled.n_classes):
        parts = breakdown(timeline, cls).total_ps
        if parts != timeline.makespan_ps:
            problems.append(f"class {cls}: breakdown sums to {parts} ps, the makespan is {timeline.makespan_ps} ps")
    return problems
