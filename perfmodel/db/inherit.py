"""A device without a fit takes that of the nearest measured device, and says so.

Laws are written in fractions of the device's own peaks, bandwidths and core counts, plus floors in seconds, so that a
fit's parameters carry over and the datasheet supplies the scale. Nearest means: the device named by `nearest` in
device.yaml if it was measured; else the one of the same kind with the smallest

    |difference in compute capability| + |log2 of the ratio of bytes per FLOP| + half of |log2 of the ratio of bandwidths|

(bytes per FLOP: memory bandwidth over FP32 peak), so that a generation weighs as much as twice the bandwidth for the same
arithmetic: H100 is nearer to A100 (HBM) than to L4, whose compute capability 8.9 is nearer but whose memory is GDDR.

`nearest` names a sibling by its arithmetic (same chip, same power), so families that memory bounds do not follow it: A100 SXM
40 GB multiplies like the 80 GB module, and streams like the 40 GB card whose memory it has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from perfmodel.db.device import Device, Fit
from perfmodel.db.fits import INHERITED_KEY
from perfmodel.estimate import Source

# An inherited fit's range is widened by these: fits without H100 predict it within about 12 % in the median, twice that
# is the edge of most shapes.
LOW_WIDENING = 0.8
HIGH_WIDENING = 1.25
MEMORY_BOUND = frozenset({"copy", "elementwise", "embedding", "norm", "optimizer", "reduction", "softmax"})


def distance(device: Device, donor: Device) -> tuple[float, str]:
    """How far `donor` is from `device` (see the module), then its name for a total order."""
    generations = abs(_capability(device) - _capability(donor))
    balance = abs(math.log2(_bytes_per_flop(device) / _bytes_per_flop(donor)))
    size = abs(math.log2(device.memory_bytes_per_s / donor.memory_bytes_per_s))
    return generations + balance + size / 2, donor.name


def nearest_donor(device: Device, donors: Iterable[Device], family: str) -> Device | None:
    """The device whose fit of `family` suits `device` best, or None if no device of its kind has one of its own."""
    measured = [
        donor for donor in donors if donor.kind == device.kind and donor.name != device.name and family in donor.fits
    ]
    named = "" if family in MEMORY_BOUND else device.nearest
    measured.sort(key=lambda donor: (donor.name != named, distance(device, donor)))
    return next((donor for donor in measured if INHERITED_KEY not in donor.fits[family].provenance), None)


def inherit_fits(device: Device, donors: Iterable[Device]) -> Device:
    """`device` with every missing fit taken from the nearest donor that has one, marked DERIVED, its range widened."""
    known = tuple(donors)
    fits = dict(device.fits)
    nearest = device.nearest
    for family in sorted({family for donor in known for family in donor.fits} - set(fits)):
        donor = nearest_donor(device, known, family)
        if donor is not None:
            fits[family] = _derived(donor.fits[family], donor.name)
            nearest = nearest or donor.name
    return replace(device, fits=fits, nearest=nearest)


def _derived(fit: Fit, donor: str) -> Fit:
    return replace(
        fit,
        low_frac=fit.low_frac * LOW_WIDENING,
        high_frac=fit.high_frac * HIGH_WIDENING,
        provenance={**fit.provenance, INHERITED_KEY: donor},
        source=Source.DERIVED,
    )


def _capability(device: Device) -> float:
    return 0.0 if device.kind == "cpu" else float(device.compute_capability)


def _bytes_per_flop(device: Device) -> float:
    return device.memory_bytes_per_s / device.peak_flops_per_s["fp32"]
