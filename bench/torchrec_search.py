"""Our search against TorchRec's default planner, on TorchRec's own objective: the costs of its own estimator, its own memory.

    make interop-bench        (or: python bench/torchrec_search.py --cases 26x8,26x64,100x16)

Both get the same topology, the same search space (TorchRec's enumerator) and the same time for the search; the planner may
finish earlier. A plan's rating is TorchRec's: the largest sum over a rank of its shards' costs (`NoopPerfModel`).
Ours asks the enumerator for options in device memory alone (`dense` and `fused`), a third of all, and for the rest only if
nothing it finds fits.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import random
import sys
import time
import warnings
from typing import Any

import numpy as np

from perfmodel.errors import InfeasiblePlanError
from perfmodel.sharding.choices import Balanced, Choice, arrays_of, best_choices
from perfmodel.sharding.search import ArraySearch

GIB = 1024**3
HOST = 8
# Rows of the 26 tables of Criteo Terabyte after the 40 M cut, as in NVIDIA's MLPerf DLRM.
CRITEO = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208, 11938, 155, 4, 976, 14,
    39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip
SPREAD = {"uniform": "uniform", "host": "host", "device": "device"}


def tables_of(n_tables: int, seed: int) -> list[tuple[int, int, float]]:
    """(rows, columns, pooling factor): Criteo's 26, or random ones of log-uniform rows and pooling factors."""
    rng = random.Random(seed)
    if n_tables == len(CRITEO):
        return [(rows, 128, float(rng.choice((1, 1, 5, 20, 50)))) for rows in CRITEO]
    return [
        (int(10 ** rng.uniform(3, 7)), rng.choice((64, 128, 256)), 10 ** rng.uniform(0, 1.7)) for _ in range(n_tables)
    ]


def setting(n_tables: int, n_ranks: int, seed: int, types: tuple[str, ...] = ()) -> dict[str, Any]:
    """What both are given: module, sharders, topology and constraints."""
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    tables = tables_of(n_tables, seed)
    limits: dict[str, Any] = {"sharding_types": list(types), "min_partition": 64} if types else {}
    configs = [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=dim, num_embeddings=rows, feature_names=[f"f{i}"])
        for i, (rows, dim, _) in enumerate(tables)
    ]
    return {
        "module": EmbeddingBagCollection(tables=configs, device=torch.device("meta")),
        "sharders": [EmbeddingBagCollectionSharder()],
        "topology": Topology(
            world_size=n_ranks, compute_device="cuda", local_world_size=min(HOST, n_ranks), hbm_cap=80 * GIB,
            ddr_cap=256 * GIB,
        ),
        "constraints": {f"t{i}": ParameterConstraints(pooling_factors=[p], **limits) for i, (_, _, p) in enumerate(tables)},
    }  # fmt: skip


def planner(given: dict[str, Any], timeout_s: int | None) -> Any:
    """TorchRec's default planner."""
    from torchrec.distributed.planner import EmbeddingShardingPlanner

    return EmbeddingShardingPlanner(
        topology=given["topology"], batch_size=512, constraints=given["constraints"], debug=False,
        timeout_seconds=timeout_s,
    )  # fmt: skip


def rated(options: list[Any], n_ranks: int) -> float:
    """TorchRec's rating of a plan, by its own model."""
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.perf_models import NoopPerfModel

    return float(NoopPerfModel(Topology(world_size=n_ranks, compute_device="cuda")).rate(options))


DEVICE_KERNELS = ["dense", "fused"]


def on_device(given: dict[str, Any]) -> dict[str, Any]:
    """The same with kernels that keep rows in device memory."""
    from dataclasses import replace

    limited = {name: replace(one, compute_kernels=DEVICE_KERNELS) for name, one in given["constraints"].items()}
    return {**given, "constraints": limited}


def choices_of(given: dict[str, Any]) -> tuple[list[list[Choice]], list[list[Any]], np.ndarray]:
    """The enumerated options by table, priced by TorchRec's estimators, and the memory that its reservation leaves."""
    asked = planner(given, None)
    left = asked._storage_reservation.reserve(
        topology=given["topology"], batch_size=512, module=given["module"], sharders=given["sharders"],
        constraints=given["constraints"],
    )  # fmt: skip
    found: dict[str, list[Any]] = {}
    for option in asked._enumerator.enumerate(given["module"], given["sharders"]):
        if option.partition_by in SPREAD:
            found.setdefault(option.name, []).append(option)
    choices = [
        [
            Choice(
                costs=np.array([shard.perf.total for shard in option.shards]),
                memory=np.array([(shard.storage.hbm, shard.storage.ddr) for shard in option.shards], dtype=float),
                spread=SPREAD[option.partition_by],  # type: ignore[arg-type]  # one of the three
            )
            for option in mine
        ]
        for mine in found.values()
    ]
    capacity = np.array([(device.storage.hbm, device.storage.ddr) for device in left.devices], dtype=float)
    return choices, list(found.values()), capacity


def searched(choices: list[list[Choice]], capacity: np.ndarray, n_ranks: int, budget_s: float, seed: int) -> Balanced:
    """Our search for so many seconds, arrays and compiled loops included."""
    begin = time.monotonic()
    search = ArraySearch(arrays_of(choices, capacity, min(HOST, n_ranks)), seed=seed)
    return best_choices(search, choices, budget_s - (time.monotonic() - begin))


def compare(n_tables: int, n_ranks: int, budget_s: float, seed: int, types: tuple[str, ...] = ()) -> dict[str, Any]:
    """Both searches on one case."""
    given = setting(n_tables, n_ranks, seed, types)
    start = time.monotonic()
    choices, options, capacity = choices_of(on_device(given))
    enumerated_s = time.monotonic() - start
    try:
        found = searched(choices, capacity, n_ranks, budget_s, seed)
    except InfeasiblePlanError:
        choices, options, capacity = choices_of(given)
        found = searched(choices, capacity, n_ranks, budget_s, seed)
    ours_s = time.monotonic() - start
    plan = []
    for mine, number, ranks in zip(options, found.choice, found.ranks, strict=True):
        for shard, rank in zip(mine[number].shards, ranks, strict=True):
            shard.rank = rank
        plan.append(mine[number])
    ours = rated(plan, n_ranks)
    theirs_planner = planner(given, max(1, round(budget_s)))
    start = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        theirs_planner.plan(given["module"], given["sharders"])
    theirs_s = time.monotonic() - start
    theirs = rated(theirs_planner._best_plan, n_ranks)
    return {
        "tables": n_tables, "gpus": n_ranks, "seed": seed, "search_budget_s": budget_s, "enumeration_s": enumerated_s,
        "torchrec": theirs, "ours": ours, "better_frac": 1.0 - ours / theirs, "torchrec_s": theirs_s, "ours_s": ours_s,
        "evaluations": found.n_evaluations, "by": found.origin,
    }  # fmt: skip


def main() -> None:
    """Prints one JSON line a case."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="26x8,26x64,100x16", help="TABLESxGPUS, one after the other")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of each search")
    parser.add_argument("--types", default="", help="only these sharding types, for both (all if empty)")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    for case in given.cases.split(","):
        n_tables, _, n_ranks = case.partition("x")
        for seed in range(given.seeds):
            types = tuple(given.types.split(",")) if given.types else ()
            found = compare(int(n_tables), int(n_ranks), given.budget, seed, types)
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
