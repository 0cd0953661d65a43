"""Time to build and to ask large machines: printed, not a gate."""

import pytest

from perfmodel.config import load_topology
from perfmodel.topology import Topology, build_topology

pytestmark = pytest.mark.bench


@pytest.mark.parametrize("n_nodes", [1, 64, 2048])
def test_build(benchmark, n_nodes: int) -> None:
    spec = load_topology("dgx_h100").with_nodes(n_nodes)
    machine: Topology = benchmark(build_topology, spec)
    assert machine.n_ranks == 8 * n_nodes


@pytest.mark.parametrize("n_nodes", [1, 64])
def test_all_routes_from_one_rank(benchmark, n_nodes: int) -> None:
    spec = load_topology("dgx_h100").with_nodes(n_nodes)

    def ask() -> int:
        machine = build_topology(spec)
        return sum(len(machine.route(0, other)) for other in range(1, machine.n_ranks))

    assert benchmark(ask) > 0


@pytest.mark.parametrize("n_nodes", [1, 64])
def test_bottleneck(benchmark, n_nodes: int) -> None:
    spec = load_topology("dgx_h100").with_nodes(n_nodes)
    assert benchmark(lambda: build_topology(spec).bottleneck(range(8 * n_nodes))) is not None
