"""Occupancy, waves and SM activity of a kernel, from its launch and its device's limits.

    resident blocks an SM = min over threads, registers, shared memory, block slots
    occupancy = resident warps / warp slots
    waves = blocks / (SMs · resident blocks);  wave efficiency = waves / ceil(waves)
    SM activity = mean share of SMs that hold at least one block: 1 in full waves, blocks left / SMs in the last

CUDA C++ Programming Guide, "Multiprocessor level" and its table of technical specifications; NVIDIA Deep Learning
Performance guide, "Wave quantization". Blocks are taken to run equally long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from perfmodel.traces.spans import LaunchShape

WARP_THREADS = 32
REGISTERS_PER_SM = 65536  # every architecture from Kepler GK210 on
_REGISTER_UNIT = 256  # registers are given to a warp in units of this many (CUDA occupancy calculator)
# Warp slots and block slots an SM, by compute capability (CUDA C++ Programming Guide, technical specifications).
_SLOTS: Mapping[str, tuple[int, int]] = {
    "6.0": (64, 32), "6.1": (64, 32), "7.0": (64, 32), "7.5": (32, 16), "8.0": (64, 32), "8.6": (48, 16), "8.9": (48, 24),
    "9.0": (64, 32), "10.0": (64, 32), "10.3": (64, 32), "12.0": (48, 24),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """Occupancy, wave efficiency and SM activity (fractions), and how many waves."""

    occupancy_frac: float
    wave_frac: float
    sm_active_frac: float
    waves: float


def residency(launch: LaunchShape, n_sms: int, compute_capability: str, smem_per_sm_bytes: int) -> Residency | None:
    """Of a launch on a device; None if the launch or the device's limits are not known."""
    threads, blocks = math.prod(launch.block), math.prod(launch.grid)
    if not launch.block or threads <= 0 or blocks <= 0 or n_sms <= 0 or compute_capability not in _SLOTS:
        return None
    warp_slots, block_slots = _SLOTS[compute_capability]
    warps = math.ceil(threads / WARP_THREADS)
    limits = [block_slots, warp_slots // warps]
    if launch.registers:
        a_warp = math.ceil(launch.registers * WARP_THREADS / _REGISTER_UNIT) * _REGISTER_UNIT
        limits.append(REGISTERS_PER_SM // a_warp // warps)
    if launch.shared_bytes and smem_per_sm_bytes:
        limits.append(smem_per_sm_bytes // launch.shared_bytes)
    resident = max(min(limits), 1)  # it did run
    waves = blocks / (n_sms * resident)
    n_waves = math.ceil(waves)
    left = blocks - (n_waves - 1) * n_sms * resident
    active = (n_waves - 1 + min(1.0, left / n_sms)) / n_waves
    held = min(resident, blocks / n_sms)
    return Residency(
        occupancy_frac=min(held * warps / warp_slots, 1.0),
        wave_frac=waves / n_waves,
        sm_active_frac=active,
        waves=waves,
    )
