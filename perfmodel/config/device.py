"""Schema of `kernels_db/<device>/device.yaml`: a datasheet as text with units, and the source of each figure."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from perfmodel.config.loading import Spec
from perfmodel.config.quantity import BytesPerS, FlopsPerS, Hertz, PositiveBytes, PositiveCount, Seconds, Watts
from perfmodel.errors import suggest

Pipe = Literal[
    "fp64",
    "fp64_tensor",
    "fp32",
    "tf32_tensor",
    "fp16",
    "fp16_tensor",
    "bf16",
    "bf16_tensor",
    "fp8_tensor",
    "int8_tensor",
]


class HostSpec(Spec):
    """Costs of the host thread that drives the device; see `perfmodel.db.HostCosts`."""

    op_dispatch: Seconds = Field(description="a time such as '4 us'")
    backward_op: Seconds = Field(description="a time such as '3 us'")
    launch: Seconds = Field(description="a time such as '2 us'")
    launch_latency: Seconds = Field(description="a time such as '5 us'")
    sync: Seconds = Field(description="a time such as '10 us'")
    low_frac: Annotated[float, Field(gt=0.0, le=1.0, description="low end of a step's host time, times this")] = 0.79
    high_frac: Annotated[float, Field(ge=1.0, description="high end of a step's host time, times this")] = 1.23
    source: str = Field(min_length=1, description="where the figures come from")


class OverlapSpec(Spec):
    """What kernels lose beside collectives over what the shares of multiprocessors and memory say, as measured."""

    scale: Annotated[float, Field(ge=0.0, le=10.0, description="a factor such as 1.29; 0 for no slowdown")]
    low_frac: Annotated[
        float, Field(ge=0.0, le=1.0, description="a multiplier for the low end of what is lost, 0 to 1")
    ]
    high_frac: Annotated[float, Field(ge=1.0, description="a multiplier for its high end, from 1")]
    source: str = Field(min_length=1, description="where the figures come from")


class DeviceSpec(Spec):
    """One GPU or CPU model. `cite` gives the source of each figure by key, and as `datasheet` that of all others."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_]*$", description="lower-case letters, digits and underscores")
    title: str = Field(min_length=1, description="the name its driver reports")
    aliases: tuple[str, ...] = ()
    kind: Literal["cuda", "cpu"] = Field(description="cuda or cpu")
    architecture: str = Field(min_length=1, description="such as 'ampere'")
    compute_capability: str = Field(pattern=r"^[0-9]+\.[0-9]+$|^none$", description="such as '8.0' (quoted), or 'none'")
    n_sms: PositiveCount = Field(description="streaming multiprocessors, or cores of a CPU")
    clock: Hertz = Field(description="a frequency such as '1.41 GHz'")
    peak: dict[Pipe, FlopsPerS] = Field(description="dense rates by pipe, such as 'fp32: 19.5 TFLOP/s'")
    memory: PositiveBytes = Field(description="a size such as '80 GiB'")
    memory_bandwidth: BytesPerS = Field(description="a rate such as '2.039 TB/s'")
    l2: PositiveBytes = Field(description="a size such as '40 MiB'")
    l2_bandwidth: BytesPerS = Field(description="a rate such as '7.2 TB/s'")
    smem_per_sm: PositiveBytes = Field(description="a size such as '164 KiB'")
    kernel_floor: Seconds = Field(description="a time such as '2 us'")
    host_link: BytesPerS = Field(description="a rate such as '31.5 GB/s', one direction")
    tdp: Watts = Field(description="a power such as '400 W'")
    nearest: str = ""
    host: HostSpec
    overlap: OverlapSpec | None = None
    cite: dict[str, str] = Field(description="the source of each figure, by key")

    @field_validator("peak")
    @classmethod
    def _has_fp32(cls, peak: dict[Pipe, float]) -> dict[Pipe, float]:
        if "fp32" not in peak:
            raise ValueError("missing fp32, needs a rate such as '19.5 TFLOP/s' (other pipes fall back to it)")
        return peak

    @model_validator(mode="after")
    def _is_cited(self) -> Self:
        figures = set(type(self).model_fields) - {
            "name",
            "title",
            "aliases",
            "kind",
            "nearest",
            "host",
            "overlap",
            "cite",
        }
        unknown = sorted(set(self.cite) - figures - {"datasheet"})
        problems = [f"cite: unknown key {key!r}{suggest(key, figures)}" for key in unknown]
        if "datasheet" not in self.cite:
            uncited = sorted(figures - set(self.cite))
            problems += [f"cite: missing the source of {key} (or of all, as 'datasheet')" for key in uncited]
        if problems:
            raise ValueError("\n".join(problems))
        return self
