"""Two ranks are one unit where a host or an NVLink domain holds both, and their parts are equal at equal places."""

from __future__ import annotations

from itertools import permutations

import pytest

from perfmodel.collectives.units import units_of
from perfmodel.config import load_topology
from perfmodel.topology import build_topology


@pytest.mark.parametrize("name", ["dgx_h100_x2", "gb200_nvl72", "pcie_8xl40s", "cluster_8xv100_1nic"])
def test_units_of_two_ranks(name: str) -> None:
    topology = build_topology(load_topology(name))
    some = topology.ranks[:3] + topology.ranks[-3:]
    for first, second in permutations({place.rank: place for place in some}.values(), 2):
        found = units_of(topology, (first.rank, second.rank))
        near = first.host == second.host or first.nvlink_domain == second.nvlink_domain
        pair = (first.rank, second.rank)
        assert found.tuples() == ((pair,) if near else ((first.rank,), (second.rank,)))
        alike = topology.host_kind(first.host) == topology.host_kind(second.host)
        same_place = alike and first.local_rank == second.local_rank
        assert found.shape.tolist() == ([0] if near else [0, 0 if same_place else 1])


def test_a_pair_and_the_same_pair_among_more_ranks_fall_into_equal_units() -> None:
    topology = build_topology(load_topology("dgx_h100_x2"))
    assert units_of(topology, (3, 11)).tuples() == ((3,), (11,))
    assert units_of(topology, (3, 11, 4)).tuples() == ((3, 4), (11,))
