"""Real training steps of a transformer spread over gloo ranks as a plan says: replicas, tensor parallel, pipeline stages.

What runs is torch's own: replicas as in `train_replicas`, `torch.distributed.pipelining` between two or more stages, whose
copies are under DistributedDataParallel; tensor parallelism is Megatron-LM's pair of column- and row-parallel
linears (arXiv:1909.08053, figure 3) with its two conjugate functions, written out here in a dozen lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from perfmodel.config import PlanSpec, load_plan
from perfmodel.validate.train import real_model
from perfmodel.validate.train_replicas import accumulated_step, replica_step

if TYPE_CHECKING:
    from torch import Tensor, nn

    from perfmodel.models.built import BuiltModel

Step = Callable[[], None]


def planned_step(model: Mapping[str, Any], plan: PlanSpec | str, rank: int, n_ranks: int) -> Step:
    """The training step of one rank of a model under a plan; the process group is there already.

    Raises ValueError for a plan that this harness has no real counterpart of.
    """
    spec = plan if isinstance(plan, PlanSpec) else load_plan(plan)
    if spec.size("pp") > 1 and n_ranks % spec.size("pp") == 0 and spec.size("tp") == 1:
        return pipeline_step(model, spec, rank, n_ranks)
    if spec.size("tp") == n_ranks and n_ranks > 1 and not spec.tensor_parallel.vocabulary_parallel:
        return accumulated_step(split_linears(real_model(model), spec, n_ranks), 1)
    if spec.mesh:
        raise ValueError(
            f"plan {spec.name}: a live case has stages and their copies, or one other mesh dimension with all ranks and the "
            "vocabulary whole"
        )
    return replica_step(real_model(model), spec)


# Tensor parallelism.


def split_linears(built: BuiltModel, plan: PlanSpec, n_ranks: int) -> BuiltModel:
    """Column- and row-parallel linears in place of those the plan names; attention and feed-forward copy their input."""
    tensor = plan.tensor_parallel
    parents = set()
    for path, linear in list(built.module.named_modules()):
        kind = _kind(path, tensor.column, tensor.row)
        if kind is None or not hasattr(linear, "weight"):
            continue
        _narrow(linear, 0 if kind == "column" else 1, n_ranks)
        if kind == "column":
            parents.add(path.rpartition(".")[0])
        else:
            linear.register_forward_hook(lambda _module, _args, output: _functions()[1](output))
    for path in parents:
        built.module.get_submodule(path).register_forward_pre_hook(
            lambda _module, args: (_functions()[0](args[0]), *args[1:])
        )
    return built


def _kind(path: str, column: Sequence[str], row: Sequence[str]) -> str | None:
    for kind, patterns in (("column", column), ("row", row)):
        if any(fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}") for pattern in patterns):
            return kind
    return None


def _narrow(linear: Any, dim: int, n_ranks: int) -> None:
    """Keeps one part of the weight (outputs, inputs) along a dimension; biases are refused, they need an order."""
    from torch import nn

    if getattr(linear, "bias", None) is not None:
        raise ValueError("tensor-parallel live cases have linears without biases")
    part = linear.weight.detach().chunk(n_ranks, dim)[0].clone()
    linear.weight = nn.Parameter(part)
    linear.out_features, linear.in_features = part.shape


def _functions() -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Megatron-LM's f (identity, all-reduces the gradient) and g (all-reduces, identity in backward)."""
    import torch
    from torch import distributed

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(_context: Any, gradient: Tensor) -> Tensor:
            gradient = gradient.contiguous()
            distributed.all_reduce(gradient)
            return gradient

    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, x: Tensor) -> Tensor:
            distributed.all_reduce(x)
            return x

        @staticmethod
        def backward(_context: Any, gradient: Tensor) -> Tensor:
            return gradient

    return Copy.apply, Reduce.apply


# Pipelines.


def pipeline_step(model: Mapping[str, Any], plan: PlanSpec, rank: int, n_ranks: int) -> Step:
    """This rank's stage under torch's 1F1B or GPipe schedule: its blocks, the embedding first, norm, head and loss last.

    Where there are more ranks than stages, neighbours are copies of a stage, which reduce gradients with the last micro-batch.
    """
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    from perfmodel.models.training import make_optimizers

    built = real_model(model)
    n_stages = plan.size("pp")
    n_copies = n_ranks // n_stages
    number = rank // n_copies
    part = _Stage(built.module, number, n_stages)
    along, across = _groups(rank, n_stages, n_copies)
    whole = part if n_copies == 1 else _reduced(part, across)
    stage = PipelineStage(whole, number, n_stages, torch.device("cpu"), group=along)
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[plan.pipeline.schedule]
    (targets,) = built.targets
    args, kwargs = built.args, built.kwargs
    schedule = kind(stage, plan.micro_batches, loss_fn=_token_loss, scale_grads=False)
    optimizers = make_optimizers(replace(built, module=part))
    del built  # a rank has its stage alone

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        if number == 0:
            schedule.step(*args, **kwargs)
        elif number == n_stages - 1:
            schedule.step(target=targets)
        else:
            schedule.step()
        for optimizer in optimizers:
            optimizer.step()

    return step


def _groups(rank: int, n_stages: int, n_copies: int) -> tuple[Any, Any]:
    """The process groups of a rank's pipeline and of its stage's copies; every rank makes all groups, in one order."""
    from torch import distributed

    lines = [range(copy, n_stages * n_copies, n_copies) for copy in range(n_copies)]
    stages = [range(stage * n_copies, (stage + 1) * n_copies) for stage in range(n_stages)]
    found = [{tuple(ranks): distributed.new_group(list(ranks)) for ranks in groups} for groups in (lines, stages)]
    along, across = (next(group for ranks, group in groups.items() if rank in ranks) for groups in found)
    return along, across


def _reduced(part: nn.Module, group: Any) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(part, process_group=group, forward_sync_buffers=False)


def _token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    from perfmodel.models.blocks import next_token_loss

    return next_token_loss(targets, logits)


def _Stage(whole: nn.Module, rank: int, n_stages: int) -> nn.Module:  # noqa: N802 -- makes a module; torch may not be imported at the top
    """A stage of a llama: an even run of its blocks."""
    from torch import nn

    body: Any = whole.model
    n_layers = len(body.layers)
    begin, end = rank * n_layers // n_stages, (rank + 1) * n_layers // n_stages
    is_first, is_last = rank == 0, rank == n_stages - 1

    class Stage(nn.Module):
        def __init__(self, layers: Sequence[nn.Module], rotary: Any, ends: tuple[Any, Any, Any]) -> None:
            super().__init__()
            self.layers, self.rotary = nn.ModuleList(layers), rotary
            self.embed, self.norm, self.head = ends

        def forward(self, x: Tensor) -> Tensor:
            hidden = x if self.embed is None else self.embed(x)
            cosine, sine = self.rotary(hidden)
            for layer in self.layers:
                hidden = layer(hidden, None, cosine, sine)
            return hidden if self.norm is None else self.head(self.norm(hidden))

    ends = (body.embed_tokens if is_first else None, body.norm if is_last else None, whole.lm_head if is_last else None)
    return Stage(list(body.layers)[begin:end], body.rotary_emb, ends)  # which refers to nothing of the other stages
