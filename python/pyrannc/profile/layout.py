"""How a tensor lies in memory: what an Op costs depends on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyrannc.capture.torch_internals.symbols import hint


@dataclass(frozen=True)
class Layout:
    """Which dimensions of a tensor lie within which others.

    Attributes:
        order: the dimensions, those with the longest strides first.
        repeated: dimensions along which the same elements are seen again and again.
    """

    order: tuple[int, ...]
    repeated: frozenset[int]

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        """The layout of a tensor, which may be fake."""
        strides, sizes = ([_number(extent) for extent in extents] for extents in (tensor.stride(), tensor.shape))
        repeated = frozenset(dim for dim, size in enumerate(sizes) if size > 1 and strides[dim] == 0)
        return Layout(tuple(sorted(range(len(sizes)), key=lambda dim: -strides[dim])), repeated)

    def make(self, shape: Sequence[int], fill: Callable[[Sequence[int]], Tensor]) -> Tensor:
        """A tensor of ``shape`` with this layout, of what ``fill`` makes for the shape that is stored."""
        stored = fill([1 if dim in self.repeated else shape[dim] for dim in self.order])
        return stored.permute([self.order.index(dim) for dim in range(len(shape))]).expand(tuple(shape))


CHANNELS_LAST = Layout((0, 2, 3, 1), frozenset())
"""That of images."""


def _number(extent: int | torch.SymInt) -> int:
    """An extent in the captured call."""
    return int(hint(extent)) if isinstance(extent, torch.SymInt) else extent
