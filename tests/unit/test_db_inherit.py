"""A device without measurements takes the fits of the nearest one that has them, and says so."""

from dataclasses import replace
from pathlib import Path

import pytest

from perfmodel.db import Device, Fit, HostCosts, add_device, inherit_fits, load_device, write_fit
from perfmodel.db.inherit import nearest_donor
from perfmodel.errors import ConfigError
from perfmodel.estimate import Source

HOST = HostCosts(op_dispatch_s=6e-6, backward_op_s=6e-6, launch_s=3e-6, launch_latency_s=2e-6, sync_s=8e-6, source="x")
PROVENANCE = dict.fromkeys(("source", "commit", "licence", "date", "rows", "heldout_rows", "software"), "x")


def device(name: str, capability: str, *families: str, bandwidth: float = 1e12, kind: str = "cuda") -> Device:
    fits = {
        family: Fit(
            family=family,
            law="a/1",
            parameters={"eff": 0.5},
            heldout={"all": {"median": 0.1}},
            low_frac=0.9,
            high_frac=1.1,
            provenance=PROVENANCE,
        )
        for family in families
    }
    return Device(
        name=name, title=name, kind=kind, architecture="a", compute_capability=capability, n_sms=100, clock_hz=1e9,
        peak_flops_per_s={"fp32": 1e13}, memory_bytes=2**34, memory_bytes_per_s=bandwidth, l2_bytes=2**22,
        l2_bytes_per_s=4e12, smem_per_sm_bytes=2**16, kernel_floor_s=2e-6, host_link_bytes_per_s=1e10, tdp_w=300.0,
        nearest="", host=HOST, cite={}, fits=fits,
    )  # fmt: skip


V100, A100, A40, H100 = (
    device("v100", "7.0", "gemm", "conv"),
    device("a100", "8.0", "gemm"),
    device("a40", "8.6", "gemm"),
    device("h100", "9.0", "gemm"),
)
DONORS = (V100, A100, A40, H100)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [("7.2", "v100"), ("8.0", "a100"), ("8.6", "a40"), ("8.9", "h100"), ("10.0", "h100"), ("6.0", "v100")],
)
def test_the_nearest_compute_capability_gives(capability: str, expected: str) -> None:
    found = nearest_donor(device("new", capability), DONORS, "gemm")
    assert found is not None
    assert found.name == expected


@pytest.mark.parametrize(
    ("heir", "donor"),
    [("h100_sxm", "a100_pcie_80gb"), ("t4", "v100_pcie_32gb"), ("a40", "l40s"), ("b200_sxm", "h200_sxm"),
     ("rtx_4090", "l40s"), ("a30", "a100_pcie_80gb")],
)  # fmt: skip
def test_shipped_devices_have_the_relatives_an_engineer_would_name(heir: str, donor: str) -> None:
    measured = ("v100_pcie_32gb", "a100_pcie_80gb", "h200_sxm", "l4", "l40s")
    known = tuple(replace(load_device(name), fits={"gemm": A100.fits["gemm"]}) for name in measured if name != heir)
    if heir == "h100_sxm":
        known = tuple(one for one in known if one.name != "h200_sxm")
    found = nearest_donor(replace(load_device(heir), fits={}, nearest=""), known, "gemm")
    assert found is not None
    assert found.name == donor


def test_among_equal_capabilities_the_most_similar_balance_gives() -> None:
    near, far = device("z_near", "9.0", "gemm", bandwidth=2.1e12), device("a_far", "9.0", "gemm", bandwidth=4e12)
    found = nearest_donor(device("new", "9.0", bandwidth=2e12), (far, near), "gemm")
    assert found is near


def test_each_family_has_its_own_nearest_donor() -> None:
    new = inherit_fits(device("new", "9.0"), DONORS)
    assert new.fits["gemm"].provenance["inherited_from"] == "h100"
    assert new.fits["conv"].provenance["inherited_from"] == "v100"
    assert new.nearest in {"v100", "h100"}


def test_an_inherited_fit_is_derived_and_its_range_wider() -> None:
    fit = inherit_fits(device("new", "9.0"), DONORS).fits["gemm"]
    assert fit.source is Source.DERIVED
    assert fit.low_frac < 0.9
    assert fit.high_frac > 1.1


def test_own_fits_stay() -> None:
    own = device("new", "9.0", "gemm")
    assert inherit_fits(own, DONORS).fits["gemm"] is own.fits["gemm"]


def test_the_device_named_nearest_comes_first() -> None:
    new = replace(device("new", "9.0"), nearest="a40")
    assert inherit_fits(new, DONORS).fits["gemm"].provenance["inherited_from"] == "a40"


def test_a_cpu_takes_nothing_from_a_gpu() -> None:
    cpu = device("my_cpu", "none", kind="cpu")
    assert inherit_fits(cpu, DONORS).fits == {}


def test_inherited_fits_are_not_handed_on() -> None:
    heir = inherit_fits(device("heir", "9.0"), DONORS)
    assert nearest_donor(device("new", "9.0"), (heir,), "gemm") is None


DATASHEET = """\
name: my_gpu
title: Example GPU 24GB
aliases: [example]
kind: cuda
architecture: hopper
compute_capability: "9.0"
n_sms: 100
clock: 1.5 GHz
peak: {fp32: 40 TFLOP/s, bf16_tensor: 600 TFLOP/s}
memory: 24 GiB
memory_bandwidth: 3 TB/s
l2: 40 MiB
l2_bandwidth: 8 TB/s
smem_per_sm: 228 KiB
kernel_floor: 2 us
host_link: 63 GB/s
tdp: 700 W
host: {op_dispatch: 6 us, backward_op: 6 us, launch: 3 us, launch_latency: 2 us, sync: 8 us, source: an example}
cite: {datasheet: an example}
"""


@pytest.fixture
def datasheet(tmp_path: Path) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text(DATASHEET)
    return path


def test_added_to_an_empty_folder_it_stands_alone_with_copied_fits(datasheet: Path, tmp_path: Path) -> None:
    root = tmp_path / "db"
    added = add_device(datasheet, root)
    assert added == load_device("example", root)
    assert added.fits["gemm"].source is Source.DERIVED
    assert added.fits["gemm"].provenance["inherited_from"] in {"h100_sxm", "h200_sxm"}
    assert (root / "my_gpu" / "gemm.fit.yaml").is_file()


def test_added_beside_measured_devices_it_follows_them(datasheet: Path, tmp_path: Path) -> None:
    root = tmp_path / "db"
    donor = root / "donor"
    donor.mkdir(parents=True)
    (donor / "device.yaml").write_text(
        DATASHEET.replace("my_gpu", "donor").replace("Example GPU", "Donor").replace("example]", "giver]")
    )
    write_fit(donor, H100.fits["gemm"])
    added = add_device(datasheet, root)
    assert added.fits["gemm"].provenance["inherited_from"] == "donor"
    assert not (root / "my_gpu" / "gemm.fit.yaml").exists()


def test_a_taken_name_or_a_bad_datasheet_adds_nothing(datasheet: Path, tmp_path: Path) -> None:
    root = tmp_path / "db"
    add_device(datasheet, root)
    datasheet.write_text(DATASHEET.replace("name: my_gpu", "name: my_other_gpu"))
    with pytest.raises(ConfigError, match="'Example GPU 24GB', which already names my_gpu"):
        add_device(datasheet, root)
    datasheet.write_text(DATASHEET.replace("n_sms: 100", "n_sms: 0").replace("my_gpu", "third"))
    with pytest.raises(ConfigError, match="n_sms"):
        add_device(datasheet, root)
    assert [path.name for path in root.iterdir()] == ["my_gpu"]
