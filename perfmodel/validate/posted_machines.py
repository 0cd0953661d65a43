"""Machines of posted nccl-tests tables: how people name them -> a shipped topology with its NICs.

A table whose machine is not told well enough to build (unknown NICs, AMD GPUs, virtual machines) has none and is left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Nics:
    """Cards of a node where they differ from the topology's: number, kind, rate, latency of a port (text)."""

    count: int
    kind: str
    bandwidth: str
    latency: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A shipped topology, cut or extended to `nodes` nodes, of which `per_node` ranks of each take part."""

    topology: str
    nodes: int = 1
    per_node: int = 8
    nics: Nics | None = None
    env: tuple[tuple[str, str], ...] = ()


_EFA_400 = Nics(count=8, kind="roce", bandwidth="400 Gbit/s", latency="7.5 us")
_ROCE_400 = Nics(count=8, kind="roce", bandwidth="400 Gbit/s")
# First match wins. The cards are those that the tables' own text gives.
_MACHINES: tuple[tuple[str, str, Nics | None], ...] = (
    (r"p5\.48xlarge", "aws_p5", None),
    (r"p4de", "aws_p4de", None),
    (r"p4d", "aws_p4d", None),
    (r"p6-b200", "dgx_b200", _EFA_400),
    (r"a3-ultragpu", "dgx_h200", _ROCE_400),
    (r"a3-mega", "dgx_h100", Nics(count=8, kind="tcp", bandwidth="200 Gbit/s")),
    (r"a3-high", "dgx_h100", Nics(count=4, kind="tcp", bandwidth="200 Gbit/s")),
    (r"BM\.GPU\.H100", "dgx_h100", _ROCE_400),
    (r"GB200 NVL72", "gb200_nvl72", None),
    (r"CoreWeave H100|Supermicro AS-8125GS|8x H100 SXM", "dgx_h100", None),
    (r"H200 node", "dgx_h200", None),
    (r"A100-SXM4|A100 SXM|DGX A100", "dgx_a100_80gb", None),
    (r"8 nodes x 8x V100, one 100Gb IB", "cluster_8xv100_1nic", None),
    (r"8x V100", "dgx1_v100", None),
)


def posted_machine(text: str, links: str, n_ranks: int, nodes: int) -> Machine | None:
    """The machine that a table's `machine` and `link_type` columns describe; None if they leave it open.

    >>> posted_machine("AWS p5.48xlarge (8x H100)", "NVLink4+NVSwitch intra", 16, 2).topology
    'aws_p5'
    """
    found = next(((name, nics) for pattern, name, nics in _MACHINES if re.search(pattern, text)), None)
    if found is None or n_ranks % nodes:
        return None
    forced = "Ring forced" in links or "(Ring)" in links
    return Machine(
        topology=found[0],
        nodes=nodes,
        per_node=n_ranks // nodes,
        nics=found[1] if nodes > 1 else None,
        env=(("NCCL_NVLS_ENABLE", "0"),) if forced else (),
    )
