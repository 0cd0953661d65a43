"""The exchange of indices on two real gloo ranks, against a plain concatenation of both ranks' bags."""

import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

# Three tables of two samples on each of two ranks: bags of each sample, by rank and table.
BAGS = {
    0: [[[1, 2], [3]], [[4], []], [[5], [6, 7]]],
    1: [[[8], [9, 10]], [[], [11]], [[12, 13], [14]]],
}


def _exchange(rank: int, store: str, owners: tuple[int, ...]) -> list[list[list[int]]]:
    """The bags of this rank's tables after the exchange, by table."""
    import torch
    from torch import distributed

    from perfmodel.validate.train_ranks import _Exchange

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        lengths = [torch.tensor([len(bag) for bag in bags]) for bags in BAGS[rank]]
        indices = [torch.tensor([i for bag in bags for i in bag], dtype=torch.int64) for bags in BAGS[rank]]
        found, offsets = _Exchange(owners, rank, [4] * len(owners)).indices(indices, lengths)
        ends = [[*o.tolist()[1:], f.numel()] for o, f in zip(offsets, found, strict=True)]
        return [
            [f.tolist()[start:end] for start, end in zip(o.tolist(), e, strict=True)]
            for f, o, e in zip(found, offsets, ends, strict=True)
        ]
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("owners", [(0, 1, 0), (1, 1, 1)])
def test_owners_get_both_ranks_bags_in_the_order_of_samples(owners):
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool, tempfile.TemporaryDirectory() as folder:
        running = [pool.submit(_exchange, rank, str(Path(folder) / "store"), owners) for rank in range(2)]
        got = [found.result() for found in running]
    for rank in range(2):
        assert got[rank] == [BAGS[0][t] + BAGS[1][t] for t, owner in enumerate(owners) if owner == rank]


DLRM = {
    "kind": "dlrm", "name": "t", "dense_features": 4, "bottom_mlp": [8, 4], "top_mlp": [8, 1], "interaction": "dot",
    "embedding_dim": 4, "batch_size": 6, "tables": [{"rows": 50, "count": 3, "pooling_factor": 2}],
}  # fmt: skip


def _built():
    from perfmodel.validate.train import real_model

    return real_model(DLRM)


def _tables(built) -> list[list[float]]:
    return [bag.weight.detach().flatten().tolist() for bag in built.module.sparse_arch.embedding_bags.values()]


def _train_sharded(rank: int, store: str, owners: tuple[int, ...]) -> list[list[float]]:
    """All tables of a rank after two steps, both ranks with the same samples."""
    from torch import distributed

    from perfmodel.validate.train import set_up
    from perfmodel.validate.train_ranks import sharded_step

    set_up(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        built = _built()
        step = sharded_step(built, owners, rank)
        step()
        step()
        return _tables(built)
    finally:
        distributed.destroy_process_group()


def _train_whole() -> list[list[float]]:
    """The same in one process: a table's owner adds up the gradients of both ranks' equal samples, so twice the rate."""
    import torch

    from perfmodel.models.training import LEARNING_RATE

    built = _built()
    tables = [bag.weight for bag in built.module.sparse_arch.embedding_bags.values()]
    dense = [p for p in built.module.parameters() if all(p is not table for table in tables)]
    optimizers = [torch.optim.SGD(dense, lr=LEARNING_RATE), torch.optim.SGD(tables, lr=2 * LEARNING_RATE)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        built.loss(built.module(*built.args)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return _tables(built)


def test_the_sharded_step_trains_tables_as_one_process_does():
    owners = (0, 1, 0)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool, tempfile.TemporaryDirectory() as folder:
        running = [pool.submit(_train_sharded, rank, str(Path(folder) / "store"), owners) for rank in range(2)]
        got = [found.result() for found in running]
    before, after = _tables(_built()), _train_whole()
    for table, expected in enumerate(after):
        moved = max(abs(a - b) for a, b in zip(before[table], expected, strict=True))
        assert moved > 2e-5  # far beyond what fp32 rounds away
        assert got[owners[table]][table] == pytest.approx(expected, abs=2e-6)
