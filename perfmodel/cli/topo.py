"""`perfmodel topo import|show`: machines from `nvidia-smi`, and pictures of machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perfmodel.errors import ConfigError, MissingCalibrationError

if TYPE_CHECKING:
    from perfmodel.topology import Topology

JSON_SCHEMA_VERSION = 1


@click.group()
def topo() -> None:
    """Import, show and draw topologies."""


@topo.command(name="import", epilog="Example: nvidia-smi topo -m | perfmodel topo import - --gpu h100_sxm > box.yaml")
@click.argument("matrix", type=click.Path(dir_okay=False, allow_dash=True))
@click.option("--gpu", "device", required=True, help="GPU model: the matrix does not name it.")
@click.option("--p2p", "p2p_path", type=click.Path(dir_okay=False), help="Text of `nvidia-smi topo -p2p r`.")
@click.option("--nic", "nic_kind", help="infiniband_edr, _hdr, _ndr, _xdr, infiniband, roce or tcp.")
@click.option("--nic-rate", help="Line rate of a NIC, such as 100 Gbit/s, where --nic does not say it.")
@click.option("--name", default="imported", show_default=True, help="Name of the topology.")
@click.option("--nodes", type=int, default=1, show_default=True, help="Number of such hosts.")
@click.option("--out", "out_path", type=click.Path(dir_okay=False), help="Write here instead of to stdout.")
def import_command(matrix: str, *, device: str, nodes: int, out_path: str | None, **options: str | None) -> None:
    """Turn the text of `nvidia-smi topo -m` (MATRIX, or - for stdin) into a topology file.

    What the matrix cannot tell stands in comments above the result, and on stderr.
    """
    from perfmodel.config.topology_text import dump_topology
    from perfmodel.report.write import write_text
    from perfmodel.topology.import_smi import NicChoice, import_smi

    p2p_path = options["p2p_path"]
    imported = import_smi(
        _read(matrix),
        device=_database_name(device),
        name=options["name"] or "imported",
        p2p_text=_read(p2p_path) if p2p_path else None,
        nic=NicChoice(kind=options["nic_kind"], bandwidth=options["nic_rate"]) if options["nic_kind"] else None,
    )
    text = dump_topology(imported.spec.with_nodes(nodes), imported.notes)
    for note in imported.notes:
        click.echo(f"note: {note}", err=True)
    if out_path is None:
        click.echo(text, nl=False)
    else:
        write_text(Path(out_path), text)


def _database_name(device: str) -> str:
    """The device's name in the database; as given for a GPU whose links are known but whose speed is not."""
    from perfmodel.db import resolve_device
    from perfmodel.topology.gpu_ports import gpu_ports

    try:
        return resolve_device(device)
    except MissingCalibrationError as error:
        gpu_ports(device)
        click.echo(f"note: {str(error).split(',')[0]}: links are known, kernel times are not", err=True)
        return device


def _read(path: str) -> str:
    try:
        with click.open_file(path, encoding="utf-8") as file:
            return str(file.read())
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: found bytes that are no UTF-8 text, allowed what nvidia-smi prints") from error


@topo.command(name="show", epilog="Example: perfmodel topo show dgx1_v100 --pair 0,5 --group 0-7 --figure dgx1.svg")
@click.argument("topology")
@click.option("--nodes", type=int, help="Use this many nodes of the topology's kind.")
@click.option("--pair", "pairs", multiple=True, help="Two ranks such as 0,5: their path, bandwidth and latency.")
@click.option("--group", help="Ranks such as 0-3,8: the link that limits them.")
@click.option("--figure", type=click.Path(dir_okay=False), help="Draw into this .svg, .png or .pdf file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def show_command(topology: str, *, nodes: int | None, figure: str | None, as_json: bool, **options: Any) -> None:
    """Draw TOPOLOGY (shipped name or file) as a matrix of paths, bandwidths and latencies."""
    from perfmodel.config import load_topology
    from perfmodel.topology import build_topology
    from perfmodel.topology.ranks import parse_ranks

    spec = load_topology(topology)
    machine = build_topology(spec if nodes is None else spec.with_nodes(nodes))
    pairs = [_pair(text, machine.n_ranks) for text in options["pairs"]]
    group = parse_ranks(options["group"], machine.n_ranks, "--group") if options["group"] else ()
    if figure is not None:
        from perfmodel.report.topology import draw_topology

        draw_topology(machine, Path(figure), group=group)
    if as_json:
        click.echo(json.dumps(_as_json(machine, pairs, group), indent=2))
    else:
        click.echo(_as_text(machine, pairs, group), nl=False)


def _pair(text: str, n_ranks: int) -> tuple[int, int]:
    from perfmodel.topology.ranks import parse_ranks

    ranks = parse_ranks(text, n_ranks, "--pair")
    if len(ranks) != 2:
        raise ConfigError(f"--pair: found {text!r}, allowed two ranks such as 0,5")
    return ranks[0], ranks[1]


def _as_text(machine: Topology, pairs: Sequence[tuple[int, int]], group: Sequence[int]) -> str:
    from perfmodel.topology.draw import render_bottleneck, render_matrix, render_pair

    head = f"{machine.name}: {machine.n_ranks} ranks on {len(machine.hosts())} hosts, fabric {machine.fabric}\n\n"
    parts = [render_pair(machine, *pair) for pair in pairs]
    parts += [render_bottleneck(machine, group)] if group else []
    return head + ("\n".join(parts) if parts else render_matrix(machine))


def _as_json(machine: Topology, pairs: Sequence[tuple[int, int]], group: Sequence[int]) -> dict[str, Any]:
    from perfmodel.report.topology import bottleneck_json, pair_json, topology_json

    found = machine.bottleneck(group) if group else None
    return {
        "schema_version": JSON_SCHEMA_VERSION,
        "topology": topology_json(machine),
        "pairs": [pair_json(machine, *pair) for pair in pairs],
        "bottleneck": bottleneck_json(found) if found else None,
    }
