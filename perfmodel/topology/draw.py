"""A topology as text: who reaches whom how, and how fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perfmodel.errors import TopologyError
from perfmodel.topology.link import PairInfo, PathKind
from perfmodel.topology.machine import Topology
from perfmodel.units import GIGA, US_PER_S, format_rate, format_time

MAX_MATRIX_RANKS = 16
_LEGEND = {
    "NV#": "# NVLinks: straight, or of each GPU into the switch",
    "NVB": "NVLink through one other GPU",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches, no host bridge",
    "PHB": "a PCIe host bridge",
    "NODE": "several host bridges of one NUMA node",
    "SYS": "between NUMA nodes",
    "SHM": "no peer-to-peer: through host memory",
    "NET": "network",
    "LO": "loopback interface",
}


def shown_ranks(topology: Topology) -> tuple[int, ...]:
    """Ranks worth a matrix: all of a small machine; of a large one the first host, one rank of the next, and the last."""
    if topology.n_ranks <= MAX_MATRIX_RANKS:
        return tuple(range(topology.n_ranks))
    hosts = topology.hosts()
    chosen = list(hosts[0][:MAX_MATRIX_RANKS])
    if len(hosts) > 1:
        chosen += [hosts[1][0], hosts[-1][-1]]
    return tuple(dict.fromkeys(chosen))


def path_label(info: PairInfo) -> str:
    """Short name of a path, as `nvidia-smi topo -m` prints it where it has a name for it."""
    if info.kind in (PathKind.NVLINK, PathKind.NVSWITCH):
        return f"NV{info.links[0].n_lanes}"
    names = {
        PathKind.SELF: "X",
        PathKind.NVLINK_RELAY: "NVB",
        PathKind.STAGED: "SHM",
        PathKind.NETWORK: "NET",
        PathKind.LOOPBACK: "LO",
    }
    return names.get(info.kind, info.kind.upper())


def render_matrix(topology: Topology, ranks: Sequence[int] | None = None) -> str:
    """Three tables over the ranks: path, bandwidth of one direction, latency of the first byte.

    `?` stands where only a measurement can tell.
    """
    shown = shown_ranks(topology) if ranks is None else tuple(ranks)
    topology.check_group(shown)
    rows = [[_pair_or_none(topology, a, b) for b in shown] for a in shown]
    labels = [[path_label(info) if info else "?" for info in row] for row in rows]
    parts = [_table("path", shown, labels, [topology.ranks[rank].node for rank in shown])]
    if len(shown) > 1:
        parts.append(_table("GB/s", shown, _cells(rows, lambda info: f"{info.bandwidth_bytes_per_s / GIGA:.1f}")))
        parts.append(_table("us", shown, _cells(rows, lambda info: f"{info.latency_s * US_PER_S:.2f}")))
    used = {label for row in labels for label in row}
    legend = ["GB/s and us: one direction of a pair with nothing else running"] if len(shown) > 1 else []
    legend += [
        f"{key:5} {text}" for key, text in _LEGEND.items() if key in used or (key == "NV#" and _any_nvlink(used))
    ]
    return "\n".join([*parts, *legend]) + "\n"


def _pair_or_none(topology: Topology, source: int, target: int) -> PairInfo | None:
    try:
        return topology.pair(source, target)
    except TopologyError:
        return None


def _cells(rows: Sequence[Sequence[PairInfo | None]], text: Callable[[PairInfo], str]) -> list[list[str]]:
    return [["?" if info is None else text(info) if info.narrowest else "-" for info in row] for row in rows]


def _any_nvlink(labels: set[str]) -> bool:
    return any(label[:2] == "NV" and label[2:].isdigit() for label in labels)


def _table(title: str, ranks: Sequence[int], cells: Sequence[Sequence[str]], notes: Sequence[str] | None = None) -> str:
    header = [title, *(str(rank) for rank in ranks)]
    body = [[str(rank), *row] for rank, row in zip(ranks, cells, strict=True)]
    widths = [max(len(line[column]) for line in [header, *body]) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [header, *body]]
    if notes:
        lines = [lines[0], *(f"{line}  {note}" for line, note in zip(lines[1:], notes, strict=True))]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def render_pair(topology: Topology, source: int, target: int) -> str:
    """One pair: path, bandwidth, latency, and each link on the way."""
    info = topology.pair(source, target)
    first, second = topology.ranks[source], topology.ranks[target]
    lines = [f"rank {source} ({first.node}) to rank {target} ({second.node}): {path_label(info)}"]
    if info.narrowest:
        rate, latency = format_rate(info.bandwidth_bytes_per_s), format_time(info.latency_s)
        lines[0] += f", {rate} one way, {latency}, narrowest link {info.narrowest.name}"
    lines += [
        f"  {link.name:34} {link.kind:10} x{link.n_lanes:<3} {format_rate(link.bandwidth_bytes_per_s):>10} "
        f"of {format_rate(link.raw_bandwidth_bytes_per_s):>10}  {format_time(link.latency_s)}"
        for link in info.links
    ]
    return "\n".join(lines) + "\n"


def render_bottleneck(topology: Topology, group: Sequence[int]) -> str:
    """The link that limits a group, and what each rank can send at that load."""
    found = topology.bottleneck(group)
    if found is None:
        return "a group of one rank sends nothing\n"
    rate, each = format_rate(found.link.bandwidth_bytes_per_s), format_rate(found.rank_bandwidth_bytes_per_s)
    return (
        f"bottleneck of {len(group)} ranks, each sending as much to every other: {found.link.name} "
        f"({found.link.kind} x{found.link.n_lanes}, {rate}), shared by {found.n_flows} of the pairs "
        f"(such as {found.pair[0]} to {found.pair[1]}); each rank sends {each}\n"
    )
