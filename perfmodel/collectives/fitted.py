"""Collectives of one unit by the fit of its fabric: NCCL's regimes with measured constants.

A regime is one algorithm and protocol. Inside a regime time is latency plus bytes over bandwidth, both with an explicit
dependence on the number of ranks, times a bounded correction that is smooth in the logarithm of the size. Which regime runs
is NCCL's own choice (candidates): the jumps of a measured curve are where that choice changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from perfmodel.collectives.nccl_tables import Algorithm
from perfmodel.db.fabric import FIRST_LOG2_BYTES, LAST_LOG2_BYTES, MAX_CORRECTION, N_SIZES, FabricFit, RegimeFit

# Element types of one byte: reductions take more instructions a byte.
ONE_BYTE_DTYPES = frozenset({"int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"})
REDUCING_OPS = frozenset({"all_reduce", "reduce_scatter", "reduce"})
GRID_BYTES: NDArray[np.float64] = np.exp2(np.arange(FIRST_LOG2_BYTES, LAST_LOG2_BYTES + 1, dtype=float))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Time (s) of a regime, in its latency and bandwidth parts, and whether the size was inside the measured range."""

    latency_s: float
    bandwidth_s: float
    inside: bool

    @property
    def time_s(self) -> float:
        """Both parts."""
        return self.latency_s + self.bandwidth_s


def steps(op: str, algorithm: str, n_ranks: int) -> int:
    """Hops that one byte's way through an algorithm has, as its latency counts them."""
    if algorithm in (Algorithm.NVLS, Algorithm.NVLS_TREE):
        return 0
    if op == "send_recv":
        return 1
    return 2 * (n_ranks - 1) if op == "all_reduce" else n_ranks - 1


def byte_factor(op: str, algorithm: str, n_ranks: int) -> float:
    """Bytes that a rank's link carries for each byte of the collective."""
    if algorithm in (Algorithm.NVLS, Algorithm.NVLS_TREE):
        return 1 + 1 / n_ranks
    if op == "send_recv":
        return 1.0
    share = (n_ranks - 1) / n_ranks
    return 2 * share if op == "all_reduce" else share


def growth(n_ranks: int, n_slope: float, *, power_law: bool) -> float:
    """How the cost of a byte moves with the number of ranks; 1 at four ranks on PCIe, towards a constant behind switches."""
    return math.exp(n_slope * (math.log2(n_ranks) - 2 if power_law else 4 / n_ranks**2))


def law(fit: FabricFit, key: tuple[str, str], n_ranks: int, link_scale: float = 1.0) -> tuple[float, float]:
    """Seconds before the first byte and seconds per byte of a regime, by its law alone."""
    regime, (op, name) = fit.regimes[key], key
    algorithm = name.rpartition("_")[0]
    latency_s = regime.base_s + regime.step_s * steps(op, algorithm, n_ranks)
    s_per_byte = (
        regime.s_per_byte
        * byte_factor(op, algorithm, n_ranks)
        * growth(n_ranks, regime.n_slope, power_law=fit.power_law)
    )
    return latency_s, s_per_byte * link_scale


def correction(fit: FabricFit, regime: RegimeFit, n_ranks: int, dtype_class: int, version: str) -> NDArray[np.float64]:
    """Logarithm of measured over law at GRID_BYTES, between measured group sizes by straight lines in log2 ranks."""
    extra = regime.versions.get(version)
    table = regime.correction[dtype_class] if extra is None else regime.correction[dtype_class] + extra
    place = float(np.interp(math.log2(n_ranks), np.log2(fit.group_sizes), np.arange(len(fit.group_sizes))))
    low = math.floor(place)
    high = min(low + 1, len(fit.group_sizes) - 1)
    found: NDArray[np.float64] = table[low] + (table[high] - table[low]) * (place - low)
    return np.clip(found, -MAX_CORRECTION, MAX_CORRECTION)


@lru_cache(maxsize=4096)
def _curve(fabric: _Keyed, key: tuple[str, str], n_ranks: int, dtype_class: int, version: str) -> NDArray[np.float64]:
    return correction(fabric.fit, fabric.fit.regimes[key], n_ranks, dtype_class, version)


class _Keyed:
    """A fit as a dictionary key: by identity, since a loaded fit is one object until its file changes."""

    __slots__ = ("fit",)

    def __init__(self, fit: FabricFit) -> None:
        self.fit = fit

    def __hash__(self) -> int:
        return id(self.fit)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keyed) and other.fit is self.fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a regime is asked for: ranks, bytes, element type, library version, and the links.

    `link_scale` is how much slower the ring's links are than the measured machine's, `bus_bytes_per_s` what they carry: no
    ring moves bytes faster.
    """

    n_ranks: int
    n_bytes: float
    dtype: str
    version: str
    link_scale: float
    bus_bytes_per_s: float


def regime_time(fit: FabricFit, key: tuple[str, str], ask: Question) -> Fitted:
    """Time of a regime at a size, never below its time at a smaller size of the grid, nor below what its links need.

    Past the largest measured size the cost of a further byte is that of the last octave. The running maximum makes time
    monotone in bytes, whatever the correction does; and since every point of it grows with `link_scale`, faster links never
    cost time.
    """
    regime = fit.regimes[key]
    narrow = ask.dtype in ONE_BYTE_DTYPES and key[0] in REDUCING_OPS
    table = _curve(_Keyed(fit), key, ask.n_ranks, int(narrow), ask.version)
    latency_s, s_per_byte = law(fit, key, ask.n_ranks, ask.link_scale)
    low, high = regime.log2_bytes
    last = round(high) - FIRST_LOG2_BYTES
    curve = np.maximum.accumulate((latency_s + s_per_byte * GRID_BYTES) * np.exp(table))
    place = math.log2(max(ask.n_bytes, 1.0)) - FIRST_LOG2_BYTES
    if place > last > 0:
        slope = float(curve[last] - curve[last - 1]) / float(GRID_BYTES[last] - GRID_BYTES[last - 1])
        time_s = float(curve[last]) + slope * (ask.n_bytes - float(GRID_BYTES[last]))
    else:
        here = math.exp(float(np.interp(place, np.arange(N_SIZES), table)))
        time_s = (latency_s + s_per_byte * ask.n_bytes) * here
        if place >= 0:
            time_s = max(time_s, float(curve[math.floor(place)]))
    moved = ask.n_bytes * byte_factor(key[0], key[1].rpartition("_")[0], ask.n_ranks)
    time_s = max(time_s, moved / ask.bus_bytes_per_s)
    share = latency_s / (latency_s + s_per_byte * ask.n_bytes)
    return Fitted(
        latency_s=time_s * share,
        bandwidth_s=time_s * (1 - share),
        inside=low <= place + FIRST_LOG2_BYTES <= high,
    )


def reference_bus(fit: FabricFit, n_ranks: int) -> float:
    """Ring bandwidth (bytes/s) of the measured machine for so many ranks; beyond its size that of all its ranks."""
    return fit.bus_bytes_per_s[min(n_ranks, max(fit.bus_bytes_per_s))]
