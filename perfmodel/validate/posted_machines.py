"""Machines of posted nccl-tests tables: how people name them -> a shipped topology with its NICs.

A table whose machine is not told well enough to build (unknown NICs, AMD GPUs, virtual machines) has none and is left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NO_GPUDIRECT, SOCKET, SLOW = "no GPUDirect", "one TCP socket", "healthy, though posted as slow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nics:
    """Cards of a node where they differ from the topology's: number, kind, rate, latency of a port (text)."""

    count: int
    kind: str
    bandwidth: str
    latency: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A shipped topology, cut or extended to `nodes` nodes, of which `per_node` ranks of each take part.

    `every` takes each second (third, ...) GPU of a node; `assumed` says what the source leaves open and we suppose.
    """

    topology: str
    nodes: int = 1
    per_node: int = 8
    nics: Nics | None = None
    env: tuple[tuple[str, str], ...] = ()
    every: int = 1
    assumed: str = ""

    @property
    def typical(self) -> bool:
        """False where bytes go through host memory, or the source calls it slow: no transport is fitted on such a machine."""
        return not any(word in self.assumed for word in (NO_GPUDIRECT, SOCKET, SLOW))

    @property
    def title(self) -> str:
        """Topology, nodes x ranks of each, and cards where they are not the topology's own; `*`: partly assumed."""
        cards = f" {self.nics.count}x {self.nics.kind} {self.nics.bandwidth}" if self.nics else ""
        return f"{self.topology} {self.nodes}x{self.per_node}{cards}{'*' if self.assumed else ''}"


TCPX_LATENCY = "450 us"
_EFA = "7.5 us"  # a port, as in the aws_* topologies
_EFA_NO_GPUDIRECT = Nics(count=1, kind="roce", bandwidth="24 Gbit/s", latency=_EFA)
ROCE_100 = Nics(count=1, kind="roce", bandwidth="100 Gbit/s")
_ROCE_400 = Nics(count=8, kind="roce", bandwidth="400 Gbit/s")
# NCCL drives one socket with one thread (NCCL_SOCKET_NTHREADS, NCCL user guide), which gets about 25 Gbit/s.
SOCKET_25 = Nics(count=1, kind="tcp", bandwidth="25 Gbit/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """A pattern of the `machine` column and what it stands for."""

    pattern: str
    topology: str
    nics: Nics | None = None
    every: int = 1
    assumed: str = ""


# First match wins. The cards are those that the tables' own text gives, or what `assumed` says.
_MACHINES = (
    _Named(pattern=r"p5\.48xlarge", topology="aws_p5"),
    _Named(pattern=r"p4de", topology="aws_p4de"),
    _Named(pattern=r"p4d.*reported as slow", topology="aws_p4d", assumed=SLOW),
    _Named(pattern=r"p4d", topology="aws_p4d"),
    _Named(pattern=r"p6-b200", topology="aws_p6_b200"),
    _Named(pattern=r"a3-ultragpu", topology="dgx_h200", nics=_ROCE_400),
    _Named(pattern=r"a3-mega", topology="dgx_h100", nics=Nics(count=8, kind="tcp", bandwidth="200 Gbit/s")),
    _Named(
        pattern=r"a3-high",
        topology="dgx_h100",
        nics=Nics(count=4, kind="tcp", bandwidth="200 Gbit/s", latency=TCPX_LATENCY),
        assumed="GPUDirect-TCPX: the table's own floor of 1 ms",
    ),
    _Named(pattern=r"BM\.GPU\.H100", topology="dgx_h100", nics=_ROCE_400),
    _Named(pattern=r"GB200 NVL72", topology="gb200_nvl72"),
    _Named(pattern=r"CoreWeave H100|Supermicro AS-8125GS|8x H100 SXM", topology="dgx_h100"),
    _Named(pattern=r"H200 node", topology="dgx_h200"),
    _Named(pattern=r"A100-SXM4|A100 SXM|DGX A100", topology="dgx_a100_80gb"),
    _Named(
        pattern=r"8 nodes x 8x V100, one 100Gb IB",
        topology="cluster_8xv100_1nic",
        nics=Nics(count=1, kind="infiniband", bandwidth="37 Gbit/s"),
        assumed=f"{NO_GPUDIRECT}: the table's own 4.4 GB/s a card",
    ),
    _Named(pattern=r"8x V100", topology="dgx1_v100"),
    _Named(
        pattern=r"GH200 per node, plugin missing",
        topology="dgx_h200",
        nics=SOCKET_25,
        assumed=f"4 of 8 GPUs of an H200 board; {SOCKET}",
    ),
    _Named(
        pattern=r"1x GH200 per node",
        topology="dgx_h200",
        nics=Nics(count=1, kind="roce", bandwidth="200 Gbit/s"),
        assumed="Slingshot taken for RoCE",
    ),
    _Named(pattern=r"1x L40S each", topology="pcie_8xl40s", nics=ROCE_100, assumed="one 100 Gbit/s card a host"),
    _Named(
        pattern=r"2x L40S each",
        topology="pcie_8xl40s",
        nics=ROCE_100,
        every=4,
        assumed="one 100 Gbit/s card a host",
    ),
    _Named(
        pattern=r"1x V100-SXM2-32GB each, EFA",
        topology="4xv100",
        nics=_EFA_NO_GPUDIRECT,
        assumed=f"{NO_GPUDIRECT}: the table's own 2.6 GB/s a card",
    ),
    _Named(pattern=r"2x V100-SXM2-16GB each", topology="4xv100", assumed="four-GPU boards, one EDR card"),
    _Named(
        pattern=r"4x A100-80GB PCIe, NVLink bridge", topology="pcie_8xa100_bridges", assumed="two sockets, not four"
    ),
    # A100-SXM4-40GB with four HDR cards (NVIDIA/nccl-tests issue 119).
    _Named(pattern=r"24 ranks \(3x8\)", topology="dgx_a100_80gb_4nic"),
    # "Theoretical 100 GB/s (25 GB/s per HDR)", A100-SXM4-80GB (NVIDIA/nccl-tests issue 152).
    _Named(pattern=r"2 nodes x 8 GPUs, ConnectX-6", topology="dgx_a100_80gb_4nic"),
)


def posted_machine(text: str, links: str, n_ranks: int, nodes: int) -> Machine | None:
    """The machine that a table's `machine` and `link_type` columns describe; None if they leave it open.

    >>> posted_machine("AWS p5.48xlarge (8x H100)", "NVLink4+NVSwitch intra", 16, 2).topology
    'aws_p5'
    """
    found = next((named for named in _MACHINES if re.search(named.pattern, text)), None)
    if found is None or n_ranks % nodes:
        return None
    forced = "Ring forced" in links or "(Ring)" in links
    return Machine(
        topology=found.topology,
        nodes=nodes,
        per_node=n_ranks // nodes,
        nics=found.nics if nodes > 1 else None,
        env=(("NCCL_NVLS_ENABLE", "0"),) if forced else (),
        every=found.every,
        assumed=found.assumed,
    )
