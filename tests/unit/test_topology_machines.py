"""Hosts, networks and routes on machines small enough to count by hand."""

from collections.abc import Mapping
from typing import Any

import pytest

from perfmodel.config import TopologySpec, load_topology
from perfmodel.errors import ConfigError, TopologyError
from perfmodel.topology import NodeKind, PathKind, Topology, build_topology
from perfmodel.topology.check import check_symmetric
from perfmodel.topology.ranks import parse_ranks

A100 = {"count": 8, "device": "a100_sxm_40gb"}


def build(node: Mapping[str, Any], **top: Any) -> Topology:
    return build_topology(load_topology({"name": "box", "node": dict(node), **top}))


def names(topology: Topology, source: int, target: int) -> list[str]:
    links = topology.route(source, target)
    return [links[0].source, *(link.target for link in links)]


def test_pcie_levels_from_near_to_far() -> None:
    pcie = {
        "generation": 4,
        "switches": [[0, 1], [2, 3]],
        "switch_trees": [[0, 1, 2, 3]],
        "host_bridges": [[0, 1, 2, 3, 4]],
        "sockets": [[0, 1, 2, 3, 4, 5], [6, 7]],
        "inter_socket": "xgmi3",
    }
    box = build({"gpus": A100, "pcie": pcie})
    assert [box.pair(0, b).kind for b in range(1, 8)] == ["pix", "pxb", "pxb", "phb", "node", "sys", "sys"]
    assert names(box, 0, 1) == ["h0/gpu0", "h0/switch1", "h0/gpu1"]
    assert names(box, 0, 2) == ["h0/gpu0", "h0/switch1", "h0/switch0", "h0/switch2", "h0/gpu2"]
    assert names(box, 0, 5) == [
        "h0/gpu0", "h0/switch1", "h0/switch0", "h0/bridge0", "h0/numa0", "h0/bridge1", "h0/gpu5",
    ]  # fmt: skip
    assert names(box, 6, 0)[:5] == ["h0/gpu6", "h0/bridge2", "h0/numa1", "h0/numa0", "h0/bridge0"]


def test_intel_stages_between_sockets_and_env_overrides() -> None:
    node = {"gpus": A100, "pcie": {"generation": 4, "sockets": 2, "inter_socket": "upi2"}}
    assert build(node).pair(0, 7).kind is PathKind.STAGED
    assert build(node).pair(0, 3).kind is PathKind.NODE
    assert build(node, env={"NCCL_P2P_LEVEL": "SYS"}).pair(0, 7).kind is PathKind.SYS
    assert build(node, env={"NCCL_P2P_LEVEL": "PIX"}).pair(0, 3).kind is PathKind.STAGED
    assert build({**node, "p2p": {"level": "sys"}}).pair(0, 7).kind is PathKind.SYS
    assert build({**node, "p2p": {"disabled": True}}).pair(0, 3).kind is PathKind.STAGED
    with pytest.raises(TopologyError, match="NCCL_P2P_LEVEL: found 'far'"):
        build(node, env={"NCCL_P2P_LEVEL": "far"}).pair(0, 3)


def test_staged_copies_pass_the_senders_memory() -> None:
    node = {"gpus": A100, "pcie": {"generation": 4, "sockets": 2}, "p2p": {"disabled": True}}
    box = build(node)
    assert names(box, 0, 7) == [
        "h0/gpu0", "h0/bridge0", "h0/numa0", "h0/memory0", "h0/numa0", "h0/numa1", "h0/bridge7", "h0/gpu7",
    ]  # fmt: skip
    assert names(box, 0, 1)[2:5] == ["h0/numa0", "h0/memory0", "h0/numa0"]
    memory = [link.resource for link in box.route(0, 1) if link.kind == "memory"]
    assert memory == ["h0/memory0", "h0/memory0"]


def test_p2p_disable_switches_nvlink_off_too() -> None:
    node = {"gpus": A100, "nvlink": {"generation": 3, "links_per_gpu": 12, "switch": True}, "pcie": {"generation": 4}}
    assert build(node).pair(0, 1).kind is PathKind.NVSWITCH
    assert build(node, env={"NCCL_P2P_DISABLE": 1}).pair(0, 1).kind is PathKind.STAGED


def test_a_slow_slot_limits_its_gpu_only() -> None:
    pcie = {"generation": 4, "ports": {"gpu3": {"generation": 3, "lanes": 4}}}
    box = build({"gpus": {"count": 4, "device": "rtx_3090"}, "pcie": pcie})
    # 4 lanes of generation 3 against 16 of generation 4: one eighth.
    assert box.pair(0, 1).bandwidth_bytes_per_s == pytest.approx(8 * box.pair(0, 3).bandwidth_bytes_per_s)


def test_uplinks_can_be_narrower() -> None:
    box = build({"gpus": A100, "pcie": {"generation": 4, "switches": 2, "uplink_lanes": 8}})
    assert box.pair(0, 1).bandwidth_bytes_per_s == 2 * box.pair(0, 4).bandwidth_bytes_per_s


def test_heterogeneous_gpus_and_groups_of_hosts() -> None:
    mixed = {
        "gpus": [{"count": 2, "device": "rtx_4090"}, {"count": 1, "device": "rtx_3090"}],
        "pcie": {"generation": 4},
        "nics": {"kind": "roce", "bandwidth": "100 Gbit/s"},
    }
    other = {
        "gpus": {"count": 2, "device": "a100_pcie_40gb"},
        "pcie": {"generation": 4},
        "nics": {"kind": "roce", "bandwidth": "50 Gbit/s"},
    }
    spec = load_topology({"name": "zoo", "groups": [{"nodes": 2, "node": mixed}, {"node": other}]})
    zoo = build_topology(spec)
    assert [place.device for place in zoo.ranks] == [
        "rtx_4090", "rtx_4090", "rtx_3090", "rtx_4090", "rtx_4090", "rtx_3090", "a100_pcie_40gb", "a100_pcie_40gb",
    ]  # fmt: skip
    assert [place.local_rank for place in zoo.ranks] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert zoo.hosts() == ((0, 1, 2), (3, 4, 5), (6, 7))
    assert zoo.pair(0, 3).bandwidth_bytes_per_s == 2 * zoo.pair(0, 6).bandwidth_bytes_per_s
    with pytest.raises(ConfigError, match="2 kinds of nodes"):
        spec.with_nodes(4)


def test_measured_pairs_widen_or_narrow_a_path() -> None:
    node = {"gpus": {"count": 4, "device": "l40s"}, "pcie": {"generation": 4, "switches": 2}}
    slow = build({**node, "measured": [{"pairs": [[0, 2]], "bandwidth": "5 GB/s"}]})
    assert slow.pair(0, 2).bandwidth_bytes_per_s == slow.pair(2, 0).bandwidth_bytes_per_s == 5e9
    assert slow.pair(1, 2).bandwidth_bytes_per_s > 20e9
    fast = build({**node, "measured": [{"path": "pix", "bandwidth": "30 GB/s"}]})
    assert fast.pair(0, 1).bandwidth_bytes_per_s == 30e9


def test_rails_keep_equal_nics_below_the_spine() -> None:
    two = build_topology(load_topology("dgx_h100_x2"))
    same, cross = two.pair(0, 8), two.pair(0, 9)
    assert same.kind is cross.kind is PathKind.NETWORK
    assert "net/spine" not in names(two, 0, 8)
    assert "net/spine" in names(two, 0, 9)
    # One more switch, 0.13 us, is passed at the spine and one at the second leaf.
    assert cross.latency_s - same.latency_s == pytest.approx(0.26e-6)


def test_oversubscription_divides_the_uplink() -> None:
    spec = {
        "name": "tree",
        "nodes": 4,
        "node": {
            "gpus": {"device": "h100_sxm"},
            "pcie": {"generation": 5, "switches": [[0, "nic0"]]},
            "nics": {"kind": "infiniband_ndr"},
        },
        "network": {"nodes_per_leaf": 2, "oversubscription": 2.0},
    }
    tree = build_topology(load_topology(spec))
    uplink = next(link for link in tree.route(0, 2) if link.target == "net/spine")
    port = next(link for link in tree.route(0, 2) if link.target == "net/leaf0")
    # Two ports of 50 GB/s below, half of their sum above.
    assert uplink.raw_bandwidth_bytes_per_s == 50e9
    assert uplink.bandwidth_bytes_per_s == pytest.approx(port.bandwidth_bytes_per_s)
    assert names(tree, 0, 1)[3:4] == ["net/leaf0"]
    assert tree.graph.nodes["net/spine"]["kind"] is NodeKind.SPINE


def test_far_nics_go_through_host_memory_and_so_does_tcp() -> None:
    pcie = {"generation": 4, "sockets": [[0, "nic0"], [1]]}
    nics = {"kind": "infiniband_hdr"}
    far = build({"gpus": {"count": 2, "device": "a100_pcie_40gb"}, "pcie": pcie, "nics": nics}, nodes=2)
    assert "h0/memory1" in names(far, 1, 2)
    near = {"generation": 4, "switches": [[0, "nic0"]]}
    rdma = build({"gpus": {"device": "l4"}, "pcie": near, "nics": nics}, nodes=2)
    tcp = build({"gpus": {"device": "l4"}, "pcie": near, "nics": {"kind": "tcp", "bandwidth": "25 Gbit/s"}}, nodes=2)
    assert "h0/memory0" not in names(rdma, 0, 1)
    assert "h0/memory0" in names(tcp, 0, 1)
    assert tcp.pair(0, 1).latency_s > rdma.pair(0, 1).latency_s


def test_one_nic_is_shared_by_all_ranks_of_a_host() -> None:
    box = build_topology(load_topology("4xv100").with_nodes(2))
    out = {link.resource for rank in range(4) for link in box.route(rank, rank + 4) if link.source == "h0/nic0"}
    assert out == {"h0/nic0>net/leaf0"}


def test_case_39_host_and_nvlink_domain_are_separate() -> None:
    """torchrec issues 3696 and 3998: 2 GPUs a host, 4 or 72 share NVLink; devices are numbered by the host."""

    def gb200(hosts_per_domain: int) -> Topology:
        nvlink = {"generation": 5, "links_per_gpu": 18, "switch": True, "nodes_per_domain": hosts_per_domain}
        node = {
            "gpus": {"count": 2, "device": "gb200"},
            "nvlink": nvlink,
            "pcie": {"generation": 5, "switches": 2},
            "nics": {"count": 2, "kind": "infiniband_ndr"},
        }
        return build(node, nodes=4)

    four = gb200(2)
    assert [place.local_rank for place in four.ranks] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert (four.gpus_per_host, four.gpus_per_nvlink_domain) == (2, 4)
    assert four.domains() == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert four.pair(0, 3).kind is PathKind.NVSWITCH
    assert four.pair(0, 4).kind is PathKind.NETWORK
    assert four.pair(0, 3).bandwidth_bytes_per_s == four.pair(0, 1).bandwidth_bytes_per_s
    eight = gb200(4)
    assert eight.pair(0, 4).kind is PathKind.NVSWITCH
    assert four.fingerprint != eight.fingerprint
    assert four.fingerprint == gb200(2).fingerprint


def test_nvl72_is_one_domain_of_eighteen_hosts() -> None:
    rack = build_topology(load_topology("gb200_nvl72"))
    assert (rack.n_ranks, rack.gpus_per_host, rack.gpus_per_nvlink_domain) == (72, 4, 72)
    assert names(rack, 0, 71) == ["h0/gpu0", "h0-17/nvswitch", "h17/gpu3"]
    two = build_topology(load_topology("gb200_nvl72").with_nodes(36))
    assert two.pair(71, 72).kind is PathKind.NETWORK
    with pytest.raises(TopologyError, match="20 nodes do not fill NVLink domains of 18"):
        build_topology(load_topology("gb200_nvl72").with_nodes(20))


def test_a_large_machine_is_one_template() -> None:
    large = build_topology(load_topology("dgx_h100").with_nodes(2048))
    assert large.n_ranks == 16384
    assert large.pair(0, 16376).bandwidth_bytes_per_s == large.pair(0, 8).bandwidth_bytes_per_s
    assert len({large.host_kind(host) for host in range(2048)}) == 1
    assert large.ranks[16383].node == "h2047/gpu7"


def test_subset_renumbers_ranks_and_keeps_links() -> None:
    whole = build_topology(load_topology("dgx1_v100"))
    part = whole.subset([6, 2, 3])
    assert [place.local_rank for place in part.ranks] == [6, 2, 3]
    assert part.route(0, 1) == whole.route(6, 2)
    assert part.subset([2, 0]).route(0, 1) == whole.route(3, 6)
    assert part.fingerprint != whole.fingerprint


def test_cpu_ranks_meet_on_the_loopback() -> None:
    two = build_topology(load_topology("cpu_x2"))
    assert two.fabric == "gloo_loopback"
    assert two.pair(0, 1).kind is PathKind.LOOPBACK
    assert two.pair(0, 1).latency_s == 29e-6
    assert two.pair(0, 1).bandwidth_bytes_per_s == 3.3e9


BAD = [
    ({"gpus": A100}, {}, "gpu0 and gpu1 have no path"),
    (
        {"gpus": {"count": 4, "device": "v100"}, "nvlink": {"generation": 2, "pairs": [[0, 1, 2], [2, 3, 2]]}},
        {},
        "gpu0 and gpu2 have no path",
    ),
    (
        {
            "gpus": {"count": 4, "device": "v100"},
            "nvlink": {"generation": 2, "pairs": [[0, 1, 1], [1, 2, 1], [2, 3, 1]]},
        },
        {},
        "gpu0 and gpu3 have no path",
    ),
    ({"gpus": A100, "pcie": {"generation": 4}}, {"nodes": 2}, r"ranks 0 \(h0/gpu0\) and 8 \(h1/gpu0\) have no path"),
    (
        {"gpus": A100, "pcie": {"generation": 4}, "nics": {"kind": "unknown"}},
        {"nodes": 2},
        "h0/nic0: its speed is unknown",
    ),
    ({"gpus": A100, "pcie": {"generation": 4, "switches": 3}}, {}, "8 GPUs do not split into 3"),
    ({"gpus": A100, "pcie": {"generation": 4, "switches": [[0, 1], [1, 2]]}}, {}, "gpu1 is named twice"),
    (
        {"gpus": A100, "pcie": {"generation": 4, "switches": [[3, 4]], "sockets": 2}},
        {},
        "gpu3 and gpu4 share a nearer group",
    ),
    (
        {"gpus": {"device": "t4"}, "pcie": {"generation": 3, "tree": {"switch0": ["switch1"], "switch1": ["switch0"]}}},
        {},
        "switch1 -> switch0 -> switch1 is a cycle",
    ),
    (
        {"gpus": {"device": "t4"}, "pcie": {"generation": 3, "tree": {"numa0": ["gpu0"], "switch0": ["gpu0"]}}},
        {},
        "gpu0 has two parents, numa0 and switch0",
    ),
    (
        {"gpus": {"count": 2, "device": "t4"}, "pcie": {"generation": 3, "tree": {"numa0": ["gpu0"]}}},
        {},
        "gpu1 is not in the tree",
    ),
    (
        {"gpus": {"device": "t4"}, "pcie": {"generation": 3, "tree": {"bridge0": ["gpu0"]}}},
        {},
        "gpu0 ends at bridge0",
    ),
    ({"gpus": {"device": "t4"}, "pcie": {"generation": 3, "ports": {"gpu7": {"lanes": 8}}}}, {}, "gpu7 is no part"),
    (
        {"gpus": {"count": 3, "device": "v100"}, "nvlink": {"generation": 2, "links_per_gpu": 6, "mesh": 4}},
        {},
        "gpu0 has 6 NVLinks but its pairs use 8",
    ),
]


@pytest.mark.parametrize(("node", "top", "words"), BAD)
def test_machines_that_do_not_hang_together_name_the_pair(
    node: dict[str, Any], top: dict[str, Any], words: str
) -> None:
    with pytest.raises(TopologyError, match=words):
        build(node, **top)


BAD_SPECS = [
    ({}, "`gpus` or `cpus`"),
    ({"gpus": {"device": "t4", "number": 2}}, "number: unknown key"),
    ({"gpus": {"device": "t4"}, "nics": {"kind": "infiniband_edr"}}, "give `pcie`"),
    ({"gpus": A100, "nvlink": {"generation": 3}}, "exactly one of `switch: true`"),
    ({"gpus": A100, "nvlink": {"generation": 3, "switch": True}}, "needs `links_per_gpu`"),
    ({"gpus": A100, "nvlink": {"generation": 3, "pairs": [[0, 8, 2]]}}, r"pair \[0, 8\] names GPU 8"),
    ({"gpus": A100, "nvlink": {"generation": 3, "pairs": [[2, 2, 2]]}}, "joins a GPU to itself"),
    ({"gpus": A100, "nvlink": {"generation": 7, "mesh": 1}}, "nvlink.generation: found 7, allowed at most 5"),
    ({"gpus": A100, "pcie": {"generation": 4, "switches": [[0, "disk1"]]}}, "found 'disk1', allowed a GPU number"),
    ({"gpus": A100, "pcie": {"generation": 4, "switches": [[0, "nic2"]]}}, "8 GPUs and 0 NICs"),
    ({"gpus": A100, "pcie": {"generation": 4}, "nics": {"kind": "roce"}}, "comes in many speeds"),
    ({"gpus": A100, "pcie": {"generation": 4}, "nics": {"kind": "tcp", "bandwidth": 100}}, "a bare number has no unit"),
    ({"gpus": A100, "pcie": {"generation": 4, "tree": {}, "switches": 2}}, "`tree` replaces `switches`"),
    ({"cpus": {"loopback_bandwidth": "3 GB/s"}}, "loopback_latency: missing"),
    ({"gpus": A100, "p2p": {"unsupported": [[0, 9]]}}, "GPU 9"),
]


@pytest.mark.parametrize(("node", "words"), BAD_SPECS)
def test_bad_specs_say_which_key(node: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_topology({"name": "box", "node": node})


def test_with_nodes_refuses_nothing_and_too_many() -> None:
    spec = load_topology("dgx_a100")
    assert isinstance(spec, TopologySpec)
    assert spec.with_nodes(3).n_nodes == 3
    for wrong in (0, -1, 10**9):
        with pytest.raises(ConfigError, match="nodes: found"):
            spec.with_nodes(wrong)


def test_the_symmetry_check_sees_a_one_way_link_and_unequal_lanes() -> None:
    graph = build_topology(load_topology("dgx1_v100")).graph
    links = {(source, target): data["link"] for source, target, data in graph.edges(data=True)}
    one_way = {ends: link for ends, link in links.items() if ends != ("h0/gpu1", "h0/gpu0")}
    with pytest.raises(TopologyError, match=r"h0/gpu0 and h0/gpu1: .*no way back"):
        check_symmetric(one_way)
    unequal = {**links, ("h0/gpu3", "h0/gpu0"): links["h0/gpu0", "h0/gpu1"]}
    with pytest.raises(TopologyError, match="h0/gpu0 and h0/gpu3: nvlink2 x2 one way, nvlink2 x1 the other"):
        check_symmetric(unequal)
    check_symmetric(links)


def test_groups_of_ranks_as_text() -> None:
    assert parse_ranks("0-2,7", 8) == (0, 1, 2, 7)
    assert parse_ranks("all", 3) == (0, 1, 2)
    for wrong in ("", "a", "3-1", "0-8", "0,0", "1-", "-1"):
        with pytest.raises(ConfigError):
            parse_ranks(wrong, 8)


def test_groups_are_checked() -> None:
    box = build_topology(load_topology("dgx_a100"))
    for wrong in ([], [0, 8], [1, 1]):
        with pytest.raises(TopologyError, match="dgx_a100"):
            box.bottleneck(wrong)
