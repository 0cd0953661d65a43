"""What a calibration case is: one aten operator call on tensors of given shapes, and the state of memory it meets.

A case is plain data with a JSON form, so that a table of measured rows says everything about itself and a fit needs no
torch. `calibrate.build` turns a case into tensors and a callable.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

State = Literal["warm", "cold", "fresh"]
# warm: the same tensors again and again. cold: inputs and outputs lie in device memory, last touched long ago. Cases of
# tables are made cold by traffic between the calls, for a table has one copy only.
# fresh: warm inputs, and outputs in pages that the process touches for the first time.

MAX_SETS = 256  # of a cold case's tensors
GOLDEN = 0.6180339887498949  # fractional parts of its multiples are as even as a sequence can be
ITEMSIZE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "bool": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorArg:
    """A tensor argument: `fill` says how values are drawn; `order` is the order of dimensions in memory, outermost first."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    fill: str = "normal"
    order: tuple[int, ...] = ()
    high: int = 0
    zipf: float = 0.0

    @property
    def bytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * ITEMSIZE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call. `args` are TensorArg, plain values or lists of TensorArg, in schema order; `notes` become op attributes."""

    family: str
    op: str
    overload: str = "default"
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    state: State = "warm"

    @property
    def bytes(self) -> int:
        """Bytes of all tensor arguments."""
        return sum(part.bytes for part in tensor_args(self.args))

    def to_json(self) -> str:
        """Canonical text: equal cases have equal text."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @property
    def key(self) -> str:
        """Short name of the case, from its text."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


def tensor_args(value: Any) -> list[TensorArg]:
    """Every tensor in nested arguments."""
    if isinstance(value, TensorArg):
        return [value]
    if isinstance(value, list | tuple):
        return [part for item in value for part in tensor_args(item)]
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far sizes go, as multiples of the plan for a CPU: FLOPs of a call, bytes of its tensors, length of a dimension."""

    flops: float = 1.0
    bytes: float = 1.0
    length: float = 1.0


class Sizes:
    """Seeded draws of sizes: log-uniform, often rounded to what people use. Equal limits give equal draws."""

    def __init__(self, seed: int, limits: Limits = Limits()) -> None:
        self.limits = limits
        self.random = random.Random(seed)
        self._place = self.random.random()

    def even(self, low: float, high: float) -> int:
        """As `log`, for a case's only size: successive draws fill the range evenly (steps of the golden section)."""
        self._place = (self._place + GOLDEN) % 1.0
        value = math.exp(math.log(low) + self._place * (math.log(high) - math.log(low)))
        rounded = 8.0 * round(value / 8) if value >= 16 and self.chance(0.5) else value
        return int(min(max(round(rounded), low), high))

    def log(self, low: float, high: float, *, step: int = 1) -> int:
        """A log-uniform whole number, rounded to a multiple of `step`, or to a power of two or 8 now and then."""
        value = math.exp(self.random.uniform(math.log(low), math.log(high)))
        style = self.random.random()
        if step == 1 and style < 0.3 and value >= 2:
            value = 2.0 ** round(math.log2(value))
        elif step == 1 and style < 0.6 and value >= 16:
            value = 8.0 * round(value / 8)
        return int(min(max(step * round(value / step), low), high))

    def pick(self, values: Sequence[Any]) -> Any:
        """One of the values."""
        return values[self.random.randrange(len(values))]

    def chance(self, share: float) -> bool:
        """True with probability `share`."""
        return self.random.random() < share


Generator = Callable[[Sizes], Case]


def case_from_json(text: str) -> Case:
    """Reads `Case.to_json`'s text."""
    body = json.loads(text)
    return Case(**{**body, "args": tuple(_argument(value) for value in body["args"])})


def _argument(value: Any) -> Any:
    if isinstance(value, dict) and "fill" in value:
        return TensorArg(**{**value, "shape": tuple(value["shape"]), "order": tuple(value["order"])})
    if isinstance(value, dict):
        return {key: _argument(part) for key, part in value.items()}
    return [_argument(part) for part in value] if isinstance(value, list) else value
