"""What every model spec shares: batch, precision and optimizers. Learning rates change no time, so they are fixed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from perfmodel.config.loading import Spec
from perfmodel.config.quantity import PositiveCount

# `fp16` and `bf16`: parameters, gradients and activations in that type. `amp_*`: fp32 parameters under autocast, with loss
# scaling in `amp_fp16`.
Precision = Literal["fp32", "tf32", "amp_fp16", "amp_bf16", "bf16", "fp16"]
InputCopies = Literal["pinned", "pageable", "prefetch"]


class Optimizer(Spec):
    """A dense optimizer as `torch.optim` runs it.

    `implementation`: `default` is what torch picks by itself (foreach on CUDA), `fused` one kernel for many parameters,
    `for_loop` one parameter at a time.
    `main_parameters`: 16-bit parameters are updated through fp32 copies, with gradients converted, checked for overflow
    and clipped, as in Megatron-LM.
    """

    name: Literal["sgd", "adagrad", "adam", "adamw"]
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    implementation: Literal["default", "foreach", "fused", "for_loop"] = "default"
    main_parameters: bool = False


class SparseOptimizer(Spec):
    """The optimizer of embedding tables. It touches only the rows that an iteration looked up.

    `fused`: the update happens in the backward kernel (FBGEMM, TorchRec) and no gradient tensor exists. `lamb` exists fused
    only.
    """

    name: Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "lamb"]
    fused: bool = False

    @model_validator(mode="after")
    def _exists(self) -> SparseOptimizer:
        if self.name == "lamb" and not self.fused:
            raise ValueError("fused: found false with lamb, allowed true (only FBGEMM has it for looked-up rows)")
        return self


class Loop(Spec):
    """What the training loop does round a step.

    `synchronize`: it waits for the device after each step, as loops do that time steps one by one. `capture_optimizer`: False
    where only forward and backward are captured in a CUDA graph (NVIDIA DeepLearningExamples, DLRM, `CudaGraphWrapper`).
    `copy_inputs`: inputs are copied on the device, outside the graph, into the tensors that a captured graph reads.
    `input_copies`: `pinned`, from page-locked memory in line with the kernels (`.to(device, non_blocking=True)`); `pageable`,
    in line, and the host waits for each copy (`.to(device)`); `prefetch`, on another stream during the step before.
    """

    synchronize: bool = False
    capture_optimizer: bool = True
    copy_inputs: bool = False
    input_copies: InputCopies = "pinned"


def named(value: Any) -> Any:
    """Lets `optimizer: adamw` stand for `optimizer: {name: adamw}`."""
    return {"name": value} if isinstance(value, str) else value


OptimizerField = Annotated[Optimizer, BeforeValidator(named)]
SparseOptimizerField = Annotated[SparseOptimizer, BeforeValidator(named)]
SGD = Optimizer(name="sgd")
ADAMW = Optimizer(name="adamw")


class Run(Spec):
    """How a module given from Python is trained."""

    precision: Precision = "fp32"
    optimizer: OptimizerField = SGD
    sparse_optimizer: SparseOptimizerField = SparseOptimizer(name="sgd")


class TrainedSpec(Spec):
    """Base of the model specs. `batch_size` is samples per rank and iteration."""

    name: str = Field(min_length=1, description="text")
    batch_size: PositiveCount = Field(description="the samples per rank and iteration, a whole number")
    precision: Precision = "fp32"
    optimizer: OptimizerField = SGD
    loop: Loop = Loop()
