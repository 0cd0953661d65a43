"""Bytes on links, against counts made by hand."""

import pytest

from perfmodel.api import as_topology
from perfmodel.collectives import CollectiveCall
from perfmodel.collectives.load import double_binary_tree, link_bytes


def call(op, n_bytes, n_ranks, **more):
    return CollectiveCall(op=op, bytes=n_bytes, ranks=tuple(range(n_ranks)), **more)


def ports(load):
    """Bytes by GPU port: into and out of the switch."""
    return {name: n for name, n in load.items() if "gpu" in name and "nvswitch" in name}


def test_a_ring_all_reduce_sends_twice_all_but_one_share_through_every_port():
    load = link_bytes(call("all_reduce", 800, 8), as_topology("dgx_a100"), "ring")
    # 8 ranks: 2 x 7 / 8 of 800 bytes over each hop; every port is one hop's way in and another's way out.
    assert len(ports(load)) == 16
    assert set(load.values()) == {1400.0}


def test_all_gather_and_reduce_scatter_send_half_of_an_all_reduce():
    machine = as_topology("dgx_a100")
    for op in ("all_gather", "reduce_scatter"):
        assert set(link_bytes(call(op, 800, 8), machine, "ring").values()) == {700.0}


def test_in_switch_reduction_sends_the_bytes_once_and_an_eighth_more():
    load = link_bytes(call("all_reduce", 800, 8), as_topology("dgx_h100"), "nvls")
    assert len(load) == 16
    assert set(load.values()) == {900.0}


def test_an_exchange_loads_each_port_with_what_its_rank_sends():
    sent = ((0, 10, 20), (1, 0, 2), (100, 200, 0))
    load = link_bytes(call("all_to_all_v", 300, 3, send_bytes=sent), as_topology("dgx_a100"), "direct")
    assert [load[f"h0/gpu{i}>h0/nvswitch"] for i in range(3)] == [30, 3, 300]
    assert [load[f"h0/nvswitch>h0/gpu{i}"] for i in range(3)] == [101, 210, 22]


def test_a_pipeline_sends_one_way():
    load = link_bytes(call("send_recv", 64, 2), as_topology("dgx_a100"), "direct")
    assert load == {"h0/gpu0>h0/nvswitch": 64.0, "h0/nvswitch>h0/gpu1": 64.0}


def test_rings_over_direct_nvlinks_run_both_ways_and_lose_no_bytes():
    load = link_bytes(call("all_reduce", 800, 4), as_topology("4xv100"), "ring")
    # Four hops of 2 x 3 / 4 of 800 bytes, however the rings are laid.
    assert sum(load.values()) == pytest.approx(4 * 1200)
    for name, n_bytes in load.items():
        source, _, target = name.partition(">")
        assert load[f"{target}>{source}"] == pytest.approx(n_bytes)


def test_rings_between_hosts_share_the_nics_evenly():
    load = link_bytes(call("all_reduce", 1600, 16), as_topology("dgx_a100_x2"), "ring")
    out = [n for name, n in load.items() if name.startswith("h0/nic") and name.partition(">")[2].startswith("net/")]
    # One ring's cut between two hosts: 2 x 15 / 16 of 1600 bytes leave each host, over 8 NICs.
    assert sum(out) == pytest.approx(3000)
    assert len(out) == 8
    assert max(out) == pytest.approx(min(out))


@pytest.mark.parametrize("n", range(2, 40))
def test_both_trees_reach_every_place_from_one_root(n):
    edges = double_binary_tree(n)
    assert len(edges) == 2 * (n - 1)
    for tree in (edges[: n - 1], edges[n - 1 :]):
        parent = dict(tree)
        assert len(parent) == n - 1
        (root,) = set(range(n)) - set(parent)
        for place in range(n):
            at, steps = place, 0
            while at != root:
                at, steps = parent[at], steps + 1
            assert steps <= n.bit_length() + 1


def test_a_tree_over_two_hosts_sends_each_half_up_one_way_and_down_the_other():
    load = link_bytes(call("all_reduce", 1600, 16), as_topology("dgx_a100_x2"), "tree")
    out = [n for name, n in load.items() if name.startswith("h0/nic") and name.partition(">")[2].startswith("net/")]
    assert sum(out) == pytest.approx(1600)


def test_one_rank_and_a_barrier_move_nothing():
    machine = as_topology("dgx_a100")
    assert link_bytes(call("all_reduce", 800, 1), machine, "none") == {}
    assert link_bytes(call("barrier", 0, 8), machine, "ring") == {}
