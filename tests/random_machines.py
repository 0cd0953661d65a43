"""Random machines of several hosts, for properties of routes and of collectives."""

from hypothesis import strategies as st

from perfmodel.config import load_topology
from perfmodel.config.topology import GroupSpec, NetworkSpec, NicSpec, TopologySpec
from perfmodel.topology import Topology, build_topology

SHIPPED = ("dgx_h100", "dgx_a100", "gb200_nvl72", "cluster_8xv100_1nic", "dgx1_v100")


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    """Several hosts, of one kind or of two, on leaves of one to three hosts, with rails or without, oversubscribed or not."""
    network = NetworkSpec(
        kind=draw(st.sampled_from(["switch", "fat_tree"])),
        rails=draw(st.booleans()),
        oversubscription=draw(st.sampled_from([1.0, 2.0, 3.5])),
        nodes_per_leaf=draw(st.integers(1, 3)),
    )
    groups = []
    for name in draw(st.lists(st.sampled_from(SHIPPED), min_size=1, max_size=2, unique=True)):
        node = load_topology(name).node_groups[0][1]
        nics = (node.nics or NicSpec(count=1)).model_copy(update={"kind": "infiniband_ndr"})
        span = node.nvlink.nodes_per_domain if node.nvlink else 1
        n_nodes = span if span > 1 else draw(st.integers(1, 4))
        groups.append(GroupSpec(nodes=n_nodes, node=node.model_copy(update={"nics": nics})))
    return build_topology(TopologySpec(name="random", groups=tuple(groups), network=network))
