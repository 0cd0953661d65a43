"""A user's own module: given from Python, or made by a factory that `entrypoint: "pkg.module:factory"` names.

`load_factory` is the one place in perfmodel where code named by a file is loaded.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from perfmodel.config.entrypoint import EntrypointSpec
from perfmodel.config.loading import validate
from perfmodel.config.training import Optimizer, Run, SparseOptimizer
from perfmodel.errors import ConfigError, GraphError, suggest
from perfmodel.graph import TableAccess
from perfmodel.models.built import CONVERTED, PARAMETER_DTYPE, BuiltModel, Loss, map_tensors, output_as_loss, tensors_in
from perfmodel.models.training import dense_arguments, sparse_arguments

Factory = Callable[..., Any]
_HERE = Path(__file__).parent


def from_module(  # noqa: PLR0913 -- what a user may say of a step; all but three by keyword
    module: nn.Module,
    inputs: Any,
    loss: Loss | None = None,
    *,
    name: str | None = None,
    optimizer: Optimizer | str = "sgd",
    sparse_optimizer: SparseOptimizer | str = "sgd",
    precision: str = "fp32",
    batch_size: int | None = None,
) -> BuiltModel:
    """A BuiltModel of a module as it is.

    Args:
        module: any module, on `meta` or CPU.
        inputs: a tensor, a tuple (positional) or a dict (by name) of what the module is called with.
        loss: from the module's output to a scalar; None if the output is the loss or has one.
        name: shown in reports; the module's class by default.
        optimizer: of parameters with dense gradients.
        sparse_optimizer: of parameters with sparse gradients.
        precision: as in a model file; `bf16` and `fp16` convert the module.
        batch_size: samples per rank; the first dimension of the first tensor by default.

    Raises:
        ConfigError: `module` is no module, the inputs hold no tensor, or an option is not known.
    """
    args, kwargs = _call_arguments(module, inputs)
    tensors = list(tensors_in((args, kwargs)))
    if not tensors:
        raise ConfigError("inputs: found no tensor, allowed a tensor, or a tuple or dict with at least one")
    run = {"precision": precision, "optimizer": optimizer, "sparse_optimizer": sparse_optimizer}
    checked = validate(Run, {key: value for key, value in run.items() if value is not None}, "from_module")
    if checked.precision in CONVERTED:
        dtype = PARAMETER_DTYPE[checked.precision]
        module = module.to(dtype)
        args, kwargs = map_tensors(_converted(dtype), args), map_tensors(_converted(dtype), kwargs)
    return BuiltModel(
        name=name or type(module).__name__,
        module=module.train(),
        args=args,
        kwargs=kwargs,
        loss=loss or output_as_loss,
        precision=checked.precision,
        batch_size=batch_size or next((int(t.shape[0]) for t in tensors if t.dim()), 1),
        tables=_tables(module),
        **dense_arguments(checked.optimizer),
        **sparse_arguments(checked.sparse_optimizer),
    )


def build_entrypoint(spec: EntrypointSpec, device: str) -> BuiltModel:
    """Runs the factory with new tensors on `device`; what it made elsewhere is moved there. Raises ConfigError."""
    factory = load_factory(spec.entrypoint)
    try:
        with torch.device(device):
            made = factory(**spec.arguments)
    except Exception as error:
        if device == "meta" and _needs_values(error):
            built = build_entrypoint(spec, "cpu")
            return replace(_moved(built, device), notes=("the factory reads tensor values, so it ran on the CPU",))
        raise ConfigError(f"{spec.entrypoint}: {describe_failure(error)}") from error
    built = _from_made(spec, made)
    return _moved(built, device)


def load_factory(entrypoint: str) -> Factory:
    """Imports `package.module:factory`, the current folder included. Raises ConfigError with one clear line."""
    module_name, _, attribute = entrypoint.partition(":")
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{entrypoint}: no module named {error.name!r} (looked in {here} and the Python path)"
            ) from error
        raise ConfigError(f"{entrypoint}: {describe_failure(error)}") from error
    except Exception as error:
        raise ConfigError(f"{entrypoint}: {describe_failure(error)}") from error
    finally:
        if added:
            sys.path.remove(here)
    factory = getattr(module, attribute, None)
    if factory is None:
        names = [name for name in vars(module) if not name.startswith("_")]
        raise ConfigError(f"{entrypoint}: {module_name} has no {attribute!r}{suggest(attribute, names)}")
    if not callable(factory):
        raise ConfigError(f"{entrypoint}: found a {type(factory).__name__}, allowed a function or class")
    return factory  # type: ignore[no-any-return]  # callable() cannot narrow what getattr returned


def describe_failure(error: BaseException) -> str:
    """`file:line: ErrorType: message` of the user's own deepest line in a traceback, on one line."""
    message = " ".join(str(error).split()) or "no message"
    place = user_line(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}"
    return f"{place}: {type(error).__name__}: {message}" if place else f"{type(error).__name__}: {message}"


def user_line(trace: TracebackType | None) -> str:
    """`file:line` of the deepest frame outside Python's and torch's libraries and outside perfmodel; empty if none."""
    libraries = (Path(torch.__file__).parent, Path(importlib.__file__).parent, _HERE.parent)
    for frame in reversed(traceback.extract_tb(trace)):
        path = Path(frame.filename)
        if not frame.filename.startswith("<") and not any(folder in path.parents for folder in libraries):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def _call_arguments(module: object, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not isinstance(module, nn.Module):
        raise ConfigError(f"module: found a {type(module).__name__}, allowed a torch.nn.Module")
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}


def _converted(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def _from_made(spec: EntrypointSpec, made: Any) -> BuiltModel:
    """Checks what a factory returned: (module, inputs), (module, inputs, loss) or (module, args, kwargs)."""
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        found = f"{len(made)} values" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise ConfigError(f"{spec.entrypoint}: the factory returned {found}, allowed (module, inputs, loss)")
    module, inputs, loss = (*made, None)[:3]
    if loss is not None and not callable(loss):
        found = type(loss).__name__
        raise ConfigError(f"{spec.entrypoint}: the factory returned a {found} as loss, allowed a function or None")
    try:
        return from_module(
            module,
            inputs,
            loss,
            name=spec.name or spec.entrypoint,
            optimizer=spec.optimizer,
            sparse_optimizer=spec.sparse_optimizer,
            precision=spec.precision,
            batch_size=spec.batch_size,
        )
    except ConfigError as error:
        raise ConfigError([f"{spec.entrypoint}: {problem}" for problem in error.problems]) from error


def _needs_values(error: BaseException) -> bool:
    """Whether code failed only because tensors on `meta` have no values."""
    text = str(error)
    return isinstance(error, RuntimeError | NotImplementedError) and ("meta" in text or "Meta" in text)


def _moved(built: BuiltModel, device: str) -> BuiltModel:
    """The same model with parameters, buffers and inputs on a device."""
    module = built.module
    if device == "meta":
        module = module.to("meta")
    elif any(t.is_meta for t in (*module.parameters(), *module.buffers(), *built.input_tensors)):
        raise GraphError(f"{built.name}: the factory made tensors on meta, so it has no values to run with")

    def move(tensor: Tensor) -> Tensor:
        return (
            torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad) if device == "meta" else tensor
        )

    return replace(built, module=module, args=map_tensors(move, built.args), kwargs=map_tensors(move, built.kwargs))


def _tables(module: nn.Module) -> tuple[TableAccess, ...]:
    """Embedding bags of a module, looked up uniformly; how many indices a bag has is known once it runs."""
    return tuple(
        TableAccess(
            parameter=f"{path}.weight" if path else "weight",
            rows=bag.num_embeddings,
            dim=bag.embedding_dim,
            itemsize_bytes=bag.weight.element_size(),
        )
        for path, bag in module.named_modules()
        if isinstance(bag, nn.EmbeddingBag)
    )
