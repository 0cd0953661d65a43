"""Real training steps on several gloo ranks: DDP, and DLRM with its tables spread over the ranks.

The sharded step does what `plan.exchange` predicts: bag lengths and indices go to the tables' owners (two all-to-alls), each
owner looks up the global batch, pooled rows come back (all-to-all), their gradients return as soon as they are complete
(all-to-all), the dense part is trained under DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perfmodel.validate.train import Timed, plain_step, real_model, set_up, timed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from perfmodel.models.built import BuiltModel


BLOCK_WARM_UP = 2  # steps of a block that do not count


def run_rank(
    rank: int, n_ranks: int, store: str, model: Mapping[str, Any], owners: Sequence[int], settings: tuple[int, float]
) -> Timed:
    """Trains one rank; `owners` gives each table's rank (empty: no table is spread), `settings` threads and budget (s)."""
    from torch import distributed

    n_threads, budget_s = settings
    set_up(n_threads)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n_ranks)
    try:
        built = real_model(model)
        step = sharded_step(built, owners, rank) if owners else ddp_step(built)
        distributed.barrier()
        return timed(step, budget_s, agreed)
    finally:
        distributed.destroy_process_group()


def run_plans(
    rank: int,
    n_ranks: int,
    store: str,
    model: Mapping[str, Any],
    plans: Sequence[Sequence[int]],
    blocks: tuple[int, int, int],
) -> list[list[float]]:
    """Trains one rank under several assignments of tables in turn: per plan the median step time (s) of each block.

    `blocks` are threads, rounds over all plans, and steps of one block; a block's first steps warm up and do not count.
    """
    import time
    from statistics import median

    from torch import distributed

    n_threads, n_rounds, n_steps = blocks
    set_up(n_threads)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n_ranks)
    found: list[list[float]] = [[] for _ in plans]
    try:
        built = real_model(model)
        steps = [sharded_step(built, owners, rank) for owners in plans]
        for _ in range(n_rounds):
            for number, step in enumerate(steps):
                distributed.barrier()
                times = []
                for _ in range(n_steps + BLOCK_WARM_UP):
                    start_s = time.perf_counter()
                    step()
                    times.append(time.perf_counter() - start_s)
                found[number].append(median(times[BLOCK_WARM_UP:]))
    finally:
        distributed.destroy_process_group()
    return found


def agreed(n_steps: int) -> int:
    """The fewest steps any rank asks for."""
    import torch
    from torch import distributed

    wanted = torch.tensor([n_steps])
    distributed.all_reduce(wanted, op=distributed.ReduceOp.MIN)
    return int(wanted)


def ddp_step(built: BuiltModel) -> Callable[[], None]:
    """The plain step with the module under DistributedDataParallel."""
    from dataclasses import replace

    return plain_step(replace(built, module=_ddp(built.module)))


def _ddp(module: nn.Module) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(module)


def sharded_step(built: BuiltModel, owners: Sequence[int], rank: int) -> Callable[[], None]:
    """The step of a DLRM whose table `t` lives on rank `owners[t]` only."""
    import torch
    from torch import nn

    from perfmodel.models.training import LEARNING_RATE

    held = [table for table, owner in enumerate(owners) if owner == rank]
    tables: Any = built.module.sparse_arch
    bags = list(tables.embedding_bags.values())
    own = [bags[table] for table in held]
    widths = [bags[table].embedding_dim for table in range(len(owners))]
    dense = _ddp(_Dense(built.module))
    exchange = _Exchange(owners, rank, widths)
    dense_optimizer = torch.optim.SGD(dense.parameters(), lr=LEARNING_RATE)
    sparse_optimizer = torch.optim.SGD([bag.weight for bag in own], lr=LEARNING_RATE) if own else None
    features, indices, offsets, _ = built.args
    # A loader of jagged features gives lengths.
    lengths = [
        torch.diff(offset, append=torch.tensor([index.numel()])) for index, offset in zip(indices, offsets, strict=True)
    ]
    loss_of = nn.functional.binary_cross_entropy_with_logits
    target = built.targets[0]

    def step() -> None:
        dense_optimizer.zero_grad(set_to_none=True)
        if sparse_optimizer is not None:
            sparse_optimizer.zero_grad(set_to_none=True)
        global_indices, global_offsets = exchange.indices(indices, lengths)
        pooled = [bag(index, offset) for bag, index, offset in zip(own, global_indices, global_offsets, strict=True)]
        rows = exchange.rows([found.detach() for found in pooled], features.shape[0])
        gradients = exchange.return_gradients(rows)
        torch.autograd.backward((loss_of(dense(features, rows), target),))
        if own:
            torch.autograd.backward(pooled, gradients())
        else:
            gradients()
        dense_optimizer.step()
        if sparse_optimizer is not None:
            sparse_optimizer.step()

    return step


def _Dense(dlrm: nn.Module) -> nn.Module:  # noqa: N802 -- makes a module; torch may not be imported at the top
    """The dense part of a DLRM, copied, as a module of (features, pooled rows)."""
    from copy import deepcopy

    from torch import nn

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parts = (dlrm.dense_arch, dlrm.inter_arch, dlrm.over_arch)
            self.dense_arch, self.inter_arch, self.over_arch = deepcopy(parts)  # of this step alone

        def forward(self, features: Tensor, rows: Sequence[Tensor]) -> Tensor:
            crossed = self.inter_arch(self.dense_arch(features), rows)  # type: ignore[operator]  # modules
            logits: Tensor = self.over_arch(crossed)  # type: ignore[operator]
            return logits

    return Dense()


class _Exchange:
    """The all-to-alls of table-wise sharding, on flat buffers; every rank has the same number of samples."""

    def __init__(self, owners: Sequence[int], rank: int, widths: Sequence[int]) -> None:
        self.n_ranks = max(*owners, _world() - 1) + 1
        self.by_rank = [[t for t, owner in enumerate(owners) if owner == r] for r in range(self.n_ranks)]
        self.rank = rank
        self.widths = widths

    def indices(self, indices: Sequence[Tensor], lengths: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The global batch's indices and offsets of this rank's tables: lengths first, as sizes depend on them."""
        import torch

        n_samples = lengths[0].numel()
        mine = self.by_rank[self.rank]
        got_lengths = self._to_owners(lengths, [len(mine) * n_samples] * self.n_ranks)
        per_source = [chunk.view(len(mine), n_samples) for chunk in got_lengths]
        sizes: list[list[int]] = torch.stack(per_source).sum(2).tolist()
        got = self._to_owners(indices, [sum(of_tables) for of_tables in sizes])
        if not mine:
            return [], []
        parts = [torch.split(chunk, of_tables) for chunk, of_tables in zip(got, sizes, strict=True)]
        all_lengths = torch.cat(per_source, 1)
        offsets = torch.cumsum(all_lengths, 1) - all_lengths
        return [torch.cat(of_table) for of_table in zip(*parts, strict=True)], list(offsets)

    def rows(self, pooled: Sequence[Tensor], n_samples: int) -> list[Tensor]:
        """This rank's samples of every table's pooled rows, as leaves that collect gradients."""
        import torch

        sent = [
            torch.cat([rows[r * n_samples : (r + 1) * n_samples].reshape(-1) for rows in pooled])
            if pooled
            else torch.empty(0)
            for r in range(self.n_ranks)
        ]
        sizes = [sum(self.widths[t] for t in tables) * n_samples for tables in self.by_rank]
        got = _all_to_all(sent, sizes)
        found: dict[int, Tensor] = {}
        for tables, chunk in zip(self.by_rank, got, strict=True):
            parts = torch.split(chunk, [self.widths[t] * n_samples for t in tables])
            for table, part in zip(tables, parts, strict=True):
                found[table] = part.view(n_samples, self.widths[table]).requires_grad_()
        return [found[table] for table in range(len(self.widths))]

    def return_gradients(self, rows: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Sends gradients of `rows` to the tables' owners once all are there; the result waits for what arrives."""
        import torch

        ready: list[int] = []
        arrived: list[Any] = []
        n_samples = rows[0].shape[0]
        mine = self.by_rank[self.rank]

        def hook(_: Tensor) -> None:
            ready.append(1)
            if len(ready) == len(rows):
                sent = [
                    torch.cat([_gradient(rows[t]).reshape(-1) for t in tables]) if tables else torch.empty(0)
                    for tables in self.by_rank
                ]
                sizes = [sum(self.widths[t] for t in mine) * n_samples] * self.n_ranks
                arrived.append(_all_to_all_async(sent, sizes))

        for row in rows:
            register: Any = row.register_post_accumulate_grad_hook
            register(hook)

        def wait() -> list[Tensor]:
            work, received = arrived[0]
            work.wait()
            chunks = [torch.split(chunk, [self.widths[t] * n_samples for t in mine]) for chunk in received]
            return [
                torch.cat([chunks[r][place].view(n_samples, self.widths[table]) for r in range(self.n_ranks)])
                for place, table in enumerate(mine)
            ]

        return wait

    def _to_owners(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        import torch

        sent = [
            torch.cat([tensors[t] for t in tables]) if tables else torch.empty(0, dtype=tensors[0].dtype)
            for tables in self.by_rank
        ]
        return _all_to_all(sent, sizes)


def _gradient(row: Tensor) -> Tensor:
    if row.grad is None:
        raise RuntimeError("a pooled row has no gradient after backward")
    return row.grad


def _world() -> int:
    from torch import distributed

    return distributed.get_world_size()


def _all_to_all(sent: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    work, received = _all_to_all_async(sent, sizes)
    work.wait()
    return list(received)


def _all_to_all_async(sent: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Any, Sequence[Tensor]]:
    """The exchange under way, and the chunks it fills: `sizes[r]` elements from rank r."""
    import torch
    from torch import distributed

    flat = torch.cat(list(sent))
    received = torch.empty(sum(sizes), dtype=flat.dtype)
    work = distributed.all_to_all_single(received, flat, list(sizes), [part.numel() for part in sent], async_op=True)
    return work, torch.split(received, list(sizes))
