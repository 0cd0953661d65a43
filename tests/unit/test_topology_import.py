"""Real matrices, and what the people who posted them found. Expected values are read off the posts, not off our code."""

from collections import Counter
from contextlib import suppress
from itertools import combinations
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.config import TopologySpec, load_topology
from perfmodel.config.topology_text import dump_topology
from perfmodel.errors import TopologyError
from perfmodel.topology import NodeKind, PathKind, Topology, build_topology
from perfmodel.topology.import_smi import Imported, NicChoice, import_smi
from perfmodel.topology.smi_matrix import parse_p2p_matrix, parse_smi_matrix

SHARED = Path(__file__).parents[2].parent / "shared"
CASES, DATA = SHARED / "cases", SHARED / "data" / "topologies"
HDR = NicChoice(kind="infiniband_hdr")


def text_of(path: Path) -> str:
    if not path.exists():
        pytest.skip(f"shared/ is absent: {path}")
    return path.read_text()


def read(path: Path, device: str, nic: NicChoice | None = HDR) -> Imported:
    text = text_of(path)
    return import_smi(text, device=device, nic=nic if parse_smi_matrix(text).nics else None)


def machine(path: Path, device: str) -> Topology:
    return build_topology(read(path, device).spec)


def test_case_01_cube_mesh() -> None:
    dgx1 = machine(CASES / "01-topo-dgx1-v100-cube-mesh" / "topo.txt", "v100_sxm2_16gb")
    lanes = Counter(
        dgx1.route(a, b)[0].n_lanes for a, b in combinations(range(8), 2) if dgx1.pair(a, b).kind is PathKind.NVLINK
    )
    assert lanes == {1: 8, 2: 8}
    relayed = [(a, b) for a, b in combinations(range(8), 2) if dgx1.pair(a, b).kind is PathKind.NVLINK_RELAY]
    assert len(relayed) == 12
    nvlink = nx.Graph()
    for a, b in combinations(range(8), 2):
        if dgx1.pair(a, b).kind is PathKind.NVLINK:
            nvlink.add_edge(a, b, lanes=dgx1.route(a, b)[0].n_lanes)
    assert nx.diameter(nvlink) == 2
    assert all(sum(d["lanes"] for _, _, d in nvlink.edges(gpu, data=True)) == 6 for gpu in nvlink)
    doubles = nx.Graph((a, b) for a, b, d in nvlink.edges(data=True) if d["lanes"] == 2)
    assert nx.is_connected(doubles)
    assert {degree for _, degree in doubles.degree()} == {2}
    assert dgx1.domains() == (tuple(range(8)),)
    # Six links at 25 GB/s each way.
    assert sum(dgx1.route(0, b)[0].raw_bandwidth_bytes_per_s for b in (1, 2, 3, 4)) == 150e9
    direct, two_hops = dgx1.pair(0, 1), dgx1.pair(0, 5)
    assert len(two_hops.links) == 2 * len(direct.links)
    assert two_hops.latency_s > direct.latency_s
    nic = {place.rank: dgx1.ranks[place.rank].nics for place in dgx1.ranks}
    assert nic[2] == nic[3] == ("h0/nic0",)


def test_case_01_the_nic_shares_a_switch_with_gpus_2_and_3_only() -> None:
    spec = read(CASES / "01-topo-dgx1-v100-cube-mesh" / "topo.txt", "v100_sxm2_16gb").spec
    assert spec.node is not None
    assert spec.node.pcie is not None
    assert spec.node.pcie.switches == (("gpu2", "gpu3", "nic0"),)
    assert spec.node.pcie.sockets == (("gpu0", "gpu1", "gpu2", "gpu3", "nic0"), ("gpu4", "gpu5", "gpu6", "gpu7"))


def test_case_03_switch_and_eight_rails() -> None:
    imported = read(CASES / "03-topo-dgx-a100-12-nic" / "topo.txt", "a100_sxm_40gb")
    dgx = build_topology(imported.spec.with_nodes(2))
    assert {dgx.pair(a, b).kind for a, b in combinations(range(8), 2)} == {PathKind.NVSWITCH}
    assert dgx.route(0, 7)[0].n_lanes == 12
    assert dgx.route(0, 7)[0].raw_bandwidth_bytes_per_s == 300e9
    assert dgx.n_rails == 8
    assert [place.nics[0] for place in dgx.ranks[:8]] == [f"h0/nic{n}" for n in (0, 1, 2, 3, 6, 7, 8, 9)]
    assert imported.spec.node is not None
    assert imported.spec.node.nics is not None
    storage = [imported.spec.node.nics.names[index] for index in imported.spec.node.nics.storage]
    assert storage == ["mlx5_4", "mlx5_5", "mlx5_10", "mlx5_11"]


def test_case_03_numa_nodes_are_those_of_the_affinity_column() -> None:
    matrix = parse_smi_matrix(text_of(CASES / "03-topo-dgx-a100-12-nic" / "topo.txt"))
    assert list(matrix.numa_affinity.values()) == ["3", "3", "1", "1", "7", "7", "5", "5"]
    assert matrix.cpu_affinity["GPU0"] == "48-63,176-191"


def test_case_05_bridged_pairs_and_the_cliff() -> None:
    box = machine(CASES / "05-topo-8xa100-pcie-nvlink-pairs" / "topo.txt", "a100_pcie_40gb")
    assert box.domains() == ((0, 1), (2, 3), (4, 5), (6, 7))
    inside, outside = box.pair(0, 1), box.pair(0, 2)
    assert (inside.kind, outside.kind) == (PathKind.NVLINK, PathKind.NODE)
    assert 8 < inside.bandwidth_bytes_per_s / outside.bandwidth_bytes_per_s < 12
    pair, three = box.bottleneck([0, 1]), box.bottleneck([0, 1, 2])
    assert pair is not None
    assert three is not None
    assert pair.link.kind.startswith("nvlink")
    assert three.link.kind.startswith("pcie")
    assert pair.rank_bandwidth_bytes_per_s > 5 * three.rank_bandwidth_bytes_per_s


def test_case_07_host_memory_paths_of_uneven_numa_nodes() -> None:
    imported = read(CASES / "07-topo-8x4090-all-sys-4numa" / "topo.txt", "rtx_4090")
    box = build_topology(imported.spec)
    assert {box.pair(a, b).kind for a, b in combinations(range(8), 2)} == {PathKind.STAGED}
    numa = [next(link.source for link in box.route(a, (a + 1) % 8) if "numa" in link.source) for a in range(8)]
    assert [numa.count(name) for name in dict.fromkeys(numa)] == [3, 1, 3, 1]
    # Three senders of one NUMA node share its memory, one sender of another does not.
    shared = {link.resource for a in (0, 1) for link in box.route(a, 7) if link.kind == "memory"}
    assert shared == {"h0/memory0"}
    assert not any(link.resource in shared for link in box.route(3, 7))
    assert any("peer-to-peer" in note for note in imported.notes)
    assert box.n_rails == 2


def test_case_07_a_measured_file_overrides_the_path() -> None:
    spec = read(CASES / "07-topo-8x4090-all-sys-4numa" / "topo.txt", "rtx_4090").spec
    plain = spec.model_dump(exclude_defaults=True)
    plain["node"]["pcie"]["generation"] = 4
    plain["node"]["measured"] = ({"path": "staged", "bandwidth": "17 GB/s", "latency": "3 us"},)
    box = build_topology(TopologySpec.model_validate(plain))
    assert {box.pair(a, b).bandwidth_bytes_per_s for a, b in combinations(range(8), 2)} == {17e9}
    assert box.pair(0, 7).latency_s == 3e-6


def test_case_09_a_hidden_tree_asks_for_a_measurement() -> None:
    imported = read(CASES / "09-topo-8xa10g-vm-phb" / "topo.txt", "a10g")
    box = build_topology(imported.spec)
    with pytest.raises(TopologyError, match=r"gpu0 and gpu5.*hides the PCIe tree.*measured"):
        box.pair(0, 5)
    assert any("Measure a pair" in note for note in imported.notes)
    plain = imported.spec.model_dump(exclude_defaults=True)
    plain["node"]["measured"] = ({"path": "phb", "bandwidth": "9 GB/s"},)
    measured = build_topology(TopologySpec.model_validate(plain))
    assert measured.pair(0, 5).bandwidth_bytes_per_s == 9e9


def test_case_11_mesh_without_a_switch() -> None:
    box = machine(CASES / "11-topo-4xa100-nv4-four-nics" / "topo.txt", "a100_sxm_80gb")
    assert {box.pair(a, b).kind for a, b in combinations(range(4), 2)} == {PathKind.NVLINK}
    assert 70e9 <= box.pair(0, 1).bandwidth_bytes_per_s <= 80e9
    assert box.route(0, 1)[0].raw_bandwidth_bytes_per_s == 100e9
    # Three such pairs in parallel: no link is shared.
    assert len({link.resource for other in (1, 2, 3) for link in box.route(0, other)}) == 3
    assert [place.nics for place in box.ranks] == [(f"h0/nic{n}",) for n in range(4)]


def test_case_13_p2p_matrix_sends_the_pair_through_host_memory() -> None:
    folder = CASES / "13-topo-2xl4-p2p-unsupported"
    two = "        GPU0 GPU1 CPU Affinity\nGPU0 X PHB 0-7\nGPU1 PHB X 0-7\n"
    without = import_smi(two, device="l4")
    refused = import_smi(two, device="l4", p2p_text=text_of(folder / "topo_p2p_r.txt"))
    assert build_topology(without.spec).pair(0, 1).kind is PathKind.PHB
    path = build_topology(refused.spec).pair(0, 1)
    assert path.kind is PathKind.STAGED
    assert any(link.kind == "memory" for link in path.links)
    matrix = parse_p2p_matrix(text_of(folder / "topo_p2p_r_8xh100.txt"))
    assert len(matrix.gpus) == 8
    assert set(matrix.label.values()) == {"OK"}


def test_case_13_the_second_matrix_must_be_of_the_same_box() -> None:
    two = "GPU0 GPU1\nGPU0 X PHB\nGPU1 PHB X\n"
    with pytest.raises(TopologyError, match="found 8 GPUs"):
        import_smi(
            two, device="h100", p2p_text=text_of(CASES / "13-topo-2xl4-p2p-unsupported" / "topo_p2p_r_8xh100.txt")
        )


def test_case_15_full_mesh_and_comma_list() -> None:
    path = CASES / "15-topo-4xv100-nv2-all" / "topo.txt"
    box = machine(path, "v100_sxm2_16gb")
    assert all(box.route(a, b)[0].n_lanes == 2 and len(box.route(a, b)) == 1 for a, b in combinations(range(4), 2))
    matrix = parse_smi_matrix(text_of(path))
    assert matrix.cpu_affinity["GPU0"] == "0,2,4,6,8,10"
    assert matrix.numa_affinity["GPU0"] == "0"


def test_case_56_soc_is_sys_and_one_gpu_is_a_machine() -> None:
    folder = CASES / "56-topo-old-driver-soc-label"
    one = machine(folder / "topo_1gpu.txt", "p100_pcie_16gb")
    assert one.n_ranks == 1
    assert one.bottleneck([0]) is None
    four = machine(folder / "topo_4gpu.txt", "p100_pcie_16gb")
    assert four.pair(0, 1).kind is PathKind.PHB
    assert any(link.kind == "socket" for link in four.route(0, 2))
    assert not any(link.kind == "socket" for link in four.route(2, 3))


def test_case_56_column_order_is_the_headers() -> None:
    text = (
        "\tGPU0\tmlx5_0\tmlx5_2\tmlx5_1\tCPU Affinity\nGPU0\tX\tPIX\tSOC\tPHB\t0-7\n"
        "mlx5_0\tPIX\tX\tSOC\tPHB\nmlx5_2\tSOC\tSOC\tX\tSOC\nmlx5_1\tPHB\tPHB\tSOC\tX\n"
    )
    matrix = parse_smi_matrix(text)
    assert matrix.nics == ("mlx5_0", "mlx5_2", "mlx5_1")
    assert matrix.label["GPU0", "mlx5_2"] == "SYS"
    assert matrix.label["GPU0", "mlx5_1"] == "PHB"


def test_a800_is_a_switch_of_eight_links_with_eight_rails() -> None:
    box = machine(DATA / "a800_x8_nv8_9nic.txt", "a800_sxm_80gb")
    assert box.pair(0, 7).kind is PathKind.NVSWITCH
    assert box.route(0, 7)[0].raw_bandwidth_bytes_per_s == 200e9
    assert [place.nics[0] for place in box.ranks] == [f"h0/nic{n}" for n in (2, 4, 6, 8, 1, 3, 5, 7)]
    assert box.n_rails == 8


def test_h100_x4_is_a_mesh_of_six() -> None:
    box = machine(DATA / "h100_x4_nv6_4nic.txt", "h100_sxm")
    assert box.pair(0, 3).kind is PathKind.NVLINK
    assert sum(box.route(0, b)[0].n_lanes for b in (1, 2, 3)) == 18


def test_two_sockets_of_pcie_switches() -> None:
    box = machine(DATA / "pcie_x8_two_sockets_pix_phb_sys.txt", "p100_pcie_16gb")
    assert [box.pair(0, b).kind for b in (1, 2, 4)] == [PathKind.PIX, PathKind.PHB, PathKind.STAGED]
    # PIX traffic stays below the switch; PHB traffic of both pairs shares its uplink.
    assert not any("bridge" in link.target for link in box.route(0, 1))
    assert {link.name for link in box.route(0, 2)} & {link.name for link in box.route(1, 3)}


def test_geforce_has_no_peer_to_peer() -> None:
    box = machine(DATA / "rtx5090_x2_phb_no_p2p.txt", "rtx_5090")
    assert box.pair(0, 1).kind is PathKind.STAGED


EVERY = [
    (CASES / "01-topo-dgx1-v100-cube-mesh" / "topo.txt", "v100_sxm2_16gb"),
    (CASES / "03-topo-dgx-a100-12-nic" / "topo.txt", "a100_sxm_40gb"),
    (CASES / "05-topo-8xa100-pcie-nvlink-pairs" / "topo.txt", "a100_pcie_40gb"),
    (CASES / "07-topo-8x4090-all-sys-4numa" / "topo.txt", "rtx_4090"),
    (CASES / "09-topo-8xa10g-vm-phb" / "topo.txt", "a10g"),
    (CASES / "11-topo-4xa100-nv4-four-nics" / "topo.txt", "a100_sxm_80gb"),
    (CASES / "15-topo-4xv100-nv2-all" / "topo.txt", "v100_sxm2_16gb"),
    (CASES / "56-topo-old-driver-soc-label" / "topo_4gpu.txt", "p100_pcie_16gb"),
    (DATA / "a800_x8_nv8_9nic.txt", "a800_sxm_80gb"),
    (DATA / "h100_x4_nv6_4nic.txt", "h100_sxm"),
    (DATA / "pcie_x8_two_sockets_pix_phb_sys.txt", "p100_pcie_16gb"),
    (DATA / "rtx5090_x2_phb_no_p2p.txt", "rtx_5090"),
]


@pytest.mark.parametrize(("path", "device"), EVERY, ids=lambda v: v if isinstance(v, str) else v.parent.name)
def test_the_yaml_of_an_import_reads_back_equal(path: Path, device: str, tmp_path: Path) -> None:
    imported = read(path, device, nic=None)
    out = tmp_path / "box.yaml"
    out.write_text(dump_topology(imported.spec, imported.notes))
    assert load_topology(out) == imported.spec


def wrapped(text: str, width: int) -> str:
    """As a terminal shows it: every line broken after `width` characters."""
    lines = [line.expandtabs(8) for line in text.splitlines()]
    return "\n".join(line[i : i + width] for line in lines for i in range(0, max(len(line), 1), width))


@pytest.mark.parametrize(("path", "device"), EVERY, ids=lambda v: v if isinstance(v, str) else v.parent.name)
@pytest.mark.parametrize("width", [57, 64, 80])
def test_wrapped_and_coloured_output_reads_the_same(path: Path, device: str, width: int) -> None:
    text = text_of(path)
    body = text.split("\nLegend")[0].split("\nNIC Legend")[0]
    expected = parse_smi_matrix(body)
    assert parse_smi_matrix(wrapped(body, width)) == expected
    underlined = body.replace("GPU0", "\x1b[4mGPU0\x1b[0m").replace("SYS", "\x1b[1;31mSYS\x1b[0m")
    assert parse_smi_matrix(underlined) == expected
    prompt = f"user@box:~$ nvidia-smi topo -m\r\n{body}\r\nuser@box:~$ "
    assert parse_smi_matrix(prompt) == expected


def test_labels_are_the_printed_ones() -> None:
    """Every GPU pair of every file: the path of the built machine says what the matrix says, or stages it."""
    for path, device in EVERY:
        text = text_of(path)
        matrix, box = parse_smi_matrix(text), machine(path, device)
        host = {name: data["kind"] for name, data in box.graph.nodes(data=True)}
        assert sum(kind is NodeKind.NIC for kind in host.values()) == len(matrix.nics)
        for a, b in combinations(range(len(matrix.gpus)), 2):
            label = matrix.label[matrix.gpus[a], matrix.gpus[b]]
            if label.startswith("NV"):
                assert box.pair(a, b).kind in (PathKind.NVLINK, PathKind.NVSWITCH)
                assert box.route(a, b)[0].n_lanes == int(label[2:])


@given(st.text(st.sampled_from("GPU01NIC XVSYHBOD4\t\n-,\x1b[m"), max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_text_is_a_matrix_or_a_topology_error(text: str) -> None:
    try:
        matrix = parse_smi_matrix(text)
    except TopologyError:
        return
    assert matrix.gpus


@given(st.integers(0, 10**6), st.sampled_from(["", " ", "\n", "X", "NV4", "SYS", "GPU1", "\t\t"]), st.integers(0, 30))
@settings(max_examples=300, deadline=None)
def test_a_damaged_matrix_is_read_or_refused_in_words(at: int, patch: str, cut: int) -> None:
    rows = ["\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity", "GPU0\t X \tNV4\tSYS\tPIX\t0-7\t0"]
    rows += ["GPU1\tNV4\t X \tPHB\tSYS\t8-15\t1", "GPU2\tSYS\tPHB\t X \tSYS\t8-15\t1", "NIC0\tPIX\tSYS\tSYS\t X "]
    text = "\n".join(rows)
    at %= len(text)
    with suppress(TopologyError):
        build_topology(import_smi(text[:at] + patch + text[at + cut :], device="a100").spec)


@pytest.mark.parametrize(
    ("text", "device", "words"),
    [
        ("", "a100", "empty|no column GPU0"),
        ("hello world", "a100", "no column GPU0"),
        ("GPU0 GPU1\nGPU0 X NV12\n", "a100", "GPU1 has a column but no row"),
        ("GPU0 GPU1\nGPU0 X NV4\nGPU1 NV2 X\n", "a100", "GPU0 and GPU1: NV4 one way, NV2 the other"),
        ("GPU0 GPU1\nGPU0 X FOO\nGPU1 FOO X\n", "a100", "GPU0 to GPU1: found 'FOO', allowed X, NV#, SYS"),
        ("GPU0 GPU1\nGPU0 X X\nGPU1 X X\n", "a100", "GPU0 to GPU1: found 'X'"),
        ("GPU0 GPU1\nGPU0 X NV12\nGPU1 NV12 X\n", "t4", "GPU0 and GPU1: NV12, but t4 has no NVLink"),
        ("GPU0 GPU1\nGPU0 X NV18\nGPU1 NV18 X\n", "a100", "GPU0 and GPU1: NV18, but a100 has 12"),
        (
            "GPU0 GPU1 GPU2\nGPU0 X NV6 NV4\nGPU1 NV6 X NV6\nGPU2 NV4 NV6 X\n",
            "v100",
            "GPU0: 10 NVLinks, v100 has 6, and the pairs are no switch",
        ),
        ("GPU0\nGPU0 X\n", "abacus", "GPU model: found 'abacus'"),
    ],
)
def test_wrong_matrices_name_what_is_wrong(text: str, device: str, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        import_smi(text, device=device)
