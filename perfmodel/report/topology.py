"""A topology as a figure (SVG, PNG, PDF) and as JSON."""

from __future__ import annotations

import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.errors import ConfigError
from perfmodel.topology import Bottleneck, Link, LinkKind, NodeKind, Topology
from perfmodel.units import format_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE_SUFFIXES = (".svg", ".png", ".pdf")
MAX_HOSTS_DRAWN = 4
_PNG_DPI = 150
_GAP = 0.75  # least distance of two nodes in a row
_NIC_SHIFT = 0.35  # so that its line passes beside the host bridge, not through it

# Height of each kind of node: the network on top, NVLink at the bottom.
_ROW: Mapping[NodeKind, float] = {
    NodeKind.SPINE: 8.0,
    NodeKind.LEAF: 7.0,
    NodeKind.NIC: 6.0,
    NodeKind.NUMA: 5.0,
    NodeKind.HOST_BRIDGE: 4.0,
    NodeKind.PCIE_SWITCH: 3.0,
    NodeKind.GPU: 2.0,
    NodeKind.CPU: 2.0,
    NodeKind.LOOPBACK: 3.0,
    NodeKind.NVSWITCH: 0.6,
}
_FILL: Mapping[NodeKind, str] = {
    NodeKind.GPU: "#76b900",
    NodeKind.CPU: "#76b900",
    NodeKind.NVSWITCH: "#c8e69a",
    NodeKind.PCIE_SWITCH: "#dbe5f1",
    NodeKind.HOST_BRIDGE: "#eeeeee",
    NodeKind.NUMA: "#d9d9d9",
    NodeKind.NIC: "#f6c78f",
    NodeKind.LEAF: "#f3e2c7",
    NodeKind.SPINE: "#f3e2c7",
    NodeKind.LOOPBACK: "#eeeeee",
}
_COLOR: Mapping[str, str] = {
    "nvlink": "#4c8c00",
    "pcie": "#4472a8",
    "socket": "#8b1a1a",
    "infiniband": "#d07a00",
    "roce": "#d07a00",
    "tcp": "#d07a00",
    "loopback": "#777777",
}
_BOTTLENECK_COLOR = "#e00000"


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a node is drawn."""

    x: float
    y: float


def draw_topology(topology: Topology, path: Path, group: Sequence[int] = ()) -> None:
    """Draws the hosts of a machine (the first few of a large one) and marks the bottleneck link of `group`.

    Raises:
        ConfigError: matplotlib is not installed, the suffix is none of .svg, .png, .pdf, or the place cannot be written.
    """
    if path.suffix.lower() not in FIGURE_SUFFIXES:
        raise ConfigError(f"{path}: found suffix {path.suffix!r}, allowed {', '.join(FIGURE_SUFFIXES)}")
    figure_class = matplotlib_figure()
    spots = layout(topology)
    found = topology.bottleneck(group) if group else None
    width = max(spot.x for spot in spots.values()) - min(spot.x for spot in spots.values())
    figure = figure_class(figsize=(max(6.0, 1.0 + width), 7.0))
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.93))
    axes.set_axis_off()
    _draw_links(axes, topology, spots, found)
    _draw_nodes(axes, topology, spots)
    hosts = len(topology.hosts())
    shown = f", the first {MAX_HOSTS_DRAWN} of {hosts} hosts" if hosts > MAX_HOSTS_DRAWN else ""
    axes.set_title(f"{topology.name}: {topology.n_ranks} ranks{shown}")
    save(figure, path)


def matplotlib_figure() -> type[Figure]:
    """The Figure class of matplotlib, set so that equal figures are equal bytes. Raises ConfigError without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure as FigureClass
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib: pip install 'perfmodel[plot]'") from error
    # Same input, same bytes: fixed ids and no date (see _save); text stays text.
    matplotlib.rcParams.update({"svg.hashsalt": "perfmodel", "svg.fonttype": "none"})
    return FigureClass


def save(figure: Figure, path: Path) -> None:
    """Writes a figure whole or not at all. Raises ConfigError if the place cannot be written."""
    suffix = path.suffix.lower()
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=suffix)
        os.close(handle)
    except OSError as error:
        raise ConfigError(f"{path}: cannot write: {error.strerror}") from error
    try:
        figure.savefig(name, metadata=metadata, dpi=_PNG_DPI)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def drawn_kinds(topology: Topology) -> dict[str, NodeKind]:
    """Nodes to draw: those of the first hosts and the network above them; host memory is left out."""
    graph = topology.graph
    kinds: dict[str, NodeKind] = {}
    for name, data in graph.nodes(data=True):
        owner = name.partition("/")[0]
        first = int(owner[1:].partition("-")[0]) if owner != "net" else 0
        if first < MAX_HOSTS_DRAWN and data["kind"] in _ROW:
            kinds[name] = data["kind"]
    return {name: kind for name, kind in kinds.items() if kind is not NodeKind.LEAF or _touches(topology, name, kinds)}


def _touches(topology: Topology, leaf: str, kinds: Mapping[str, NodeKind]) -> bool:
    return any(kinds.get(other) is NodeKind.NIC for other in topology.graph.successors(leaf))


def layout(topology: Topology) -> dict[str, Spot]:
    """Ranks side by side, host after host; every other node over the middle of what hangs below it, kept apart."""
    kinds = drawn_kinds(topology)
    spots: dict[str, Spot] = {}
    x = 0.0
    for members in topology.hosts()[:MAX_HOSTS_DRAWN]:
        for index, rank in enumerate(members):
            spots[topology.ranks[rank].node] = Spot(x + index, _ROW[NodeKind.GPU])
        home = topology.ranks[members[0]].node.partition("/")[0]
        rows = Counter(kind for name, kind in kinds.items() if name.partition("/")[0] == home)
        x += max(len(members), _GAP * max(rows.values())) + 0.8
    order = (
        NodeKind.LOOPBACK,
        NodeKind.NVSWITCH,
        NodeKind.PCIE_SWITCH,
        NodeKind.HOST_BRIDGE,
        NodeKind.NUMA,
        NodeKind.NIC,
        NodeKind.LEAF,
        NodeKind.SPINE,
    )
    for kind in order:
        _place_row(topology, [name for name, found in kinds.items() if found is kind], kind, spots)
    return spots


def _place_row(topology: Topology, names: Sequence[str], kind: NodeKind, spots: dict[str, Spot]) -> None:
    wanted = []
    deeper = topology.graph
    for name in names:
        near = [spots[other].x for other in deeper.predecessors(name) if other in spots]
        wanted.append((sum(near) / len(near) if near else _after(spots, name), name))
    wanted.sort()
    last = float("-inf")
    levels: dict[str, int] = _switch_depth(topology, names) if kind is NodeKind.PCIE_SWITCH else {}
    for x, name in wanted:
        place = x if levels else max(x, last + _GAP)
        last = place
        spots[name] = Spot(
            place + (_NIC_SHIFT if kind is NodeKind.NIC else 0.0), _ROW[kind] + 0.45 * levels.get(name, 0)
        )


def _after(spots: Mapping[str, Spot], name: str) -> float:
    """Right of what the same host already has."""
    host = name.partition("/")[0] + "/"
    return max((spot.x for other, spot in spots.items() if other.startswith(host)), default=0.0)


def _switch_depth(topology: Topology, names: Iterable[str]) -> dict[str, int]:
    """1 for a PCIe switch with switches below it, 0 for the others."""
    graph = topology.graph
    switches = set(names)
    return {
        name: int(
            any(other in switches for other in graph.successors(name))
            and any(graph.nodes[other]["kind"] is NodeKind.HOST_BRIDGE for other in graph.successors(name))
        )
        for name in names
    }


def _color(kind: LinkKind) -> str:
    return _COLOR[kind.rstrip("123456")]


def _draw_links(axes: Axes, topology: Topology, spots: Mapping[str, Spot], found: Bottleneck | None) -> None:
    drawn: dict[tuple[LinkKind, int], Link] = {}
    limit = {found.link.source, found.link.target} if found else set()
    for source, target, data in topology.graph.edges(data=True):
        if source >= target or source not in spots or target not in spots:
            continue
        link: Link = data["link"]
        drawn.setdefault((link.kind, link.n_lanes), link)
        marked = {source, target} == limit
        color = _BOTTLENECK_COLOR if marked else _color(link.kind)
        width = 3.5 if marked else 0.8 + 0.35 * min(link.n_lanes, 12 if link.kind.startswith("nvlink") else 4)
        _draw_link(axes, spots[source], spots[target], color, width)
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=_color(link.kind), label=f"{kind} x{lanes}: {format_rate(link.bandwidth_bytes_per_s)}")
        for (kind, lanes), link in sorted(drawn.items())
    ]
    if found:
        label = f"bottleneck {found.link.name}"
        handles.append(Line2D([], [], color=_BOTTLENECK_COLOR, linewidth=3.5, label=label))
    axes.legend(handles=handles, loc="upper left", fontsize=7, frameon=False, ncols=max(1, len(handles) // 3))


def _draw_link(axes: Axes, first: Spot, second: Spot, color: str, width: float) -> None:
    """A straight line, or an arc where both ends stand in one row: below the GPUs, above the others."""
    if first.y != second.y:
        axes.plot([first.x, second.x], [first.y, second.y], color=color, linewidth=width, zorder=1)
        return
    from matplotlib.patches import Arc

    span = abs(first.x - second.x)
    middle = (first.x + second.x) / 2
    below = first.y == _ROW[NodeKind.GPU]
    height = min(0.5 + 0.35 * span, 3.2) if below else 1.0
    start = 180 if below else 0
    arc = Arc((middle, first.y), span, height, theta1=start, theta2=start + 180, color=color, linewidth=width, zorder=1)
    axes.add_patch(arc)


def _draw_nodes(axes: Axes, topology: Topology, spots: Mapping[str, Spot]) -> None:
    rank_of = {place.node: place.rank for place in topology.ranks}
    for name, spot in spots.items():
        kind: NodeKind = topology.graph.nodes[name]["kind"]
        short = name.partition("/")[2]
        text = f"{short}\nrank {rank_of[name]}" if name in rank_of else short
        box = {"boxstyle": "round,pad=0.25", "facecolor": _FILL[kind], "edgecolor": "#555555", "linewidth": 0.6}
        axes.text(spot.x, spot.y, text, ha="center", va="center", fontsize=6.5, bbox=box, zorder=2)
    left, right = min(spot.x for spot in spots.values()), max(spot.x for spot in spots.values())
    top, bottom = max(spot.y for spot in spots.values()), min(spot.y for spot in spots.values())
    axes.set_xlim(left - 0.7, right + 0.7)
    axes.set_ylim(min(bottom, _ROW[NodeKind.NVSWITCH]) - 0.5, top + 1.2)


def topology_json(topology: Topology) -> dict[str, Any]:
    """What a machine is, in plain values; SI units."""
    return {
        "name": topology.name,
        "fabric": topology.fabric,
        "fingerprint": topology.fingerprint,
        "n_ranks": topology.n_ranks,
        "gpus_per_host": topology.gpus_per_host,
        "gpus_per_nvlink_domain": topology.gpus_per_nvlink_domain,
        "n_rails": topology.n_rails,
        "hosts": [_ranges(members) for members in topology.hosts()],
        "nvlink_domains": [_ranges(members) for members in topology.domains()],
        "devices": sorted({place.device for place in topology.ranks}),
    }


def _ranges(ranks: Sequence[int]) -> str:
    """`0-7,9` of a sorted group."""
    parts: dict[int, list[int]] = defaultdict(list)
    for index, rank in enumerate(ranks):
        parts[rank - index].append(rank)
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts.values())


def pair_json(topology: Topology, source: int, target: int) -> dict[str, Any]:
    """One pair of ranks: path, bandwidth and latency, and its links."""
    info = topology.pair(source, target)
    return {
        "ranks": [source, target],
        "path": str(info.kind),
        "bandwidth_bytes_per_s": info.bandwidth_bytes_per_s if info.narrowest else None,
        "latency_s": info.latency_s,
        "links": [link_json(link) for link in info.links],
    }


def link_json(link: Link) -> dict[str, Any]:
    """One link; SI units."""
    return {
        "name": link.name,
        "kind": str(link.kind),
        "n_lanes": link.n_lanes,
        "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
        "raw_bandwidth_bytes_per_s": link.raw_bandwidth_bytes_per_s,
        "latency_s": link.latency_s,
    }


def bottleneck_json(found: Bottleneck) -> dict[str, Any]:
    """The limiting link of a group."""
    return {
        "link": link_json(found.link),
        "n_flows": found.n_flows,
        "pair": list(found.pair),
        "rank_bandwidth_bytes_per_s": found.rank_bandwidth_bytes_per_s,
    }
