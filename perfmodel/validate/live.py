"""Live comparison: predicts and really trains a set of models on this machine, in processes of their own.

Rounds over all cases alternate prediction and measurement. A case's measured time is the median of its blocks' medians, its
noise the largest relative distance of a block from it.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from os import environ
from pathlib import Path
from statistics import median

from perfmodel.config import TopologySpec, load_topology
from perfmodel.config.topology import PaceSpec
from perfmodel.db.device import Pace
from perfmodel.kernels.cpu_heap import NEVER_TRIMMED_BYTES, NO_MAPS, TRIM_FROM
from perfmodel.pipeline.prediction import Prediction
from perfmodel.validate.live_cases import LiveCase
from perfmodel.validate.run_suite import CaseResult, run_case
from perfmodel.validate.suite import Case
from perfmodel.validate.train import measure, pin_threads
from perfmodel.validate.train_ranks import run_rank

ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSettings:
    """Ranks, threads of each rank, the shipped topology they make, seconds for one block of steps, and variables of glibc."""

    n_ranks: int = 1
    n_threads: int = 2
    topology: str = "cpu"
    block_s: float = 1.0
    env: Mapping[str, str] = field(default_factory=dict)


Measure = Callable[[LiveCase, LiveSettings, Prediction, Executor], float]


def live_settings(n_cores: int, n_ranks: int) -> LiveSettings:
    """Each rank has an equal part of the cores, at least one."""
    topology = live_topology(n_ranks)
    return LiveSettings(
        n_ranks=n_ranks, n_threads=max(1, n_cores // n_ranks), topology=topology.name, env=heap_env(n_ranks)
    )


def live_topology(n_ranks: int, pace: Pace = Pace()) -> TopologySpec:  # noqa: B008 -- frozen
    """`n_ranks` processes on this machine's CPU, joined by its loopback, with what this process's environment says."""
    plain = load_topology("cpu")
    one = plain.model_copy(update={"env": {**plain.env, **heap_env(n_ranks)}})
    if one.node is None or one.node.cpus is None:
        return one
    cpus = one.node.cpus.model_copy(update={"ranks": n_ranks, "pace": PaceSpec(**asdict(pace))})
    name = one.name if n_ranks == 1 else f"cpu_x{n_ranks}"
    return one.model_copy(update={"name": name, "node": one.node.model_copy(update={"cpus": cpus})})


def heap_env(n_ranks: int) -> dict[str, str]:
    """What glibc is told in live processes: what this process's environment says; else one process keeps its pages.

    With glibc's defaults it is chance whether a step faults on new pages (`kernels.cpu_heap`): what else lies on the heap
    decides, and a process that has trained another model before hardly ever does.
    """
    own = {name: environ[name] for name in (NO_MAPS, TRIM_FROM) if name in environ}
    if own or n_ranks > 1:
        return own
    return {NO_MAPS: "0", TRIM_FROM: str(NEVER_TRIMMED_BYTES)}


@contextmanager
def told(env: Mapping[str, str]) -> Iterator[None]:
    """Processes that are started inside find `env` in their environment."""
    before = {name: environ.get(name) for name in env}
    environ.update(env)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del environ[name]
            else:
                environ[name] = value


def run_live(
    cases: Sequence[LiveCase],
    settings: LiveSettings,
    predict: Callable[[LiveCase], Prediction],
    done: Callable[[str], None] | None = None,
    measured: Measure | None = None,
    look: Callable[[], None] | None = None,
) -> tuple[CaseResult, ...]:
    """The results of all cases; `done` hears what has been finished, `measured` trains in place of `measure_case`.

    `look` is called before each block of steps, to see what else the machine does.
    """
    train = measured or measure_case
    blocks: dict[str, list[float]] = {case.name: [] for case in cases}
    predicted: dict[str, Prediction] = {}
    for number in range(ROUNDS):
        # New processes each round: what a round leaves behind (heap, threads) is part of the noise.
        with (
            told(settings.env),
            ProcessPoolExecutor(settings.n_ranks, get_context("spawn"), pin_threads, (settings.n_ranks,)) as pool,
        ):
            for case in cases:
                if look is not None:
                    look()
                if case.name not in predicted:
                    predicted[case.name] = predict(case)
                blocks[case.name].append(train(case, settings, predicted[case.name], pool))
        if done is not None:
            done(f"round {number + 1} of {ROUNDS} done")
    return tuple(_result(case, settings, blocks[case.name], predicted[case.name]) for case in cases)


def measure_case(case: LiveCase, settings: LiveSettings, prediction: Prediction, pool: Executor) -> float:
    """Median step time (s) of one block, of the slowest rank; `pool` has a process for each rank."""
    n_ranks = settings.n_ranks
    if n_ranks == 1:
        return pool.submit(measure, case.model, settings.n_threads, settings.block_s).result().median_s
    with tempfile.TemporaryDirectory() as folder:
        owners = table_owners(prediction)
        given = (n_ranks, str(Path(folder) / "store"), case.model, owners, (settings.n_threads, settings.block_s))
        running = [pool.submit(run_rank, rank, *given) for rank in range(n_ranks)]
        return max(found.result().median_s for found in running)


def predicted_again(results: Sequence[CaseResult], predict: Callable[[str], Prediction]) -> tuple[CaseResult, ...]:
    """The same measurements beside other predictions, which `predict` makes of a case's name."""
    again = (run_case(result.case, lambda case: predict(case.name)) for result in results)
    return tuple(replace(new, noise=old.noise) for new, old in zip(again, results, strict=True))


def with_pace_range(
    results: Sequence[CaseResult], fast: Sequence[CaseResult], slow: Sequence[CaseResult]
) -> tuple[CaseResult, ...]:
    """The results with ranges that hold, in quadrature, what the same cases take where the machine is `fast` and `slow`."""
    return tuple(map(_with_pace_range, results, fast, slow))


def _with_pace_range(result: CaseResult, fast: CaseResult, slow: CaseResult) -> CaseResult:
    time_s, low_s, high_s = result.predicted_s, result.low_s, result.high_s
    if time_s is None or low_s is None or high_s is None or fast.predicted_s is None or slow.predicted_s is None:
        return result
    below_s, above_s = max(time_s - fast.predicted_s, 0.0), max(slow.predicted_s - time_s, 0.0)
    return replace(
        result,
        low_s=max(time_s - math.hypot(time_s - low_s, below_s), 0.0),
        high_s=time_s + math.hypot(high_s - time_s, above_s),
    )


def table_owners(prediction: Prediction) -> tuple[int, ...]:
    """The rank that the plan gave each embedding table, in the model's order of tables."""
    owner = {table: summary.ranks[0] for summary in prediction.ranks for table in summary.tables}
    numbered = {int(name.rpartition(".weight")[0].rpartition(".t")[2]): rank for name, rank in owner.items()}
    return tuple(numbered[table] for table in range(len(numbered)))


def _result(case: LiveCase, settings: LiveSettings, blocks_s: Sequence[float], prediction: Prediction) -> CaseResult:
    measured_s = median(blocks_s)
    noise = max(abs(block_s / measured_s - 1.0) for block_s in blocks_s)
    row = Case(
        name=case.name,
        model=str(case.model.get("kind")),
        topology=settings.topology,
        plan=case.plan,
        batch_per_rank=prediction.batch_per_rank,
        seq_len=None,
        precision=prediction.precision,
        mode="eager",
        phase="train",
        measured_s=measured_s,
        weight=1.0,
        source=f"live, {time.strftime('%Y-%m-%d')}",
        note=f"{settings.n_ranks} ranks of {settings.n_threads} threads; median of {len(blocks_s)} blocks",
    )
    return replace(run_case(row, lambda _: prediction), noise=noise)
