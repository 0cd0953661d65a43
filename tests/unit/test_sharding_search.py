"""The search against exhaustive enumeration, constraints and files; odds against a closed form."""

import itertools

import numpy as np
import pytest

from perfmodel.config import load_plan
from perfmodel.errors import ConfigError, InfeasiblePlanError
from perfmodel.graph import TableAccess
from perfmodel.sharding.anneal import reload
from perfmodel.sharding.cost import ShardTimes
from perfmodel.sharding.exact import optimum
from perfmodel.sharding.layout import lay_out
from perfmodel.sharding.plan import plain_plan, plan_to_text
from perfmodel.sharding.problem import Constraint, Problem, read_constraints
from perfmodel.sharding.search import Search


class Drawn:
    """Costs of parts by size, with noise that belongs to the table."""

    def __init__(self, seed):
        self.seed = seed

    def shard_times(self, shards):
        found = []
        for shard in shards:
            rng = np.random.default_rng([self.seed, int(shard.name[1:]), shard.access.dim])
            scale = shard.share_frac * shard.access.dim
            found.append(
                ShardTimes(
                    lookup_s=scale * rng.uniform(0.5, 1),
                    update_s=scale * rng.uniform(0.5, 2),
                    output_s=rng.uniform(0, 9),
                )
            )
        return found


def problem(seed, n_tables=4, n_ranks=3, **fields):
    rng = np.random.default_rng(seed)
    tables = {
        f"t{i}": TableAccess(parameter=f"t{i}", rows=int(rng.integers(50, 5000)), dim=64) for i in range(n_tables)
    }
    given = {
        "tables": tables, "n_ranks": n_ranks, "batch": 8, "domains": (tuple(range(n_ranks)),),
        "free_bytes": (2_000_000,) * n_ranks, "row_bytes": dict.fromkeys(tables, 64 * 4 + 4),
    }  # fmt: skip
    return Problem(**{**given, **fields})


def enumerated(layout):
    a = layout.arrays
    choices = []
    for t in range(len(layout.tables)):
        mine = []
        for o in range(a.option_ptr[t], a.option_ptr[t + 1]):
            mine += [(o - a.option_ptr[t], g) for g in itertools.product(range(a.n_groups[o]), repeat=a.n_pieces[o])]
        choices.append(mine)
    best = float("inf")
    load, held = np.zeros((len(a.capacity), 3)), np.zeros(a.capacity.shape)
    piece = np.zeros((len(choices), layout.max_pieces), dtype=np.int64)
    for state in itertools.product(*choices):
        for t, (_, groups) in enumerate(state):
            piece[t, : len(groups)] = groups
        best = min(best, reload(a, np.array([o for o, _ in state]), piece, load, held))
    return best


@pytest.mark.parametrize("seed", range(2))
def test_branch_and_bound_is_the_enumerated_optimum(seed):
    layout = lay_out(problem(seed, n_tables=2), Drawn(seed))
    assert optimum(layout)[0] == pytest.approx(enumerated(layout), rel=1e-12)


def test_search_finds_the_optimum_of_small_problems():
    hits = 0
    for seed in range(6):
        search = Search(problem(seed, n_tables=3), Drawn(seed), seed=seed)
        best = search.run(budget_s=60.0, rounds=3)[0].cost_s
        exact = optimum(search.layout)[0]
        assert best >= exact * (1 - 1e-9)
        hits += best <= exact * (1 + 1e-9)
    assert hits == 6


def test_a_search_of_given_rounds_is_reproducible():
    first, second = (Search(problem(3), Drawn(3), seed=5).run(60.0, rounds=1) for _ in range(2))
    assert [f.placement for f in first] == [f.placement for f in second]


def test_constraints_hold():
    rules = {
        "t0": Constraint(sharding=("table_wise",), ranks=(2,)),
        "t1": Constraint(together="pair"),
        "t2": Constraint(together="pair"),
        "t3": Constraint(sharding=("column_wise",), min_partition=32),
    }
    found = Search(problem(1, constraints=rules), Drawn(1)).run(60.0, rounds=1)
    for one in found:
        assert one.placement["t0"].ranks == (2,)
        assert one.placement["t1"].ranks == one.placement["t2"].ranks
        assert one.placement["t3"].sharding == "column_wise"


def test_constraints_that_are_wrong():
    with pytest.raises(ConfigError, match="no such table; did you mean 't1'"):
        read_constraints({"t11": {"ranks": [0]}}, ["t1", "q"])
    with pytest.raises(InfeasiblePlanError, match="table t0: its constraints allow no placement"):
        lay_out(problem(1, constraints={"t0": Constraint(sharding=("row_wise",), ranks=(1,))}), Drawn(1))


def test_a_plan_written_is_the_plan_read(tmp_path):
    plan = load_plan(
        {
            "name": "mine",
            "embeddings": {
                "row_precision": "bf16", "ssd": "3 GB/s",
                "placement": {
                    "a": {"sharding": "grid", "ranks": [0, 1, 2, 3], "widths": [32, 96], "kernel": "uvm_caching"},
                    "b": 3, "c": "data_parallel",
                },
            },
        }
    )  # fmt: skip
    assert load_plan(plain_plan(plan)) == plan
    for suffix in (".yaml", ".json"):
        path = tmp_path / f"plan{suffix}"
        path.write_text(plan_to_text(plan, suffix), encoding="utf-8")
        assert load_plan(str(path)) == plan
