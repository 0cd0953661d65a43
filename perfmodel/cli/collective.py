"""`perfmodel collective`: predicted collectives, printed as nccl-tests prints them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from perfmodel.errors import ConfigError

if TYPE_CHECKING:
    from perfmodel.collectives import CollectiveEstimate

JSON_SCHEMA_VERSION = 1


@click.command(epilog="Example: perfmodel collective --topo dgx_a100 --op all_reduce --sizes 1K:8G --group 0-7")
@click.option("--topo", "topology", required=True, help="Topology: shipped name or file.")
@click.option("--nodes", type=int, help="Use this many nodes of the topology's kind.")
@click.option("--op", default="all_reduce", show_default=True, help="Collective.")
@click.option(
    "--sizes", default="1K:1G", show_default=True, help="First:last[:factor], or a list 4K,1M. K, M, G are 1024s."
)
@click.option("--group", default="all", show_default=True, help="Ranks such as 0-3,8.")
@click.option("--dtype", default="float32", show_default=True, help="Element type.")
@click.option("--algo", help="Force ring, tree, nvls or nvls_tree, as NCCL_ALGO does.")
@click.option("--proto", help="Force ll, ll128 or simple, as NCCL_PROTO does.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def collective(topology: str, *, nodes: int | None, op: str, as_json: bool, **options: str | None) -> None:
    """Predict a collective over a range of sizes: time, algorithm and bus bandwidth.

    Sizes follow nccl-tests: all_gather the total received, reduce_scatter the total sent, all_to_all the send buffer of one
    rank.
    """
    from perfmodel.collectives import CollectiveCall, estimate_collective
    from perfmodel.config import load_topology
    from perfmodel.topology import build_topology
    from perfmodel.topology.ranks import parse_ranks

    sizes = parse_sizes(options["sizes"] or "")
    spec = load_topology(topology)
    machine = build_topology(spec if nodes is None else spec.with_nodes(nodes))
    ranks = parse_ranks(options["group"] or "all", machine.n_ranks, "--group")
    if len(ranks) < 2:
        raise ConfigError(f"--group: found {len(ranks)} rank, allowed 2 or more: a rank alone exchanges nothing")
    dtype = options["dtype"] or "float32"
    if op == "all_to_all_v":
        raise ConfigError("--op: all_to_all_v needs a matrix of sizes: call perfmodel.collectives from Python")
    found = [
        estimate_collective(
            CollectiveCall(op=op, bytes=size, ranks=ranks, dtype=dtype),
            machine,
            algo=options["algo"],
            proto=options["proto"],
        )
        for size in sizes
    ]
    head = {"topology": machine.name, "op": op, "ranks": list(ranks), "dtype": dtype, "fabric": machine.fabric}
    if as_json:
        rows = [_as_json(size, estimate) for size, estimate in zip(sizes, found, strict=True)]
        click.echo(json.dumps({"schema_version": JSON_SCHEMA_VERSION, **head, "rows": rows}, indent=2))
    else:
        click.echo(_table(f"{machine.name}, {op}, {len(ranks)} ranks, {dtype}, fabric {machine.fabric}", sizes, found))


def parse_sizes(text: str) -> tuple[int, ...]:
    """Bytes from `1K:8G` (doubling), `1M:1G:4` (a factor) or `4K,1M`; K, M, G are powers of 1024 as in nccl-tests.

    Raises ConfigError for anything else.

    >>> parse_sizes("1K:4K"), parse_sizes("512,1M")
    ((1024, 2048, 4096), (512, 1048576))
    """
    if ":" not in text:
        return tuple(_size(part) for part in text.split(","))
    parts = text.split(":")
    if len(parts) > 3:
        raise ConfigError(f"--sizes: found {text!r}, allowed first:last or first:last:factor, such as 1K:8G")
    low, high = _size(parts[0]), _size(parts[1])
    factor = int(parts[2]) if len(parts) == 3 and parts[2].isdecimal() else 2 if len(parts) == 2 else 0
    if factor < 2 or not 0 < low <= high:
        raise ConfigError(
            f"--sizes: found {text!r}, allowed first:last[:factor] with first <= last and a factor from 2"
        )
    sizes = [low]
    while sizes[-1] * factor <= high:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


def _size(text: str) -> int:
    from perfmodel.units import parse_bytes

    stripped = text.strip()
    suffix = stripped[-1:].upper()
    try:
        if suffix in ("K", "M", "G", "T"):
            return parse_bytes(f"{stripped[:-1]} {suffix}iB")
        return parse_bytes(stripped if not stripped.isdecimal() else f"{stripped} B")
    except ValueError as error:
        raise ConfigError(f"--sizes: found {text!r}, allowed a size such as 512, 4K, 64M or 8G") from error


def _table(head: str, sizes: Sequence[int], found: Sequence[CollectiveEstimate]) -> str:
    """Columns of nccl-tests, then the range and why."""
    from perfmodel.units import GIGA, US_PER_S

    lines = [
        f"# {head}",
        f"#{'size':>13s}{'time':>12s}{'algbw':>9s}{'busbw':>9s}{'low':>12s}{'high':>12s}  algorithm",
        f"#{'(B)':>13s}{'(us)':>12s}{'(GB/s)':>9s}{'(GB/s)':>9s}{'(us)':>12s}{'(us)':>12s}  protocol, price source, link",
    ]
    for size, e in zip(sizes, found, strict=True):
        low, time, high = (value * US_PER_S for value in (e.low_s, e.time_s, e.high_s))
        algbw, busbw = e.algbw_bytes_per_s / GIGA, e.busbw_bytes_per_s / GIGA
        why = " ".join(word for word in (e.algorithm, e.protocol, e.source.label, e.bottleneck) if word != "none")
        lines.append(f"{size:14d}{time:12.2f}{algbw:9.2f}{busbw:9.2f}{low:12.2f}{high:12.2f}  {why}")
    return "\n".join(lines)


def _as_json(size: int, e: CollectiveEstimate) -> dict[str, object]:
    return {
        "bytes": size,
        "time_s": e.time_s,
        "low_s": e.low_s,
        "high_s": e.high_s,
        "algbw_bytes_per_s": e.algbw_bytes_per_s,
        "busbw_bytes_per_s": e.busbw_bytes_per_s,
        "algorithm": e.algorithm,
        "protocol": e.protocol,
        "n_channels": e.n_channels,
        "latency_s": e.latency_s,
        "bandwidth_s": e.bandwidth_s,
        "bottleneck": e.bottleneck,
        "source": e.source.label,
    }
