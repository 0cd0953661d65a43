"""Field types for specs: text with a unit in the file, a plain SI number in the spec.

A field `bandwidth: BytesPerS` reads `3.35 TB/s`. Sizes and times may be zero; `Positive...` may not.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from perfmodel.units import (
    parse_bytes,
    parse_bytes_per_s,
    parse_count,
    parse_flops_per_s,
    parse_hz,
    parse_seconds,
    parse_watts,
)

MAX_COUNT = parse_count("1T")  # a few of them multiplied still count in 64 bits, as torch's sizes must


def _positive(value: float) -> Any:
    if value <= 0:
        raise ValueError(f"found {value:g}, allowed more than 0")
    return value


def _countable(value: int) -> Any:
    if value > MAX_COUNT:
        raise ValueError(f"found {value}, allowed at most {MAX_COUNT}")
    return _positive(value)


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
PositiveBytes = Annotated[int, BeforeValidator(parse_bytes), AfterValidator(_positive)]
BytesPerS = Annotated[float, BeforeValidator(parse_bytes_per_s), AfterValidator(_positive)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]
FlopsPerS = Annotated[float, BeforeValidator(parse_flops_per_s), AfterValidator(_positive)]
Hertz = Annotated[float, BeforeValidator(parse_hz), AfterValidator(_positive)]
Watts = Annotated[float, BeforeValidator(parse_watts), AfterValidator(_positive)]
Count = Annotated[int, BeforeValidator(parse_count)]
PositiveCount = Annotated[int, BeforeValidator(parse_count), AfterValidator(_countable)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
