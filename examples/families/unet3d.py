"""3D U-Net, which says of each voxel what it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from .family import Family, Row

_CLASSES = 3
_MOST_CHANNELS = 320


@dataclass(frozen=True)
class UNet3d(Family):
    """3D U-Net (Çiçek et al., MICCAI 2016) as in MLPerf: channels double with each of the levels, up to 320."""

    channels: int = 4
    levels: int = 3
    depth: int = 8
    height: int = 16
    width: int = 16

    def model(self) -> nn.Module:
        return _Network([min(self.channels * 2**level, _MOST_CHANNELS) for level in range(self.levels)])

    def row(self, generator: Generator) -> Row:
        extents = (self.depth, self.height, self.width)
        return {
            "volume": torch.randn(1, *extents, generator=generator),
            "labels": torch.randint(_CLASSES, extents, generator=generator),
        }


class _Network(nn.Module):
    """Each level has half of the extents of the one above, and hands what it found over to the way up."""

    def __init__(self, channels: list[int]) -> None:
        super().__init__()
        deeper = list(pairwise(channels))
        self.enter = _convolutions(1, channels[0], stride=1)
        self.down = nn.ModuleList(_convolutions(above, below, stride=2) for above, below in deeper)
        self.enlarge = nn.ModuleList(nn.ConvTranspose3d(below, above, 2, stride=2) for above, below in deeper)
        self.up = nn.ModuleList(_convolutions(2 * above, above, stride=1) for above, _ in deeper)
        self.classify = nn.Conv3d(channels[0], _CLASSES, 1)

    def forward(self, volume: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = [self.enter(volume)]
        for down in self.down:
            found.append(down(found[-1]))
        below = found.pop()
        for enlarge, up in zip(reversed(self.enlarge), reversed(self.up), strict=True):
            below = up(torch.cat([enlarge(below), found.pop()], dim=1))
        return {"loss": functional.cross_entropy(self.classify(below), labels)}


def _convolutions(channels: int, wide: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(channels, wide, 3, stride=stride, padding=1, bias=False),
        nn.InstanceNorm3d(wide, affine=True),
        nn.ReLU(inplace=True),
        nn.Conv3d(wide, wide, 3, padding=1, bias=False),
        nn.InstanceNorm3d(wide, affine=True),
        nn.ReLU(inplace=True),
    )
