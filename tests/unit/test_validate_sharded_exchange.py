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
