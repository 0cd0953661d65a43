"""Runs one training step under the recorder and puts the graph together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from perfmodel.errors import GraphError
from perfmodel.extract import _torch, optimizers
from perfmodel.extract.devices import OneDevice
from perfmodel.extract.failures import explained
from perfmodel.extract.modules import ModulePaths
from perfmodel.extract.record import SYNCHRONIZE, Recorder
from perfmodel.extract.rewrites import attention, dropout, norm, rnn, softmax  # noqa: F401 -- each registers its routes
from perfmodel.extract.rewrites.autocast import Autocast, Casting, autocast
from perfmodel.extract.rewrites.embedding import fused_embedding_update
from perfmodel.extract.rewrites.routing import Routing, routes
from perfmodel.extract.rewrites.scaler import LossScale
from perfmodel.extract.rewrites.tf32 import tf32
from perfmodel.extract.sparse_optimizers import sparse_optimizer
from perfmodel.extract.tables import with_tables
from perfmodel.extract.twin import Built, tensors_in, twin_of
from perfmodel.extract.waits import seen_waits
from perfmodel.graph import INPUT_COPIES, TO_DEVICE, Graph, Op, Parameter, TableAccess, TensorSpec

Target = Literal["cuda", "cpu"]
Values = Literal["meta", "real"]
# What one iteration is: forward, loss, backward and optimizer; all but the optimizer; a forward pass in evaluation mode.
Span = Literal["train", "forward_backward", "forward"]
_AUTOCAST_DTYPE = {"amp_fp16": torch.float16, "amp_bf16": torch.bfloat16}


class _Step:
    """One step of one model: what has been seen so far."""

    def __init__(self, built: Built, target: Target, values: Values, span: Span) -> None:
        self.built = built
        self.span = span
        self.target = target
        self.values = values
        self.device = "meta" if values == "meta" else "cpu"
        self.paths = ModulePaths(built.module)
        self.recorder = Recorder(self.paths, self.device, target)
        self.parameters = dict(built.module.named_parameters())
        self.specs: dict[str, TensorSpec] = {}
        self.grad_op: dict[str, int] = {}
        self.in_backward: list[torch.optim.Optimizer] = []
        self.fuses_tables = target == "cuda" and bool(built.sparse_optimizer_kwargs.get("fused"))
        self.held: tuple[Any, ...] = ()
        self.optimizers: list[torch.optim.Optimizer] = []
        dtype = _AUTOCAST_DTYPE.get(built.precision)
        whole_step = None if dtype is None else Casting(enabled=True, dtype=dtype)
        self.autocast = Autocast(target=target, recorder=self.recorder, whole_step=whole_step)
        self.scale: LossScale | None = None
        self.routing = Routing(target=target, values=values, recorder=self.recorder)

    def register_state(self) -> None:
        """Parameters, buffers and inputs are there before the first op."""
        storages = self.recorder.storages
        for name, parameter in self.parameters.items():
            storages.number(parameter, kind="parameter", born=-1)
            self.specs[name] = self.recorder.spec(parameter)
        for buffer in self.built.module.buffers():
            storages.number(buffer, kind="buffer", born=-1)

    def copy_inputs(self) -> None:
        """Inputs and targets reach the device: one copy each in training on CUDA, else nothing (they are there).

        A loop that replays a graph may copy them once more, on the device, into the tensors that the graph reads.
        """
        self.recorder.phase = "input"
        built = self.built
        copied = self.target == "cuda" and self.span == "train"
        again = self.target == "cuda" and built.copies_inputs
        seen: set[int] = set()
        for tensor in (*tensors_in((built.args, built.kwargs)), *(built.targets if self.span != "forward" else ())):
            born = len(self.recorder.ops) if copied else -1
            number = self.recorder.storages.number(tensor, kind="input", born=born)
            if copied and number not in seen:
                self.recorder.emit(TO_DEVICE, outputs=(tensor,), attrs=INPUT_COPIES[built.input_copies])
            if again and number not in seen:
                names, kept_out = ("self", "src"), {"uncaptured": True}
                self.recorder.emit(
                    "aten.copy_", inputs=(tensor, tensor), names=names, outputs=(tensor,), attrs=kept_out
                )
            seen.add(number)

    def keep_gradients(self) -> None:
        """Dense gradients of the step before: with no optimizer nothing drops them, so backward adds to them."""
        sparse = {
            id(part.weight)
            for part in self.built.module.modules()
            if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse
        }
        for parameter in self.parameters.values():
            if parameter.requires_grad and id(parameter) not in sparse:
                parameter.grad = torch.zeros_like(parameter)
                self.recorder.storages.number(parameter.grad, kind="gradient", born=-1)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """The module in evaluation mode while only its forward pass is wanted."""
        modes = [(part, part.training) for part in self.built.module.modules()]
        if self.span == "forward":
            self.built.module.eval()
        try:
            yield
        finally:
            for part, training in modes:
                part.training = training

    @contextmanager
    def device_choices(self) -> Iterator[None]:
        """Operators are chosen for the target, by torch itself where the step really runs on the target."""
        with ExitStack() as stack:
            if (self.target, self.values) != ("cpu", "real"):
                stack.enter_context(routes(self.routing))
                stack.enter_context(autocast(self.autocast))
            yield

    @contextmanager
    def mixed_precision(self) -> Iterator[None]:
        """The autocast region that training code puts round forward and loss in precision `amp_*`."""
        if self.autocast.whole_step is None:
            yield
            return
        with torch.autocast(self.target, dtype=self.autocast.whole_step.dtype):
            yield

    def forward(self) -> Any:
        """The module's output."""
        self.recorder.phase = "forward"
        with explained(self.built.module, "forward", values=self.values):
            return self.built.module(*self.built.args, **self.built.kwargs)

    def loss(self, output: Any) -> Tensor:
        """The scalar that is differentiated."""
        self.recorder.phase = "loss"
        with explained(self.built.module, "the loss", values=self.values):
            loss = self.built.loss(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise GraphError(f"{self.built.name}: the loss must be a scalar tensor, found {found}")
        if not loss.requires_grad:
            raise GraphError(f"{self.built.name}: the loss depends on no parameter that requires a gradient")
        return loss

    def backward(self, loss: Tensor) -> None:
        """Gradients of all parameters, and the op after which each is complete."""
        loss = self._scaled(loss)
        self.recorder.phase = "backward"
        with self._gradient_hooks(), explained(self.built.module, "backward", values=self.values):
            _torch.run_backward(loss)

    def _scaled(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, in fp16 training on CUDA."""
        if self.built.precision != "amp_fp16" or self.target != "cuda":
            return loss
        self.scale = LossScale(self.recorder, self.device)
        self.routing.used.add("grad_scaler")
        return self.scale.scaled(loss)

    def make_optimizers(self) -> None:
        """The dense and the sparse optimizer with their state from earlier steps."""
        built = self.built
        with_grad = [p for p in self.parameters.values() if p.grad is not None]
        dense = [p for p in with_grad if p.grad is not None and not p.grad.is_sparse]
        sparse = [p for p in with_grad if p.grad is not None and p.grad.is_sparse]
        if dense:
            made = optimizers.dense_optimizer(built.optimizer, dense, built.optimizer_kwargs, self.target)
            self.optimizers.append(made)
        if sparse:
            made = sparse_optimizer(built.sparse_optimizer, sparse, built.sparse_optimizer_kwargs)
            (self.in_backward if self.fuses_tables else self.optimizers).append(made)
        storages = self.recorder.storages
        for optimizer in (*self.optimizers, *self.in_backward):
            counters = optimizers.host_counters(optimizer) if self.target == "cuda" else []
            self.recorder.keep_on_host(counters)
            on_host = {id(counter) for counter in counters}
            for tensor in optimizers.state_tensors(optimizer):
                if id(tensor) not in on_host:
                    storages.number(tensor, kind="optimizer_state", born=-1)

    def states_in_backward(self) -> dict[str, tuple[TensorSpec, ...]]:
        """State tensors, by parameter name, of the optimizers that work inside backward kernels; no step counters."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return {
            names[id(parameter)]: tuple(
                self.recorder.spec(value) for value in state.values() if isinstance(value, Tensor) and value.dim()
            )
            for optimizer in self.in_backward
            for parameter, state in optimizer.state.items()
        }

    def optimize(self) -> None:
        """One step of each optimizer; `zero_grad` drops gradients (set_to_none) and runs no kernel."""
        self.recorder.phase = "optimizer"
        with self.recorder:
            for optimizer in self.optimizers:
                if self.scale is not None:
                    self.scale.unscale([p for group in optimizer.param_groups for p in group["params"]])
                optimizer.step()
            if self.scale is not None:
                self.scale.update()

    def synchronize(self) -> None:
        """The host waits for all that the step has issued, where the loop does so."""
        if self.built.synchronizes and self.target == "cuda":
            self.recorder.emit(SYNCHRONIZE)

    def synchronize_for_host(self) -> None:
        """The host waits where the model says so or moves a tensor to it."""
        if self.target == "cuda":
            self.recorder.emit(SYNCHRONIZE)

    @contextmanager
    def _gradient_hooks(self) -> Iterator[None]:
        handles = [
            _torch.on_gradient_ready(parameter, self._ready(name))
            for name, parameter in self.parameters.items()
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _ready(self, name: str) -> Any:
        def hook(parameter: Tensor) -> None:
            self.grad_op[name] = len(self.recorder.ops) - 1
            gradient = parameter.grad
            for part in () if gradient is None else _torch.dense_parts(gradient):
                self.recorder.storages.mark(part, "gradient")

        return hook

    def _ops(self) -> tuple[Op, ...]:
        ops: list[Op] = with_tables(self.recorder.ops, self.table_storages())
        if not self.built.captures_optimizer:
            ops = [replace(op, attrs={**op.attrs, "uncaptured": True}) if op.phase == "optimizer" else op for op in ops]
        return tuple(tf32(ops, self.built.precision) if self.target == "cuda" else ops)

    def table_storages(self) -> dict[int, TableAccess]:
        """Which storages hold a table or its sparse gradient."""
        found: dict[int, TableAccess] = {}
        for table in self.built.tables:
            spec = self.specs.get(table.parameter)
            if spec is None:
                raise GraphError(f"{self.built.name}: table {table.parameter!r} is no parameter of the module")
            found[spec.storage] = table
            gradient = self.parameters[table.parameter].grad
            for part in () if gradient is None or not gradient.is_sparse else _torch.dense_parts(gradient):
                found[self.recorder.storages.number(part)] = table
        return found

    def graph(self) -> Graph:
        """Everything recorded."""
        built = self.built
        sparse = {name for name, p in self.parameters.items() if p.grad is not None and p.grad.is_sparse}
        return Graph(
            model=built.name,
            target=self.target,
            precision=built.precision,
            batch_size=built.batch_size,
            ops=self._ops(),
            parameters=tuple(
                Parameter(name=name, tensor=spec, grad_op=self.grad_op.get(name), sparse_grad=name in sparse)
                for name, spec in self.specs.items()
            ),
            tables=built.tables,
            storages=self.recorder.storages.close(),
            optimizer=built.optimizer,
            sparse_optimizer=built.sparse_optimizer if sparse or built.tables else "",
            values=self.values,
            rewrites=tuple(sorted(self.routing.used | self.autocast.used)),
            notes=_notes(built, self.values),
        )


def _notes(built: Built, values: Values) -> tuple[str, ...]:
    if values == "real":
        return (*built.notes, "control flow followed the values of these inputs: other inputs may take another path")
    return built.notes


def trace(built: Built, *, target: Target = "cuda", values: Values = "meta", span: Span = "train") -> Graph:
    """The execution graph of one training step (or the part of it that `span` names) as `target` would run it.

    `span="forward_backward"` leaves the optimizer out and adds to the gradients of the step before; `span="forward"` is
    a forward pass in evaluation mode without gradients. In both the inputs are on the device already.

    `values="meta"` runs on tensors without storage; `values="real"` on real CPU tensors, for models whose control flow
    reads values. Raises GraphError with the module path and source line if the model cannot be run.
    """
    step = _Step(twin_of(built, values), target, values, span)
    try:
        with step.evaluation():
            _run(step)
        graph = step.graph()
        if step.fuses_tables and graph.tables and span == "train":
            return fused_embedding_update(graph, step.states_in_backward())
        return graph
    finally:
        for parameter in step.parameters.values():
            parameter.grad = None


def _run(step: _Step) -> None:
    step.register_state()
    if step.span == "forward_backward":
        step.keep_gradients()
    step.copy_inputs()
    with ExitStack() as stack:
        stack.enter_context(_torch.module_hooks(step.paths.enter, step.paths.leave))
        if step.values == "meta":
            stack.enter_context(torch.device("meta"))
        stack.enter_context(OneDevice(step.device, step.synchronize_for_host))
        if step.target == "cuda":
            stack.enter_context(seen_waits(step.synchronize_for_host))
        stack.enter_context(torch.set_grad_enabled(step.span != "forward"))
        stack.enter_context(_torch.unchecked_sparse())
        stack.enter_context(step.device_choices())
        stack.enter_context(step.recorder)
        with step.mixed_precision():
            output = step.forward()
            if step.span == "forward":
                step.synchronize()
                return
            loss = step.loss(output)
        step.backward(loss)
    if step.span == "forward_backward":
        step.synchronize()
        step.held = (output, loss)
        return
    with _torch.unchecked_sparse(), _torch.fused_optimizers_on_meta():
        step.make_optimizers()
        step.optimize()
        step.synchronize()
    step.held = (output, loss)
