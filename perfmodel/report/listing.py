"""Rows for the lists of shipped models, topologies and devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO

from perfmodel.config import ModelSpec
from perfmodel.db.device import Device
from perfmodel.estimate import Source
from perfmodel.topology import Topology
from perfmodel.units import format_bytes, format_flops_per_s, format_rate


def model_row(name: str, spec: ModelSpec) -> dict[str, str]:
    """One shipped model: name, kind, batch per rank, precision, optimizer."""
    return {
        "name": name,
        "kind": getattr(spec, "architecture", spec.kind),
        "batch": str(spec.batch_size),
        "precision": spec.precision,
        "optimizer": spec.optimizer.name,
    }


def topology_row(topology: Topology, name: str) -> dict[str, str]:
    """One shipped topology: name, ranks, nodes, devices, collective fabric."""
    return {
        "name": name,
        "ranks": str(topology.n_ranks),
        "nodes": str(len(topology.hosts())),
        "device": ", ".join(sorted({place.device for place in topology.ranks})),
        "fabric": topology.fabric,
    }


def device_row(device: Device) -> dict[str, str]:
    """One device: name, memory, bandwidth, fastest dense rate, calibrated families."""
    fastest = max(device.peak_flops_per_s, key=lambda pipe: device.peak_flops_per_s[pipe])
    return {
        "name": device.name,
        "memory": format_bytes(device.memory_bytes),
        "bandwidth": format_rate(device.memory_bytes_per_s),
        "peak": f"{format_flops_per_s(device.peak_flops_per_s[fastest])} {fastest}",
        "fitted": _families(device, own=True),
        "derived": _families(device, own=False),
    }


def _families(device: Device, *, own: bool) -> str:
    """Families whose fit comes from measurements of this device (`own`), or from the nearest measured one."""
    names = sorted(name for name, fit in device.fits.items() if (fit.source is Source.FITTED) == own)
    return ", ".join(names) or "-"


def render_rows(rows: Sequence[dict[str, str]], width: int = 140) -> str:
    """Rows of equal keys as a plain text table."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in rows[0] if rows else ():
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    buffer = StringIO()
    Console(file=buffer, width=width, no_color=True, highlight=False).print(table)
    return buffer.getvalue()


def render_markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of equal keys as a Markdown table; empty text for no rows."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
