"""How a route gets between Python and torch's operators: two dispatch keys that no tensor of ours has.

torch runs an operator's kernels in order of dispatch keys; autocast keys come before autograd, which is where a device
choice must be made to be differentiated. The autocast keys of two backends that torch carries without kernels (HPU,
IPU) are switched on while a step is traced: the first holds autocast casts, the second routes. An operator without an
entry falls through at no cost. Outside a trace both keys are off and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

from perfmodel.extract import _torch
from perfmodel.extract.record import Recorder

Target = Literal["cuda", "cpu"]
Route = Callable[..., Any]
ROUTES: dict[tuple[Target, str], Route] = {}


@dataclass(slots=True, kw_only=True)
class Routing:
    """What routes know about the step: its target, its recorder, and which rewrites took effect so far."""

    target: Target
    values: Literal["meta", "real"]
    recorder: Recorder
    used: set[str] = field(default_factory=set)


_ACTIVE: ContextVar[Routing] = ContextVar("routing")


def route(target: Target, *operators: str) -> Callable[[Route], Route]:
    """Registers what `target` runs for the operators (`batch_norm`, `lstm.input`, without namespace).

    The function gets the operator's arguments and may call `declined` to keep torch's own choice.
    """

    def register(function: Route) -> Route:
        for operator in operators:
            if (target, operator) in ROUTES:
                raise RuntimeError(f"{operator} has two routes for {target}")
            ROUTES[target, operator] = function
        return function

    return register


def active() -> Routing:
    """The routing of the step that is traced now."""
    return _ACTIVE.get()


def declined(operator: str, *args: Any, **kwargs: Any) -> Any:
    """Runs the operator as torch would without a route; routes stay on for the operators inside it."""
    return _torch.composite(operator, *args, **kwargs)


def _entry(operator: str) -> Route:
    def call(*args: Any, **kwargs: Any) -> Any:
        routing = _ACTIVE.get()
        chosen = ROUTES.get((routing.target, operator))
        if chosen is None:
            return declined(operator, *args, **kwargs)
        return chosen(*args, **kwargs)

    return call


@contextmanager
def routes(routing: Routing) -> Iterator[None]:
    """Switches routes on for one step."""
    _torch.ROUTES.install({operator: _entry(operator) for _, operator in ROUTES})
    token = _ACTIVE.set(routing)
    try:
        with _torch.ROUTES.on():
            yield
    finally:
        _ACTIVE.reset(token)


def arguments(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Positional and keyword arguments of a call by name."""
    return {**dict(zip(names, args, strict=False)), **kwargs}
