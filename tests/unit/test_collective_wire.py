"""Collectives between hosts: the transports' law by hand, its place in prices, and the rows that are left out."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from perfmodel.cli.db import db
from perfmodel.collectives import CollectiveCall, estimate_collective
from perfmodel.collectives.candidates import Candidate
from perfmodel.collectives.group import group_of
from perfmodel.collectives.nccl_tables import Algorithm, Protocol
from perfmodel.collectives.wire import over_wire
from perfmodel.config import load_topology
from perfmodel.db.device import Fit
from perfmodel.db.wire import LAW, WireFit, check_wires, load_wires
from perfmodel.topology import build_topology
from perfmodel.validate.collective_rows import is_heldout_collective, read_collectives

WIRE = WireFit(
    port_s=1e-5, bandwidth_frac=0.5, fill_s=1e-4, half_bytes=1e6, channel_bytes_per_s=1e9, low_frac=0.7, high_frac=1.5
)
SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "collectives"


def group(name, nodes):
    topology = build_topology(load_topology(name).with_nodes(nodes))
    return group_of(topology, tuple(range(topology.n_ranks)))


def candidate(algorithm):
    return Candidate(
        algorithm=algorithm,
        protocol=Protocol.SIMPLE,
        latency_s=1e-5,
        bandwidth_s=1e-3,
        n_channels=16,
        bottleneck="nic",
    )


@pytest.mark.parametrize(
    ("algorithm", "nodes", "latency_s", "bandwidth_s"),
    [
        (Algorithm.RING, 4, 1e-5 + 6e-5, 2e-3 + 5e-5),
        (Algorithm.TREE, 4, 1e-5 + 4e-5, 2e-3 + 1e-4),
        (Algorithm.DIRECT, 4, 1e-5 + 2e-5, 2e-3 + 5e-5),
        (Algorithm.NVLS_TREE, 2, 1e-5 + 2e-5, 2e-3 + 5e-5),
    ],
)
def test_a_transport_adds_hops_filling_and_a_share_of_bandwidth(algorithm, nodes, latency_s, bandwidth_s):
    found = over_wire(candidate(algorithm), "all_reduce", 1e6, group("dgx_h100", nodes), WIRE)
    assert found.latency_s == pytest.approx(latency_s)
    assert found.bandwidth_s == pytest.approx(bandwidth_s)


def test_an_in_switch_tree_is_bound_by_its_channels():
    slow = replace(WIRE, channel_bytes_per_s=1e7)
    found = over_wire(candidate(Algorithm.NVLS_TREE), "all_reduce", 1e9, group("dgx_h100", 2), slow)
    assert found.bandwidth_s == pytest.approx(1e9 / 16e7 + 1e-4 * 1e9 / (1e9 + 1e6))


@pytest.mark.parametrize(
    ("name", "transport"),
    [("dgx_h100", "infiniband"), ("aws_p5", "efa"), ("aws_p4d", "efa"), ("dgx_b200", "infiniband")],
)
def test_a_group_knows_its_transport(name, transport):
    assert group(name, 2).transport == transport
    assert group(name, 1).transport == ""


def test_shipped_transports_price_between_hosts_and_time_grows_with_bytes():
    wires = load_wires()
    assert wires is not None
    assert {"efa", "infiniband", "roce", "tcp"} <= set(wires)
    topology = build_topology(load_topology("aws_p5").with_nodes(2))
    times = [
        estimate_collective(
            CollectiveCall(op="all_reduce", bytes=2**n, ranks=tuple(range(16))), topology, algo="ring", proto="simple"
        ).time_s
        for n in range(10, 35)
    ]
    assert times == sorted(times)


def test_a_damaged_fit_names_every_mistake():
    fit = Fit(family="wire", law="other", parameters={"wifi.port_s": -1.0})
    found = "\n".join(check_wires(fit))
    for word in (LAW, "wifi", "missing wifi.fill_s", "found -1.0"):
        assert word in found


def test_every_public_format_is_scored_and_says_what_it_leaves_out():
    files = sorted(SHARED.glob("*.csv*"))
    if not files:
        pytest.skip("shared/ is absent: no public tables")
    small = [path for path in files if "vidur" not in path.name and "aic" not in path.name]
    found = CliRunner().invoke(db, ["score", *map(str, small), "--heldout", "--json"])
    assert found.exit_code == 0, found.output
    assert "rows left out" in found.output


def test_host_timed_rows_add_their_floor_to_the_kernel():
    path = SHARED / "collectives_4xV100_DGX1_latency_us_digitised.csv"
    if not path.is_file():
        pytest.skip("shared/ is absent: no V100 table")
    rows = read_collectives(path)
    assert len(rows) == 206
    assert all(row.added_s > 50e-6 for row in rows)
    assert 0 < sum(is_heldout_collective(row.key) for row in rows) < len(rows) / 3
