"""Image classifiers: ResNet (He et al. 2015, arXiv:1512.03385), ResNeXt (Xie et al. 2017, arXiv:1611.05431)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from perfmodel.config.quantity import PositiveCount
from perfmodel.config.training import TrainedSpec

# Stem and stages halve the image five times.
TOTAL_STRIDE = 32


class VisionSpec(TrainedSpec):
    """A residual network.

    Attributes:
        depth: 18 and 34 use basic blocks, 50, 101 and 152 bottlenecks.
        groups, width_per_group: of the 3x3 convolution in a bottleneck; 1 and 64 is ResNet, 32 and 4 ResNeXt-50 32x4d.
        image_size: height and width of the square input (pixels).
        channels_last: memory format of activations and weights.
    """

    kind: Literal["vision"] = "vision"
    depth: Literal[18, 34, 50, 101, 152] = Field(description="18, 34, 50, 101 or 152")
    groups: PositiveCount = 1
    width_per_group: PositiveCount = 64
    image_size: PositiveCount = 224
    classes: PositiveCount = 1000
    channels_last: bool = False

    @model_validator(mode="after")
    def _normalisable(self) -> VisionSpec:
        side = -(-self.image_size // TOTAL_STRIDE)
        if self.batch_size * side * side < 2:
            raise ValueError(
                "batch_size: found 1 with an image that shrinks to one pixel, allowed at least 2 "
                "(batch norm needs more than one value per channel)"
            )
        return self
