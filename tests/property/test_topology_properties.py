"""Random hosts and machines: routes are chains, both ways alike; the bottleneck is the brute force's; matrices read back."""

from collections import Counter
from itertools import combinations, permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.config import TopologySpec, load_topology
from perfmodel.config.loading import validate
from perfmodel.config.topology_text import dump_topology
from perfmodel.topology import PathKind, Topology, build_topology
from perfmodel.topology.host import Host
from perfmodel.topology.import_smi import import_smi

MAX_GPUS = 6


@st.composite
def partitions(draw: st.DrawFn, items: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Items in groups, each group's members in order, groups by first member."""
    homes = [draw(st.integers(0, len(items) - 1)) for _ in items]
    groups: dict[int, list[str]] = {}
    for item, home in zip(items, homes, strict=True):
        groups.setdefault(home, []).append(item)
    return tuple(tuple(group) for group in groups.values())


def coarser(
    draw: st.DrawFn, groups: tuple[tuple[str, ...], ...], items: tuple[str, ...]
) -> tuple[tuple[str, ...], ...]:
    """Groups joined at random into larger ones."""
    joined = draw(partitions(tuple(str(index) for index in range(len(groups)))))
    order = {item: index for index, item in enumerate(items)}
    merged = [sorted((m for part in union for m in groups[int(part)]), key=order.__getitem__) for union in joined]
    return tuple(sorted((tuple(group) for group in merged), key=lambda group: order[group[0]]))


@st.composite
def nodes(draw: st.DrawFn, *, nics: bool = False) -> dict[str, Any]:
    n_gpus = draw(st.integers(2, MAX_GPUS))
    n_nics = draw(st.integers(1, 2)) if nics else 0
    items = tuple(f"gpu{i}" for i in range(n_gpus)) + tuple(f"nic{i}" for i in range(n_nics))
    levels = [draw(partitions(items))]
    for _ in range(3):
        levels.append(coarser(draw, levels[-1], items))
    keys = ("switches", "switch_trees", "host_bridges", "sockets")
    pcie: dict[str, Any] = {"generation": draw(st.integers(3, 6)), **dict(zip(keys, levels, strict=True))}
    pcie["inter_socket"] = draw(st.sampled_from(["upi", "upi2", "xgmi3"]))
    node: dict[str, Any] = {"gpus": ({"count": n_gpus, "device": "a100_sxm_40gb"},), "pcie": pcie}
    if n_nics:
        node["nics"] = {"count": n_nics, "kind": draw(st.sampled_from(["infiniband_hdr", "infiniband_ndr"]))}
    shape = draw(st.sampled_from(["none", "switch", "pairs"]))
    if shape == "switch":
        node["nvlink"] = {"generation": 3, "links_per_gpu": 12, "switch": True}
    elif shape == "pairs":
        chosen = draw(st.sets(st.sampled_from(list(combinations(range(n_gpus), 2))), min_size=1))
        node["nvlink"] = {"generation": 3, "pairs": tuple((a, b, draw(st.integers(1, 2))) for a, b in sorted(chosen))}
    return node


def spec_of(node: dict[str, Any], **top: Any) -> TopologySpec:
    return validate(TopologySpec, {"name": "random", "node": node, **top}, "random")


def check_pair(box: Topology, a: int, b: int) -> None:
    there, back = box.pair(a, b), box.pair(b, a)
    assert there.kind is back.kind
    assert there.bandwidth_bytes_per_s == back.bandwidth_bytes_per_s
    assert there.links[0].source == box.ranks[a].node
    assert there.links[-1].target == box.ranks[b].node
    assert all(first.target == second.source for first, second in zip(there.links, there.links[1:], strict=False))
    assert all(box.graph.edges[link.source, link.target]["link"] == link for link in there.links)


@given(nodes())
@settings(max_examples=60, deadline=None)
def test_routes_are_chains_of_graph_links_both_ways_alike(node: dict[str, Any]) -> None:
    box = build_topology(spec_of(node))
    for a, b in combinations(range(box.n_ranks), 2):
        check_pair(box, a, b)


@given(nodes(nics=True), st.integers(2, 5), st.booleans(), st.integers(1, 3), st.data())
@settings(max_examples=60, deadline=None)
def test_bottleneck_is_the_brute_force_over_every_pair(
    node: dict[str, Any], n_nodes: int, rails: bool, nodes_per_leaf: int, data: st.DataObject
) -> None:
    network = {"rails": rails, "nodes_per_leaf": nodes_per_leaf, "oversubscription": 2.0}
    box = build_topology(spec_of(node, nodes=n_nodes, network=network))
    group = data.draw(st.lists(st.sampled_from(range(box.n_ranks)), min_size=2, max_size=12, unique=True))
    flows: Counter[str] = Counter()
    rates = {}
    for a, b in permutations(group, 2):
        check_pair(box, a, b)
        for link in box.route(a, b):
            flows[link.resource] += 1
            rates[link.resource] = link.bandwidth_bytes_per_s
    slowest = max(flows[name] / rates[name] for name in flows)
    found = box.bottleneck(group)
    assert found is not None
    assert found.n_flows == flows[found.link.resource]
    assert flows[found.link.resource] / rates[found.link.resource] == slowest
    assert found.link.resource in {link.resource for link in box.route(*found.pair)}
    assert abs(found.rank_bandwidth_bytes_per_s * slowest / (len(group) - 1) - 1) < 1e-12


@given(nodes(nics=True), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_written_yaml_reads_back_equal(node: dict[str, Any], n_nodes: int) -> None:
    spec = spec_of(node, nodes=n_nodes)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "random.yaml"
        path.write_text(dump_topology(spec))
        assert load_topology(path) == spec


LABEL = {kind: kind.upper() for kind in (PathKind.PIX, PathKind.PXB, PathKind.PHB, PathKind.NODE, PathKind.SYS)}


def printed(spec: TopologySpec) -> str:
    """The matrix that nvidia-smi would print for a spec, from the PCIe tree and the NVLink counts alone."""
    assert spec.node is not None
    host = Host(spec.node, {})
    names = [*host.ranks, *(f"nic{i}" for i in range(spec.node.nics.count if spec.node.nics else 0))]
    shown = {name: name.upper() for name in names}
    lines = ["\t" + "\t".join(shown.values())]
    for a in names:
        row = [shown[a]]
        for b in names:
            if a == b:
                row.append(" X ")
            elif host.graph.has_edge(a, b) and b.startswith("gpu") and a.startswith("gpu"):
                row.append(f"NV{host.graph.edges[a, b]['link'].n_lanes}")
            elif "nvswitch" in host.graph and a.startswith("gpu") and b.startswith("gpu"):
                row.append(f"NV{spec.node.nvlink.links_per_gpu}" if spec.node.nvlink else "?")
            else:
                row.append(LABEL[host.pcie_path(a, b)[0]])
        lines.append("\t".join(row))
    return "\n".join(lines) + "\n"


@given(nodes(nics=True))
@settings(max_examples=60, deadline=None)
def test_a_printed_matrix_imports_to_the_same_labels(node: dict[str, Any]) -> None:
    spec = spec_of(node)
    imported = import_smi(printed(spec), device="a100_sxm_40gb")
    hidden = imported.spec.node is not None and imported.spec.node.pcie is not None and imported.spec.node.pcie.hidden
    if not hidden:
        assert printed(imported.spec) == printed(spec)
