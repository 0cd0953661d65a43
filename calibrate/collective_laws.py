"""The law of collectives per fabric and regime, and its features for the residual model.

Which algorithm and protocol each row ran is NCCL's own choice, as perfmodel.collectives models it; nothing about it is
fitted but one bandwidth figure per PCIe fabric. Inside each such regime a law of four numbers is fitted by robust least
squares, and its residuals by Gaussian-process regression over log size, ranks, operation, element type, library version
and sister fabric (GPUs with equal links). The posterior mean on a grid of sizes is what ships.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from calibrate.residuals import Features, Kernel
from perfmodel.collectives.fitted import ONE_BYTE_DTYPES, byte_factor, steps
from perfmodel.collectives.gloo import GLOO_REGIME
from perfmodel.collectives.group import group_of
from perfmodel.collectives.regime import chosen_regime
from perfmodel.config import load_topology
from perfmodel.topology import Topology, build_topology
from perfmodel.validate.collective_rows import CollectiveRow

Array = NDArray[np.float64]
N_FOLDS = 7
MIN_BYTES = 512
GLOO = "gloo_loopback"
# Fabrics whose GPUs have equal links and clocks: what one was not measured at, its sister tells.
SISTERS: Sequence[tuple[str, ...]] = (
    ("a100_sxm",),
    ("h100_sxm", "h200_sxm"),
    ("b200_sxm", "gb200"),
    ("l40s",),
    ("rtx_pro_6000_server",),
    (GLOO,),
)
# Where the cost of a byte is a power of the number of ranks: links that all of them share.
SHARED_SYSTEMS = frozenset({"l40s", "rtx_pro_6000_server", GLOO})
# What NCCL takes the ring bandwidth for when it chooses, as a share of what our topology gives: read off the sizes at which
# the measured curves change regime (RTX PRO 6000: Simple from 1 MiB on 8 GPUs and not yet at 512 KiB on 4, so 25-26.5 GB/s).
TUNER_BUS_FRAC: Mapping[str, float] = {"rtx_pro_6000_server": 0.503}
OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send_recv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The median of equal rows: one case, element class and library version."""

    system: str
    op: str
    regime: str
    n_ranks: int
    bytes: int
    narrow: bool
    version: str
    log_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimeLaw:
    """The law of one family of fabrics and regime: shared parameters, and a factor per system and per operation."""

    base: float
    step: float
    per_byte: float
    slope: float
    system_factor: Mapping[str, tuple[float, float]]
    op_factor: Mapping[str, tuple[float, float]]
    power_law: bool

    def parts(self, system: str, op: str) -> tuple[float, float, float, float]:
        """base_s, step_s, s_per_byte and n_slope of one system and operation."""
        a = self.system_factor[system][0] * self.op_factor[op][0]
        b = self.system_factor[system][1] * self.op_factor[op][1]
        return self.base * a, self.step * a, self.per_byte * b, self.slope


def fold_of(key: str) -> int:
    """The fold of a case: by hash, the same everywhere."""
    return zlib.crc32(key.encode()) % N_FOLDS


@lru_cache(maxsize=64)
def machine(name: str) -> Topology:
    """A shipped topology, built once."""
    return build_topology(load_topology(name))


@lru_cache(maxsize=65536)
def regime_of(topology: str, system: str, op: str, n_ranks: int, n_bytes: int) -> str:
    """What NCCL would run for a row."""
    if system == GLOO:
        return GLOO_REGIME
    built = machine(topology)
    group = group_of(built, tuple(range(n_ranks)))
    return chosen_regime(op, n_bytes, built, group, TUNER_BUS_FRAC.get(system, 1.0))


def points_of(rows: Iterable[CollectiveRow]) -> list[Point]:
    """Medians of equal rows, each with its regime."""
    groups: dict[tuple[str, str, str, int, int, bool, str], list[float]] = {}
    for row in rows:
        regime = regime_of(row.machine.topology, row.system, row.op, row.n_ranks, row.bytes)
        key = (row.system, row.op, regime, row.n_ranks, row.bytes, row.dtype in ONE_BYTE_DTYPES, row.version)
        groups.setdefault(key, []).append(float(np.log(row.measured_s)))
    return [
        Point(
            system=key[0],
            op=key[1],
            regime=key[2],
            n_ranks=key[3],
            bytes=key[4],
            narrow=key[5],
            version=key[6],
            log_time=float(np.median(times)),
        )
        for key, times in groups.items()
    ]


def family_key(point: Point) -> tuple[int, str, str]:
    """Points fitted together: sister fabrics, ring operations, exchanges or pairs (gloo: one operation), one regime."""
    family = next(index for index, systems in enumerate(SISTERS) if point.system in systems)
    if point.system == GLOO:
        return family, point.op, point.regime
    kind = {"all_to_all": "exchange", "send_recv": "pair"}.get(point.op, "ring")
    return family, kind, point.regime


def fit_law(points: Sequence[Point]) -> RegimeLaw:
    """Robust least squares on log times, with weak priors so that a regime of few sizes stays sensible."""
    systems = sorted({point.system for point in points})
    ops = sorted({point.op for point in points})
    power_law = points[0].system in SHARED_SYSTEMS
    algorithm = points[0].regime.rpartition("_")[0]
    columns = _columns(points, systems, ops, power_law=power_law)
    y = np.array([point.log_time for point in points])
    n_extra = 2 * (len(systems) + len(ops))

    def residual(p: Array) -> Array:
        priors = np.concatenate(
            [
                [0.1 * (p[0] - np.log(8e-6)), 0.05 * (p[1] - np.log(1e-6)), 0.02 * (p[2] - np.log(5e-12)), 0.2 * p[3]],
                0.5 * p[4:],
            ]
        )
        return np.concatenate([_log_law(p, columns, len(systems), len(ops)) - y, priors])

    starts = [np.concatenate([np.log([8e-6, 1e-6, c]), [0.0], np.zeros(n_extra)]) for c in (1e-12, 1e-11, 1e-10)]
    best = min(
        (least_squares(residual, start, loss="soft_l1", f_scale=0.05) for start in starts), key=lambda found: found.cost
    )
    p = best.x
    n_sys = len(systems)
    factors = np.exp(p[4:])
    switched = algorithm.startswith("nvls")
    return RegimeLaw(
        base=float(np.exp(p[0])),
        step=0.0 if switched else float(np.exp(p[1])),
        per_byte=float(np.exp(p[2])),
        slope=float(p[3]),
        system_factor={s: (float(factors[i]), float(factors[n_sys + i])) for i, s in enumerate(systems)},
        op_factor={
            o: (float(factors[2 * n_sys + i]), float(factors[2 * n_sys + len(ops) + i])) for i, o in enumerate(ops)
        },
        power_law=power_law,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    steps: Array
    bytes: Array
    growth: Array
    system: NDArray[np.intp]
    op: NDArray[np.intp]


def _columns(points: Sequence[Point], systems: Sequence[str], ops: Sequence[str], *, power_law: bool) -> _Columns:
    n = np.array([point.n_ranks for point in points], dtype=float)
    names = [(point.op, point.regime.rpartition("_")[0], point.n_ranks) for point in points]
    return _Columns(
        steps=np.array([float(steps(*name)) for name in names]),
        bytes=np.array([point.bytes * byte_factor(*name) for point, name in zip(points, names, strict=True)]),
        growth=np.log2(n) - 2 if power_law else 4 / n**2,
        system=np.array([systems.index(point.system) for point in points]),
        op=np.array([ops.index(point.op) for point in points]),
    )


def _log_law(p: Array, c: _Columns, n_systems: int, n_ops: int) -> Array:
    q = p[4:]
    latency = q[:n_systems][c.system] + q[2 * n_systems : 2 * n_systems + n_ops][c.op]
    rate = q[n_systems : 2 * n_systems][c.system] + q[2 * n_systems + n_ops :][c.op]
    first = (np.exp(p[0]) + np.exp(p[1]) * c.steps) * np.exp(latency)
    logs: Array = np.log(first + c.bytes * np.exp(p[2] + rate + p[3] * c.growth))
    return logs


def law_log_times(found: RegimeLaw, points: Sequence[Point]) -> Array:
    """The law's log times of points of its family and regime."""
    times = []
    for point in points:
        base, step, per_byte, slope = found.parts(point.system, point.op)
        algorithm = point.regime.rpartition("_")[0]
        growth = np.log2(point.n_ranks) - 2 if found.power_law else 4 / point.n_ranks**2
        moved = point.bytes * byte_factor(point.op, algorithm, point.n_ranks)
        times.append(
            np.log(base + step * steps(point.op, algorithm, point.n_ranks) + moved * per_byte * np.exp(slope * growth))
        )
    return np.array(times)


def features(points: Sequence[Point], versions: Sequence[str]) -> Features:
    """What the residual model sees of each point; version -1 is none in particular."""
    systems = [name for group in SISTERS for name in group]
    return Features(
        log2_bytes=np.log2([float(point.bytes) for point in points]),
        log2_ranks=np.log2([float(point.n_ranks) for point in points]),
        narrow=np.array([float(point.narrow and point.op in ("all_reduce", "reduce_scatter")) for point in points]),
        op=np.array([float(OPS.index(point.op)) for point in points]),
        system=np.array([float(systems.index(point.system)) for point in points]),
        version=np.array(
            [float(versions.index(point.version)) if point.version in versions else -1.0 for point in points]
        ),
    )


# Chosen once by cross-validation on the public rows.
RING_KERNEL = Kernel(
    level=0.05,
    smooth=0.14,
    smooth_octaves=1.2,
    rough=0.045,
    rough_octaves=0.54,
    rank_octaves=0.6,
    ops=0.69,
    systems=0.86,
    dtypes=0.2,
    version=0.06,
    version_octaves=1.76,
    noise=0.016,
)
EXCHANGE_KERNEL = Kernel(
    level=0.06,
    smooth=0.07,
    smooth_octaves=1.33,
    rough=0.016,
    rough_octaves=0.17,
    rank_octaves=0.5,
    ops=0.86,
    systems=0.98,
    dtypes=0.98,
    version=0.066,
    version_octaves=2.36,
    noise=0.021,
)
# The L40S box, and processes that share two cores: repeats differ by tens of per cent, so neighbours count for more.
NOISY_KERNEL = Kernel(
    level=1.0,
    smooth=0.27,
    smooth_octaves=1.25,
    rough=0.016,
    rough_octaves=0.1,
    rank_octaves=0.56,
    ops=0.33,
    systems=0.9,
    dtypes=0.96,
    version=0.06,
    version_octaves=1.0,
    noise=0.075,
)


def kernel_of(key: tuple[int, str, str]) -> Kernel:
    """The residual model's hyperparameters for a family of points."""
    if SISTERS[key[0]] in (("l40s",), (GLOO,)):
        return NOISY_KERNEL
    return RING_KERNEL if key[1] == "ring" else EXCHANGE_KERNEL
