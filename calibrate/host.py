"""What a call costs more in a step than in a loop of itself: its code and the allocator's lists have left the caches.

A loop that calls one small operator finds every instruction and table where the call before left them; a training step runs
dozens of other operators in between. Each case here is timed both ways in turn: in a loop, and behind a handful of other
operators, with gradients. The difference hardly depends on sizes and is kept as one figure an operator.
"""

from __future__ import annotations

import csv
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from calibrate.build import Prepared, prepare
from calibrate.cases import Case, draw_cases
from calibrate.session import replace_file

TABLE = "in_step.csv"
COLUMNS = ("family", "name", "case", "tight_s", "time_s", "repeats")
CASES_PER_OPERATOR = 3
LONGEST_S = 150e-6  # in longer calls the difference drowns in their own spread
ROUNDS, TIGHT_CALLS, STEP_CALLS = 10, 25, 12
QUANTILE = 0.1  # noise only adds time
SEED = 20261129
STATISTIC = "tenth percentile of 250 calls in a loop and of 120 in a step, in turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class InStep:
    """One case: seconds in a loop and in a step."""

    family: str
    name: str
    case: Case
    tight_s: float
    step_s: float


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(torch.relu(self.linear(x))).sum()
        return out


def disturbance() -> Callable[[], None]:
    """A function that runs a small network's forward and backward and a dozen other operators."""
    net, x, wide = _Net(), torch.randn(64, 64), torch.randn(256, 256)
    vector, rows = torch.rand(64), torch.randint(0, 64, (64,))

    def run() -> None:
        with torch.enable_grad():
            net.zero_grad()
            net(x).backward()
        torch.cat([x, x], 1)
        torch.softmax(wide, -1)
        x.t().contiguous()
        vector.sqrt()
        wide.sum(0)
        torch.index_select(x, 0, rows)
        torch.bmm(wide.view(4, 64, 256), wide.view(4, 256, 64))
        for call in (torch.ops.aten.abs, torch.ops.aten.floor, torch.ops.aten.ceil, torch.ops.aten.trunc):
            call.default(vector)

    return run


def measure(families: tuple[str, ...]) -> list[InStep]:
    """Small cases of every operator of the families, timed both ways."""
    run, found = disturbance(), []
    with torch.no_grad():
        for family in families:
            cases = [case for case in draw_cases(family) if case.state == "warm"]
            random.Random(SEED).shuffle(cases)
            done: dict[str, int] = {}
            for case in cases:
                name = _name(case)
                if done.get(name, 0) < CASES_PER_OPERATOR:
                    item = _both_ways(case, name, run)
                    if item is not None:
                        done[name] = done.get(name, 0) + 1
                        found.append(item)
    return found


def _name(case: Case) -> str:
    sparse = any(isinstance(value, Mapping) for value in case.args)
    return f"{case.op}.sparse" if sparse else case.op


def _both_ways(case: Case, name: str, run: Callable[[], None]) -> InStep | None:
    """None for a case that takes too long to show the difference."""
    prepared = prepare(case, "cpu", 0)
    if _once(prepared) > LONGEST_S:
        return None
    tight: list[float] = []
    step: list[float] = []
    for _ in range(ROUNDS):
        tight += [_once(prepared) for _ in range(TIGHT_CALLS)]
        for _ in range(STEP_CALLS):
            run()
            step.append(_once(prepared))
    low = [float(np.quantile(times, QUANTILE)) for times in (tight, step)]
    return InStep(family=case.family, name=name, case=case, tight_s=low[0], step_s=low[1])


def _once(prepared: Prepared) -> float:
    arguments = prepared.arguments[0]
    begun = time.perf_counter()
    result = prepared.call(*arguments, **prepared.kwargs)
    taken = time.perf_counter() - begun
    del result
    return taken


def write(out: Path, items: list[InStep]) -> Path:
    """Writes the table of both times, whole or not at all."""
    lines = [",".join(COLUMNS)]
    repeats = ROUNDS * STEP_CALLS
    for item in items:
        text = item.case.to_json().replace('"', '""')
        lines.append(f'{item.family},{item.name},"{text}",{item.tight_s:.4g},{item.step_s:.4g},{repeats}')
    replace_file(out / TABLE, "\n".join(lines) + "\n")
    return out / TABLE


def extra_s(table: Path) -> dict[str, float]:
    """Per operator the median seconds that a step adds to a call; per family for its other operators (key `family:`)."""
    if not table.exists():
        return {}
    grouped: dict[str, list[float]] = {}
    with table.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            extra = max(float(row["time_s"]) - float(row["tight_s"]), 0.0)
            grouped.setdefault(row["name"], []).append(extra)
            grouped.setdefault(f"family:{row['family']}", []).append(extra)
    return {name: statistics.median(values) for name, values in grouped.items()}
