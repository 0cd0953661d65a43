"""The name under which collective fits of a machine's links are kept."""

from __future__ import annotations

import re

from perfmodel.config.topology import NodeSpec, TopologySpec

# Parts of a device's name that say how it is packaged, not which chip it is: links depend on the chip.
_PACKAGING = re.compile(r"sxm\d?|pcie|nvl|oam|\d+gb|\d+g|server|workstation")


def device_family(device: str) -> str:
    """The chip of a device's name.

    >>> device_family("a100_sxm_40gb"), device_family("rtx_pro_6000_server"), device_family("v100_sxm2_16gb")
    ('a100', 'rtx_pro_6000', 'v100')
    """
    parts = [part for part in device.lower().split("_") if not _PACKAGING.fullmatch(part)]
    return "_".join(parts) or device


def fabric_name(spec: TopologySpec) -> str:
    """`<shape>_<chip>` of the first node (nvswitch, nvlink_mesh, nvlink_pairs, pcie); gloo_loopback for CPUs."""
    node = spec.node_groups[0][1]
    return "gloo_loopback" if node.cpus else f"{_shape(node)}_{device_family(node.devices[0])}"


def _shape(node: NodeSpec) -> str:
    if node.nvlink is None:
        return "pcie"
    if node.nvlink.switch:
        return "nvswitch"
    joined = [gpu for first, second, _ in node.nvlink.pairs for gpu in (first, second)]
    bridges = bool(joined) and len(joined) == len(set(joined)) and len(node.devices) > 2
    return "nvlink_pairs" if bridges else "nvlink_mesh"
