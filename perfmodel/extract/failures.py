"""Turns whatever a model raises while it is traced into one clear line: module path, source line, what to do."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from perfmodel.errors import GraphError, PerfModelError

_TORCH_ROOT = str(Path(torch.__file__).parent)
_OWN_ROOT = str(Path(__file__).parent)
# What torch says when Python asks a tensor without storage for a value, or an operator's result size depends on one.
_VALUE_WAS_READ = ("cannot be called on meta tensors", "data-dependent", "meta tensor", "no data", "meta_nonzero")
# What it says when an operator has no kernel that works on shapes alone.
_NO_SHAPE_KERNEL = ("Could not run", "not implemented for 'Meta'", "no meta", "on meta")


@contextmanager
def explained(root: nn.Module, doing: str, *, values: str) -> Iterator[None]:
    """Raises GraphError, with the place in the model, for anything that is raised inside."""
    try:
        yield
    except PerfModelError:
        raise
    except Exception as error:
        raise GraphError(_message(error, root, doing, values)) from error


def _message(error: Exception, root: nn.Module, doing: str, values: str) -> str:
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    where = _module_path(frames, root)
    line = _source_line(frames)
    place = ", ".join(part for part in (f"module {where}" if where else "", line) if part)
    told = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if str(error).strip() else repr(error)
    return f"{doing} failed{f' in {place}' if place else ''}: {_advice(str(error), told, values)}"


def _advice(text: str, told: str, values: str) -> str:
    if values == "meta" and any(sign in text for sign in _VALUE_WAS_READ):
        return (
            "the model reads a tensor's value here, and extraction runs without values; pass --values real to run it on "
            f"real CPU tensors (the answer then holds for these inputs only) [{told}]"
        )
    if values == "meta" and any(sign in text for sign in _NO_SHAPE_KERNEL):
        return f"this operator cannot run on shapes alone; pass --values real to run it on real CPU tensors [{told}]"
    return f"the model raised {told}"


def _module_path(frames: list[tuple[FrameType, int]], root: nn.Module) -> str:
    """Path of the innermost module in the traceback, or an empty string."""
    names = {id(module): name or type(module).__name__ for name, module in root.named_modules()}
    for frame, _ in reversed(frames):
        name = names.get(id(frame.f_locals.get("self")))
        if name is not None:
            return name
    return ""


def _source_line(frames: list[tuple[FrameType, int]]) -> str:
    """`file:line (code)` of the innermost frame outside of torch and of this room."""
    for frame, line in reversed(frames):
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH_ROOT, _OWN_ROOT, "<")):
            code = traceback.FrameSummary(file, line, frame.f_code.co_name).line
            return f"{file}:{line} ({code})" if code else f"{file}:{line}"
    return ""
