"""From an `nvidia-smi topo -m` matrix to a TopologySpec.

The matrix tells who shares what, never how fast: link counts come from it, rates from the GPU model. What neither can tell
(the speed of NICs, PCIe distances that NVLink hides, a tree behind a virtual machine) is left open and said in a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfmodel.config.loading import validate
from perfmodel.config.topology import LEVELS, TopologySpec
from perfmodel.errors import TopologyError
from perfmodel.topology.gpu_ports import GpuPorts, gpu_ports
from perfmodel.topology.smi_matrix import SmiMatrix, parse_p2p_matrix, parse_smi_matrix

# Distance labels from near to far, each with the level of groups whose members are that near.
_NEAR: Mapping[str, int] = {"PIX": 0, "PXB": 1, "PHB": 2, "NODE": 3, "SYS": 4}
_P2P_WORKS = ("OK", "DR")
# From this many GPUs on one host bridge the label is a virtual machine's: no CPU socket has so many x16 root ports in one.
_HIDDEN_FROM_GPUS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A spec read from a matrix, and what a person should know or fill in."""

    spec: TopologySpec
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NicChoice:
    """What the matrix does not say about NICs: `kind` and `bandwidth` as NicSpec takes them."""

    kind: str
    bandwidth: str | None = None


def import_smi(
    text: str, *, device: str, name: str = "imported", p2p_text: str | None = None, nic: NicChoice | None = None
) -> Imported:
    """Reads a matrix (and, if given, the one of `topo -p2p r`) of a host with GPUs of one model.

    Raises:
        TopologyError: text that is no matrix, labels that contradict each other or the GPU model; the pair is named.
        ConfigError: a kind or rate of NIC that no spec can have.
    """
    matrix, ports, notes = parse_smi_matrix(text), gpu_ports(device), _Notes()
    node: dict[str, Any] = {"gpus": ({"count": len(matrix.gpus), "device": device},)}
    nvlink = _nvlink(matrix, ports, device)
    if nvlink:
        node["nvlink"] = nvlink
    node["pcie"] = _pcie(matrix, ports, notes)
    if matrix.nics:
        node["nics"] = _nics(matrix, nic, notes)
    p2p = _p2p(matrix, ports, p2p_text, device, notes)
    if p2p:
        node["p2p"] = p2p
    spec = validate(TopologySpec, {"name": name, "node": node}, "topo import")
    return Imported(spec=spec, notes=notes.lines())


class _Notes:
    """Collects what to tell the person, in order, once each."""

    def __init__(self) -> None:
        self._lines: dict[str, None] = {}

    def add(self, line: str) -> None:
        self._lines[line] = None

    def lines(self) -> tuple[str, ...]:
        return tuple(self._lines)


# NVLink: `NV#` counts the links between two GPUs, or, with a switch between, the links of each into the switch.


def _nvlink(matrix: SmiMatrix, ports: GpuPorts, device: str) -> dict[str, Any] | None:
    gpus = matrix.gpus
    counts = {
        (a, b): int(matrix.label[a, b][2:])
        for a in gpus
        for b in gpus
        if a != b and matrix.label[a, b].startswith("NV")
    }
    if not counts:
        return None
    if not ports.n_nvlinks:
        (first, second), n_links = next(iter(counts.items()))
        raise TopologyError(f"{first} and {second}: NV{n_links}, but {device} has no NVLink; give the right GPU model")
    too_many = next(((pair, n) for pair, n in counts.items() if n > ports.n_nvlinks), None)
    if too_many:
        (first, second), n_links = too_many
        raise TopologyError(f"{first} and {second}: NV{n_links}, but {device} has {ports.n_nvlinks} NVLinks in all")
    spec: dict[str, Any] = {"generation": ports.nvlink_generation}
    if ports.link_bandwidth:
        spec["link_bandwidth"] = ports.link_bandwidth
    return spec | _nvlink_shape(gpus, counts, ports.n_nvlinks, device)


def _nvlink_shape(
    gpus: Sequence[str], counts: Mapping[tuple[str, str], int], n_nvlinks: int, device: str
) -> dict[str, Any]:
    """A switch where the links of a row add up to more than the GPU has; else a mesh, or the pairs as they stand."""
    used = {gpu: sum(n for (first, _), n in counts.items() if first == gpu) for gpu in gpus}
    everywhere = len(counts) == len(gpus) * (len(gpus) - 1)
    uniform = len(set(counts.values())) == 1
    per_pair = next(iter(counts.values()))
    over = next((gpu for gpu in gpus if used[gpu] > n_nvlinks), None)
    if over:
        if not (everywhere and uniform):
            raise TopologyError(f"{over}: {used[over]} NVLinks, {device} has {n_nvlinks}, and the pairs are no switch")
        return {"switch": True, "links_per_gpu": per_pair}
    if everywhere and uniform and len(gpus) > 2:
        return {"links_per_gpu": n_nvlinks, "mesh": per_pair}
    order = {gpu: index for index, gpu in enumerate(gpus)}
    pairs = tuple((order[a], order[b], n) for (a, b), n in counts.items() if order[a] < order[b])
    return {"links_per_gpu": n_nvlinks, "pairs": pairs}


# PCIe: labels are distances in a tree, so that "at most this far" puts devices into groups at every level.


def _pcie(matrix: SmiMatrix, ports: GpuPorts, notes: _Notes) -> dict[str, Any]:
    spec: dict[str, Any] = {"generation": ports.pcie_generation}
    if ports.pcie_lanes != 16:
        spec["lanes"] = ports.pcie_lanes
    names = {name: f"gpu{i}" for i, name in enumerate(matrix.gpus)}
    names |= {name: f"nic{i}" for i, name in enumerate(matrix.nics)}
    below: list[tuple[str, ...]] = [(name,) for name in matrix.names]
    for level, key in enumerate(LEVELS):
        near = [pair for pair, label in matrix.label.items() if _NEAR.get(label, len(_NEAR)) <= level]
        if key == "sockets":
            near += _same_socket(matrix)
        groups = _components(matrix.names, near)
        _note_contradictions(matrix, groups, level, notes)
        shown = [group for group in groups if _is_said(group, groups, below, key)]
        if shown:
            spec[key] = tuple(tuple(names[name] for name in group) for group in shown)
        below = groups
    if len(below) > 1:
        notes.add(
            "the matrix does not name the CPUs: set pcie.inter_socket (upi: Xeon Skylake, upi2, upi3, xgmi2-4: EPYC)"
        )
    if _is_hidden(matrix):
        spec["hidden"] = True
        notes.add(
            "every pair is PHB: a virtual machine hides the PCIe tree. Measure a pair (p2pBandwidthLatencyTest) and set "
            "node.measured: [{path: phb, bandwidth: ...}]; until then no time for these pairs is given"
        )
    _note_unseen(matrix, below, notes)
    return spec


def _is_said(group: Sequence[str], groups: Sequence[Sequence[str]], below: Sequence[Sequence[str]], key: str) -> bool:
    """Whether a spec has to name the group: not where a level groups nothing new, nor a GPU alone, nor the only socket.

    A NIC alone is named at the nearest level, or it would be taken to sit beside a GPU.
    """
    if key == "sockets":
        return len(groups) > 1
    if key == "switches" and not group[0].startswith("GPU"):
        return True
    return len(group) > 1 and groups != below


def _same_socket(matrix: SmiMatrix) -> list[tuple[str, str]]:
    """GPU pairs with the same NUMA node; without a NUMA column, with the same CPU list. A range tells nothing."""
    cells = matrix.numa_affinity
    if not all(re.fullmatch(r"[0-9]+", cells[gpu]) for gpu in matrix.gpus):
        cells = matrix.cpu_affinity
        if any(matrix.numa_affinity.values()) or not all(cells.values()):
            return []
    return [(a, b) for a in matrix.gpus for b in matrix.gpus if a != b and cells[a] == cells[b]]


def _components(names: Sequence[str], near: Iterable[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Names joined by near pairs, in the order of the names."""
    home = {name: name for name in names}

    def find(name: str) -> str:
        while home[name] != name:
            name = home[name]
        return name

    for first, second in near:
        home[find(second)] = find(first)
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(find(name), []).append(name)
    return [tuple(group) for group in groups.values()]


def _note_contradictions(matrix: SmiMatrix, groups: Sequence[Sequence[str]], level: int, notes: _Notes) -> None:
    """Pairs printed as farther than the chain of others that joins them: real drivers do this across host bridges."""
    farther = [
        (a, b)
        for group in groups
        for index, a in enumerate(group)
        for b in group[index + 1 :]
        if level < _NEAR.get(matrix.label.get((a, b), ""), 0)
    ]
    if farther:
        first, second = farther[0]
        notes.add(
            f"{len(farther)} pairs (such as {first} and {second}) are printed {matrix.label[first, second]}, but others, or "
            f"their NUMA node, put them nearer: read as {list(_NEAR)[level]}"
        )


def _is_hidden(matrix: SmiMatrix) -> bool:
    gpus = matrix.gpus
    labels = {matrix.label[a, b] for a in gpus for b in gpus if a != b}
    ranges = any("-" in cell or "," in cell for cell in matrix.numa_affinity.values())
    return labels == {"PHB"} and (ranges or len(gpus) >= _HIDDEN_FROM_GPUS)


def _note_unseen(matrix: SmiMatrix, sockets: Sequence[Sequence[str]], notes: _Notes) -> None:
    """Where NVLink labels hide the PCIe distance of GPUs that may share a switch."""
    gpus = matrix.gpus
    hidden = [
        (a, b)
        for group in sockets
        for a in group
        for b in group
        if a < b and a in gpus and b in gpus and matrix.label[a, b].startswith("NV")
    ]
    if hidden:
        first, second = hidden[0]
        notes.add(
            f"NVLink hides the PCIe distance of {len(hidden)} pairs (such as {first} and {second}): they share a switch "
            "here only where a NIC shows it; correct pcie.switches if they do"
        )


# Network cards and peer-to-peer.


def _nics(matrix: SmiMatrix, nic: NicChoice | None, notes: _Notes) -> dict[str, Any]:
    spec: dict[str, Any] = {"count": len(matrix.nics), "kind": nic.kind if nic else "unknown"}
    if nic and nic.bandwidth:
        spec["bandwidth"] = nic.bandwidth
    if not nic:
        notes.add(
            "the matrix does not say how fast the NICs are: set nics.kind and nics.bandwidth before using two nodes"
        )
    spec["names"] = tuple(matrix.nic_names.get(name, name) for name in matrix.nics)
    nearest: set[str] = set()
    for gpu in matrix.gpus:
        distance = {name: _NEAR[matrix.label[gpu, name]] for name in matrix.nics}
        nearest |= {name for name, far in distance.items() if far == min(distance.values())}
    storage = tuple(index for index, name in enumerate(matrix.nics) if name not in nearest)
    if storage:
        spec["storage"] = storage
        notes.add(f"NICs {', '.join(matrix.nics[i] for i in storage)} are nearest to no GPU: not used for training")
    return spec


def _p2p(matrix: SmiMatrix, ports: GpuPorts, p2p_text: str | None, device: str, notes: _Notes) -> dict[str, Any] | None:
    if len(matrix.gpus) < 2:
        return None
    if p2p_text is None:
        if ports.pcie_p2p:
            return None
        notes.add(f"the stock driver has no PCIe peer-to-peer on {device}: pairs go through host memory")
        return {"disabled": True}
    p2p = parse_p2p_matrix(p2p_text)
    if p2p.gpus != matrix.gpus:
        raise TopologyError(f"-p2p matrix: found {len(p2p.gpus)} GPUs, the -m matrix has {len(matrix.gpus)}")
    order = {gpu: index for index, gpu in enumerate(matrix.gpus)}
    refused = [
        (order[a], order[b]) for (a, b), label in p2p.label.items() if order[a] < order[b] and label not in _P2P_WORKS
    ]
    if not refused:
        return None
    notes.add(f"no peer-to-peer for {len(refused)} pairs: they go through host memory")
    everywhere = len(refused) == len(order) * (len(order) - 1) // 2
    return {"disabled": True} if everywhere else {"unsupported": tuple(refused)}
