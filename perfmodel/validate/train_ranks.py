"""Real training steps on several gloo ranks: DDP, and DLRM with its tables spread over the ranks.

The sharded step does what `plan.exchange` predicts: bag lengths and indices go to the tables' owners (two all-to-alls), each
owner looks up the global batch, pooled rows come back (all-to-all) while the bottom MLP runs, their gradients return as soon
as they are complete (all-to-all), the dense part is trained under DDP without broadcasts of buffers.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from perfmodel.validate.train import Batch, Timed, batches, plain_step, real_model, set_up, timed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from perfmodel.models.built import BuiltModel


BLOCK_WARM_UP = 2  # steps of a block that do not count

T = TypeVar("T")


def in_gloo_group(rank: int, n_ranks: int, store: str, work: Callable[[], T]) -> T:
    """What `work` returns as one rank of a gloo group that meets at the file `store`; the group ends with it.

    What `work` leaves behind goes before the group does. DDP's reducer holds the group and is freed under the interpreter's
    lock: if it were the last to hold it, it would wait for gloo's threads, and one of those may be waiting for that lock.
    """
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n_ranks)
    try:
        return work()
    finally:
        gc.collect()
        distributed.destroy_process_group()


def run_rank(
    rank: int, n_ranks: int, store: str, model: Mapping[str, Any], owners: Sequence[int], settings: tuple[int, float]
) -> Timed:
    """Trains one rank; `owners` gives each table's rank (empty: no table is spread), `settings` threads and budget (s)."""
    from torch import distributed

    n_threads, budget_s = settings
    set_up(n_threads)

    def work() -> Timed:
        step = rank_step(model, owners, rank)
        distributed.barrier()
        return timed(step, budget_s, agreed)

    return in_gloo_group(rank, n_ranks, store, work)


def rank_step(model: Mapping[str, Any], owners: Sequence[int], rank: int) -> Callable[[], None]:
    """The training step of one rank: tables spread as `owners` say, or all under DDP if it is empty."""
    built, others = real_model(model), batches(model)
    return sharded_step(built, owners, rank, others) if owners else ddp_step(built, others)


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
    n_threads, n_rounds, n_steps = blocks
    set_up(n_threads)

    def work() -> list[list[float]]:
        built, others = real_model(model), batches(model)
        steps = [sharded_step(built, owners, rank, others) for owners in plans]
        rounds = [[_block_s(step, n_steps) for step in steps] for _ in range(n_rounds)]
        return [list(of_plan) for of_plan in zip(*rounds, strict=True)]

    return in_gloo_group(rank, n_ranks, store, work)


def _block_s(step: Callable[[], None], n_steps: int) -> float:
    """Median time (s) of a block of steps that all ranks begin together."""
    import time
    from statistics import median

    from torch import distributed

    distributed.barrier()
    times = []
    for _ in range(n_steps + BLOCK_WARM_UP):
        start_s = time.perf_counter()
        step()
        times.append(time.perf_counter() - start_s)
    return median(times[BLOCK_WARM_UP:])


def agreed(n_steps: int) -> int:
    """The fewest steps any rank asks for."""
    import torch
    from torch import distributed

    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    wanted = torch.tensor([n_steps], device=device)
    distributed.all_reduce(wanted, op=distributed.ReduceOp.MIN)
    return int(wanted)


def ddp_step(built: BuiltModel, others: Sequence[Batch] = ()) -> Callable[[], None]:
    """The plain step with the module under DistributedDataParallel."""
    from dataclasses import replace

    return plain_step(replace(built, module=_ddp(built.module)), others)


def _ddp(module: nn.Module, *, sync_buffers: bool = True) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(module, forward_sync_buffers=sync_buffers)


def sharded_step(
    built: BuiltModel, owners: Sequence[int], rank: int, others: Sequence[Batch] = ()
) -> Callable[[], None]:
    """The step of a DLRM whose table `t` lives on rank `owners[t]` only; `others` as in `plain_step`."""
    import torch

    from perfmodel.models.training import LEARNING_RATE

    held = [table for table, owner in enumerate(owners) if owner == rank]
    tables: Any = built.module.sparse_arch
    bags = list(tables.embedding_bags.values())
    own = [bags[table] for table in held]
    widths = [bags[table].embedding_dim for table in range(len(owners))]
    dense = _ddp(_Dense(built.module), sync_buffers=False)
    exchange = _Exchange(owners, rank, widths, built.args[0].device)
    dense_optimizer = torch.optim.SGD(dense.parameters(), lr=LEARNING_RATE)
    sparse_optimizer = torch.optim.SGD([bag.weight for bag in own], lr=LEARNING_RATE) if own else None
    turns = itertools.cycle([(args, _lengths(args), loss) for args, loss in others or ((built.args, built.loss),)])

    def step() -> None:
        (features, indices, _, _), lengths, loss = next(turns)
        dense_optimizer.zero_grad(set_to_none=True)
        if sparse_optimizer is not None:
            sparse_optimizer.zero_grad(set_to_none=True)
        global_indices, global_offsets = exchange.indices(indices, lengths)
        pooled = [bag(index, offset) for bag, index, offset in zip(own, global_indices, global_offsets, strict=True)]
        arrive = exchange.send_rows([found.detach() for found in pooled], features.shape[0])
        torch.autograd.backward((loss(dense(features, arrive)),))
        gradients = exchange.gradients()
        if own:
            torch.autograd.backward(pooled, gradients)
        dense_optimizer.step()
        if sparse_optimizer is not None:
            sparse_optimizer.step()

    return step


def _lengths(args: tuple[Any, ...]) -> list[Tensor]:
    """Lengths of the bags of each table, as a loader of jagged features gives them."""
    import torch

    _, indices, offsets, _ = args
    return [torch.diff(o, append=o.new_tensor([i.numel()])) for i, o in zip(indices, offsets, strict=True)]


def _Dense(dlrm: nn.Module) -> nn.Module:  # noqa: N802 -- makes a module; torch may not be imported at the top
    """The dense part of a DLRM, copied, as a module of (features, function that waits for pooled rows)."""
    from copy import deepcopy

    from torch import nn

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parts = (dlrm.dense_arch, dlrm.inter_arch, dlrm.over_arch)
            self.dense_arch, self.inter_arch, self.over_arch = deepcopy(parts)  # of this step alone

        def forward(self, features: Tensor, arrive: Callable[[], Sequence[Tensor]]) -> Tensor:
            dense = self.dense_arch(features)  # type: ignore[operator]  # modules
            crossed = self.inter_arch(dense, arrive())  # type: ignore[operator]
            logits: Tensor = self.over_arch(crossed)  # type: ignore[operator]
            return logits

    return Dense()


class _Exchange:
    """The all-to-alls of table-wise sharding, on flat buffers; every rank has the same number of samples."""

    def __init__(self, owners: Sequence[int], rank: int, widths: Sequence[int], device: Any = "cpu") -> None:
        import torch

        self.n_ranks = max(*owners, _world() - 1) + 1
        self.by_rank = [[t for t, owner in enumerate(owners) if owner == r] for r in range(self.n_ranks)]
        self.mine = self.by_rank[rank]
        self.widths = widths
        self.anchor = torch.zeros(
            (), requires_grad=True, device=device
        )  # an input that makes autograd come back to the rows
        self.n_samples = 0
        self.returning: tuple[Any, Tensor] | None = None

    def indices(self, indices: Sequence[Tensor], lengths: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The global batch's indices and offsets of this rank's tables: lengths first, as sizes depend on them."""
        import torch

        n_samples = lengths[0].numel()
        got_lengths = self._to_owners(lengths, [len(self.mine) * n_samples] * self.n_ranks)
        per_source = got_lengths.view(self.n_ranks, len(self.mine), n_samples)
        sizes: list[list[int]] = per_source.sum(2).tolist()
        got = self._to_owners(indices, [sum(of_tables) for of_tables in sizes])
        if not self.mine:
            return [], []
        parts = torch.split(got, [size for of_tables in sizes for size in of_tables])
        all_lengths = torch.cat(per_source.unbind(), 1)
        offsets = torch.cumsum(all_lengths, 1) - all_lengths
        return [torch.cat(parts[place :: len(self.mine)]) for place in range(len(self.mine))], list(offsets)

    def send_rows(self, pooled: Sequence[Tensor], n_samples: int) -> Callable[[], Sequence[Tensor]]:
        """Sends pooled rows to their samples' ranks; the result waits for this rank's rows of every table."""
        import torch

        self.n_samples = n_samples
        sent = [rows[r * n_samples : (r + 1) * n_samples].reshape(-1) for r in range(self.n_ranks) for rows in pooled]
        flat = torch.cat(sent) if sent else torch.empty(0, device=self.anchor.device)
        sizes = [sum(self.widths[t] for t in tables) * n_samples for tables in self.by_rank]
        work, received = _all_to_all(flat, sizes, [flat.numel() // self.n_ranks] * self.n_ranks)

        def arrive() -> Sequence[Tensor]:
            work.wait()
            found: Sequence[Tensor] = _rows_function().apply(self.anchor, received, self)
            return found

        return arrive

    def split_rows(self, received: Tensor) -> tuple[Tensor, ...]:
        """The received rows of each table, in the model's order of tables."""
        import torch

        tables = [t for of_rank in self.by_rank for t in of_rank]
        parts = torch.split(received, [self.widths[t] * self.n_samples for t in tables])
        found = dict(zip(tables, parts, strict=True))
        return tuple(found[t].view(self.n_samples, self.widths[t]) for t in range(len(self.widths)))

    def return_gradients(self, of_tables: Sequence[Tensor]) -> None:
        """Sends gradients of a step's rows to the tables' owners."""
        import torch

        flat = torch.cat([of_tables[t].reshape(-1) for tables in self.by_rank for t in tables])
        sizes = [sum(self.widths[t] for t in self.mine) * self.n_samples] * self.n_ranks
        sent = [sum(self.widths[t] for t in tables) * self.n_samples for tables in self.by_rank]
        self.returning = _all_to_all(flat, sizes, sent)

    def gradients(self) -> list[Tensor]:
        """Waits for the global batch's gradients of this rank's tables."""
        import torch

        if self.returning is None:
            raise RuntimeError("backward has not come to the pooled rows")
        work, received = self.returning
        work.wait()
        widths = [self.widths[t] for t in self.mine]
        parts = torch.split(received, [width * self.n_samples for width in widths] * self.n_ranks)
        return [torch.cat(parts[place :: len(widths)]).view(-1, width) for place, width in enumerate(widths)]

    def _to_owners(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        import torch

        flat = torch.cat([tensors[t] for tables in self.by_rank for t in tables])
        sent = [sum(tensors[t].numel() for t in tables) for tables in self.by_rank]
        work, received = _all_to_all(flat, sizes, sent)
        work.wait()
        return received


@cache
def _rows_function() -> Any:
    """Autograd's function from what arrived to rows of tables; its backward sends their gradients away."""
    import torch

    class Rows(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, _anchor: Tensor, received: Tensor, exchange: _Exchange) -> tuple[Tensor, ...]:
            context.exchange = exchange
            return exchange.split_rows(received)

        @staticmethod
        def backward(context: Any, *gradients: Tensor) -> tuple[None, None, None]:
            context.exchange.return_gradients(gradients)
            return None, None, None

    return Rows


def _world() -> int:
    from torch import distributed

    return distributed.get_world_size()


def _all_to_all(flat: Tensor, sizes: Sequence[int], sent: Sequence[int]) -> tuple[Any, Tensor]:
    """The exchange under way, and what it fills: `sizes[r]` elements from rank r, for `sent[r]` to it."""
    import torch
    from torch import distributed

    received = torch.empty(sum(sizes), dtype=flat.dtype, device=flat.device)
    work = distributed.all_to_all_single(received, flat, list(sizes), list(sent), async_op=True)
    return work, received
