"""Fits of fabrics on disk: what is written is read back, and what is wrong is refused by name."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.collectives import CollectiveCall, estimate_collective
from perfmodel.config import load_topology
from perfmodel.db.fabric import LAW, N_SIZES, check_fabric, list_fabrics, load_fabric, write_fabric
from perfmodel.errors import ConfigError
from perfmodel.estimate import Source
from perfmodel.topology import build_topology
from perfmodel.validate.collective_rows import read_collectives
from perfmodel.validate.score_collectives import score_collectives


@pytest.fixture
def fit():
    return load_fabric("nvswitch_a100").fit


def test_every_shipped_fabric_loads_and_passes_its_check():
    names = list_fabrics()
    assert {"gloo_loopback", "nvswitch_a100", "nvswitch_h100", "nvswitch_b200", "pcie_rtx_pro_6000"} <= set(names)
    for name in names:
        assert check_fabric(name, load_fabric(name).fit) == []


def test_a_fabric_without_tables_takes_the_nearest_and_one_without_any_takes_none():
    assert load_fabric("nvswitch_b300").fabric == "nvswitch_b200"
    assert load_fabric("pcie_t4").fabric == "pcie_rtx_pro_6000"
    assert load_fabric("nvlink_mesh_a100") is None


def test_a_fit_survives_the_disk(tmp_path, fit):
    write_fabric("nvswitch_a100", fit, tmp_path)
    again = load_fabric("nvswitch_a100", tmp_path)
    first = load_fabric("nvswitch_a100")
    assert again.regimes.keys() == first.regimes.keys()
    for key, regime in again.regimes.items():
        assert np.array_equal(regime.correction, first.regimes[key].correction)
        assert regime.s_per_byte == pytest.approx(first.regimes[key].s_per_byte)
    assert again.bus_bytes_per_s == first.bus_bytes_per_s


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (lambda fit: replace(fit, law="other"), LAW),
        (
            lambda fit: replace(fit, parameters={k: v for k, v in fit.parameters.items() if "low_frac" not in k}),
            "low_frac",
        ),
        (
            lambda fit: replace(fit, parameters={k: v for k, v in fit.parameters.items() if "bus_" not in k}),
            "bus_bytes",
        ),
        (lambda fit: replace(fit, arrays={k: v * np.nan for k, v in fit.arrays.items()}), "no number"),
        (lambda fit: replace(fit, arrays={k: v + 2.0 for k, v in fit.arrays.items()}), "beyond 0.7"),
        (lambda fit: replace(fit, arrays={k: v[..., 1:] for k, v in fit.arrays.items()}), str(N_SIZES)),
        (lambda fit: replace(fit, parameters={**fit.parameters, "all_reduce.ring_ll.base_s": -1.0}), "negative"),
    ],
)
def test_broken_fits_are_refused(tmp_path, fit, broken, text):
    with pytest.raises(ConfigError, match=text):
        write_fabric("nvswitch_a100", broken(fit), tmp_path)
    assert not list(tmp_path.glob("**/*.yaml"))


def price(name, op, n_bytes, ranks, **env):
    spec = load_topology(name)
    topology = build_topology(spec.model_copy(update={"env": {**spec.env, **env}}))
    return estimate_collective(CollectiveCall(op=op, bytes=n_bytes, ranks=tuple(ranks)), topology)


def test_sources_say_what_was_measured():
    assert price("dgx_h100", "all_reduce", 2**20, range(8)).source is Source.FITTED
    assert price("dgx_h100", "all_reduce", 2**33, range(8)).source is Source.EXTRAPOLATED
    assert price("dgx_h100", "all_reduce", 2**20, range(6)).source is Source.DERIVED
    assert price("dgx_h100", "broadcast", 2**20, range(8)).source is Source.DERIVED
    assert price("pcie_8xl40s", "all_reduce", 2**20, range(8)).source is Source.DERIVED
    assert price("dgx1_v100", "all_reduce", 2**20, range(8)).source is Source.DERIVED
    assert price("dgx_h100_x2", "all_reduce", 2**20, range(16)).source is Source.DERIVED


def test_a_library_version_moves_the_price():
    """NCCL 2.23's small all_to_all on 8 H100 took 13 to 16 us in the tables, 2.27's 7 to 8."""
    old = price("dgx_h100", "all_to_all", 4096, range(8), NCCL_VERSION="2.23").time_s
    new = price("dgx_h100", "all_to_all", 4096, range(8), NCCL_VERSION="2.27.3").time_s
    assert old > 1.3 * new


AIC = "system,nccl_dir_version,nccl_version_col,collective,dtype,num_gpus,bytes,repeat,us\n"


def test_scoring_finds_the_error_of_each_row(tmp_path):
    """Rows written as twice and as exactly the prediction: errors 50 % and 0."""
    exact = price("dgx_h100", "all_reduce", 2**20, range(8), NCCL_VERSION="2.29.2").time_s * 1e6
    table = tmp_path / "table.csv"
    table.write_text(
        AIC + "".join(f"h100_sxm,2.29.2,2.29.2,all_reduce,half,8,1048576,0,{us:.6f}\n" for us in (exact, 2 * exact))
    )
    (score,) = score_collectives([table])
    assert (score.system, score.op, score.n_rows) == ("h100_sxm", "all_reduce", 2)
    assert score.worst == pytest.approx(0.5, abs=1e-6)
    assert score.mean == pytest.approx(0.25, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "columns: found a, b"),
        (AIC + "h100_sxm,2,2,all_reduce,half,8,many,0,3\n", "line 2"),
        (AIC + "tpu_v5,2,2,all_reduce,half,8,1024,0,3\n", "tpu_v5"),
        (AIC + "h100_sxm,2,2,all_reduce,half,8,1024,0,-3\n", "positive"),
    ],
)
def test_damaged_tables_are_named(tmp_path, text, message):
    table = tmp_path / "table.csv"
    table.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_collectives(table)
