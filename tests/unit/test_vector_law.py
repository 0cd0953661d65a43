"""The law of vector kernels: limits that physics sets, and shares that a person can compute."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from perfmodel.db import load_device
from perfmodel.estimate import Source
from perfmodel.graph import Op
from perfmodel.kernels import price
from perfmodel.kernels.norm import BATCH, GRAD_WEIGHT
from perfmodel.kernels.vector_law import BLOCK_ROWS, block_fill, padded_cols, row_gain, stream_s
from perfmodel.validate.kernel_rows import tensor

PARAMETERS = {
    "bw_eff": 0.8, "stream_gain": 1.0, "l2_share": 1.0, "l2_sharp": 8.0, "l2_eff": 0.5, "block_gain": 0.9, "again_gain": 0.6,
    "long_gain": 0.5,
}  # fmt: skip


def columns(**values):
    base = {
        "bytes": 1.0,
        "footprint_bytes": values.get("bytes", 1.0),
        "kind": 0.0,
        "rows": 100.0,
        "stage": 0.0,
        "n_streams": 2.0,
        "regime": 0.0,
        "cols": 1.0,
        "itemsize_bytes": 4.0,
        "is_norm": 0.0,
    }
    return {name: np.array([float(value)]) for name, value in {**base, **values}.items()}


def test_large_streams_run_at_memory_speed_and_small_ones_at_l2_speed():
    device = load_device("v100_pcie_32gb")  # 900 GB/s, L2 of 6 MiB at 2155 GB/s
    large = stream_s(PARAMETERS, columns(bytes=9e9), device)[0]
    assert large == pytest.approx(9e9 / (0.8 * 900e9), rel=1e-6)
    small = stream_s(PARAMETERS, columns(bytes=1e5), device)[0]
    assert small == pytest.approx(1e5 / (0.5 * device.l2_bytes_per_s), rel=1e-6)
    # At the L2's size half of the bytes come from either.
    size = float(device.l2_bytes)
    half = 0.5 * size / (0.8 * 900e9) + 0.5 * size / (0.5 * device.l2_bytes_per_s)
    assert stream_s(PARAMETERS, columns(bytes=size), device)[0] == pytest.approx(half, rel=1e-9)


def test_row_gain_by_regime_and_l1():
    device = load_device("v100_pcie_32gb")
    assert row_gain(PARAMETERS, columns(cols=512), device)[0] == 1.0
    block = columns(cols=64, regime=BLOCK_ROWS, is_norm=1)  # 64 * 4 * 16 blocks = 4 KiB: far below L1
    assert row_gain(PARAMETERS, block, device)[0] == pytest.approx(0.9, rel=1e-3)
    far = columns(cols=65536, regime=BLOCK_ROWS, is_norm=1)  # 4 MiB of resident rows: no second pass hits L1
    assert row_gain(PARAMETERS, far, device)[0] == pytest.approx(0.9 * 0.5, rel=1e-3)


def test_channels_and_columns_fill_the_sms():
    device = load_device("v100_pcie_32gb")  # 80 SMs
    batch = columns(cols=4096, rows=40, kind=BATCH, is_norm=1)
    assert row_gain(PARAMETERS, batch, device)[0] == pytest.approx(0.5)
    assert row_gain(PARAMETERS, columns(cols=4096, rows=800, kind=BATCH, is_norm=1), device)[0] == 1.0
    weights = columns(cols=640, regime=BLOCK_ROWS, is_norm=1, stage=GRAD_WEIGHT)  # 20 blocks of 32 columns
    rows = columns(cols=640, regime=BLOCK_ROWS, is_norm=1)
    ratio = row_gain(PARAMETERS, weights, device)[0] / row_gain(PARAMETERS, rows, device)[0]
    assert ratio == pytest.approx((20 / 80) ** 0.5)


@pytest.mark.parametrize(
    ("device_name", "shape", "measured_s"),
    [
        # NeuSight's model tables, backward of layer norm timed alone, less the 10 us that its smallest operators read.
        ("a100_pcie_80gb", (4096, 1024), 75e-6),
        ("a100_pcie_80gb", (2048, 3072), 118e-6),
        ("v100_pcie_32gb", (4096, 1024), 151e-6),
        ("h100_sxm", (4096, 1024), 42e-6),
    ],
)
def test_layer_norm_backward_where_it_was_measured(device_name, shape, measured_s):
    gradient, source, out = (tensor(i, shape, "float32") for i in range(3))
    mean, rstd = (tensor(i, (shape[0], 1), "float32") for i in (3, 4))
    weight, bias, dweight, dbias = (tensor(i, shape[1:], "float32") for i in range(5, 9))
    op = Op(
        id=0,
        name="aten.native_layer_norm_backward",
        inputs=(gradient, source, mean, rstd, weight, bias),
        input_names=("grad_out", "input", "mean", "rstd", "weight", "bias"),
        outputs=(out, dweight, dbias),
        attrs={"normalized_shape": [shape[1]], "output_mask": [True, True, True]},
    )
    predicted = sum(estimate.time_s for estimate in price([op], load_device(device_name))[0])
    assert predicted == pytest.approx(measured_s, rel=0.40)


def test_padding_and_fill_by_hand():
    assert padded_cols(np.array([1.0, 33.0, 1024.0, 1025.0])).tolist() == [1.0, 64.0, 1024.0, 1056.0]
    # 1280 floats are 320 loads of 16 bytes: 256 threads loop twice and use 320 of 512 slots.
    fill = block_fill({"cols": np.array([1280.0, 2048.0]), "itemsize_bytes": np.array([4.0, 4.0])})
    assert fill.tolist() == [320 / 512, 1.0]


def ops(n_rows, cols, dtype="float32"):
    x, y, out = (tensor(i, (n_rows, cols), dtype) for i in range(3))
    return {
        "add": Op(id=0, name="aten.add", inputs=(x, y), input_names=("self", "other"), outputs=(out,)),
        "sum": Op(id=0, name="aten.sum", inputs=(x,), input_names=("self",), outputs=(tensor(3, (), dtype),)),
        "softmax": Op(
            id=0, name="aten._softmax", inputs=(x,), input_names=("self",), outputs=(out,), attrs={"dim": -1}
        ),
    }


@pytest.mark.parametrize("device_name", ["v100_sxm2_16gb", "a100_sxm_40gb", "h100_sxm", "h200_sxm", "l40s", "t4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_device_moves_large_tensors_faster_than_its_memory(device_name, dtype):
    device = load_device(device_name)
    for name, op in ops(65536, 8192, dtype).items():
        (estimate,) = price([op], device)[0]
        operands = {"add": 3, "sum": 1, "softmax": 2}[name]
        least = operands * op.inputs[0].bytes / device.memory_bytes_per_s
        assert least < estimate.time_s < 4 * least, name
        assert estimate.low_s <= estimate.time_s <= estimate.high_s


def test_more_elements_never_take_less_by_more_than_the_law_allows():
    device = load_device("a100_sxm_80gb")
    times = [price([ops(2**k, 1024)["add"]], device)[0][0].time_s for k in range(0, 17)]
    assert all(later > 0.9 * earlier for earlier, later in pairwise(times))


def test_a_family_without_a_fit_borrows_the_law_and_says_so():
    (estimate,) = price([ops(4096, 4096)["sum"]], load_device("v100_pcie_32gb"))[0]
    assert estimate.source >= Source.DERIVED
    assert estimate.source < Source.UNMODELLED
