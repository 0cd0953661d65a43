"""A data loader beside the step: worker processes make batches ahead, and the host takes one at the start of an iteration.

Of W workers that need t for a batch, one is ready every t / W (they start one after the other), so a task of that length, on a
stream of its own, stands for them. The host's first task of an iteration waits for the batch that was made during the one
before; the loader stops when its queue of W times `prefetch_factor` batches is full. In the steady state an iteration takes
the longer of its own time and t / W. Without workers the host makes each batch itself, after all else it does.

Left out: cores that workers take from each other and from the host thread (give the time of a batch with all workers of a
host at work), and the start of an epoch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from perfmodel.errors import ConfigError
from perfmodel.estimate import Source
from perfmodel.pipeline.tasks import CATEGORIES, LoweredClass, Tasks
from perfmodel.sim.program import HOST, NO_GROUP, ArrayProgram
from perfmodel.sim.steady import CarryDep
from perfmodel.units import PS_PER_S, format_time, parse_seconds

LOADER_FAMILY = "data loader"
LOADER_STREAM = 99  # of inputs alone; no stream of a plan has that number
WAITS_FRAC = 1e-3  # of an iteration, within which the loader sets its length
MAX_WORKERS = 1024
MAX_BATCH_S = 3600.0
FORM = "workers=COUNT,batch=TIME[,prefetch=COUNT]"
_PART = re.compile(r"(workers|batch|prefetch)=(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """Worker processes of a rank, how long one takes for a batch (s), and how many batches each keeps ready."""

    workers: int
    batch_s: float
    prefetch_factor: int = 2

    @property
    def period_s(self) -> float:
        """Time between two batches."""
        return self.batch_s / max(self.workers, 1)


def parse_loader(text: str) -> Loader:
    """`workers=4,batch=120ms` or `workers=4,batch=120ms,prefetch=2` as a loader. Raises ConfigError with every mistake."""
    found: dict[str, str] = {}
    problems: list[str] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            problems.append(f"loader: found {part.strip()!r}, allowed {FORM}")
        elif match[1] in found:
            problems.append(f"loader: found {match[1]} twice, allowed {FORM}")
        else:
            found[match[1]] = match[2].strip()
    problems += [f"loader: missing {name}, allowed {FORM}" for name in ("workers", "batch") if name not in found]
    counts = {}
    for name in ("workers", "prefetch"):
        value = found.get(name, "2")
        counts[name] = int(value) if value.isdecimal() else -1
        if counts[name] < 0:
            problems.append(f"loader: {name}: found {value!r}, allowed a whole number such as 4")
    batch_s = 0.0
    try:
        batch_s = parse_seconds(found["batch"]) if "batch" in found else 0.0
    except ValueError as error:
        problems.append(f"loader: batch: {error}")
    if problems:
        raise ConfigError(problems)
    loader = Loader(workers=counts["workers"], batch_s=batch_s, prefetch_factor=counts["prefetch"])
    if found_problems := loader_problems(loader):
        raise ConfigError(found_problems)
    return loader


def loader_problems(loader: Loader) -> list[str]:
    """What is wrong with a loader, a line each."""
    problems = []
    if not 0 <= loader.workers <= MAX_WORKERS:
        problems.append(f"loader: workers: found {loader.workers}, allowed 0 to {MAX_WORKERS}")
    if not 0 <= loader.batch_s <= MAX_BATCH_S:
        problems.append(f"loader: batch: found {loader.batch_s} s, allowed 0 to {MAX_BATCH_S:g} s")
    if loader.prefetch_factor < 1:
        problems.append(f"loader: prefetch: found {loader.prefetch_factor}, allowed 1 or more")
    return problems


def with_loader(classes: Sequence[LoweredClass], loader: Loader) -> tuple[LoweredClass, ...]:
    """The classes, each with a loader. Raises ConfigError where a device is a CPU, whose cores the workers would share."""
    cpus = sorted({lowered.device.name for lowered in classes if lowered.device.kind == "cpu"})
    if cpus:
        raise ConfigError(f"loader: found device {cpus[0]}, allowed GPUs: on a CPU the workers share the model's cores")
    return tuple(_with_task(lowered, loader, cls) for cls, lowered in enumerate(classes))


def loader_note(loader: Loader, iteration_s: float) -> str:
    """What the loader means for an iteration, in words."""
    if loader.workers == 0:
        return (
            f"the host makes each batch itself, {format_time(loader.batch_s)} an iteration: workers would do it beside"
        )
    share = loader.period_s / iteration_s if iteration_s > 0 else 0.0
    every = f"a batch is ready every {format_time(loader.period_s)}"
    if share < 1 - WAITS_FRAC:
        return f"input: {every}, {share:.0%} of an iteration: the loader keeps up"
    return (
        f"waiting for input: {every}, and the iteration takes that long: more workers, or a faster loader, shorten it"
    )


def _with_task(lowered: LoweredClass, loader: Loader, cls: int) -> LoweredClass:
    program = lowered.program
    host = np.flatnonzero(program.stream == HOST)
    new, takes = len(program.stream), int(host[0])
    carry = [CarryDep(cls=cls, task=takes, on=new)]
    deps: list[int] = []
    if loader.workers == 0:
        deps = [int(host[-1])]  # in the host's own time
    elif loader.workers * loader.prefetch_factor == 1:
        deps = [takes]
    else:
        carry.append(CarryDep(cls=cls, task=new, on=takes))
    return replace(
        lowered,
        program=_longer(program, deps, round(loader.period_s * PS_PER_S)),
        tasks=_described(lowered.tasks, takes, loader.period_s),
        carry=(*lowered.carry, *carry),
    )


def _longer(program: ArrayProgram, deps: Sequence[int], duration_ps: int) -> ArrayProgram:
    return replace(
        program,
        stream=np.append(program.stream, LOADER_STREAM),
        duration_ps=np.append(program.duration_ps, duration_ps),
        group=np.append(program.group, NO_GROUP),
        dep_count=np.append(program.dep_count, len(deps)),
        dep_index=np.append(program.dep_index, np.array(deps, dtype=np.int64)),
        dep_lag_ps=np.append(program.dep_lag_ps, np.zeros(len(deps), dtype=np.int64)),
        stream_kinds={**program.stream_kinds, LOADER_STREAM: "input"},
    )


def _described(tasks: Tasks, takes: int, period_s: float) -> Tasks:
    """The tasks and one more, whose time is given and so has no range."""
    return replace(
        tasks,
        event=np.append(tasks.event, tasks.event[takes]),
        category=np.append(tasks.category, CATEGORIES.index("host")),
        family=np.append(tasks.family, len(tasks.names)),
        source=np.append(tasks.source, int(Source.MEASURED)),
        time_s=np.append(tasks.time_s, period_s),
        low_s=np.append(tasks.low_s, period_s),
        high_s=np.append(tasks.high_s, period_s),
        ideal_s=np.append(tasks.ideal_s, 0.0),
        memory_frac=np.append(tasks.memory_frac, 0.0),
        names=(*tasks.names, LOADER_FAMILY),
    )
