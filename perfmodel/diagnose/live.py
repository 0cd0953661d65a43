"""Diagnosis against the truth: scripts with one thing wrong are profiled, mended and timed again, on this machine's CPU."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from perfmodel.db import load_device
from perfmodel.diagnose.diagnose import diagnose
from perfmodel.profiling.live_cases import CASES
from perfmodel.profiling.run import Profiled, run_profiled
from perfmodel.profiling.settings import ProfileSettings
from perfmodel.traces.ranks import load_job
from perfmodel.utilisation.devices import CPU

ROUNDS = 3
WARM_UP, PLAIN, ACTIVE = 6, 20, 10  # steps; twenty hold two evaluations of the mended case


@dataclass(frozen=True, slots=True, kw_only=True)
class FixResult:
    """One fix: step times (s) without a profiler before and after it, and the share of the step it was predicted to gain."""

    cause: str
    found: bool
    before_s: float
    after_s: float
    predicted_frac: float

    @property
    def predicted_s(self) -> float:
        """Predicted gain (s): the predicted share of the step without a profiler."""
        return self.predicted_frac * self.before_s

    @property
    def measured_s(self) -> float:
        """Measured gain (s)."""
        return self.before_s - self.after_s

    @property
    def error_frac(self) -> float:
        """Predicted over measured gain, less 1."""
        return self.predicted_s / self.measured_s - 1.0 if self.measured_s else float("inf")


def run_fixes(names: Sequence[str] = tuple(CASES), done: Callable[[str], None] | None = None) -> tuple[FixResult, ...]:
    """Every case: profiled and diagnosed as it is, then timed with its fix."""
    results = []
    for name in names:
        results.append(_run(name))
        if done is not None:
            done(f"{name} done")
    return tuple(results)


def _run(name: str) -> FixResult:
    """Rounds of the case as it is and mended, in turn, so that what drifts meets both; medians over rounds."""
    before, after, predicted = [], [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            slow = _profiled(name, Path(folder) / "slow")
            findings = diagnose(load_job(slow.traces), load_device(CPU))
            fixed = _profiled(name, Path(folder) / "fixed", "--fixed")
        before.append(_step_s(slow))
        after.append(_step_s(fixed))
        predicted += [finding.gain_frac for finding in findings if finding.cause.id == name]
    return FixResult(
        cause=name,
        found=len(predicted) == ROUNDS,
        before_s=median(before),
        after_s=median(after),
        predicted_frac=median(predicted) if predicted else 0.0,
    )


def _profiled(name: str, folder: Path, *flags: str) -> Profiled:
    settings = ProfileSettings(folder=str(folder), warm_up=WARM_UP, plain=PLAIN, active=ACTIVE)
    return run_profiled([sys.executable, "-m", "perfmodel.profiling.live_cases", name, *flags], settings)


def _step_s(profiled: Profiled) -> float:
    """Mean step without the profiler."""
    return mean((*profiled.times[0].before_s, *profiled.times[0].after_s))
