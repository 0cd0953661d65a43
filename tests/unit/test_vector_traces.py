"""Predicted kernel durations against profiler traces of real training steps that no fit of these devices has used."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from statistics import median

import pytest

from perfmodel.db import load_device
from perfmodel.graph import Op
from perfmodel.kernels import price
from perfmodel.units import US_PER_S
from perfmodel.validate.kernel_rows import tensor

TRACES = Path(__file__).parents[2].parent / "shared" / "data" / "traces"
A100_TRACE = TRACES / "resnet50_ddp_a100x2_rank0_3steps.json.gz"


@cache
def durations_by_grid(path):
    """Durations (s) of PyTorch's vectorised pointwise kernels by kernel and number of blocks."""
    with gzip.open(path, "rt") as text:
        trace = json.load(text)
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel" and "vectorized_elementwise_kernel" in event.get("name", ""):
            found[event["name"], event["args"]["grid"][0]].append(event["dur"] / US_PER_S)
    return found


# ResNet-50, batch 32 a GPU; a block of this kernel takes 512 elements. From 25,690,112 (32 x 256 x 56 x 56) elements, which
# come from memory, down to 3,211,264, most of which the kernel before left in the 40 MiB of L2.
@pytest.mark.parametrize(("blocks", "tolerance"), [(50176, 0.06), (25088, 0.08), (12544, 0.20), (6272, 0.20)])
@pytest.mark.parametrize(
    ("marker", "op_name", "n_operands"),
    [
        ("threshol", "aten.threshold_backward", 2),
        ("CUDAFunctor_add", "aten.add_", 2),
        ("clamp_scalar", "aten.relu_", 1),
    ],
)
def test_pointwise_kernels_of_a_real_step_on_a100(marker, op_name, n_operands, blocks, tolerance):
    if not A100_TRACE.exists():
        pytest.skip(f"shared/ is absent: {A100_TRACE}")
    measured = [
        s
        for (name, grid), durations in durations_by_grid(A100_TRACE).items()
        if marker in name and grid == blocks
        for s in durations
    ]
    operands = tuple(tensor(i, (blocks * 512,), "float32") for i in range(n_operands))
    out = operands[0] if op_name.endswith("_") else tensor(9, (blocks * 512,), "float32")
    op = Op(id=0, name=op_name, inputs=operands, input_names=("self", "other")[:n_operands], outputs=(out,))
    predicted = price([op], load_device("a100_sxm_40gb"))[0][0].time_s
    assert predicted == pytest.approx(median(measured), rel=tolerance)


def test_small_pointwise_kernels_of_a_real_step_on_a100():
    if not A100_TRACE.exists():
        pytest.skip(f"shared/ is absent: {A100_TRACE}")
    tiny = [s for (_, grid), all_s in durations_by_grid(A100_TRACE).items() if grid == 1 for s in all_s]
    operand = tensor(0, (256,), "float32")
    op = Op(id=0, name="aten.add_", inputs=(operand,), input_names=("self",), outputs=(operand,))
    predicted = price([op], load_device("a100_sxm_40gb"))[0][0].time_s
    assert 0.6 * median(tiny) < predicted < 1.6 * median(tiny)
