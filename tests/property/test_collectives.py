"""Collectives: what must hold for any size, group and speed of link."""

import math
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.collectives import CollectiveCall, estimate_collective
from perfmodel.collectives.exchange import exchange_time
from perfmodel.collectives.group import group_of
from perfmodel.config import load_topology
from perfmodel.topology import build_topology

MACHINES = ("dgx_a100", "dgx_h100", "dgx_b200", "dgx1_v100", "pcie_8xl40s", "pcie_8xrtx_pro_6000")
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
sizes = st.integers(1, 2**33)
groups = st.lists(st.integers(0, 7), min_size=2, max_size=8, unique=True).map(tuple)


@lru_cache
def machine(name, nodes=1):
    spec = load_topology(name)
    return build_topology(spec.with_nodes(nodes) if nodes > 1 else spec)


@lru_cache
def faster(name, factor):
    """The machine with NVLinks `factor` times as fast, its fabric fit the same."""
    spec = load_topology(name)
    nvlink = spec.node.nvlink
    link = {"generation": nvlink.generation}
    base = {2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}[link["generation"]]
    quick = nvlink.model_copy(update={"link_bandwidth": base * factor})
    return build_topology(spec.model_copy(update={"node": spec.node.model_copy(update={"nvlink": quick})}))


@pytest.mark.parametrize("fitted", [True, False])
@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(MACHINES),
    op=st.sampled_from(OPS),
    group=groups,
    pair=st.tuples(sizes, sizes),
    proto=st.sampled_from(["ll", "simple"]),
)
def test_more_bytes_never_take_less_time_with_one_algorithm(fitted, name, op, group, pair, proto):
    """One algorithm and protocol; exchanges change protocol by size themselves, so both sizes stay on one side."""
    low, high = sorted(pair)
    if op in ("all_to_all", "send_recv"):
        low, high = max(low, 2**18), max(high, 2**18)
    fits = None if fitted else {}
    times = [
        estimate_collective(
            CollectiveCall(op=op, bytes=n, ranks=group), machine(name), fits=fits, algo="ring", proto=proto
        ).time_s
        for n in (low, high)
    ]
    assert times[0] <= times[1] * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(MACHINES[:4]),
    op=st.sampled_from(OPS),
    group=groups,
    n_bytes=sizes,
    factor=st.sampled_from([1.1, 1.5, 3.0]),
)
def test_faster_links_never_slow_a_collective(name, op, group, n_bytes, factor):
    """With the algorithm held: NCCL's own choice may change for the worse, as it does on real machines."""
    call = CollectiveCall(op=op, bytes=n_bytes, ranks=group)
    slow = estimate_collective(call, machine(name), algo="ring", proto="simple").time_s
    quick = estimate_collective(call, faster(name, factor), algo="ring", proto="simple").time_s
    assert quick <= slow * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(("dgx_a100", "dgx1_v100")), group=groups, n_bytes=sizes, data=st.data())
def test_renumbering_ranks_of_a_switch_changes_nothing(name, group, n_bytes, data):
    shuffled = tuple(data.draw(st.permutations(group)))
    times = [
        estimate_collective(CollectiveCall(op="all_reduce", bytes=n_bytes, ranks=order), machine(name)).time_s
        for order in (group, shuffled)
    ]
    assert times[0] == pytest.approx(times[1], rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(matrix=st.lists(st.lists(st.integers(0, 2**26), min_size=8, max_size=8), min_size=8, max_size=8))
def test_all_to_all_v_lies_between_the_busiest_link_and_all_bytes_on_one_link(matrix):
    """Behind a switch the busiest port needs max(row or column sum) / bandwidth; all bytes over one port is the most."""
    import numpy as np

    topology = machine("dgx_a100")
    send = np.array(matrix, dtype=float)
    np.fill_diagonal(send, 0.0)
    time_s, _ = exchange_time(topology, group_of(topology, tuple(range(8))), range(8), send)
    port = 12 * 19.3e9
    assert time_s >= max(send.sum(axis=0).max(), send.sum(axis=1).max()) / port * (1 - 1e-9)
    assert time_s <= send.sum() / port * (1 + 1e-9) + 1e-15


@settings(max_examples=30, deadline=None)
@given(op=st.sampled_from(OPS), n_bytes=sizes, nodes=st.sampled_from([1, 2, 3, 5]))
def test_estimates_are_finite_ordered_and_named(op, n_bytes, nodes):
    topology = machine("dgx_h100_x2", max(nodes, 2))
    ranks = tuple(range(8 * nodes))
    found = estimate_collective(CollectiveCall(op=op, bytes=n_bytes, ranks=ranks), topology)
    assert 0 < found.low_s <= found.time_s <= found.high_s
    assert math.isfinite(found.high_s)
    assert found.bottleneck
