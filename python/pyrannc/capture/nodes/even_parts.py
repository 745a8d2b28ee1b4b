"""Parts of equal extents: ``chunk(3)``, or ``split(len(x))``, of three batches one after another.

Torch counts them by rounding, which a symbol for the rows leaves open; here their extents tell how many there are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dims import AffineReader, Dim
from .operands import named_arguments

_aten = torch.ops.aten
_BY_SIZES = {
    _aten.split.Tensor: _aten.split_with_sizes.default,
    _aten.chunk.default: _aten.split_with_sizes.default,
    _aten.unsafe_split.Tensor: _aten.unsafe_split_with_sizes.default,
    _aten.unsafe_chunk.default: _aten.unsafe_split_with_sizes.default,
}
"""What takes the extent or the number of its parts, and the same with the extent of each."""


def by_sizes(func: Any, args: Any, kwargs: Any, reader: AffineReader) -> tuple[Any, Any, Any]:
    """A call of an operator; one that divides what grows with the rows into equal parts as a call with their extents.

    Args:
        reader: of numbers in the symbol for the rows.
    """
    if func not in _BY_SIZES:
        return func, args, kwargs
    given = named_arguments(func, args, kwargs)
    tensor: Tensor = given["self"]
    dim: int = given["dim"]
    extent = reader.read(tensor.shape[dim]) if tensor.dim() else None
    if extent is None or not extent.per_row:
        return func, args, kwargs
    count = _divisor(extent, given["chunks"]) if "chunks" in given else _ratio(extent, reader.read(given["split_size"]))
    if not count:
        return func, args, kwargs
    return _BY_SIZES[func], (tensor, [tensor.shape[dim] // count] * count, dim), {}


def _divisor(extent: Dim, count: int) -> int | None:
    """The number, if it divides the extent for any number of rows."""
    return count if count > 0 and not extent.per_row % count and not extent.fixed % count else None


def _ratio(extent: Dim, size: Dim | None) -> int | None:
    """How many times one extent has the other, for any number of rows."""
    if size is None or size.per_row <= 0 or extent.per_row % size.per_row:
        return None
    count = extent.per_row // size.per_row
    return count if size.fixed * count == extent.fixed else None
