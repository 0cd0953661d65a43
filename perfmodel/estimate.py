"""Work and Estimate: what a kernel does, and how long that takes. Two values that add, and do nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Source(IntEnum):
    """Where a price came from, most trusted first. A sum takes the less trusted of the two."""

    MEASURED = 0  # read from a measurement of exactly this call
    FITTED = 1  # a law fitted to measurements of this device, inside the fit range
    DERIVED = 2  # a law fitted to another kernel of this device, or inherited from the nearest device
    ROOFLINE = 3  # datasheet peak rates only
    EXTRAPOLATED = 4  # a fitted law outside the range of its measurements
    UNMODELLED = 5  # no rule for this op: priced from the bytes of its inputs and outputs

    @property
    def label(self) -> str:
        """Lower-case word used in reports and JSON."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a kernel does: FLOPs (a fused multiply-add is 2) and bytes moved to and from device memory."""

    flops: int = 0
    read_bytes: int = 0
    write_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Bytes read plus bytes written."""
        return self.read_bytes + self.write_bytes

    def __add__(self, other: Work) -> Work:
        return Work(
            flops=self.flops + other.flops,
            read_bytes=self.read_bytes + other.read_bytes,
            write_bytes=self.write_bytes + other.write_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Predicted duration (s) with a low-high range (s) and its source. A sum adds the three and keeps the less trusted."""

    time_s: float
    low_s: float
    high_s: float
    source: Source

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(
            time_s=self.time_s + other.time_s,
            low_s=self.low_s + other.low_s,
            high_s=self.high_s + other.high_s,
            source=max(self.source, other.source),
        )

    def scaled(self, factor: float) -> Estimate:
        """The same estimate with its three times multiplied by `factor` (what-if)."""
        return Estimate(
            time_s=self.time_s * factor, low_s=self.low_s * factor, high_s=self.high_s * factor, source=self.source
        )


ZERO = Estimate(time_s=0.0, low_s=0.0, high_s=0.0, source=Source.MEASURED)
