"""Collectives against hand counts, closed forms and brute force."""

import math
import time
from typing import NamedTuple

import numpy as np
import pytest

from perfmodel.collectives import (
    CollectiveCall,
    bus_factor,
    estimate_collective,
    estimate_collectives,
    estimate_concurrent,
)
from perfmodel.collectives.exchange import exchange_time, uniform
from perfmodel.collectives.flows import ends_of, max_min_rates
from perfmodel.collectives.group import group_of
from perfmodel.collectives.rings import best_rings
from perfmodel.config import load_topology
from perfmodel.errors import ConfigError, TopologyError
from perfmodel.topology import Topology, build_topology

GIB = 2**30
UNFITTED: dict = {}


def machine(name: str, nodes: int = 1, **env: str) -> Topology:
    spec = load_topology(name)
    spec = spec.with_nodes(nodes) if nodes > 1 else spec
    return build_topology(spec.model_copy(update={"env": {**spec.env, **env}}))


def call(op: str, n_bytes: int, ranks, **more) -> CollectiveCall:
    return CollectiveCall(op=op, bytes=n_bytes, ranks=tuple(ranks), **more)


@pytest.mark.parametrize("name", ["dgx_a100", "dgx_h100", "dgx1_v100", "pcie_8xl40s"])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_large_ring_all_reduce_tends_to_its_bytes_over_the_ring_bandwidth(name, n):
    """Each rank passes on 2 (n - 1) / n of the buffer; at 64 GiB latency is nothing."""
    topology = machine(name)
    n_bytes = 64 * GIB
    found = estimate_collective(
        call("all_reduce", n_bytes, range(n)), topology, fits=UNFITTED, algo="ring", proto="simple"
    )
    ring = best_rings(topology, range(n)).bus_bytes_per_s
    assert found.time_s == pytest.approx(2 * (n - 1) / n * n_bytes / ring, rel=1e-3)


def test_dgx1_has_three_edge_disjoint_rings_each_way():
    """Six lanes of 22.6 GB/s a GPU, two of them used by each undirected ring: 3 rings, 2 directions, 135.6 GB/s in all."""
    lane = best_rings(machine("dgx1_v100"), range(8))
    assert lane.bus_bytes_per_s == pytest.approx(6 * 22.6e9, rel=1e-6)
    assert sum(share for _, share in lane.orders) == pytest.approx(1.0)


def test_a_lane_carries_no_more_than_it_can():
    """Brute force over the rings found: bytes a second on every directed NVLink of the cube mesh."""
    topology = machine("dgx1_v100")
    lane = best_rings(topology, range(8))
    load: dict[tuple[int, int], float] = {}
    for order, share in lane.orders:
        for a, b in zip(order, (*order[1:], order[0]), strict=True):
            for hop in ((a, b), (b, a)):
                load[hop] = load.get(hop, 0.0) + share * lane.bus_bytes_per_s / 2
    for (a, b), rate in load.items():
        assert rate <= topology.pair(a, b).bandwidth_bytes_per_s * (1 + 1e-6)


def test_max_min_rates_of_a_textbook_network():
    """Bertsekas and Gallager 6.5.2 in small: link 0 (capacity 1) carries flows A, B; link 1 (capacity 2) carries B, C.

    A and B share link 0 evenly (0.5 each); C takes what B leaves of link 1 (1.5).
    """
    crossings = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    assert max_min_rates(crossings, np.array([1.0, 2.0])) == pytest.approx([0.5, 0.5, 1.5])


class Flow(NamedTuple):
    """Bytes that cross some resources; `resources` may name one twice."""

    n_bytes: float
    resources: tuple[str, ...]


def _simulated_ends(flows, capacity, step_s):
    """Brute force in time steps: every flow moves at its max-min rate, found by raising all rates in tiny shares."""
    left = [flow.n_bytes for flow in flows]
    ends, clock = [0.0] * len(flows), 0.0
    while any(value > 0 for value in left):
        rates = [0.0] * len(flows)
        frozen = [value <= 0 for value in left]
        quantum = min(capacity.values()) / 400
        while not all(frozen):
            for f, flow in enumerate(flows):
                used = {
                    r: sum(rates[g] * other.resources.count(r) for g, other in enumerate(flows)) for r in flow.resources
                }
                if any(used[r] + quantum * flow.resources.count(r) > capacity[r] for r in flow.resources):
                    frozen[f] = True
                if not frozen[f]:
                    rates[f] += quantum
        clock += step_s
        for f, value in enumerate(left):
            if value > 0:
                left[f] = value - rates[f] * step_s
                ends[f] = clock
    return ends


def test_flow_ends_agree_with_a_time_stepped_simulation():
    flows = [
        Flow(n_bytes=4.0, resources=("a", "b")),
        Flow(n_bytes=2.0, resources=("b",)),
        Flow(n_bytes=3.0, resources=("a",)),
        Flow(n_bytes=1.0, resources=("c", "c")),
    ]
    capacity = {"a": 2.0, "b": 1.0, "c": 1.0}
    crossings = np.array([[flow.resources.count(name) for name in capacity] for flow in flows], dtype=float)
    found = ends_of(crossings, np.array(list(capacity.values())), np.array([flow.n_bytes for flow in flows]))
    assert list(found) == pytest.approx(_simulated_ends(flows, capacity, 0.05), rel=0.03)


def test_uniform_all_to_all_takes_as_long_as_its_busiest_link():
    """8 GPUs behind a switch: each link carries 7/8 of a send buffer each way."""
    topology = machine("dgx_a100")
    group = group_of(topology, tuple(range(8)))
    time_s, _ = exchange_time(topology, group, range(8), uniform(8, GIB))
    assert time_s == pytest.approx(7 / 8 * GIB / (12 * 19.3e9), rel=1e-6)


def test_all_to_all_v_equals_all_to_all_for_equal_sizes_and_conserves_bytes():
    topology = machine("dgx_a100")
    part = 2**20
    send = tuple(tuple(part for _ in range(8)) for _ in range(8))
    even = estimate_collective(call("all_to_all", 8 * part, range(8)), topology)
    uneven = estimate_collective(call("all_to_all_v", 8 * part, range(8), send_bytes=send), topology)
    assert uneven.time_s == pytest.approx(even.time_s, rel=1e-9)


def test_all_to_all_v_is_bound_by_the_rank_that_sends_most():
    """One rank sends 7 MiB to each other, the rest nothing: its link carries 49 MiB, whoever receives."""
    topology = machine("dgx_a100")
    rows = [[0] * 8 for _ in range(8)]
    rows[3] = [7 * 2**20 if j != 3 else 0 for j in range(8)]
    group = group_of(topology, tuple(range(8)))
    time_s, link = exchange_time(topology, group, range(8), np.array(rows, dtype=float))
    assert time_s == pytest.approx(49 * 2**20 / (12 * 19.3e9), rel=1e-6)
    assert link == "h0/gpu3>h0/nvswitch"


def test_two_way_counting_of_loads_agrees_where_both_apply():
    """Flows followed exactly against loads counted by ends: 8 GPUs on a PCIe tree, uneven sizes."""
    from perfmodel.collectives.exchange import _by_ends, _exact
    from perfmodel.collectives.sent import Sent

    topology = machine("pcie_8xl40s")
    group = group_of(topology, tuple(range(8)))
    send = uniform(8, GIB)
    assert _by_ends(topology, group, range(8), Sent.of_matrix(send))[0] == pytest.approx(
        _exact(topology, range(8), send)[0], rel=1e-6
    )


@pytest.mark.bench
def test_512_ranks_on_64_nodes_are_priced_in_50_ms():
    topology = machine("dgx_h100_x2", nodes=64)
    ranks = tuple(range(512))
    estimate_collective(call("all_reduce", 1, (0, 1)), topology)  # the database is read once a process
    start = time.perf_counter()
    for op in ("all_reduce", "all_gather", "all_to_all"):
        estimate_collective(call(op, 2**28, ranks), topology)
    assert (time.perf_counter() - start) / 3 < 0.05


def test_two_groups_on_one_pcie_tree_slow_each_other_and_disjoint_ones_do_not():
    topology = machine("pcie_8xl40s")
    pairs = [call("all_reduce", GIB, (0, 1)), call("all_reduce", GIB, (2, 3))]
    alone = estimate_collectives(pairs, topology)
    assert [e.time_s for e in estimate_concurrent(pairs, topology)] == pytest.approx([e.time_s for e in alone])
    crossing = [call("all_reduce", GIB, (0, 4)), call("all_reduce", GIB, (1, 5))]
    single = estimate_collective(crossing[0], topology)
    both = estimate_concurrent(crossing, topology)
    # Both cross the one link between the sockets in each direction: it takes twice as long.
    assert both[0].bandwidth_s == pytest.approx(2 * single.bandwidth_s, rel=0.02)


def test_bus_factors_are_those_of_nccl_tests():
    """doc/PERFORMANCE.md: all_reduce 2(n-1)/n, all_gather, reduce_scatter and alltoall (n-1)/n, broadcast and reduce 1."""
    assert [bus_factor(op, 4) for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")] == [
        1.5,
        0.75,
        0.75,
        0.75,
    ]
    assert bus_factor("broadcast", 4) == bus_factor("reduce", 4) == 1.0


def test_settings_of_the_topology_force_the_choice():
    h100 = call("all_reduce", 2**28, range(8))
    assert estimate_collective(h100, machine("dgx_h100")).algorithm == "nvls"
    assert estimate_collective(h100, machine("dgx_h100", NCCL_NVLS_ENABLE="0")).algorithm == "ring"
    assert estimate_collective(h100, machine("dgx_h100", NCCL_ALGO="Tree")).algorithm == "tree"
    assert estimate_collective(h100, machine("dgx_h100", NCCL_ALGO="^NVLS", NCCL_PROTO="LL")).protocol == "ll"
    assert estimate_collective(h100, machine("dgx_h100"), algo="ring").algorithm == "ring"


def test_few_channels_are_slow():
    few = estimate_collective(
        call("all_reduce", GIB, range(8)), machine("dgx_a100", NCCL_MAX_NCHANNELS="2"), fits=UNFITTED
    )
    many = estimate_collective(call("all_reduce", GIB, range(8)), machine("dgx_a100"), fits=UNFITTED)
    assert few.n_channels == 2
    assert few.time_s > 4 * many.time_s


def test_peer_to_peer_off_goes_through_host_memory():
    on, off = machine("pcie_8xrtx_pro_6000"), machine("pcie_8xrtx_pro_6000", NCCL_P2P_DISABLE="1")
    pair = call("all_reduce", GIB, (0, 1))
    assert estimate_collective(pair, off).time_s > estimate_collective(pair, on).time_s


def test_one_rank_costs_nothing_and_a_barrier_costs_a_tiny_all_reduce():
    topology = machine("dgx_a100")
    assert estimate_collective(call("all_reduce", GIB, (3,)), topology).time_s == 0.0
    barrier = estimate_collective(call("barrier", 0, range(8)), topology)
    assert barrier.time_s == estimate_collective(call("all_reduce", 4, range(8)), topology).time_s
    assert barrier.busbw_bytes_per_s == 0.0


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        ({"op": "allreduce"}, ConfigError, "did you mean 'all_reduce'"),
        ({"bytes": -1}, ConfigError, "0 or more"),
        ({"ranks": (0, 9)}, TopologyError, "rank 9 does not exist"),
        ({"ranks": (0, 0)}, TopologyError, "twice"),
        ({"op": "all_to_all_v"}, ConfigError, "send_bytes"),
        ({"op": "all_to_all_v", "send_bytes": ((1,),)}, ConfigError, "2 rows of 2"),
    ],
)
def test_bad_calls_say_what_is_wrong(bad, error, text):
    good = {"op": "all_reduce", "bytes": 1024, "ranks": (0, 1)}
    with pytest.raises(error, match=text):
        estimate_collective(CollectiveCall(**{**good, **bad}), machine("dgx_a100"))


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"NCCL_ALGO": "rings"}, "did you mean 'ring'"),
        ({"NCCL_PROTO": "LL64"}, "NCCL_PROTO"),
        ({"NCCL_MAX_NCHANNELS": "0"}, "1 to 64"),
        ({"NCCL_ALGO": "Tree", "NCCL_PROTO": "^LL,LL128,Simple"}, "none of which"),
    ],
)
def test_bad_settings_say_what_is_wrong(env, text):
    with pytest.raises(ConfigError, match=text):
        estimate_collective(call("all_reduce", 1024, range(8)), machine("dgx_a100", **env))


def test_equal_calls_are_equal_objects_and_order_is_kept():
    topology = machine("dgx_a100")
    calls = [call("all_reduce", GIB, range(8)), call("all_gather", GIB, range(4)), call("all_reduce", GIB, range(8))]
    found = estimate_collectives(calls, topology)
    assert found[0] is found[2]
    assert found[1].time_s == estimate_collective(calls[1], topology).time_s


def test_latency_and_bandwidth_parts_make_the_time():
    found = estimate_collective(call("all_reduce", 2**24, range(8)), machine("dgx_h100"))
    assert found.latency_s + found.bandwidth_s == pytest.approx(found.time_s)
    assert found.low_s < found.time_s < found.high_s
    assert found.busbw_bytes_per_s == pytest.approx(1.75 * 2**24 / found.time_s)
    assert math.isfinite(found.algbw_bytes_per_s)
