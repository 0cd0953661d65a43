"""Devices by the names that published tables of results give them (MLCommons' training results, NVIDIA's examples)."""

import pytest

from perfmodel.db import load_device
from perfmodel.errors import MissingCalibrationError


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA A100-SXM4-80GB (400W)", "a100_sxm_80gb"),
        ("NVIDIA A100-SXM4-80GB(500W)", "a100_sxm_80gb"),
        ("NVIDIA A100-PCIe-40GB (250W)", "a100_pcie_40gb"),
        ("Tesla V100-SXM3-32GB (450W)", "v100_sxm3_32gb"),
        ("NVIDIA H100-SXM5-80GB", "h100_sxm"),
        ("NVIDIA Blackwell GPU (B200-SXM-180GB)", "b200_sxm"),
        ("NVIDIA Blackwell GPU (GB200)", "gb200"),
    ],
)
def test_published_names(name, device):
    assert load_device(name).name == device


def test_a_size_that_no_device_has_is_not_guessed():
    with pytest.raises(MissingCalibrationError, match="H100-SXM5-96GB"):
        load_device("NVIDIA H100-SXM5-96GB")
