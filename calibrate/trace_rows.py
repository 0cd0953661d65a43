"""Kernel durations with operand shapes from a PyTorch profiler trace, as rows for a fit.

The public trace of two ResNet-50 steps on a V100 (pytorch/kineto, tb_plugin samples) records the shapes of each operator and
its kernels' durations in whole microseconds, rounded down: half a microsecond is added.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from perfmodel.graph import Op
from perfmodel.units import US_PER_S
from perfmodel.validate.kernel_rows import KernelRow, tensor

TRUNCATION_S = 0.5e-6
UNARY = frozenset({"aten::mul_", "aten::clamp_min", "aten::fill_"})
BINARY = frozenset({"aten::add", "aten::add_", "aten::threshold_backward"})
Shapes = Sequence[Sequence[int]]


def op_of(name: str, shapes: Shapes) -> Op | None:
    """The operator with fp32 tensors of these shapes; None for those that no fit uses."""
    full = [tuple(shape) for shape in shapes if shape]
    base = name.replace("::", ".")
    if not full:
        return None
    first, second = tensor(0, full[0], "float32"), tensor(1, full[0], "float32")
    result = first if name.endswith("_") else tensor(9, full[0], "float32")
    if name in UNARY and name != "aten::fill_":
        return Op(id=0, name=base, inputs=(first,), input_names=("self",), outputs=(result,))
    if name in BINARY and len(full) > 1 and full[1] == full[0]:
        return Op(id=0, name=base, inputs=(first, second), input_names=("self", "other"), outputs=(result,))
    if name == "aten::cudnn_batch_norm":
        small = tuple(tensor(i, full[1], "float32") for i in range(2, 6))
        outputs = (result, *(tensor(i, full[1], "float32") for i in (10, 11)))
        names = ("input", "weight", "bias", "running_mean", "running_var")
        return Op(id=0, name=base, inputs=(first, *small), input_names=names, outputs=outputs, attrs={"training": True})
    if name == "aten::cudnn_batch_norm_backward":
        outputs = (result, *(tensor(i, full[2], "float32") for i in (10, 11)))
        return Op(id=0, name=base, inputs=(first, second), input_names=("input", "grad_output"), outputs=outputs)
    return None


def _durations(trace: Mapping[str, Any]) -> dict[tuple[str, str], list[float]]:
    """Kernel durations (s) by innermost operator and its shapes."""
    operators: dict[int, Mapping[str, Any]] = {}
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "cat" in event]
    for event in events:
        if event["cat"].lower() in {"cpu_op", "operator"}:
            operators[event["args"].get("External id")] = event
    for event in events:
        owner = operators.get(event["args"].get("external id")) if event["cat"].lower() == "kernel" else None
        if owner is not None:
            shapes = json.dumps(owner["args"].get("Input dims", owner["args"].get("Input Dims", [])))
            found[owner["name"], shapes].append(float(event["dur"]) / US_PER_S)
    return found


def trace_rows(path: Path, device: str) -> Iterator[KernelRow]:
    """One row per operator and shape: the median duration of its kernels."""
    with gzip.open(path, "rt", encoding="utf-8") as text:
        trace = json.load(text)
    for (name, shapes), durations in sorted(_durations(trace).items()):
        op = op_of(name, json.loads(shapes))
        if op is not None:
            yield KernelRow(
                device=device,
                family="trace fp32",
                ops=(op,),
                measured_s=median(durations) + TRUNCATION_S,
                key=f"{name} {shapes}",
                timed=name,
                subset="trace",
            )
