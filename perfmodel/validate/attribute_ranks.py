"""Attribution of a live case on several ranks: operators of the first rank's thread, and collectives beside them.

Operators compare as on one process; what lies outside them holds the waits for other ranks, which the prediction has too.
A collective counts from where it is asked for to its end. It runs beside operators, so its row is no part of the sum.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from perfmodel.pipeline.run import Run
from perfmodel.sim.program import COMM, COMPUTE
from perfmodel.units import PS_PER_S, US_PER_S
from perfmodel.validate.attribute import OTHER, PROFILED_STEPS, OpGap, ProfiledOps, by_operator, gaps, pair_up
from perfmodel.validate.live import LiveSettings
from perfmodel.validate.train import set_up, timed
from perfmodel.validate.train_plans import planned_step
from perfmodel.validate.train_ranks import agreed, in_gloo_group, rank_step

Totals = dict[str, tuple[float, float]]  # seconds and calls of a step, by name
BESIDE = " (asked to done)"  # behind the name of a collective
_GLOO = "gloo:"
_OPS = {"all_to_all_v": "all_to_all"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What ranks train: a model (as the mapping of a model file), and the ranks of its tables or else its plan."""

    model: Mapping[str, Any]
    owners: tuple[int, ...] = ()
    plan: str = "ddp"

    def step(self, rank: int, n_ranks: int) -> Callable[[], None]:
        """The training step of one rank."""
        if self.owners or self.plan == "ddp":
            return rank_step(self.model, self.owners, rank)
        return planned_step(self.model, self.plan, rank, n_ranks)


def attribute_ranks(run: Run, trained: Trained, settings: LiveSettings) -> tuple[OpGap, ...]:
    """Gaps of the first rank, largest first, those of collectives last; those before them sum to the error of the step."""
    operators, collectives = predicted_rank(run)
    n_ranks = settings.n_ranks
    with (
        ProcessPoolExecutor(n_ranks, get_context("spawn")) as pool,
        tempfile.TemporaryDirectory() as folder,
    ):
        how = (settings.n_threads, settings.block_s, frozenset(operators))
        given = (n_ranks, str(Path(folder) / "store"), trained, how)
        running = [pool.submit(profile_rank, rank, *given) for rank in range(n_ranks)]
        profiled, measured = running[0].result()
    return (*gaps(operators, profiled), *_beside(collectives, measured))


def predicted_rank(run: Run) -> tuple[Totals, Totals]:
    """Time (s) and calls of operators and of collectives of the first rank in a predicted step, waits under OTHER."""
    timeline, lowered = run.steady.timeline, run.classes[0]
    tasks = timeline.compiled.tasks_of(0)
    kinds = timeline.compiled.kinds_of(0).tolist()
    clocks = (timeline.ready_ps, timeline.start_ps, timeline.end_ps)
    operators: Totals = {}
    collectives: Totals = {}
    for number, (ready, start, end) in enumerate(zip(*(clock[tasks].tolist() for clock in clocks), strict=True)):
        event = lowered.rank_class.events[int(lowered.tasks.event[number])]
        if kinds[number] == COMPUTE and event.op is not None:
            _add(operators, event.op.name, (end - start) / PS_PER_S)
        elif kinds[number] == COMM and event.collective is not None:
            _add(collectives, _OPS.get(event.collective.op, event.collective.op), (end - ready) / PS_PER_S)
    inside_s = sum(spent_s for spent_s, _ in operators.values())
    operators[OTHER] = (run.prediction.iteration_time_s - inside_s, 0.0)
    return operators, collectives


def _add(totals: Totals, name: str, time_s: float) -> None:
    before = totals.get(name, (0.0, 0.0))
    totals[name] = (before[0] + time_s, before[1] + 1.0)


def _beside(predicted: Totals, measured: Totals) -> list[OpGap]:
    found = sorted(pair_up(predicted, measured), key=lambda gap: gap.name)
    return [replace(gap, name=gap.name + BESIDE) for gap in found]


def profile_rank(
    rank: int,
    n_ranks: int,
    store: str,
    trained: Trained,
    settings: tuple[int, float, frozenset[str]],
) -> tuple[ProfiledOps, Totals]:
    """Trains one rank, the first one under the profiler: its operators, and its collectives; nothing of others.

    `settings` are threads, seconds of unprofiled steps, and the names of predicted operators.
    """
    from torch import distributed
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    n_threads, budget_s, names = settings
    set_up(n_threads)

    def work() -> tuple[ProfiledOps, Totals]:
        step = trained.step(rank, n_ranks)
        distributed.barrier()
        plain = timed(step, budget_s, agreed)
        if rank:
            for _ in range(PROFILED_STEPS):
                step()
            return ProfiledOps(step_s=plain.median_s, by_name={}), {}
        with torch_profile(activities=[ProfilerActivity.CPU]) as recorded:
            for _ in range(PROFILED_STEPS):
                step()
        events = list(recorded.events())
        found = by_operator(events, plain.median_s, names)
        return ProfiledOps(step_s=plain.median_s, by_name=found), _collectives(events)

    return in_gloo_group(rank, n_ranks, store, work)


def _collectives(events: Iterable[Any]) -> Totals:
    totals: Totals = {}
    for event in events:
        if event.name.startswith(_GLOO):
            _add(totals, event.name.removeprefix(_GLOO), event.time_range.elapsed_us() / US_PER_S)
    return {name: (spent / PROFILED_STEPS, calls / PROFILED_STEPS) for name, (spent, calls) in totals.items()}
