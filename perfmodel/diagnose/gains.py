"""What a change to a traced run would be worth: the run replayed by the simulator, with and without the change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from perfmodel.diagnose.view import RankView, View
from perfmodel.errors import ConfigError, GraphError
from perfmodel.sim import simulate
from perfmodel.sim.intervals import Spans, union
from perfmodel.traces.explain import spans_of
from perfmodel.traces.replay import AS_MEASURED, Edit, replay_programs
from perfmodel.traces.spans import DeviceSpan, HostSpan
from perfmodel.units import ps_to_seconds

REPLAY, DIRECT = "replayed by the simulator", "host time taken off the steps"


class Replayer:
    """Replays a view's ranks with edits. What cannot be replayed (a CPU run, lost launches) loses host time alone."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.whole = True  # all ranks together; False: the main rank alone
        self._inside = {rank.trace.rank: _launched_by_last_step(rank) for rank in view.ranks}
        self._base = self._steps(AS_MEASURED)

    @property
    def basis(self) -> str:
        """How gains are found."""
        return REPLAY if self._base is not None else DIRECT

    def gain_s(self, edit: Edit) -> float:
        """Mean seconds that a step gets shorter by."""
        return max(self.change_s(edit), 0.0)

    def change_s(self, edit: Edit) -> float:
        """As `gain_s`; negative where steps get longer."""
        if self._base is not None:
            changed = self._steps(edit)
            if changed is not None:
                return self._base - changed
        return self._direct(edit)

    def _direct(self, edit: Edit) -> float:
        main = self.view.main
        rank = main.trace.rank
        return sum(s.duration_s - edit.host_s(rank, s.start_s, s.end_s) for s in main.steps) / main.n_steps

    def _steps(self, edit: Edit) -> float | None:
        """Mean simulated step (s) of all ranks together; None if the trace cannot be replayed.

        From the first rank's first step to when the last rank has ended its last, on its host and on its device: a host
        that merely runs further ahead gains nothing.
        """
        traces = [rank.trace for rank in self.view.ranks] if self.whole else [self.view.main.trace]
        try:
            ranks = replay_programs(traces, edit)
            timeline = simulate([rank.program for rank in ranks])
        except (ConfigError, GraphError):
            if self.whole and len(self.view.ranks) > 1:
                self.whole = False
                return self._steps(edit)
            return None
        begins, finishes = [], []
        for cls, rank in enumerate(ranks):
            ends = timeline.ends(cls)
            launched = [rank.device_tasks[c] for c in self._inside[rank.trace.rank] if c in rank.device_tasks]
            begins.append(int(ends[rank.steps[0][0]]))
            finishes.append(max([int(ends[rank.steps[-1][1]]), *(int(ends[task]) for task in launched)]))
        return ps_to_seconds(max(finishes) - min(begins)) / self.view.main.n_steps


def _launched_by_last_step(rank: RankView) -> list[int]:
    """Correlation ids of device work that a rank launched before its last step ended."""
    end_s = rank.steps[-1].end_s
    calls = rank.trace.calls
    return [w.span.correlation for w in rank.links.work if w.call >= 0 and calls[w.call].start_s < end_s]


def host_edit(view: RankView, spans: Spans, factor: float) -> Mapping[int, list[tuple[float, float, float]]]:
    """Host time inside spans multiplied, on one rank."""
    pairs = zip(*(part.tolist() for part in union(spans)), strict=True)
    return {view.trace.rank: [(ps_to_seconds(a), ps_to_seconds(b), factor) for a, b in pairs]}


def everywhere(view: View, spans: Mapping[int, Spans], factor: float) -> dict[int, list[tuple[float, float, float]]]:
    """Host time inside each rank's spans multiplied."""
    found: dict[int, list[tuple[float, float, float]]] = {}
    for rank in view.ranks:
        if rank.trace.rank in spans:
            found |= host_edit(rank, spans[rank.trace.rank], factor)
    return found


def removed(view: View, pick: Mapping[int, Sequence[HostSpan]], factor: float = 0.0) -> Edit:
    """An edit that shortens the picked host spans, and the device work launched in them, of each rank."""
    gone: dict[int, float] = {}
    for rank in view.ranks:
        for number in rank.launched_in(pick.get(rank.trace.rank, ())):
            gone[id(rank.links.work[number].span)] = factor
    hosts = {rank: spans_of(spans) for rank, spans in pick.items()}
    return Edit(host=everywhere(view, hosts, factor), device=_by_identity(gone))


def device_edit(factors: Iterable[tuple[DeviceSpan, float]]) -> Edit:
    """An edit that multiplies the time of some device work."""
    return Edit(device=_by_identity({id(span): factor for span, factor in factors}))


class _by_identity:  # noqa: N801 -- used as a function
    def __init__(self, factors: Mapping[int, float]) -> None:
        self.factors = factors

    def __call__(self, span: DeviceSpan) -> float:
        return self.factors.get(id(span), 1.0)
