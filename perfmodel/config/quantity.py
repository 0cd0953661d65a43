"""Field types for specs: text with a unit in the file, a plain SI number in the spec.

A field `bandwidth: BytesPerS` reads `3.35 TB/s`. Sizes and times may be zero; `Positive...` may not.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

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


def _text(quantity: str, *examples: str) -> WithJsonSchema:
    """What editors are told of a field: text with a unit, such as the examples."""
    return WithJsonSchema({"type": "string", "x-quantity": quantity, "examples": list(examples)})


_BYTES, _SECONDS = _text("bytes", "80 GiB", "25 MB"), _text("seconds", "2 us", "1.5 ms")
_BYTES_PER_S = _text("bytes_per_s", "3.35 TB/s", "200 Gbit/s")
_COUNT_SCHEMA = {"type": ["integer", "string"], "x-quantity": "count", "examples": [1000, "45M"]}
_COUNT = WithJsonSchema({**_COUNT_SCHEMA, "minimum": 0})
_POSITIVE_COUNT = WithJsonSchema({**_COUNT_SCHEMA, "minimum": 1})

Bytes = Annotated[int, BeforeValidator(parse_bytes), _BYTES]
PositiveBytes = Annotated[int, BeforeValidator(parse_bytes), AfterValidator(_positive), _BYTES]
BytesPerS = Annotated[float, BeforeValidator(parse_bytes_per_s), AfterValidator(_positive), _BYTES_PER_S]
Seconds = Annotated[float, BeforeValidator(parse_seconds), _SECONDS]
FlopsPerS = Annotated[
    float, BeforeValidator(parse_flops_per_s), AfterValidator(_positive), _text("flops_per_s", "989 TFLOP/s")
]
Hertz = Annotated[float, BeforeValidator(parse_hz), AfterValidator(_positive), _text("hz", "1.41 GHz")]
Watts = Annotated[float, BeforeValidator(parse_watts), AfterValidator(_positive), _text("watts", "700 W")]
Count = Annotated[int, BeforeValidator(parse_count), _COUNT]
PositiveCount = Annotated[int, BeforeValidator(parse_count), AfterValidator(_countable), _POSITIVE_COUNT]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
