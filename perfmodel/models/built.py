"""BuiltModel: a module, its inputs, its loss and how it is trained; what `extract` runs once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from perfmodel.errors import GraphError
from perfmodel.graph import TableAccess

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """One training step of one rank, ready to run.

    Attributes:
        module: in training mode, on `meta` (`build`) or CPU (`materialize`).
        args, kwargs: what the module is called with.
        loss: from the module's output to a scalar.
        targets: tensors that the loss reads besides the output.
        optimizer, optimizer_kwargs: name (`sgd`, `adagrad`, `adam`, `adamw`) and arguments of the dense optimizer.
        sparse_optimizer, sparse_optimizer_kwargs: of parameters with sparse gradients (also `rowwise_adagrad`);
            `fused: True` means the update belongs to the backward kernel.
        precision: as in the spec. `bf16` and `fp16` modules are in that type already; `amp_*` run under autocast.
        checkpointing: True if blocks are recomputed in backward (the module does so by itself).
        tables: the embedding tables and how they are looked up.
        realize: builds the same model on a device with real values drawn from a seed; None if only this copy exists.
        synchronizes: the loop waits for the device after each step.
        copies_inputs: inputs are copied once more, on the device, into tensors that a captured graph reads.
        input_copies: `pinned`, `pageable` or `prefetch`: how inputs reach the device.
        captures_optimizer: a CUDA graph of the step holds the optimizer too.
        notes: what was approximated, in words for the report.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Loss
    targets: tuple[Tensor, ...] = ()
    optimizer: str = "sgd"
    optimizer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    sparse_optimizer: str = "sgd"
    sparse_optimizer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    batch_size: int = 1
    checkpointing: bool = False
    tables: tuple[TableAccess, ...] = ()
    realize: Callable[[int], BuiltModel] | None = None
    synchronizes: bool = False
    captures_optimizer: bool = True
    copies_inputs: bool = False
    input_copies: str = "pinned"
    notes: tuple[str, ...] = ()

    @property
    def input_tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that must reach the device before a step, in call order, targets last."""
        return (*tensors_in((self.args, dict(self.kwargs))), *self.targets)

    @property
    def n_parameters(self) -> int:
        """Number of learnable elements; a shared tensor counts once."""
        return sum(parameter.numel() for parameter in self.module.parameters())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same nesting of tuples, lists and dicts with `function` applied to each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def output_as_loss(output: Any) -> Tensor:
    """The loss inside a module's own output: the output if it is a scalar, or its `loss`.

    Raises GraphError where there is none.
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(found, tuple | list) and found:
        found = found[0]
    if isinstance(found, Tensor) and found.numel() == 1 and found.is_floating_point():
        return found
    shape = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(output).__name__}"
    raise GraphError(
        f"no loss: the module returned {shape}; pass loss=..., a function from its output to a scalar tensor, "
        "or let the module return a scalar or an object with `.loss`"
    )


# Parameter types by precision: autocast and TF32 keep parameters in fp32.
PARAMETER_DTYPE: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "amp_fp16": torch.float32,
    "amp_bf16": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# Precisions in which the module itself is converted.
CONVERTED = frozenset({"bf16", "fp16"})
