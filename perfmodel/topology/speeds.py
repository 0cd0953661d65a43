"""Rates and latencies of each kind of link, with their sources.

`raw` is the datasheet's rate less line coding, one direction; `delivered` is what a large NCCL transfer gets through.
Both are per lane (NVLink: per link). The delivered figures are defaults for a box nobody has measured: a topology file
may give its own, and collective fits replace them.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfmodel.topology.link import LinkKind
from perfmodel.units import parse_bytes_per_s as rate
from perfmodel.units import parse_seconds as seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """Per lane and direction: rates in bytes per second, latency of the whole link in seconds."""

    raw_bytes_per_s: float
    delivered_bytes_per_s: float
    latency_s: float


# First-byte latency of one GPU-to-GPU NVLink hop: NCCL's LL ring constant, 0.6 us (nccl src/graph/tuning.cc, hwLat
# NVLINK). LL polls a flag beside the data, so the constant is close to what the wire and the two ends cost.
NVLINK_HOP_S = seconds("0.6 us")
# A route through a switch has two links; each carries half of the hop.
NVSWITCH_LINK_S = NVLINK_HOP_S / 2
# One PCIe peer-to-peer path, 1.0 us (the same table, PCI): four links (GPU, root port, root port, GPU) of 0.25 us.
PCIE_LINK_S = seconds("0.25 us")
# Crossing sockets adds about 0.1-0.15 us to a load (Intel Memory Latency Checker, local against remote, Xeon Scalable).
SOCKET_LINK_S = seconds("0.15 us")
# One pass through host memory: DRAM write and read, about 0.1 us each (same tool, idle latency).
MEMORY_LINK_S = seconds("0.1 us")
# One message between two hosts by RDMA, 2.7 us (hwLat NET, ring LL): NIC out, switch, NIC in and the proxy thread.
# A switch takes 0.13 us of it (NVIDIA QM8700 and QM9700 datasheets), the rest is split between the two NICs.
RDMA_MESSAGE_S = seconds("2.7 us")
SWITCH_S = seconds("0.13 us")
NIC_LINK_S = (RDMA_MESSAGE_S - SWITCH_S) / 2
# A TCP message through two kernels, about 15 us one way in a data centre (half of a 30 us netperf TCP_RR round trip).
TCP_NIC_LINK_S = seconds("7.5 us")

# NVLink, per link. Raw: NVIDIA V100, A100, H100 and Blackwell architecture papers (20, 25, 25, 25, 50 GB/s each way).
# Delivered: bus bandwidth of a large ring all-reduce with every link busy, divided by the links of a GPU:
# V100 135.5/6 (OCI, 1 GiB), A100 232/12 (10 GiB, DGX A100), H200 365.6/18 and B200 682.2/18 (8 GiB, ring forced,
# ml-engineering network notes). NVLink 1: nccl src/graph/topo.h, SM60_NVLINK_BW.
NVLINK: dict[int, LinkSpeed] = {
    1: LinkSpeed(raw_bytes_per_s=rate("20 GB/s"), delivered_bytes_per_s=rate("18 GB/s"), latency_s=NVLINK_HOP_S),
    2: LinkSpeed(raw_bytes_per_s=rate("25 GB/s"), delivered_bytes_per_s=rate("22.6 GB/s"), latency_s=NVLINK_HOP_S),
    3: LinkSpeed(raw_bytes_per_s=rate("25 GB/s"), delivered_bytes_per_s=rate("19.3 GB/s"), latency_s=NVLINK_HOP_S),
    4: LinkSpeed(raw_bytes_per_s=rate("25 GB/s"), delivered_bytes_per_s=rate("20.3 GB/s"), latency_s=NVLINK_HOP_S),
    5: LinkSpeed(raw_bytes_per_s=rate("50 GB/s"), delivered_bytes_per_s=rate("37.9 GB/s"), latency_s=NVLINK_HOP_S),
}

# PCIe, per lane. Raw: PCI-SIG, 8/16/32 GT/s with 128b/130b coding; 64 GT/s PAM4 with 242 of 256 bytes of a flit.
# Delivered: 0.83 of raw, 13.1, 26.2 and 52 GB/s on x16 of generations 3, 4, 5: pinned copies of CUDA's bandwidthTest on V100,
# A100 and H100. Packets of 256 bytes with 26 of header and framing allow 0.91, flow control takes the rest.
PCIE_DELIVERED_FRAC = 0.83
_PCIE_RAW = {
    3: rate("8 Gbit/s") * 128 / 130,
    4: rate("16 Gbit/s") * 128 / 130,
    5: rate("32 Gbit/s") * 128 / 130,
    6: rate("64 Gbit/s") * 242 / 256,
}
PCIE: dict[int, LinkSpeed] = {
    generation: LinkSpeed(raw_bytes_per_s=raw, delivered_bytes_per_s=raw * PCIE_DELIVERED_FRAC, latency_s=PCIE_LINK_S)
    for generation, raw in _PCIE_RAW.items()
}

# Between sockets, one direction, GPU traffic: nccl src/graph/topo.h (BDW_QPI_BW, SKL_QPI_BW, SRP_QPI_BW, ERP_QPI_BW,
# AMD_ZEN*_BW). Raw: Xeon UPI links at 9.6, 10.4, 16 and 20 GT/s, times 2 to 4 links, 2 bytes a transfer; EPYC xGMI: 4
# x16 links at 16 (Rome), 18 (Milan) and 32 GT/s (Turin).
SOCKET: dict[str, LinkSpeed] = {
    "qpi": LinkSpeed(raw_bytes_per_s=rate("38.4 GB/s"), delivered_bytes_per_s=rate("6 GB/s"), latency_s=SOCKET_LINK_S),
    "upi": LinkSpeed(raw_bytes_per_s=rate("41.6 GB/s"), delivered_bytes_per_s=rate("10 GB/s"), latency_s=SOCKET_LINK_S),
    "upi2": LinkSpeed(raw_bytes_per_s=rate("96 GB/s"), delivered_bytes_per_s=rate("22 GB/s"), latency_s=SOCKET_LINK_S),
    "upi3": LinkSpeed(raw_bytes_per_s=rate("120 GB/s"), delivered_bytes_per_s=rate("40 GB/s"), latency_s=SOCKET_LINK_S),
    "xgmi2": LinkSpeed(
        raw_bytes_per_s=rate("128 GB/s"), delivered_bytes_per_s=rate("16 GB/s"), latency_s=SOCKET_LINK_S
    ),
    "xgmi3": LinkSpeed(
        raw_bytes_per_s=rate("144 GB/s"), delivered_bytes_per_s=rate("24 GB/s"), latency_s=SOCKET_LINK_S
    ),
    "xgmi4": LinkSpeed(
        raw_bytes_per_s=rate("256 GB/s"), delivered_bytes_per_s=rate("32 GB/s"), latency_s=SOCKET_LINK_S
    ),
}

# Host memory of one NUMA node, reads and writes together: 8 channels of DDR4-3200 give 204.8 GB/s; STREAM gets 0.8.
HOST_MEMORY_BYTES_PER_S = rate("160 GB/s")

# Share of a NIC's line rate that RDMA payload gets: ib_write_bw of 1 MiB at HDR and NDR, 0.97-0.99 (MTU 4096); RoCE
# carries Ethernet, IP and UDP headers on each packet, and its congestion control; TCP about 0.90 (iperf3, MTU 9000).
NIC_DELIVERED_FRAC: dict[LinkKind, float] = {LinkKind.INFINIBAND: 0.97, LinkKind.ROCE: 0.94, LinkKind.TCP: 0.90}
NIC_LATENCY_S: dict[LinkKind, float] = {
    LinkKind.INFINIBAND: NIC_LINK_S,
    LinkKind.ROCE: NIC_LINK_S,
    LinkKind.TCP: TCP_NIC_LINK_S,
}
# Line rate by common name.
NIC_RATES: dict[str, tuple[LinkKind, float]] = {
    "infiniband_edr": (LinkKind.INFINIBAND, rate("100 Gbit/s")),
    "infiniband_hdr": (LinkKind.INFINIBAND, rate("200 Gbit/s")),
    "infiniband_ndr": (LinkKind.INFINIBAND, rate("400 Gbit/s")),
    "infiniband_xdr": (LinkKind.INFINIBAND, rate("800 Gbit/s")),
}
