"""Machines that people posted: what each case's CASE.md expects of a collective."""

import csv
from pathlib import Path
from statistics import fmean, stdev

import pytest
import yaml

from perfmodel.collectives import CollectiveCall, estimate_collective
from perfmodel.config import load_topology
from perfmodel.topology import build_topology

SHARED = Path(__file__).parents[2].parent / "shared"
GIB = 2**30
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="shared/ is absent: the posted cases are not here")


def machine(name, nodes=1, **nics):
    spec = load_topology(name)
    if nodes > 1:
        spec = spec.with_nodes(nodes)
    if nics:
        node = spec.node.model_copy(update={"nics": spec.node.nics.model_copy(update=nics)})
        spec = spec.model_copy(update={"node": node})
    return build_topology(spec)


def price(topology, op, n_bytes, ranks, **more):
    return estimate_collective(CollectiveCall(op=op, bytes=n_bytes, ranks=tuple(ranks)), topology, **more)


def gb_per_s(estimate):
    return estimate.busbw_bytes_per_s / 1e9


def bench(number):
    folder = next((SHARED / "cases").glob(f"{number:02d}-*"), None)
    if folder is None:
        pytest.skip(f"shared/cases/{number:02d} is absent")
    return yaml.safe_load((folder / "bench.yaml").read_text())


def posted(table_id):
    path = SHARED / "data" / "collectives" / "nccl_tests_posted_tables.csv"
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["table_id"] == table_id and row["time_us"]]
    return {int(row["bytes"]): float(row["time_us"]) / 1e6 for row in rows}


def test_01_cube_mesh_all_reduce_is_near_135_gb_per_s():
    topology = machine("dgx1_v100")
    assert gb_per_s(price(topology, "all_reduce", GIB, range(8))) == pytest.approx(135.5, rel=0.03)
    direct, relayed = (price(topology, "send_recv", GIB, pair).time_s for pair in ((0, 4), (0, 5)))
    assert relayed > 1.5 * direct


def test_05_nvlink_pairs_fall_off_a_cliff_at_the_third_gpu():
    rows = bench(5)["measured"]
    topology = machine("pcie_8xa100_bridges")
    found = {tuple(row["gpus"]): gb_per_s(price(topology, "all_reduce", 12 * GIB, row["gpus"])) for row in rows}
    assert found[0, 1] == pytest.approx(208, rel=0.15)
    assert found[0, 1, 2] == pytest.approx(
        20, rel=0.35
    )  # no PCIe table of this box: delivered copies, not NCCL's share
    assert found[0, 1] / gb_per_s(price(topology, "all_reduce", 12 * GIB, (0, 2))) == pytest.approx(10, rel=0.25)


def test_07_staged_all_reduce_is_not_blamed_on_one_link(tmp_path):
    """GPUs of NUMA nodes 3, 1, 3, 1 without peer-to-peer: bytes go through host memory and the nodes with three share it."""
    text = """
name: c07
node:
  gpus: {count: 8, device: rtx_4090}
  pcie: {generation: 4, sockets: [[0, 1, 2], [3], [4, 5, 6], [7]]}
  p2p: {disabled: true}
"""
    (tmp_path / "c07.yaml").write_text(text)
    topology = build_topology(load_topology(tmp_path / "c07.yaml"))
    whole = price(topology, "all_reduce", GIB, range(8))
    assert whole.time_s > price(topology, "all_reduce", GIB, (0, 1)).time_s
    uneven = price(topology, "all_to_all", GIB, range(8), fits={})
    even = price(topology, "all_to_all", GIB, (0, 3, 4, 7), fits={})
    assert uneven.bandwidth_s > even.bandwidth_s


def test_11_mesh_pair_delivers_its_four_lanes():
    topology = machine("hgx_4xa100")
    for pair in ((0, 1), (0, 2), (0, 3)):
        assert 70 < gb_per_s(price(topology, "send_recv", GIB, pair)) < 80
    assert gb_per_s(price(topology, "all_reduce", GIB, range(4))) == pytest.approx(3 * 77.2, rel=0.02)


@pytest.mark.parametrize(
    ("name", "box", "threshold", "tolerance"), [("dgx_h200", "8x H200", 5, 0.03), ("dgx_b200", "8x B200", 6, 0.14)]
)
def test_18_in_switch_reduction_starts_at_its_threshold_and_for_all_reduce_alone(name, box, threshold, tolerance):
    """B200: the posted 8 GiB figures are 13 % above the same machine's at 1 to 4 GiB (723-741 GB/s), which we follow."""
    rows = bench(18)["machines"][box]
    topology = machine(name)
    for n, default, ring in zip(rows["gpus"], rows["default_GBps"], rows["ring_GBps"], strict=True):
        free = price(topology, "all_reduce", 8 * GIB, range(n))
        forced = price(topology, "all_reduce", 8 * GIB, range(n), algo="ring")
        assert (free.algorithm == "nvls") == (n >= threshold)
        assert gb_per_s(free) == pytest.approx(default, rel=tolerance)
        assert gb_per_s(forced) == pytest.approx(ring, rel=0.05)
    for op in ("all_gather", "reduce_scatter"):
        found = price(topology, op, 16 * GIB, range(8))
        assert found.algorithm == "ring"
        assert found.busbw_bytes_per_s < 1.001 * forced.busbw_bytes_per_s


def test_18_all_gather_and_reduce_scatter_stay_at_the_ring_rate():
    rows = bench(18)["other_collectives_8xH200_16GiB"]
    for op in ("all_gather", "reduce_scatter"):
        assert gb_per_s(price(machine("dgx_h200"), op, 16 * GIB, range(8))) == pytest.approx(rows[op], rel=0.06)


def test_19_four_nodes_use_all_their_nics():
    rows = bench(19)
    found = price(machine("dgx_b200", nodes=4), "all_reduce", rows["bytes"], range(32)).time_s
    assert 0.016 < found < 0.02625
    assert found == pytest.approx(rows["measured_ms"]["ranks_32"] / 1e3, rel=0.15)
    one = machine("dgx_b200", nodes=4, count=1)
    assert price(one, "all_reduce", rows["bytes"], range(32)).time_s > 3 * found


def test_19_leaving_the_node_costs_most_for_small_messages():
    """Four p6-b200 nodes against one: the penalty falls from far above to about 2 with size."""
    many, one = machine("aws_p6_b200", nodes=4), machine("aws_p6_b200")
    sizes = (2**15, 2**20, 2**25, 2**30, 2**34)
    penalty = [
        price(many, "all_reduce", n, range(32)).time_s / price(one, "all_reduce", n, range(8)).time_s for n in sizes
    ]
    assert penalty[0] > 9  # 120 as posted, of a 32 KiB point that is slower than the same machine's 1 MiB point
    assert penalty[-1] == pytest.approx(2.2, rel=0.15)
    assert penalty[1:] == sorted(penalty[1:], reverse=True)


def test_21_all_to_all_over_one_nic_is_far_dearer_than_all_reduce():
    rows = {row["collective"]: row["time_us"] for row in bench(21)["measured"]}
    topology = machine("cluster_8xv100_1nic", nodes=8)
    reduce, exchange = (price(topology, op, 2**28, range(64)) for op in ("all_reduce", "all_to_all"))
    assert exchange.time_s / reduce.time_s == pytest.approx(rows["alltoall"] / rows["all_reduce"], rel=0.25)
    assert exchange.time_s >= 0.15  # the floor: 8 x 268 MB x 7/8 over 12.5 GB/s
    assert "nic" in exchange.bottleneck


@pytest.mark.parametrize(
    ("name", "nodes", "measured"),
    [("aws_p4de", 2, 78.3), ("aws_p5", 2, 487.0), ("dgx_h100", 2, 471.0), ("dgx_h100", 12, 386.0)],
)
def test_23_two_nodes_beat_the_wire_and_more_do_not(name, nodes, measured):
    topology = machine(name, nodes=nodes)
    found = price(topology, "all_reduce", GIB if nodes == 2 else 8 * GIB, range(8 * nodes))
    assert gb_per_s(found) == pytest.approx(measured, rel=0.15)
    wire = 50.0 if "p4" in name else 400.0
    assert (gb_per_s(found) > wire) == (nodes == 2)
    assert found.algbw_bytes_per_s / 1e9 < wire


def test_23_slow_nodes_are_flagged():
    """p4d on 3 and 4 nodes was reported as a fault: the measurement is above the range, on 1 and 2 nodes inside or near it."""
    measured = {nodes: us / 1e6 for nodes, us in bench(23)["p4d_measured_us"].items()}
    for nodes in (3, 4):
        found = price(machine("aws_p4d", nodes=nodes), "all_reduce", GIB, range(8 * nodes))
        assert measured[nodes] > found.high_s
    found = price(machine("aws_p4d", nodes=2), "all_reduce", GIB, range(16))
    assert measured[2] < found.high_s


def test_24_the_range_is_tight_inside_a_node_and_wide_between_nodes():
    """Ten equal runs: at most 0.3 % of spread inside a node, 15 % between 8 nodes."""
    with next((SHARED / "cases").glob("24-*")).joinpath("runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    spreads = {}
    for nodes in ("1", "8"):
        tables = {}
        for row in rows:
            if row["nodes"] == nodes and row["placement"] == "out":
                tables.setdefault((row["table_id"].rsplit("_run", 1)[0], row["bytes"]), []).append(
                    float(row["time_us"])
                )
        spreads[nodes] = max((stdev(v) / fmean(v) for v in tables.values() if len(v) > 2), default=0.0)
    one = price(machine("dgx_h200"), "all_reduce", 2**28, range(8))
    eight = price(machine("dgx_h200_x2", nodes=8), "all_reduce", 2**28, range(64))
    width = [(e.high_s - e.low_s) / e.time_s for e in (one, eight)]
    assert width[0] < 0.25
    assert width[1] > 2 * 0.15
    assert width[1] > 2 * spreads["8"]
    assert width[0] > spreads["1"]


def test_posted_single_node_tables_agree():
    """Tables that no fit has seen, from 64 MiB on: one node of H100 (simumax), A100 and B200 (ml-engineering)."""
    for table_id, name, op in (
        ("simumax_h100_8_all_reduce", "dgx_h100", "all_reduce"),
        ("simumax_h100_8_all_gather", "dgx_h100", "all_gather"),
        ("simumax_h100_8_reduce_scatter", "dgx_h100", "reduce_scatter"),
        ("stas_a100_8", "dgx_a100", "all_reduce"),
        ("stas_b200_8", "dgx_b200", "all_reduce"),
    ):
        topology = machine(name)
        errors = [
            abs(price(topology, op, n_bytes, range(8)).time_s / time_s - 1)
            for n_bytes, time_s in posted(table_id).items()
            if 2**26 <= n_bytes <= 2**32
        ]
        assert sorted(errors)[len(errors) // 2] < 0.10, (table_id, errors)
