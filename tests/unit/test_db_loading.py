"""Finding, loading and resolving devices; every mistake of a datasheet in one error."""

from pathlib import Path

import pytest

from perfmodel.db import db_root, list_devices, load_device, resolve_device
from perfmodel.errors import ConfigError, MissingCalibrationError
from perfmodel.units import GIBI, GIGA, TERA

DATASHEET = """\
name: my_gpu
title: Example GPU 24GB
aliases: [example]
kind: cuda
architecture: ampere
compute_capability: "8.6"
n_sms: 10
clock: 1.5 GHz
peak:
  fp32: 4 TFLOP/s
  bf16_tensor: 16 TFLOP/s
memory: 24 GiB
memory_bandwidth: 300 GB/s
l2: 4 MiB
l2_bandwidth: 1 TB/s
smem_per_sm: 100 KiB
kernel_floor: 2 us
host_link: 31.5 GB/s
tdp: 70 W
host:
  op_dispatch: 6 us
  backward_op: 6 us
  launch: 3 us
  launch_latency: 2 us
  sync: 8 us
  source: an example
cite:
  datasheet: an example
"""


def make_db(root: Path, text: str = DATASHEET, name: str = "my_gpu") -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "device.yaml").write_text(text)
    return root


def test_every_shipped_device_loads_and_cites_its_figures() -> None:
    for name in list_devices():
        device = load_device(name)
        assert device.name == name
        assert device.peak_flops_per_s["fp32"] > 0
        assert device.cite["datasheet"]
        assert device.host.source


def test_units_of_a_datasheet_become_base_units(tmp_path: Path) -> None:
    device = load_device("my_gpu", make_db(tmp_path))
    assert device.memory_bytes == 24 * GIBI
    assert device.memory_bytes_per_s == 300 * GIGA
    assert device.peak_flops_per_s == {"fp32": 4 * TERA, "bf16_tensor": 16 * TERA}
    assert device.host.launch_s == 3e-6
    assert device.clock_hz == 1.5e9


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # Names that drivers report, and those that the measured data sets in docs/accuracy.md use.
        ("NVIDIA A100-PCIE-40GB", "a100_pcie_40gb"),
        ("NVIDIA_A100_80GB_PCIe", "a100_pcie_80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm_80gb"),
        ("Tesla_V100-PCIE-32GB", "v100_pcie_32gb"),
        ("Tesla V100-SXM2-16GB", "v100_sxm2_16gb"),
        ("Tesla_P100-PCIE-16GB", "p100_pcie_16gb"),
        ("Tesla_T4", "t4"),
        ("NVIDIA_L4", "l4"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("a100_sxm", "a100_sxm_80gb"),
        ("h200_sxm", "h200_sxm"),
        ("A40", "a40"),
        ("NVIDIA GB200", "gb200"),
    ],
)
def test_driver_names_and_aliases_resolve(given: str, expected: str) -> None:
    assert resolve_device(given) == expected


def test_an_unknown_device_is_named_with_the_nearest() -> None:
    with pytest.raises(MissingCalibrationError, match=r"found 'h1000', allowed .*did you mean 'h100'"):
        load_device("h1000")


def test_all_mistakes_of_a_datasheet_come_at_once(tmp_path: Path) -> None:
    text = (
        DATASHEET.replace("n_sms: 10", "n_sms: -3")
        .replace("memory: 24 GiB", "memory: 24")
        .replace("tdp: 70 W\n", "")
        .replace("kind: cuda", "kind: cudaa")
        .replace("bf16_tensor: 16 TFLOP/s", "bf17_tensor: 16 TFLOPS")
        + "colour: green\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_device("my_gpu", make_db(tmp_path, text))
    text = "\n".join(caught.value.problems)
    for part in ("n_sms", "memory", "tdp", "kind: found 'cudaa'", "did you mean 'cuda'", "bf17_tensor", "colour"):
        assert part in text
    assert len(caught.value.problems) >= 6


def test_a_figure_without_a_source_is_refused(tmp_path: Path) -> None:
    text = DATASHEET.replace("  datasheet: an example", "  memory: an example\n  l3: nowhere")
    with pytest.raises(ConfigError) as caught:
        load_device("my_gpu", make_db(tmp_path, text))
    problems = "\n".join(caught.value.problems)
    assert "missing the source of l2 " in problems
    assert "unknown key 'l3'; did you mean 'l2'" in problems
    assert "source of memory " not in problems


def test_a_folder_must_bear_its_devices_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name: found 'my_gpu', allowed 'other'"):
        load_device("other", make_db(tmp_path, name="other"))


def test_root_order_argument_then_environment_then_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = db_root()
    mine, theirs = make_db(tmp_path / "mine"), make_db(tmp_path / "theirs")
    monkeypatch.setenv("PERFMODEL_DB", str(theirs))
    assert db_root() == theirs
    assert db_root(mine) == mine
    monkeypatch.delenv("PERFMODEL_DB")
    assert db_root() == shipped


@pytest.mark.parametrize("by_argument", [True, False])
def test_a_root_that_does_not_exist_is_an_error(by_argument: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not by_argument:
        monkeypatch.setenv("PERFMODEL_DB", "/nowhere/at/all")
    with pytest.raises(ConfigError, match=r"(--db|PERFMODEL_DB): found '/nowhere/at/all'"):
        db_root("/nowhere/at/all" if by_argument else None)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    root = make_db(tmp_path)
    assert load_device("my_gpu", root).n_sms == 10
    path = root / "my_gpu" / "device.yaml"
    path.write_text(DATASHEET.replace("n_sms: 10", "n_sms: 12"))
    import os

    os.utime(path, ns=(1, 1))
    assert load_device("my_gpu", root).n_sms == 12
