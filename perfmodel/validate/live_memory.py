"""Peak memory of live ranks: the bytes of tensors that torch's CPU allocator has given out and not got back.

Counted from before the model is made, so parameters, optimizer states and buckets are in it; the peak is the third step's.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from perfmodel.pipeline.prediction import Prediction
from perfmodel.validate.live import LiveSettings
from perfmodel.validate.live_cases import LiveCase
from perfmodel.validate.train import set_up
from perfmodel.validate.train_plans import planned_step
from perfmodel.validate.train_ranks import in_gloo_group

STEPS_BEFORE = 2  # optimizer states come with the first step, DDP's buckets in their final order with the second
_MARK = "counted step"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakGap:
    """Predicted and measured peak of live bytes on the fullest rank of a case."""

    name: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def error_frac(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_bytes / self.measured_bytes - 1.0


def compare_peaks(
    cases: Sequence[LiveCase], settings: LiveSettings, predictions: Sequence[Prediction]
) -> list[PeakGap]:
    """Trains each case for three steps, in processes of its own."""
    found = []
    for case, prediction in zip(cases, predictions, strict=True):
        with (
            ProcessPoolExecutor(settings.n_ranks, get_context("spawn")) as pool,
            tempfile.TemporaryDirectory() as folder,
        ):
            given = (settings.n_ranks, folder, case.model, case.plan, settings.n_threads)
            running = [pool.submit(peak_of_rank, rank, *given) for rank in range(settings.n_ranks)]
            measured = max(rank.result() for rank in running)
        found.append(PeakGap(name=case.name, predicted_bytes=predicted_peak(prediction), measured_bytes=measured))
    return found


def predicted_peak(prediction: Prediction) -> int:
    """Live bytes of the fullest rank: what the allocator rounds and reserves is left out, as it is in the measurement."""
    return max(rank.memory.total_bytes - rank.memory.allocator_bytes for rank in prediction.ranks)


def peak_of_rank(rank: int, n_ranks: int, folder: str, model: Mapping[str, Any], plan: str, n_threads: int) -> int:
    """Live bytes at the peak of one rank's third step; ranks meet at a file in `folder`."""
    from torch.profiler import ProfilerActivity, profile, record_function

    set_up(n_threads)

    def work() -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            step = planned_step(model, plan, rank, n_ranks)
            for _ in range(STEPS_BEFORE):
                step()
            with record_function(_MARK):
                step()
        path = Path(folder) / f"rank{rank}.json"
        recorded.export_chrome_trace(str(path))
        return peak_in_step(json.loads(path.read_text())["traceEvents"])

    return in_gloo_group(rank, n_ranks, str(Path(folder) / "store"), work)


def peak_in_step(events: Iterable[Mapping[str, Any]]) -> int:
    """Largest live bytes during the counted step of a trace that has every change since the process's first tensor.

    >>> change = lambda at, size, where: {"name": "[memory]", "ts": at, "args": {"Bytes": size, "Addr": where}}
    >>> mark = {"name": "counted step", "ts": 2.0, "dur": 2.0}
    >>> peak_in_step([change(0, 8, 1), mark, change(1, 90, 2), change(1.5, -90, 2), change(3, 4, 2), change(5, 100, 3)])
    12
    """
    rows = list(events)
    marks = [row for row in rows if row["name"] == _MARK and "dur" in row]
    begin, end = marks[0]["ts"], marks[0]["ts"] + marks[0]["dur"]
    changes = sorted(
        (row["ts"], row["args"]["Bytes"], row["args"]["Addr"]) for row in rows if row["name"] == "[memory]"
    )
    live = peak = 0
    for at, change in sorted([*((at, change) for at, change, _ in changes), *_unseen(changes, rows)]):
        if at > end:
            break
        if at > begin:
            peak = max(peak, live)
        live += change
    return max(peak, live)


def _unseen(changes: Sequence[tuple[float, int, int]], rows: Iterable[Mapping[str, Any]]) -> list[tuple[float, int]]:
    """When tensors were freed that gloo's thread was the last to hold, which the profiler does not see: (time, -bytes).

    Gloo's thread drops a collective's copies when it is over, outside what is profiled. Those are the tensors without a
    recorded end that were made in a collective's call, or whose address was given out again. They end with the first
    collective to end after they were made.
    """
    ends = sorted(row["ts"] + row["dur"] for row in rows if row["name"].startswith("gloo:") and "dur" in row)
    calls = [(row["ts"], row["ts"] + row["dur"]) for row in rows if row["name"].startswith("c10d::") and "dur" in row]
    held: dict[int, tuple[float, int]] = {}
    lost = []
    for at, change, address in changes:
        before = held.pop(address, None)
        if change > 0:
            lost += [before] if before is not None else []
            held[address] = (at, change)
    lost += [(at, size) for at, size in held.values() if any(begin <= at <= end for begin, end in calls)]
    over = ((bisect_left(ends, at), size) for at, size in lost)
    return [(ends[place], -size) for place, size in over if place < len(ends)]
