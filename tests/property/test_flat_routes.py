"""Routes as arrays: on random machines they cross the links that the plain routes cross, in the same order."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.topology import Topology
from tests.random_machines import machines


@given(machines(), st.data())
@settings(max_examples=40, deadline=None)
def test_flat_routes_cross_what_plain_routes_cross(machine: Topology, data: st.DataObject) -> None:
    ranks = st.integers(0, machine.n_ranks - 1)
    pairs = data.draw(st.lists(st.tuples(ranks, ranks), min_size=1, max_size=60))
    found = machine.flat_routes.of(*np.array(pairs).T)
    plain = [(number, link) for number, pair in enumerate(pairs) for link in machine.route(*pair)]
    assert found.pair.tolist() == [number for number, _ in plain]
    assert found.bandwidth_bytes_per_s.tolist() == [link.bandwidth_bytes_per_s for _, link in plain]
    names = {}
    for number, (_, link) in zip(found.resource.tolist(), plain, strict=True):
        assert names.setdefault(number, link.resource) == link.resource  # equal numbers: one resource
    assert len(set(names.values())) == len(names)  # and one number for a resource


@given(machines())
@settings(max_examples=20, deadline=None)
def test_leaves_have_numbers_that_are_equal_where_their_names_are(machine: Topology) -> None:
    leaves = [machine.network.leaf_of(place.nics[0]) for place in machine.ranks]
    numbers = machine.columns.leaf.tolist()
    assert len(set(leaves)) == len(set(numbers)) == len(set(zip(leaves, numbers, strict=True)))
