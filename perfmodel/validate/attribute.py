"""Where a live prediction goes wrong: measured times of operators (torch.profiler) beside predicted ones, by operator.

An operator's measured time is what it and all it calls spend on the host thread in a step. The profiler makes steps longer:
where operators together would fill more than an unprofiled step, all are scaled to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np

from perfmodel.pipeline.run import Run
from perfmodel.units import US_PER_S
from perfmodel.validate.live import LiveSettings, told
from perfmodel.validate.train import batches, pin_threads, plain_step, real_model, set_up, timed

PROFILED_STEPS = 10
OTHER = "(outside operators)"  # Python, autograd and whatever the profiler saw no operator for


Totals = Mapping[str, tuple[float, float]]  # seconds and calls of a step, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGap:
    """All calls of one operator in a step: predicted and measured time (s); `calls` as predicted, as measured."""

    name: str
    predicted_s: float
    measured_s: float
    calls: tuple[float, float]

    @property
    def gap_s(self) -> float:
        """Predicted minus measured (s)."""
        return self.predicted_s - self.measured_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledOps:
    """Step time (s) without the profiler and, by operator, (self time in s, calls) of one step."""

    step_s: float
    by_name: Mapping[str, tuple[float, float]]


def attribute(run: Run, model: Mapping[str, Any], settings: LiveSettings) -> tuple[OpGap, ...]:
    """Gaps by operator of a one-process CPU prediction, largest first; their sum is the error of the step."""
    predicted = predicted_ops(run)
    with told(settings.env), ProcessPoolExecutor(1, get_context("spawn"), pin_threads, (1,)) as pool:
        given = (model, settings.n_threads, settings.block_s, frozenset(predicted))
        profiled = pool.submit(profile, *given).result()
    return gaps(predicted, profiled)


def predicted_ops(run: Run) -> dict[str, tuple[float, float]]:
    """Time (s) and calls of each operator on the first rank class, by aten name; host work of an op is part of it."""
    lowered = run.classes[0]
    found: dict[str, tuple[float, float]] = {}
    time_s = np.bincount(lowered.tasks.event, weights=lowered.tasks.time_s, minlength=len(lowered.rank_class.events))
    for event, spent_s in zip(lowered.rank_class.events, time_s.tolist(), strict=True):
        name = event.op.name if event.op is not None else event.label
        before = found.get(name, (0.0, 0.0))
        found[name] = (before[0] + spent_s, before[1] + 1.0)
    return found


def gaps(predicted: Totals, profiled: ProfiledOps) -> tuple[OpGap, ...]:
    """Predicted beside measured by operator, largest gap first, with what lies outside operators as a row of its own."""
    inside_s = sum(spent_s for spent_s, _ in profiled.by_name.values())
    measured = {**profiled.by_name, OTHER: (profiled.step_s - inside_s, 0.0)}
    return pair_up(predicted, measured)


def pair_up(predicted: Totals, measured: Totals) -> tuple[OpGap, ...]:
    """A gap for each name on either side, which the other may not have; the largest first."""
    rows = [
        OpGap(
            name=name,
            predicted_s=predicted.get(name, (0.0, 0.0))[0],
            measured_s=measured.get(name, (0.0, 0.0))[0],
            calls=(predicted.get(name, (0.0, 0.0))[1], measured.get(name, (0.0, 0.0))[1]),
        )
        for name in {**predicted, **measured}
    ]
    return tuple(sorted(rows, key=lambda row: (-abs(row.gap_s), row.name)))


def profile(model: Mapping[str, Any], n_threads: int, budget_s: float, names: frozenset[str]) -> ProfiledOps:
    """Times of a model's operators in this process, as means over steps under the profiler; `names` are those predicted."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    set_up(n_threads)
    step = plain_step(real_model(model), batches(model))
    plain = timed(step, budget_s)
    with torch_profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(PROFILED_STEPS):
            step()
    return ProfiledOps(step_s=plain.median_s, by_name=by_operator(recorded.events(), plain.median_s, names))


def by_operator(events: Iterable[Any], step_s: float, names: frozenset[str]) -> dict[str, tuple[float, float]]:
    """Seconds and calls a step of operators; together no longer than the step without a profiler.

    What an operator calls counts to the outermost one that was predicted: `add_` of a sparse gradient, not its `add`.
    """
    spent_us: dict[str, float] = {}
    calls: dict[str, int] = {}
    n_inside = 0
    for event in events:
        if not event.key.startswith("aten::"):
            continue
        owner = _owner(event, names)
        name = _name(owner)
        spent_us[name] = spent_us.get(name, 0.0) + event.self_cpu_time_total
        calls[name] = calls.get(name, 0) + (owner is event)
        n_inside += 1
    total_s = sum(spent_us.values()) / US_PER_S / PROFILED_STEPS
    fit = min(1.0, step_s / total_s) if n_inside else 1.0
    return {name: (spent_us[name] / US_PER_S / PROFILED_STEPS * fit, calls[name] / PROFILED_STEPS) for name in spent_us}


def _name(event: Any) -> str:
    name: str = event.key
    return name.replace("::", ".")


def _owner(event: Any, names: frozenset[str]) -> Any:
    """The outermost operator above an event that was predicted, or the event itself."""
    owner, above = event, event.cpu_parent
    while above is not None:
        if _name(above) in names:
            owner = above
        above = above.cpu_parent
    return owner
