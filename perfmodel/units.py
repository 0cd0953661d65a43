"""Parses and prints quantities; the only file that knows scale factors. Inside perfmodel everything is SI and unscaled.

Text is a number, an optional space and a unit: `80 GiB`, `3.35 TB/s`, `200 Gbit/s`, `2 us`, `312 TFLOP/s`, `1.41 GHz`.
k, M, G, T, P are powers of 1000; Ki, Mi, Gi, Ti, Pi are powers of 1024. A bare number is refused, and so is `Gb/s`,
which half of its readers take for bytes. Counts (rows, parameters) have no unit: `40M`, `1Ki`, plain whole numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction

from perfmodel.errors import suggest

KILO, MEGA, GIGA, TERA, PETA = 10**3, 10**6, 10**9, 10**12, 10**15
KIBI, MEBI, GIBI, TEBI, PEBI = 2**10, 2**20, 2**30, 2**40, 2**50
BITS_PER_BYTE = 8
MS_PER_S = 10**3
US_PER_S = 10**6
NS_PER_S = 10**9
PS_PER_S = 10**12
SECONDS_PER_MINUTE = 60
SECONDS_PER_HOUR = 3600

DECIMAL: Mapping[str, int] = {"": 1, "k": KILO, "M": MEGA, "G": GIGA, "T": TERA, "P": PETA}
BINARY: Mapping[str, int] = {"Ki": KIBI, "Mi": MEBI, "Gi": GIBI, "Ti": TEBI, "Pi": PEBI}
PREFIXES: Mapping[str, int] = {**DECIMAL, **BINARY}


def _units(prefixes: Mapping[str, int], *bases: str, divisor: int = 1) -> dict[str, Fraction]:
    return {prefix + base: Fraction(scale, divisor) for prefix, scale in prefixes.items() for base in bases}


SIZE_UNITS: Mapping[str, Fraction] = _units(PREFIXES, "B")
RATE_UNITS: Mapping[str, Fraction] = {
    **_units(PREFIXES, "B/s"),
    **_units(PREFIXES, "bit/s", divisor=BITS_PER_BYTE),
}
TIME_UNITS: Mapping[str, Fraction] = {
    "s": Fraction(1),
    "ms": Fraction(1, MS_PER_S),
    "us": Fraction(1, US_PER_S),
    "µs": Fraction(1, US_PER_S),
    "ns": Fraction(1, NS_PER_S),
    "ps": Fraction(1, PS_PER_S),
    "min": Fraction(SECONDS_PER_MINUTE),
    "h": Fraction(SECONDS_PER_HOUR),
}
FLOP_UNITS: Mapping[str, Fraction] = _units(DECIMAL, "FLOP", "flop")
FLOP_RATE_UNITS: Mapping[str, Fraction] = _units(DECIMAL, "FLOP/s", "flop/s")
FREQUENCY_UNITS: Mapping[str, Fraction] = _units(DECIMAL, "Hz")
POWER_UNITS: Mapping[str, Fraction] = _units(DECIMAL, "W")
COUNT_UNITS: Mapping[str, Fraction] = _units(PREFIXES, "")

_QUANTITY = re.compile(r"\s*([-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,2})?)\s*([^\s0-9].*?)?\s*")

# Spellings that people write and that we refuse, each with what to write instead.
_REFUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"[kKMGTP]i?(b/s|bps)$"), "is it bits or bytes? write Gbit/s or GB/s"),
    (re.compile(r"[kKMGTP]i?b$"), "is it bits or bytes? write Gbit or GB"),
    (re.compile(r"[kKMGTP]?(FLOPS|flops|FLOPs)$"), "a rate is written TFLOP/s, an amount TFLOP"),
    (re.compile(r"K(B|B/s|bit/s)?$"), "write k for 1000, Ki for 1024"),
)


def parse_bytes(text: object) -> int:
    """Bytes from text such as `80 GiB` or `25 MB`, rounded to a whole byte. Raises ValueError.

    >>> parse_bytes("1.5 KiB")
    1536
    """
    return round(_parse(text, SIZE_UNITS, "a size such as '80 GiB'"))


def parse_bytes_per_s(text: object) -> float:
    """Bytes per second from text such as `3.35 TB/s` or `200 Gbit/s`. Raises ValueError.

    >>> parse_bytes_per_s("200 Gbit/s")
    25000000000.0
    """
    return float(_parse(text, RATE_UNITS, "a rate such as '3.35 TB/s' or '200 Gbit/s'"))


def parse_seconds(text: object) -> float:
    """Seconds from text such as `2 us` or `1.5 ms`. Raises ValueError.

    >>> parse_seconds("2 us")
    2e-06
    """
    return float(_parse(text, TIME_UNITS, "a time such as '2 us'"))


def parse_flops(text: object) -> int:
    """FLOPs (an amount) from text such as `7.5 GFLOP`, rounded to a whole one. Raises ValueError."""
    return round(_parse(text, FLOP_UNITS, "an amount such as '7.5 GFLOP'"))


def parse_flops_per_s(text: object) -> float:
    """FLOPs per second from text such as `312 TFLOP/s`. Raises ValueError."""
    return float(_parse(text, FLOP_RATE_UNITS, "a rate such as '312 TFLOP/s'"))


def parse_hz(text: object) -> float:
    """Hertz from text such as `1.41 GHz`. Raises ValueError."""
    return float(_parse(text, FREQUENCY_UNITS, "a frequency such as '1.41 GHz'"))


def parse_watts(text: object) -> float:
    """Watts from text such as `400 W`. Raises ValueError."""
    return float(_parse(text, POWER_UNITS, "a power such as '400 W'"))


def parse_count(text: object) -> int:
    """A whole number from an int or from text such as `40M` or `1Ki`. Raises ValueError.

    >>> parse_count("2.5M"), parse_count(12)
    (2500000, 12)
    """
    if isinstance(text, int) and not isinstance(text, bool):
        text = str(text)
    value = _parse(text, COUNT_UNITS, "a whole number such as 40000000 or '40M'")
    if value.denominator != 1:
        raise ValueError(f"found {text!r}, allowed a whole number")
    return int(value)


def _parse(text: object, units: Mapping[str, Fraction], allowed: str) -> Fraction:
    if not isinstance(text, str):
        bare = isinstance(text, int | float) and not isinstance(text, bool) and "" not in units
        hint = " (a bare number has no unit)" if bare else ""
        raise ValueError(f"found {text!r}{hint}, allowed {allowed}")
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"found {text!r}, allowed {allowed}")
    number, unit = match[1], match[2] or ""
    if unit not in units:
        raise ValueError(f"found {text!r}, allowed {allowed}{_unit_hint(unit, units)}")
    value = Fraction(number) * units[unit]
    if value < 0:
        raise ValueError(f"found {text!r}, allowed {allowed}, not negative")
    return value


def _unit_hint(unit: str, units: Mapping[str, Fraction]) -> str:
    if not unit:
        return "; a bare number has no unit"
    for pattern, advice in _REFUSED:
        if pattern.match(unit):
            return f"; {unit!r} is refused: {advice}"
    return f"; unknown unit {unit!r}{suggest(unit, [name for name in units if name])}"


def format_bytes(n_bytes: float, digits: int | None = 3) -> str:
    """A size with a power-of-1024 unit. `digits` significant digits; None prints every digit.

    >>> format_bytes(26 * 2**20), format_bytes(512)
    ('26.0 MiB', '512 B')
    """
    return _format(n_bytes, {"": 1, **BINARY}, "B", digits)


def format_rate(bytes_per_s: float, digits: int | None = 3) -> str:
    """Bytes per second with a power-of-1000 unit.

    >>> format_rate(3.35e12)
    '3.35 TB/s'
    """
    return _format(bytes_per_s, DECIMAL, "B/s", digits)


def format_flops(flops: float, digits: int | None = 3) -> str:
    """An amount of floating-point work.

    >>> format_flops(7_500_000_000)
    '7.50 GFLOP'
    """
    return _format(flops, DECIMAL, "FLOP", digits)


def format_flops_per_s(flops_per_s: float, digits: int | None = 3) -> str:
    """A rate of floating-point work, such as `312 TFLOP/s`."""
    return _format(flops_per_s, DECIMAL, "FLOP/s", digits)


def format_hz(hz: float, digits: int | None = 3) -> str:
    """A frequency, such as `1.41 GHz`."""
    return _format(hz, DECIMAL, "Hz", digits)


def format_count(count: float, digits: int | None = 3) -> str:
    """A number of things with a power-of-1000 letter and no unit.

    >>> format_count(774_030_080), format_count(12)
    ('774M', '12')
    """
    return _format(count, DECIMAL, "", digits).replace(" ", "")


def format_time(time_s: float, digits: int | None = 3) -> str:
    """Seconds with the unit that fits: s, ms, us or ns.

    >>> format_time(0.003272), format_time(2e-6), format_time(75.0)
    ('3.27 ms', '2.00 us', '75 s')
    """
    units = {"n": Fraction(1, NS_PER_S), "u": Fraction(1, US_PER_S), "m": Fraction(1, MS_PER_S), "": Fraction(1)}
    return _format(time_s, units, "s", digits)


def format_percent(fraction: float) -> str:
    """A fraction (0 to 1) as a percentage with one decimal.

    >>> format_percent(0.0521)
    '5.2%'
    """
    return f"{100 * fraction:.1f}%"


def _format(value: float, scales: Mapping[str, int] | Mapping[str, Fraction], base: str, digits: int | None) -> str:
    if digits is None:
        return _exact(value, scales, base)
    rounded = Fraction(f"{float(value):.{digits - 1}e}")
    size = max(abs(rounded), abs(Fraction(value)))
    fitting = [prefix for prefix, scale in scales.items() if size >= scale]
    prefix = fitting[-1] if fitting else next(iter(scales))
    prefix = "" if value == 0 else prefix
    scaled = Fraction(value) / Fraction(scales[prefix])
    return f"{_rounded(scaled, digits, whole=scales[prefix] == 1)} {prefix}{base}".rstrip()


def _exact(value: float, scales: Mapping[str, int] | Mapping[str, Fraction], base: str) -> str:
    """Text that reads back as the same number: the largest prefix that divides a whole number, else every digit."""
    number = Fraction(repr(value))
    whole = [prefix for prefix, scale in scales.items() if number and (number / Fraction(scale)).denominator == 1]
    if whole:
        prefix = whole[-1]
        return f"{number / Fraction(scales[prefix])} {prefix}{base}".rstrip()
    return f"{Decimal(repr(value)):f} {base}".rstrip()


def _rounded(scaled: Fraction, digits: int, *, whole: bool) -> str:
    """`digits` significant digits, never fewer than the whole part; a whole unscaled number stays as it is."""
    if scaled.denominator == 1 and whole:
        return str(scaled.numerator)
    number = float(scaled)
    decimals = max(0, digits - len(str(int(abs(number)))))
    return f"{number:.{decimals}f}"


def seconds_to_ps(time_s: float) -> int:
    """Picoseconds of the simulator's integer clock, rounded to the nearest.

    >>> seconds_to_ps(1.5e-6)
    1500000
    """
    return round(time_s * PS_PER_S)


def ps_to_seconds(time_ps: float) -> float:
    """Seconds of a time on the simulator's clock.

    >>> ps_to_seconds(1_500_000)
    1.5e-06
    """
    return time_ps / PS_PER_S
