"""Every shipped topology loads, stands on known devices, and has the link rates of its datasheet."""

import csv
from pathlib import Path

import pytest

from perfmodel.config import list_configs, load_topology
from perfmodel.config.topology_text import dump_topology
from perfmodel.db import list_devices
from perfmodel.topology import Topology, build_topology

GOLDEN = Path(__file__).parents[1] / "golden" / "topology_datasheets.csv"
ROWS = {row["topology"]: row for row in csv.DictReader(GOLDEN.read_text().splitlines())}


def test_the_golden_table_covers_what_is_shipped() -> None:
    assert sorted(ROWS) == list_configs("topologies")


@pytest.mark.parametrize("name", sorted(ROWS))
def test_shipped_topology_is_its_datasheet(name: str, tmp_path: Path) -> None:
    row, spec = ROWS[name], load_topology(name)
    machine = build_topology(spec)
    assert spec.name == name
    assert {place.device for place in machine.ranks} <= set(list_devices())
    assert machine.n_ranks == int(row["n_ranks"])
    assert len(machine.hosts()) == int(row["n_hosts"])
    assert machine.gpus_per_nvlink_domain == int(row["gpus_per_nvlink_domain"])
    assert nvlink_out(machine) == float(row["nvlink_raw_gb_per_s"] or 0) * 1e9
    assert machine.n_rails == int(row["n_rails"])
    if row["nic_raw_gbit_per_s"] and spec.node is not None:
        two = build_topology(spec.with_nodes(2 * spec.n_nodes))
        ports = [link for link in two.route(0, two.n_ranks - 1) if "/nic" in link.source and link.target[:3] == "net"]
        assert [port.raw_bandwidth_bytes_per_s * 8 for port in ports] == [float(row["nic_raw_gbit_per_s"]) * 1e9]
    out = tmp_path / "again.yaml"
    out.write_text(dump_topology(spec))
    assert load_topology(out) == spec


def nvlink_out(machine: Topology) -> float:
    """Raw NVLink bytes per second out of the first GPU."""
    edges = machine.graph.out_edges(machine.ranks[0].node, data=True)
    return sum(d["link"].raw_bandwidth_bytes_per_s for _, _, d in edges if d["link"].kind.startswith("nvlink"))


def test_every_link_delivers_at_most_its_raw_rate() -> None:
    for name in ROWS:
        for _, _, data in build_topology(load_topology(name)).graph.edges(data=True):
            link = data["link"]
            assert 0 < link.bandwidth_bytes_per_s <= link.raw_bandwidth_bytes_per_s, (name, link)
            assert link.latency_s >= 0


def test_dgx_is_the_dgx_a100_under_a_short_name() -> None:
    short = load_topology("dgx").model_copy(update={"name": "dgx_a100", "description": ""})
    assert short == load_topology("dgx_a100").model_copy(update={"description": ""})


def test_published_all_reduce_rates_are_within_a_tenth_of_the_narrowest_link() -> None:
    """Bus bandwidth of a large ring all-reduce is at most what the links of one GPU deliver, and near it where all work.

    8 GPUs: DGX A100 232 GB/s at 10 GiB, H200 ring forced 365.6 and B200 682.2 GB/s at 8 GiB, DGX-1 V100 135.5 at 1 GiB.
    """
    for name, published in (("dgx_a100", 232e9), ("dgx_h200", 365.6e9), ("dgx_b200", 682.2e9), ("dgx2_v100", 135.5e9)):
        link = build_topology(load_topology(name)).route(0, 1)[0]
        assert link.bandwidth_bytes_per_s == pytest.approx(published, rel=0.1)
