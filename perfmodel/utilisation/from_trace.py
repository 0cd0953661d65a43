"""What a traced run tells of a prediction: measured over predicted time by kernel family, collective and host.

The factors are ratios at the traced configuration; applied as what-ifs they carry to another batch, rank count, topology or
plan, where the laws say how times scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perfmodel.errors import ConfigError
from perfmodel.pipeline.run import Run
from perfmodel.sim.intervals import clip, total, union
from perfmodel.traces.explain import SYNC_CALLS, explain_steps, spans_of
from perfmodel.traces.export import traces_of_run
from perfmodel.traces.link import link
from perfmodel.traces.ranks import Job, make_job
from perfmodel.units import PS_PER_S, ps_to_seconds
from perfmodel.utilisation.levels import device_work

LEAST_SHARE = 0.01  # of the device's time: smaller families say nothing
MAX_RATIO = 20.0  # beyond it trace and prediction are not of the same thing
HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Measured over predicted time by the words of what-ifs, and families one side has and the other has not."""

    by_word: Mapping[str, float]
    measured_step_s: float
    predicted_step_s: float
    unmatched: tuple[str, ...]

    def what_ifs(self) -> tuple[str, ...]:
        """The factors as what-ifs."""
        return tuple(f"{word} x{factor:.6g}" for word, factor in self.by_word.items())


def find_factors(job: Job, run: Run) -> Factors:
    """Compares a job with the prediction of the configuration it was traced in.

    Raises:
        ConfigError: nothing in the trace and the prediction compares, or they differ beyond any calibration.
    """
    predicted = traces_of_run(run)
    ours, theirs = _times(make_job(predicted[:1]), run), _times(job, run)
    words = sorted(set(ours) & set(theirs))
    factors = {word: theirs[word] / ours[word] for word in words if ours[word] > 0 and theirs[word] > 0}
    if not factors:
        raise ConfigError(f"{job.traces[0].path}: nothing in it compares with the prediction of {run.prediction.model}")
    off = {word: factor for word, factor in factors.items() if not 1 / MAX_RATIO < factor < MAX_RATIO}
    if off:
        listed = ", ".join(f"{word} x{factor:.3g}" for word, factor in off.items())
        raise ConfigError(
            f"{job.traces[0].path}: {listed} of what {run.prediction.model} at batch {run.prediction.batch_per_rank} would "
            "take: the trace is of another model, batch (say --trace-batch) or plan"
        )
    steps = [row.step.duration_s for row in explain_steps(job)]
    return Factors(
        by_word=factors,
        measured_step_s=sum(steps) / len(steps),
        predicted_step_s=run.prediction.iteration_time_s,
        unmatched=tuple(sorted(set(ours) ^ set(theirs))),
    )


def _times(job: Job, run: Run) -> dict[str, float]:
    """Seconds a step by word: families, collectives (their transfer: the minimum over ranks), and the host's ops."""
    trace = job.traces[0]
    steps = [row for row in explain_steps(job) if row.rank == trace.rank]
    if "perfmodel" in trace.info and len(steps) > 2:
        steps = steps[1:-1]
    windows = [(row.step.start_s, row.step.end_s) for row in steps]
    found: dict[str, float] = {}
    transfers = {
        round(member.arrive_s - job.starts_s[trace.rank], 9): shared.transfer_s
        for shared in job.collectives
        for member in shared.members
        if member.rank == trace.rank
    }
    for piece in device_work(trace, link(trace), run.classes[0].device):
        if any(begin <= piece.start_s < end for begin, end in windows):
            time_s = transfers.get(round(piece.start_s, 9), piece.time_s)
            word = piece.family if trace.device else f"aten.{piece.family}".replace("aten.aten.", "aten.")
            found[word] = found.get(word, 0.0) + time_s
    total_s = sum(found.values())
    kept = {word: time_s / len(windows) for word, time_s in found.items() if time_s >= LEAST_SHARE * total_s}
    if trace.device:
        kept[HOST] = _host_s(job, windows) / len(windows)
    return {word: time_s for word, time_s in kept.items() if time_s > 0}


def _host_s(job: Job, windows: list[tuple[float, float]]) -> float:
    """Host time of ops and calls in the windows, without waiting for the device."""
    trace = job.traces[0]
    spans = union(spans_of([*(op for op in trace.ops if op.kind == "op"), *trace.calls]))
    waits = union(spans_of([call for call in trace.calls if call.name.startswith(SYNC_CALLS)]))
    time_ps = 0
    for begin, end in windows:
        window = (round(begin * PS_PER_S), round(end * PS_PER_S))
        time_ps += total(clip(spans, *window)) - total(clip(waits, *window))
    return ps_to_seconds(max(time_ps, 0))
