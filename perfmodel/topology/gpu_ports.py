"""What each GPU model can be joined by: NVLinks, PCIe generation, peer-to-peer over PCIe. Needed to read a matrix."""

from __future__ import annotations

from dataclasses import dataclass

from perfmodel.errors import TopologyError, suggest


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPorts:
    """Links of one GPU model.

    Attributes:
        nvlink_generation: 0 where it has none.
        n_nvlinks: links of one GPU.
        pcie_generation, pcie_lanes: of its edge or board connector.
        link_bandwidth: text, where a link is slower than its generation's (28.125 GB/s pairs on GA102), else None.
        pcie_p2p: whether the stock driver lets it write to its peers over PCIe.
    """

    nvlink_generation: int = 0
    n_nvlinks: int = 0
    pcie_generation: int
    pcie_lanes: int = 16
    link_bandwidth: str | None = None
    pcie_p2p: bool = True


# Four links at 14.0625 GB/s each way on GA102 (NVIDIA Ampere GA102 GPU Architecture, v2.1, 2020: 56.25 GB/s each way).
_GA102_LINK = "14.0625 GB/s"
# Source of each row: the model's NVIDIA datasheet or architecture paper. GeForce and TITAN boards since Turing have no PCIe
# peer-to-peer in the stock driver (the matrix of `nvidia-smi topo -p2p r` says NS or GNS); NVLink bridges still work.
GPU_PORTS: dict[str, GpuPorts] = {
    "p100_sxm2": GpuPorts(nvlink_generation=1, n_nvlinks=4, pcie_generation=3),
    "p100": GpuPorts(pcie_generation=3),
    "p4": GpuPorts(pcie_generation=3),
    "v100_pcie": GpuPorts(pcie_generation=3),
    "v100s": GpuPorts(pcie_generation=3),
    "v100": GpuPorts(nvlink_generation=2, n_nvlinks=6, pcie_generation=3),
    "t4": GpuPorts(pcie_generation=3),
    "titan_rtx": GpuPorts(nvlink_generation=2, n_nvlinks=2, pcie_generation=3, pcie_p2p=False),
    "rtx_2080_ti": GpuPorts(nvlink_generation=2, n_nvlinks=2, pcie_generation=3, pcie_p2p=False),
    "a100": GpuPorts(nvlink_generation=3, n_nvlinks=12, pcie_generation=4),
    "a800": GpuPorts(nvlink_generation=3, n_nvlinks=8, pcie_generation=4),
    "a30": GpuPorts(nvlink_generation=3, n_nvlinks=4, pcie_generation=4),
    "a40": GpuPorts(nvlink_generation=3, n_nvlinks=4, pcie_generation=4, link_bandwidth=_GA102_LINK),
    "a6000": GpuPorts(nvlink_generation=3, n_nvlinks=4, pcie_generation=4, link_bandwidth=_GA102_LINK),
    "a10": GpuPorts(pcie_generation=4),
    "a10g": GpuPorts(pcie_generation=4),
    "rtx_3090": GpuPorts(
        nvlink_generation=3, n_nvlinks=4, pcie_generation=4, link_bandwidth=_GA102_LINK, pcie_p2p=False
    ),
    "rtx_4090": GpuPorts(pcie_generation=4, pcie_p2p=False),
    "l4": GpuPorts(pcie_generation=4),
    "l40": GpuPorts(pcie_generation=4),
    "l40s": GpuPorts(pcie_generation=4),
    "h100_pcie": GpuPorts(nvlink_generation=4, n_nvlinks=12, pcie_generation=5),
    "h100_nvl": GpuPorts(nvlink_generation=4, n_nvlinks=12, pcie_generation=5),
    "h100": GpuPorts(nvlink_generation=4, n_nvlinks=18, pcie_generation=5),
    "h800": GpuPorts(nvlink_generation=4, n_nvlinks=8, pcie_generation=5),
    "h20": GpuPorts(nvlink_generation=4, n_nvlinks=18, pcie_generation=5),
    "h200": GpuPorts(nvlink_generation=4, n_nvlinks=18, pcie_generation=5),
    "gh200": GpuPorts(nvlink_generation=4, n_nvlinks=18, pcie_generation=5),
    "b200": GpuPorts(nvlink_generation=5, n_nvlinks=18, pcie_generation=5),
    "gb200": GpuPorts(nvlink_generation=5, n_nvlinks=18, pcie_generation=5),
    "b300": GpuPorts(nvlink_generation=5, n_nvlinks=18, pcie_generation=6),
    "gb300": GpuPorts(nvlink_generation=5, n_nvlinks=18, pcie_generation=6),
    "rtx_5090": GpuPorts(pcie_generation=5, pcie_p2p=False),
    "rtx_pro_6000": GpuPorts(pcie_generation=5),
}


def gpu_ports(device: str) -> GpuPorts:
    """Links of a GPU by the name of its device: the longest known beginning counts.

    Raises:
        TopologyError: an unknown model, with the nearest known one.

    >>> gpu_ports("h100_pcie").n_nvlinks, gpu_ports("h100_sxm").n_nvlinks
    (12, 18)
    """
    parts = device.lower().replace("-", "_").replace(" ", "_").split("_")
    for length in range(len(parts), 0, -1):
        found = GPU_PORTS.get("_".join(parts[:length]))
        if found:
            return found
    raise TopologyError(f"GPU model: found {device!r}, allowed {', '.join(GPU_PORTS)}{suggest(device, GPU_PORTS)}")
