"""Our plans in the real TorchRec, on CPU: they train under DistributedModelParallel, and planners' plans come back equal.

Run by `make interop`, which has its own environment; skipped where TorchRec is not installed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from perfmodel.config.sharding import TablePlacement
from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import TableAccess
from perfmodel.plan.shards import TableShard
from perfmodel.sharding.cost import ShardTimes
from perfmodel.sharding.torchrec import Ranks, TableSize, from_torchrec, to_torchrec

pytest.importorskip("torchrec", reason="TorchRec is not installed here: make interop", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("default")

ROWS, DIM, BATCH, POOLING = 100, 8, 4, 3
NAMES = ("t0", "t1", "t2", "t3")
SIZES = {name: TableSize(rows=ROWS + 1, dim=DIM) for name in NAMES}
MODULES = dict.fromkeys(NAMES, "bags")
CPU = Ranks(n_ranks=2, per_host=2, device="cpu")
PLAN = {
    "t0": TablePlacement(ranks=(1,)),
    "t1": TablePlacement(sharding="row_wise", ranks=(0, 1)),
    "t2": TablePlacement(sharding="column_wise", ranks=(1, 0)),
    "t3": TablePlacement(sharding="data_parallel", kernel="dense"),
}


def _model(device: str) -> Any:
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = EmbeddingBagCollection(
                tables=[
                    EmbeddingBagConfig(
                        name=name, embedding_dim=DIM, num_embeddings=ROWS + 1, feature_names=[f"f{name}"]
                    )
                    for name in NAMES
                ],
                device=torch.device(device),
            )
            self.over = torch.nn.Linear(DIM * len(NAMES), 1, device=device)

        def forward(self, features: Any) -> Any:
            return self.over(self.bags(features).values())

    return Model()


def _features(rank: int) -> Any:
    import torch
    from torchrec import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(rank)
    n = BATCH * len(NAMES)
    return KeyedJaggedTensor.from_lengths_sync(
        keys=[f"f{name}" for name in NAMES],
        values=torch.randint(0, ROWS, (n * POOLING,), generator=generator),
        lengths=torch.full((n,), POOLING),
    )


def _loss(output: Any) -> Any:
    return output.square().mean()


def _train(rank: int, store: str, saved: str, out: str) -> None:
    """One rank: the model under our plan, from given weights; writes its losses."""
    import torch
    from torch import distributed
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv

    from perfmodel.sharding.torchrec_job import read_sharding_plan, sharding_plan

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    plan = sharding_plan(PLAN, SIZES, CPU, MODULES)
    assert dict(read_sharding_plan(plan).placement) == PLAN
    group = distributed.group.WORLD
    assert group is not None
    module = DistributedModelParallel(
        _model("cpu"),
        env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"),
        plan=plan,
        sharders=[EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})],
        init_data_parallel=True,
    )
    whole = torch.load(saved)
    state = module.state_dict()
    for key, value in state.items():
        full = whole[key]
        if hasattr(value, "local_shards"):
            for shard in value.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                shard.tensor.copy_(full[row : row + rows, column : column + columns])
        else:
            value.copy_(full)
    losses = []
    for _ in range(3):
        loss = _loss(module(_features(rank)))
        losses.append(float(loss))
        loss.backward()
    distributed.barrier()  # no rank closes its connections while the other still uses them
    Path(out).write_text(json.dumps(losses))
    os._exit(0)  # threads of the groups that the lookups hold end after their interpreter, which aborts now and then


def test_our_plan_trains_under_distributed_model_parallel(tmp_path: Path):
    import torch

    torch.manual_seed(0)
    whole = _model("cpu")
    torch.save({name: value.detach() for name, value in whole.state_dict().items()}, tmp_path / "weights.pt")
    context = multiprocessing.get_context("spawn")
    outs = [str(tmp_path / f"out{rank}.json") for rank in range(2)]
    processes = [
        context.Process(target=_train, args=(rank, str(tmp_path / "store"), str(tmp_path / "weights.pt"), outs[rank]))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=240)
    assert [process.exitcode for process in processes] == [0, 0]
    for rank, out in enumerate(outs):
        losses = json.loads(Path(out).read_text())
        # Forward by the shards is the forward of the whole model; the optimizer in backward then lowers the loss.
        assert losses[0] == pytest.approx(float(_loss(whole(_features(rank)))), rel=1e-5)
        assert losses[2] < losses[0]


def _planner(n_ranks: int = 2, device: str = "cpu", **keys: Any) -> Any:
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

    topology = Topology(world_size=n_ranks, compute_device=device, local_world_size=n_ranks)
    return EmbeddingShardingPlanner(topology=topology, batch_size=BATCH, debug=False, **keys), topology


def _sharders() -> list[Any]:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    return [EmbeddingBagCollectionSharder()]


@pytest.mark.parametrize(("n_ranks", "device"), [(2, "cpu"), (8, "cuda")])
def test_a_planner_plan_comes_back_equal(n_ranks: int, device: str):
    from perfmodel.sharding.torchrec_job import read_sharding_plan, sharding_plan

    planner, _ = _planner(n_ranks, device)
    plan = planner.plan(_model("meta"), _sharders())
    ranks = Ranks(n_ranks=n_ranks, per_host=n_ranks, device=device)
    found = read_sharding_plan(plan)
    again = sharding_plan(found.placement, SIZES, ranks, found.modules)
    assert again == plan
    assert json.loads(json.dumps(to_torchrec(found.placement, SIZES, ranks, found.modules))) == plan._serialize()
    assert from_torchrec(plan._serialize()).placement == found.placement


def test_a_planner_takes_our_plan_from_a_loader():
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.types import ParameterConstraints

    from perfmodel.sharding.torchrec_job import plan_loader, sharding_plan

    constraints = {"t2": ParameterConstraints(min_partition=DIM // 2)}
    _, topology = _planner(2, "cuda")  # row-wise is not among the types that TorchRec enumerates for CPUs
    enumerator = EmbeddingEnumerator(topology, batch_size=BATCH, constraints=constraints)
    model = _model("meta")
    loader = plan_loader(PLAN, model, _sharders(), enumerator)
    planner, _ = _planner(2, "cuda", plan_loader=loader, constraints=constraints)
    assert planner.plan(model, _sharders()) == sharding_plan(PLAN, SIZES, Ranks(n_ranks=2, per_host=2), MODULES)


def test_a_plan_outside_the_search_space_is_refused_by_name():
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

    from perfmodel.sharding.torchrec_job import plan_loader

    _, topology = _planner()
    enumerator = EmbeddingEnumerator(topology, batch_size=BATCH)
    loader = plan_loader({"t0": PLAN["t2"]}, _model("meta"), _sharders(), enumerator)
    with pytest.raises(InfeasiblePlanError, match="table t0: found column_wise by fused in 2 part"):
        loader.load()


class _Heavy:
    """Prices the first table so that it should be alone on a rank; by hand, the best plan's rank then costs 3 s."""

    def shard_times(self, shards: Sequence[TableShard]) -> list[ShardTimes]:
        price = {"t0": 3.0}
        return [ShardTimes(lookup_s=price.get(shard.name, 1.0)) for shard in shards]


def test_a_planner_with_our_prices_balances_by_them():
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
    from torchrec.distributed.planner.types import ParameterConstraints

    from perfmodel.sharding.torchrec_job import read_sharding_plan, shard_estimator

    tables = {name: TableAccess(parameter=name, rows=ROWS + 1, dim=DIM, pooling_factor=POOLING) for name in NAMES}
    constraints = {name: ParameterConstraints(sharding_types=["table_wise"]) for name in NAMES}
    _, topology = _planner()
    estimators = [shard_estimator(_Heavy(), tables)(topology), EmbeddingStorageEstimator(topology=topology)]
    enumerator = EmbeddingEnumerator(topology, batch_size=BATCH, constraints=constraints, estimator=estimators)
    planner, _ = _planner(enumerator=enumerator, constraints=constraints)
    placement = read_sharding_plan(planner.plan(_model("meta"), _sharders())).placement
    alone = placement["t0"].ranks
    assert [placement[name].ranks == alone for name in NAMES] == [True, False, False, False]
