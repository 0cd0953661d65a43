"""ResNet (He et al. 2015) and ResNeXt (Xie et al. 2017); parameter names as in torchvision."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from perfmodel.config.vision import VisionSpec
from perfmodel.models.built import PARAMETER_DTYPE

_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
_STEM_WIDTH = 64


def _conv(n_in: int, n_out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(n_in, n_out, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    expansion = 1

    def __init__(self, n_in: int, width: int, stride: int, spec: VisionSpec) -> None:
        super().__init__()
        self.conv1 = _conv(n_in, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(n_in, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        activated: Tensor = self.relu(out)
        return activated


class Bottleneck(nn.Module):
    """1x1, grouped 3x3 and 1x1 convolutions around a shortcut; the stride is on the 3x3 (ResNet v1.5)."""

    expansion = 4

    def __init__(self, n_in: int, width: int, stride: int, spec: VisionSpec) -> None:
        super().__init__()
        inner, n_out = width * spec.width_per_group // _STEM_WIDTH * spec.groups, width * self.expansion
        self.conv1 = _conv(n_in, inner, 1)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = _conv(inner, inner, 3, stride, spec.groups)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = _conv(inner, n_out, 1)
        self.bn3 = nn.BatchNorm2d(n_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(n_in, n_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        activated: Tensor = self.relu(out)
        return activated


def _shortcut(n_in: int, n_out: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and n_in == n_out:
        return None
    return nn.Sequential(_conv(n_in, n_out, 1, stride), nn.BatchNorm2d(n_out))


class ResNet(nn.Module):
    """Logits (batch, classes) of images (batch, 3, size, size)."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        block = BasicBlock if spec.depth < 50 else Bottleneck
        self.conv1 = nn.Conv2d(3, _STEM_WIDTH, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(_STEM_WIDTH)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        n_in = _STEM_WIDTH
        for stage, n_blocks in enumerate(_BLOCKS[spec.depth]):
            width = _STEM_WIDTH * 2**stage
            blocks = []
            for position in range(n_blocks):
                stride = 2 if stage and not position else 1
                blocks.append(block(n_in, width, stride, spec))
                n_in = width * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(n_in, spec.classes)

    def forward(self, x: Tensor) -> Tensor:
        """Stem, four stages, pooling and classifier."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in range(4):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


def build_parts(spec: VisionSpec, device: str, seed: int) -> dict[str, Any]:
    """BuiltModel fields of a ResNet on a device; `seed` draws the inputs where the device holds values."""
    dtype = PARAMETER_DTYPE[spec.precision]
    layout = torch.channels_last if spec.channels_last else torch.contiguous_format
    with torch.device(device):
        module = ResNet(spec).to(dtype=dtype, memory_format=layout)  # type: ignore[call-overload]  # stubs lack this form
    shape = (spec.batch_size, 3, spec.image_size, spec.image_size)
    images = torch.empty(shape, dtype=dtype, device=device, memory_format=layout)
    labels = torch.empty(spec.batch_size, dtype=torch.int64, device=device)
    if device != "meta":
        generator = torch.Generator().manual_seed(seed)
        images.copy_(torch.rand(shape, generator=generator))
        labels.copy_(torch.randint(0, spec.classes, labels.shape, generator=generator))
    return {"module": module, "args": (images,), "loss": partial(_class_loss, labels), "targets": (labels,)}


def _class_loss(labels: Tensor, logits: Tensor) -> Tensor:
    return fn.cross_entropy(logits, labels)
