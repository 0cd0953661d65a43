"""Modules that live cases reach as a user's own would be: by an entrypoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def mlp(batch: int, width: int, layers: int = 4) -> tuple[Any, Any, Any]:
    """A multi-layer perceptron that regresses one value: (module, inputs, loss)."""
    import torch
    from torch import nn

    sizes = [width] * layers
    parts: list[nn.Module] = []
    for size in sizes:
        parts += [nn.Linear(width, size), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, 1)), (torch.randn(batch, width),), _mean_square


def autoencoder(batch: int, channels: int) -> tuple[Any, Any, Any]:
    """A small convolutional autoencoder with group norm and a bottleneck: (module, inputs, loss)."""
    import torch
    from torch import nn

    module = nn.Sequential(
        nn.Conv2d(3, channels, 3, stride=2, padding=1), nn.GroupNorm(4, channels), nn.SiLU(),
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1), nn.GroupNorm(4, 2 * channels), nn.SiLU(),
        nn.Conv2d(2 * channels, 2 * channels, 3, padding=1), nn.SiLU(),
        nn.Upsample(scale_factor=2), nn.Conv2d(2 * channels, channels, 3, padding=1), nn.SiLU(),
        nn.Upsample(scale_factor=2), nn.Conv2d(channels, 3, 3, padding=1),
    )  # fmt: skip
    return module, (torch.randn(batch, 3, 64, 64),), _mean_square


def _mean_square(output: Tensor) -> Tensor:
    return output.square().mean()
