"""NCCL's own tuning figures: what its choices rest on.

Source: NVIDIA/nccl v2.27-2.28, src/graph/tuning.cc, ncclTunerConstantsDefaults and ncclTopoTuneModel (BSD-3-Clause); the
names there stand in the comments. Latencies in us and bandwidths in GB/s there, SI here.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from perfmodel.units import GIGA, US_PER_S


class Algorithm(StrEnum):
    """How the bytes travel."""

    RING = "ring"
    TREE = "tree"
    NVLS = "nvls"
    NVLS_TREE = "nvls_tree"
    DIRECT = "direct"
    NONE = "none"


class Protocol(StrEnum):
    """How two neighbours hand bytes over: flag with every 4 bytes, with every 120, or a semaphore a chunk."""

    LL = "ll"
    LL128 = "ll128"
    SIMPLE = "simple"
    NONE = "none"


class Generation(StrEnum):
    """Rows of NCCL's tables, by compute capability."""

    VOLTA = "volta"
    AMPERE = "ampere"
    HOPPER = "hopper"
    BLACKWELL = "blackwell"


PROTOCOLS = (Protocol.LL, Protocol.LL128, Protocol.SIMPLE)


def _us(*values: float) -> Mapping[Protocol, float]:
    return {protocol: value / US_PER_S for protocol, value in zip(PROTOCOLS, values, strict=True)}


# baseLatencies: kernel start to first byte and end, by algorithm and protocol. NVLS: none (its hop holds it).
BASE_S: Mapping[Algorithm, Mapping[Protocol, float]] = {
    Algorithm.TREE: _us(6.8, 14.0, 8.4),
    Algorithm.RING: _us(6.6, 14.0, 8.4),
    Algorithm.NVLS: _us(0.0, 0.0, 0.0),
    Algorithm.NVLS_TREE: _us(0.0, 0.0, 0.0),
}
# hwLatencies by medium: one step of an algorithm. NVLS exists with Simple only.
HOP_S: Mapping[str, Mapping[Algorithm, Mapping[Protocol, float]]] = {
    "nvlink": {
        Algorithm.TREE: _us(0.6, 1.25, 4.0),
        Algorithm.RING: _us(0.6, 1.9, 3.4),
        Algorithm.NVLS: _us(0.0, 0.0, 25.0),
        Algorithm.NVLS_TREE: _us(0.0, 0.0, 25.0),
    },
    "pcie": {Algorithm.TREE: _us(1.0, 1.9, 4.0), Algorithm.RING: _us(1.0, 2.5, 5.7)},
    "net": {
        Algorithm.TREE: _us(5.0, 8.5, 14.0),
        Algorithm.RING: _us(2.7, 4.0, 14.0),
        Algorithm.NVLS: _us(0.0, 0.0, 18.0),
        Algorithm.NVLS_TREE: _us(0.0, 0.0, 20.9),
    },
}
_GB = float(GIGA)
# llMaxBws on one node: bus bandwidth that LL cannot pass.
LL_MAX_BYTES_PER_S: Mapping[Generation, float] = {
    Generation.VOLTA: 39.0 * _GB,
    Generation.AMPERE: 87.7 * _GB,
    Generation.HOPPER: 141.0 * _GB,
    Generation.BLACKWELL: 282.0 * _GB,
}
# llMaxBws on two and on more nodes, with Intel hosts (row VOLTA there) and AMD hosts (row AMPERE).
LL_MAX_NET_BYTES_PER_S: Mapping[str, tuple[float, float]] = {
    "intel": (39.0 * _GB, 20.4 * _GB),
    "amd": (22.5 * _GB, 19.0 * _GB),
}
# perChMaxRingLL128Bws, perChMaxTreeLL128Bws, perChMaxTreeBws, perChMaxNVLSTreeBws: per channel on one, two and more nodes.
PerNodes = tuple[float, float, float]


def _gb(one: float, two: float, more: float) -> PerNodes:
    return one * _GB, two * _GB, more * _GB


RING_LL128_PER_CHANNEL: Mapping[Generation, PerNodes] = {
    Generation.VOLTA: _gb(20.0, 20.0, 20.0),
    Generation.AMPERE: _gb(20.0, 20.0, 20.0),
    Generation.HOPPER: _gb(36.7, 36.7, 36.7),
    Generation.BLACKWELL: _gb(40.0, 40.0, 40.0),
}
TREE_LL128_PER_CHANNEL: Mapping[Generation, PerNodes] = {
    Generation.VOLTA: _gb(20.0, 20.0, 20.0),
    Generation.AMPERE: _gb(20.0, 20.0, 20.0),
    Generation.HOPPER: _gb(36.7, 36.7, 29.0),
    Generation.BLACKWELL: _gb(55.6, 31.67, 20.0),
}
TREE_PER_CHANNEL: Mapping[Generation, PerNodes] = {
    Generation.VOLTA: _gb(26.5, 18.5, 10.0),
    Generation.AMPERE: _gb(24.0, 23.6, 17.8),
    Generation.HOPPER: _gb(38.7, 41.4, 36.0),
    Generation.BLACKWELL: _gb(70.0, 42.8, 24.0),
}
NVLS_TREE_PER_CHANNEL: Mapping[Generation, PerNodes] = {
    Generation.HOPPER: _gb(57.7, 57.7, 45.5),
    Generation.BLACKWELL: _gb(96.0, 96.0, 80.0),
}
# nvlsEfficiency: share of a GPU's link bandwidth that in-switch reduction gets.
NVLS_EFFICIENCY: Mapping[Generation, float] = {Generation.HOPPER: 0.85, Generation.BLACKWELL: 0.74}
LL128_FRAC = 0.92  # of 120/128 data bytes a line, less what the tuner takes off
TREE_FRAC = 0.92
LL_RING_FRAC = 0.5  # half of every LL line is flags
LL_TREE_FRAC = 1 / 3.8
TREE_LL128_ONE_NODE_FRAC = 7 / 9
# "Plateau effect of ring": factor on the latency of a multi-node Simple ring all-reduce from 64 bytes a rank and channel.
PLATEAU: Mapping[Generation, float] = {
    Generation.VOLTA: 1.9,
    Generation.AMPERE: 1.4,
    Generation.HOPPER: 1.4,
    Generation.BLACKWELL: 1.4,
}
PLATEAU_BYTES = 64
# treeCorrectionFactor: share of a tree's bandwidth at 64 B x 2^i.
TREE_CORRECTION_START_BYTES = 64
TREE_CORRECTION: Mapping[Protocol, tuple[float, ...]] = {
    Protocol.LL: (1.0,) * 4 + (0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9) + (1.0,) * 5,
    Protocol.LL128: (1.0,) * 5
    + (0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9)
    + (1.0,) * 3,
    Protocol.SIMPLE: (0.9,) * 7 + (0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9),
}
# Channels of one node behind NVSwitches, as NCCL's INFO log gives them on DGX-2, DGX A100, DGX H100 and DGX B200.
SWITCH_CHANNELS: Mapping[Generation, int] = {
    Generation.VOLTA: 12,
    Generation.AMPERE: 24,
    Generation.HOPPER: 24,
    Generation.BLACKWELL: 32,
}
CHANNELS_PER_RING = 2  # NCCL doubles the channels that its search finds (ncclTopoPostset) where it finds few
MAX_CHANNELS = 64


def generation_of(compute_capability: str) -> Generation:
    """The table row of a compute capability such as `9.0`.

    >>> generation_of("8.9"), generation_of("12.0"), generation_of("6.1")
    (<Generation.AMPERE: 'ampere'>, <Generation.BLACKWELL: 'blackwell'>, <Generation.VOLTA: 'volta'>)
    """
    number = float(compute_capability)
    if number >= 10:
        return Generation.BLACKWELL
    if number >= 9:
        return Generation.HOPPER
    return Generation.AMPERE if number >= 8 else Generation.VOLTA
