"""Groups at once on random machines: shares of links, ends and prices are those of plain loops over routes by name."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.collectives import CollectiveCall, estimate_collective, estimate_concurrent
from perfmodel.collectives.concurrent import _ring_shares
from perfmodel.collectives.estimate import estimate_collectives
from perfmodel.collectives.exchange import exchange_time
from perfmodel.collectives.flows import max_min_rates
from perfmodel.collectives.group import group_of
from perfmodel.collectives.sent import Sent
from perfmodel.topology import Topology
from tests.random_machines import machines


def plain_units(machine: Topology, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Hosts, or NVLink domains of which the group has ranks on several hosts; by first member."""
    places = [machine.ranks[rank] for rank in ranks]
    hosts = {p.nvlink_domain: {o.host for o in places if o.nvlink_domain == p.nvlink_domain} for p in places}
    units: dict[tuple[bool, int], list[int]] = {}
    for place in places:
        wide = len(hosts[place.nvlink_domain]) > 1
        units.setdefault((wide, place.nvlink_domain if wide else place.host), []).append(place.rank)
    return tuple(map(tuple, units.values()))


def first_by_nic(machine: Topology, unit: tuple[int, ...]) -> list[int]:
    firsts: dict[str, int] = {}
    for rank in unit:
        firsts.setdefault(machine.ranks[rank].nics[0], rank)
    return list(firsts.values())


def plain_shares(machine: Topology, ranks: tuple[int, ...]) -> dict[str, float]:
    """A byte over each hop of each unit's rings and from NIC to NIC of following units, as seconds by resource."""
    group, busy = group_of(machine, ranks), dict[str, float]()

    def send(first: int, second: int, n_bytes: float) -> None:
        for link in machine.route(first, second):
            busy[link.resource] = busy.get(link.resource, 0.0) + n_bytes / link.bandwidth_bytes_per_s

    orders = group.intra.orders if group.intra else ()
    units = plain_units(machine, ranks)
    for unit in units:
        fitting = [(o, share) for o, share in orders if len(o) == len(unit) and set(o) <= set(units[0])]
        turned = [(tuple(unit[units[0].index(rank)] for rank in o), share) for o, share in fitting]
        for order, share in (turned or [(unit, 1.0)]) if len(unit) > 1 else []:
            for a, b in pairwise((*order, order[0])):
                send(a, b, share / 2 if len(orders) > 1 else share)
                if len(orders) > 1:
                    send(b, a, share / 2)
    for unit, following in zip(units, (*units[1:], units[0]), strict=True) if len(units) > 1 else []:
        nics = list(zip(first_by_nic(machine, unit), first_by_nic(machine, following), strict=False))
        for a, b in nics:
            send(a, b, 1.0 / len(nics))
    return {name: seconds / max(busy.values()) for name, seconds in busy.items()}


def plain_ends(parts: list[tuple[float, float]], shares: list[dict[str, float]]) -> list[float]:
    """Progressive filling over every resource by name, each collective's own included."""
    names = sorted({name for share in shares for name in share})
    uses = np.array([[share.get(name, 0.0) for name in names] for share in shares])
    uses = np.concatenate([uses, np.eye(len(shares))], axis=1)
    begins, left = np.array([a for a, _ in parts]), np.array([b for _, b in parts])
    ends, clock = begins.copy(), 0.0
    while (left > 1e-15).any():
        open_ = left > 1e-15
        running = np.flatnonzero(open_ & (begins <= clock + 1e-15))
        later = begins[open_ & (begins > clock + 1e-15)]
        if not len(running):
            clock = float(later.min())
            continue
        speeds = max_min_rates(uses[running], np.ones(uses.shape[1]))
        step = min([float((left[running] / speeds).min()), *(later - clock)])
        left[running] -= speeds * step
        clock += step
        ends[running] = np.where(left[running] <= 1e-15, clock, ends[running])
    return [float(end) for end in ends]


def groups_on(machine: Topology, data: st.DataObject) -> list[tuple[int, ...]]:
    """Disjoint groups as meshes have them: ranks at even strides, or any ranks in any order."""
    n = machine.n_ranks
    if data.draw(st.booleans()):
        stride = data.draw(st.sampled_from([d for d in (1, 2, 4, 8) if d <= n // 2]))
        size = data.draw(st.integers(2, n // stride))
        return [tuple(range(first, first + stride * size, stride)) for first in range(min(stride, 4))]
    ranks = data.draw(st.permutations(range(n)))
    cut = data.draw(st.integers(2, n - 2))
    return [tuple(ranks[:cut]), tuple(ranks[cut:])]


@given(machines(), st.data())
@settings(max_examples=40, deadline=None)
def test_shares_of_links_are_those_of_plain_loops(machine: Topology, data: st.DataObject) -> None:
    for ranks in groups_on(machine, data):
        assert group_of(machine, ranks).units == plain_units(machine, ranks)
        plain = plain_shares(machine, ranks)
        found = _ring_shares(ranks, machine)
        assert np.sort(found.busy).tolist() == sorted(plain.values())


@given(machines(), st.data(), st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]), st.integers(1, 2**32))
@settings(max_examples=40, deadline=None)
def test_groups_at_once_cost_what_plain_loops_say(machine: Topology, data: st.DataObject, op: str, n: int) -> None:
    groups = groups_on(machine, data)
    calls = [CollectiveCall(op=op, bytes=n, ranks=ranks) for ranks in groups]
    alone = [estimate_collective(call, machine) for call in calls]
    assert estimate_collectives(calls, machine) == alone  # names of limiting links included
    ends = plain_ends([(e.latency_s, e.bandwidth_s) for e in alone], [plain_shares(machine, r) for r in groups])
    expected = [max(end, e.time_s) for end, e in zip(ends, alone, strict=True)]
    assert [e.time_s for e in estimate_concurrent(calls, machine)] == pytest.approx(expected, rel=1e-12)


@given(machines(), st.data())
@settings(max_examples=40, deadline=None)
def test_exchanges_of_few_different_rows_cost_what_their_matrix_costs(machine: Topology, data: st.DataObject) -> None:
    """By loads of every pair's own route: a resource's bytes over its rate, the largest of all, and a link of it."""
    ranks = tuple(data.draw(st.permutations(range(machine.n_ranks)))[: data.draw(st.integers(17, 24))])
    if len(ranks) < 17:
        return
    n = len(ranks)
    kinds = data.draw(st.lists(st.lists(st.integers(0, 2**20), min_size=n, max_size=n), min_size=1, max_size=3))
    rows = [tuple(row) for row in kinds]
    send = tuple(rows[data.draw(st.integers(0, len(rows) - 1))] for _ in ranks)
    matrix = np.array(send, dtype=float)
    np.fill_diagonal(matrix, 0.0)
    few = Sent.of_tuples(send)
    assert len(few.rows) <= len(rows)
    assert few.sent().tolist() == matrix.sum(axis=1).tolist()
    assert few.received().tolist() == matrix.sum(axis=0).tolist()
    group = group_of(machine, ranks)
    assert exchange_time(machine, group, ranks, few) == exchange_time(machine, group, ranks, matrix)
    loads: dict[str, float] = {}
    for i, j in np.argwhere(matrix > 0).tolist():
        for link in machine.route(ranks[i], ranks[j]):
            loads[link.resource] = loads.get(link.resource, 0.0) + matrix[i, j] / link.bandwidth_bytes_per_s
    time_s, _ = exchange_time(machine, group, ranks, few)
    assert time_s == pytest.approx(max(loads.values(), default=0.0), rel=1e-9)
