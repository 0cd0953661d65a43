"""Real training steps of replicas: DistributedDataParallel, `fully_shard`, and optimizer states divided over ranks (ZeRO 1).

Blocks are computed again in backward where the plan says so (`torch.utils.checkpoint`), and gradients are accumulated over
micro-batches without being reduced before the last (`no_sync`; `fully_shard` scatters those of each).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from perfmodel.config import PlanSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from perfmodel.models.built import BuiltModel

Step = Callable[[], None]


def replica_step(built: BuiltModel, plan: PlanSpec) -> Step:
    """The step of one of the plan's replicas, all ranks of the process group.

    Raises ValueError for a plan that has no real counterpart here.
    """
    shard, n_passes = plan.data_parallel.shard, plan.accumulate
    if plan.recompute not in (None, "full") or plan.micro_batches > 1 or plan.fsdp.scatter is not None:
        raise ValueError(
            f"plan {plan.name}: live replicas recompute all or nothing of a block, and accumulate whole batches"
        )
    if plan.recompute == "full":
        checkpointed(built.module)
    if shard == "parameters":
        return accumulated_step(fully_sharded(built, plan), n_passes)
    if shard == "nothing":
        return accumulated_step(replicated(built, plan), n_passes)
    if shard == "optimizer" and n_passes == 1:
        return divided_step(built, plan)
    raise ValueError(f"plan {plan.name}: ZeRO 2, and ZeRO 1 over several micro-batches, have no live counterpart")


def accumulated_step(built: BuiltModel, n_passes: int) -> Step:
    """Forward and backward of the batch `n_passes` times, reduced with the last where the module knows `no_sync`."""
    import torch

    from perfmodel.models.training import make_optimizers

    optimizers = make_optimizers(built)
    alone: Callable[[], Any] = getattr(built.module, "no_sync", nullcontext)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        for number in range(n_passes):
            with nullcontext() if number == n_passes - 1 else alone():
                output = built.module(
                    *built.args, **built.kwargs
                )  # a training loop's variable: it lives through backward
                torch.autograd.backward((built.loss(output),))
        for optimizer in optimizers:
            optimizer.step()

    return step


def replicated(built: BuiltModel, plan: PlanSpec) -> BuiltModel:
    """Under DistributedDataParallel with the plan's buckets."""
    from torch.nn.parallel import DistributedDataParallel

    from perfmodel.units import MEBI

    ddp = plan.data_parallel
    module = DistributedDataParallel(
        built.module,
        bucket_cap_mb=ddp.bucket_cap / MEBI,
        gradient_as_bucket_view=ddp.gradient_as_bucket_view,
        static_graph=ddp.static_graph,
    )
    return replace(built, module=module)


def fully_sharded(built: BuiltModel, plan: PlanSpec) -> BuiltModel:
    """Every block and the rest under `fully_shard` on a mesh of all ranks; the rest stays after forward, torch's default."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    again = None if plan.fsdp.reshard_after_forward else False  # None: blocks are freed, the rest is not
    for block in blocks_of(built.module):
        fully_shard(block, mesh=mesh, reshard_after_forward=again)
    fully_shard(built.module, mesh=mesh, reshard_after_forward=again)
    return built


def checkpointed(module: nn.Module) -> None:
    """Blocks that keep their inputs and run again in backward."""
    from torch.utils.checkpoint import checkpoint

    for block in blocks_of(module):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def blocks_of(module: nn.Module) -> Sequence[nn.Module]:
    """The longest list of modules: the model's blocks."""
    from torch import nn

    longest: Any = max((m for m in module.modules() if isinstance(m, nn.ModuleList)), key=len)
    return list(longest)


# ZeRO 1.


def divided_step(built: BuiltModel, plan: PlanSpec) -> Step:
    """ZeRO 1 as Megatron-LM's distributed optimizer has it.

    Parameters and gradients lie in flat buckets, filled in the order of backward; a full bucket's gradients are scattered
    during backward, each rank updates its part, and all gather the parts.
    """
    import torch

    from perfmodel.models.training import make_optimizers

    buckets = [_Bucket(parameters) for parameters in _bucketed(built.module, plan)]
    parts = torch.nn.ParameterList(part for bucket in buckets for part in bucket.parts)
    optimizers = make_optimizers(replace(built, module=parts))

    def step() -> None:
        output = built.module(*built.args, **built.kwargs)
        torch.autograd.backward((built.loss(output),))
        for bucket in buckets:
            bucket.take_gradients()
        for optimizer in optimizers:
            optimizer.step()
        for bucket in buckets:
            bucket.gather()

    return step


def _bucketed(module: nn.Module, plan: PlanSpec) -> list[list[nn.Parameter]]:
    """Parameters of each bucket, from the last on, as DDP's sizes say."""
    found: list[list[nn.Parameter]] = [[]]
    size, limit = 0, plan.data_parallel.first_bucket
    for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
        found[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
        if size >= limit:
            found.append([])
            size, limit = 0, plan.data_parallel.bucket_cap
    return [parameters for parameters in found if parameters]


class _Bucket:
    """Flat parameters and gradients; this rank keeps states of its contiguous part, cut at the ends of parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        import torch
        from torch import distributed

        n_ranks, rank = distributed.get_world_size(), distributed.get_rank()
        total = sum(p.numel() for p in parameters)
        share = -(-total // n_ranks)
        self.values, self.sums = torch.zeros(share * n_ranks), torch.zeros(share * n_ranks)
        self.n_ranks, self.missing, self.n_parameters = n_ranks, len(parameters), len(parameters)
        mine = slice(rank * share, (rank + 1) * share)
        self.own, self.own_sums = self.values[mine], self.sums[mine]  # sums arrive where the rank's part lay
        self.work: Any = None
        self.parts: list[nn.Parameter] = []
        self.slices: list[slice] = []
        begin = 0
        for parameter in parameters:
            self._place(parameter, begin, mine)
            begin += parameter.numel()

    def _place(self, parameter: nn.Parameter, begin: int, mine: slice) -> None:
        from torch import nn

        end = begin + parameter.numel()
        flat = self.values[begin:end]
        flat.copy_(parameter.detach().view(-1))
        parameter.data = flat.view(parameter.shape)
        place = self.sums[begin:end].view(parameter.shape)
        register: Any = parameter.register_post_accumulate_grad_hook
        register(partial(self._arrived, place))
        first, last = max(begin, mine.start), min(end, mine.stop)
        if first < last:
            self.parts.append(nn.Parameter(self.values[first:last]))
            self.slices.append(slice(first - mine.start, last - mine.start))

    def _arrived(self, place: Tensor, parameter: Tensor) -> None:
        """A gradient goes to its place, divided by the number of ranks; the last one lets the bucket go."""
        import torch
        from torch import distributed

        if parameter.grad is None:
            raise RuntimeError("a parameter's hook has its gradient")
        torch.mul(parameter.grad, 1.0 / self.n_ranks, out=place)
        parameter.grad = None
        self.missing -= 1
        if not self.missing:
            self.missing = self.n_parameters
            self.work = distributed.reduce_scatter_single(self.own_sums, self.sums, async_op=True)

    def take_gradients(self) -> None:
        """Waits for this rank's sums, which become the gradients of its parts."""
        self.work.wait()
        self.work = None  # as Megatron-LM's grad_reduce_handle: gloo's copy of what it scattered goes with it
        for part, where in zip(self.parts, self.slices, strict=True):
            part.grad = self.own_sums[where]

    def gather(self) -> None:
        """Everybody's updated parts."""
        from torch import distributed

        distributed.all_gather_single(self.values, self.own.clone())
