"""Runs one training step under the recorder and puts the graph together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from perfmodel.errors import GraphError
from perfmodel.extract import _torch, optimizers
from perfmodel.extract.failures import explained
from perfmodel.extract.modules import ModulePaths
from perfmodel.extract.record import Recorder
from perfmodel.extract.twin import Built, tensors_in, twin_of
from perfmodel.graph import Graph, Op, Parameter, TensorSpec

Target = Literal["cuda", "cpu"]
Values = Literal["meta", "real"]


class _Step:
    """One step of one model: what has been seen so far."""

    def __init__(self, built: Built, target: Target, values: Values) -> None:
        self.built = built
        self.target = target
        self.values = values
        self.device = "meta" if values == "meta" else "cpu"
        self.paths = ModulePaths(built.module)
        self.recorder = Recorder(self.paths, self.device)
        self.parameters = dict(built.module.named_parameters())
        self.specs: dict[str, TensorSpec] = {}
        self.grad_op: dict[str, int] = {}
        self.optimizers: list[torch.optim.Optimizer] = []

    def register_state(self) -> None:
        """Parameters, buffers and inputs are there before the first op."""
        storages = self.recorder.storages
        for name, parameter in self.parameters.items():
            storages.number(parameter, kind="parameter", born=-1)
            self.specs[name] = self.recorder.spec(parameter)
        for buffer in self.built.module.buffers():
            storages.number(buffer, kind="buffer", born=-1)

    def copy_inputs(self) -> None:
        """Inputs and targets reach the device: one copy each on CUDA, nothing on the CPU."""
        self.recorder.phase = "input"
        built = self.built
        seen: set[int] = set()
        for tensor in (*tensors_in((built.args, built.kwargs)), *built.targets):
            born = len(self.recorder.ops) if self.target == "cuda" else -1
            number = self.recorder.storages.number(tensor, kind="input", born=born)
            if self.target == "cuda" and number not in seen:
                seen.add(number)
                self.recorder.add(
                    Op(
                        id=len(self.recorder.ops),
                        name="perfmodel.host_to_device_copy",
                        outputs=(self.recorder.spec(tensor),),
                        phase="input",
                        stream="copy",
                    )
                )

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
        self.recorder.phase = "backward"
        with self._gradient_hooks(), explained(self.built.module, "backward", values=self.values):
            _torch.run_backward(loss)

    def optimize(self) -> None:
        """One step of the dense and of the sparse optimizer; `zero_grad` drops gradients and runs no kernel."""
        self.recorder.phase = "optimizer"
        with_grad = [p for p in self.parameters.values() if p.grad is not None]
        dense = [p for p in with_grad if p.grad is not None and not p.grad.is_sparse]
        sparse = [p for p in with_grad if p.grad is not None and p.grad.is_sparse]
        built = self.built
        for gradient in (p.grad for p in dense):
            if gradient is not None:
                self.recorder.storages.mark(gradient, "gradient")
        chosen = self.optimizers
        if dense:
            chosen.append(optimizers.dense_optimizer(built.optimizer, dense, built.optimizer_kwargs, self.target))
        if sparse:
            options = {k: v for k, v in built.sparse_optimizer_kwargs.items() if k != "fused"}
            chosen.append(optimizers.sparse_optimizer(built.sparse_optimizer, sparse, options))
        for optimizer in chosen:
            for tensor in optimizers.state_tensors(optimizer):
                if tensor.device.type == self.device:
                    self.recorder.storages.number(tensor, kind="optimizer_state", born=-1)
        with self.recorder:
            for optimizer in chosen:
                optimizer.step()

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
        def hook(_parameter: nn.Parameter) -> None:
            self.grad_op[name] = len(self.recorder.ops) - 1

        return hook

    def graph(self) -> Graph:
        """Everything recorded."""
        built = self.built
        sparse = {name for name, p in self.parameters.items() if p.grad is not None and p.grad.is_sparse}
        return Graph(
            model=built.name,
            target=self.target,
            precision=built.precision,
            batch_size=built.batch_size,
            ops=tuple(_with_tables(self.recorder.ops, self.specs, built)),
            parameters=tuple(
                Parameter(name=name, tensor=spec, grad_op=self.grad_op.get(name), sparse_grad=name in sparse)
                for name, spec in self.specs.items()
            ),
            tables=built.tables,
            storages=self.recorder.storages.close(),
            optimizer=built.optimizer,
            sparse_optimizer=built.sparse_optimizer if sparse or built.tables else "",
            values=self.values,
            notes=_notes(built, self.values),
        )


def _notes(built: Built, values: Values) -> tuple[str, ...]:
    if values == "real":
        return (*built.notes, "control flow followed the values of these inputs: other inputs may take another path")
    return built.notes


def _with_tables(ops: list[Op], specs: Mapping[str, TensorSpec], built: Built) -> Iterator[Op]:
    """Adds what is known about a table's indices to every op that reads the table."""
    known = {
        specs[table.parameter].storage: {
            "parameter": table.parameter,
            "pooling_factor": table.pooling_factor,
            "zipf_exponent": table.zipf_exponent,
            "histogram": [list(pair) for pair in table.histogram],
        }
        for table in built.tables
        if table.parameter in specs
    }
    by_module = {
        table.parameter.rpartition(".")[0]: specs[table.parameter].storage
        for table in built.tables
        if table.parameter in specs
    }
    for op in ops:
        found = next((known[spec.storage] for spec in op.inputs if spec.storage in known), None)
        if found is None and "embedding" in op.name and op.module in by_module:
            found = known[by_module[op.module]]
        yield op if found is None else replace(op, attrs={**op.attrs, **found})


def trace(built: Built, *, target: Target = "cuda", values: Values = "meta", training: bool = True) -> Graph:
    """The execution graph of one training step (or, without `training`, of one forward pass) as `target` would run it.

    `values="meta"` runs on tensors without storage; `values="real"` on real CPU tensors, for models whose control flow
    reads values. Raises GraphError with the module path and source line if the model cannot be run.
    """
    step = _Step(twin_of(built, values), target, values)
    try:
        _run(step, training=training)
        return step.graph()
    finally:
        for parameter in step.parameters.values():
            parameter.grad = None


def _run(step: _Step, *, training: bool) -> None:
    step.register_state()
    step.copy_inputs()
    with ExitStack() as stack:
        stack.enter_context(_torch.module_hooks(step.paths.enter, step.paths.leave))
        if step.values == "meta":
            stack.enter_context(torch.device("meta"))
        stack.enter_context(torch.set_grad_enabled(training))
        stack.enter_context(step.recorder)
        output = step.forward()
        if not training:
            return
        loss = step.loss(output)
        step.backward(loss)
    step.optimize()
    del output, loss
