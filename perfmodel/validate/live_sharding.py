"""Live ranking of sharding plans: random DLRMs on 2 and 4 ranks, plans ranked by prediction, then all trained for real.

Blocks of steps of all plans take turns in the same processes, so that what disturbs the machine meets every plan. A plan's
time is the median of its blocks; its noise half the distance of their quartiles, relative to the median.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.errors import ConfigError
from perfmodel.metrics import kendall_tau, percentile, regret
from perfmodel.validate.train_ranks import run_plans

SEED = 20261129
N_PLANS = 8
ROUNDS, STEPS = 15, 4
CANDIDATES = 200  # random plans, of which those are taken whose heaviest ranks differ most
# 2 ranks, 4 ranks, in turn; skew of the indices in turn of two.
SHAPES = tuple((2 if number % 2 == 0 else 4, 0.0 if number % 4 < 2 else 1.05) for number in range(10))


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A DLRM (as the mapping of a model file), its ranks, and the plans to rank: the rank of each table."""

    name: str
    model: Mapping[str, Any]
    n_ranks: int
    plans: tuple[tuple[int, ...], ...]

    def plan_files(self) -> list[dict[str, Any]]:
        """The plans as the mappings of plan files."""
        return [
            {"name": f"plan{number}", "embeddings": {f"t{table}": rank for table, rank in enumerate(owners)}}
            for number, owners in enumerate(self.plans)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingScore:
    """How a ranking held: times (s) by plan, whether the first is the fastest or within noise of it, regret and tau."""

    name: str
    predicted_s: tuple[float, ...]
    measured_s: tuple[float, ...]
    noise_frac: float
    is_best: bool
    regret_frac: float
    tau: float


def random_subjects(seed: int = SEED) -> tuple[Subject, ...]:
    """Ten random DLRMs with their plans; the same for one seed."""
    rng = np.random.default_rng(seed)
    return tuple(_subject(number, n_ranks, zipf, rng) for number, (n_ranks, zipf) in enumerate(SHAPES))


def _subject(number: int, n_ranks: int, zipf: float, rng: np.random.Generator) -> Subject:
    n_tables = int(rng.integers(6, 11))
    distribution: Any = {"zipf": zipf} if zipf else "uniform"
    tables = [
        {
            "rows": int(10 ** rng.uniform(3.5, 5.2)),
            "count": 1,
            "pooling_factor": int(10 ** rng.uniform(0.3, 1.9)),
            "distribution": distribution,
        }
        for _ in range(n_tables)
    ]
    name = f"dlrm{number}-{n_ranks}r-{'zipf' if zipf else 'uniform'}"
    model: dict[str, Any] = {
        "kind": "dlrm",
        "name": name,
        "dense_features": 13,
        "bottom_mlp": [64, 64],
        "top_mlp": [64, 1],
        "interaction": "dot",
        "embedding_dim": 64,
        "optimizer": "sgd",
        "sparse_optimizer": "sgd",
        "batch_size": 2048 // n_ranks,
        "tables": tables,
    }
    weights = [table["pooling_factor"] for table in tables]
    return Subject(name=name, model=model, n_ranks=n_ranks, plans=_plans(weights, n_ranks, rng))


def _plans(weights: Sequence[int], n_ranks: int, rng: np.random.Generator) -> tuple[tuple[int, ...], ...]:
    """By lookups greedily, all tables on one rank, and random plans between: their heaviest ranks' lookups evenly spaced.

    No two are alike up to the ranks' names. Lookups choose the plans, so that these differ by more than noise; not prices.
    """
    n_tables = len(weights)
    greedy, load = [0] * n_tables, [0] * n_ranks
    for table in sorted(range(n_tables), key=lambda t: -weights[t]):
        greedy[table] = load.index(min(load))
        load[greedy[table]] += weights[table]
    found = {_renamed(plan): None for plan in (greedy, (0,) * n_tables)}
    drawn = {_renamed(rng.integers(0, n_ranks, n_tables).tolist()): None for _ in range(CANDIDATES)}
    heaviest = {
        plan: max(sum(w for w, rank in zip(weights, plan, strict=True) if rank == r) for r in range(n_ranks))
        for plan in drawn
        if plan not in found
    }
    wanted = np.linspace(max(load), sum(weights), N_PLANS)[1:-1]
    for share in wanted.tolist():
        nearest = min(heaviest, key=lambda plan: (abs(heaviest[plan] - share), plan))
        found[nearest] = None
        del heaviest[nearest]
    return tuple(found)


def _renamed(owners: Sequence[int]) -> tuple[int, ...]:
    """The plan with ranks numbered as they first appear: all ranks are alike."""
    names: dict[int, int] = {}
    return tuple(names.setdefault(owner, len(names)) for owner in owners)


def measure_subject(subject: Subject, n_threads: int) -> list[list[float]]:
    """Median step times (s) of the blocks of each plan, of the slowest rank."""
    with (
        ProcessPoolExecutor(subject.n_ranks, mp_context=get_context("spawn")) as pool,
        tempfile.TemporaryDirectory() as folder,
    ):
        given = (subject.n_ranks, str(Path(folder) / "store"), subject.model, subject.plans, (n_threads, ROUNDS, STEPS))
        running = [pool.submit(run_plans, rank, *given) for rank in range(subject.n_ranks)]
        by_rank = np.array([found.result() for found in running])
    blocks: list[list[float]] = by_rank.max(axis=0).tolist()
    return blocks


def score_subject(subject: Subject, predicted_s: Sequence[float], blocks_s: Sequence[Sequence[float]]) -> RankingScore:
    """Compares a ranking made beforehand with measured blocks of each plan."""
    measured = [percentile(blocks, 0.5) for blocks in blocks_s]
    spreads = [(percentile(b, 0.75) - percentile(b, 0.25)) / 2.0 / m for b, m in zip(blocks_s, measured, strict=True)]
    noise = percentile(spreads, 0.5)
    lost = regret(predicted_s, measured)
    return RankingScore(
        name=subject.name,
        predicted_s=tuple(predicted_s),
        measured_s=tuple(measured),
        noise_frac=noise,
        is_best=lost <= noise,
        regret_frac=lost,
        tau=kendall_tau(predicted_s, measured),
    )


def read_scores(path: str) -> dict[str, RankingScore]:
    """Scores that earlier runs left in a file of JSON lines, by name; none if there is no file. Raises ConfigError."""
    file = Path(path)
    if not file.exists():
        return {}
    found = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            data = json.loads(line)
            for key in ("predicted_s", "measured_s"):
                data[key] = tuple(data[key])
            score = RankingScore(**data)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: line {number}: found no score of an earlier run ({error})") from error
        found[score.name] = score
    return found


def add_score(path: str, score: RankingScore) -> None:
    """Adds a line to the file of scores."""
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(score)) + "\n")
