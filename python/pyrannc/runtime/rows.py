"""Rows of tensors: taken out, put together, and found in a local batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pyrannc.core.partition import RowDim
from pyrannc.core.program import Rows, Slice


def take_rows(tensor: Tensor, row_dim: RowDim, rows: Rows) -> Tensor:
    """A view of rows ``lo..hi`` of a tensor."""
    lo, hi = rows
    start, length = lo * row_dim.per_row, (hi - lo) * row_dim.per_row
    if start == 0 and length == tensor.size(row_dim.dim):
        return tensor
    return tensor.narrow(row_dim.dim, start, length)


def join_rows(pieces: Iterable[tuple[Rows, Tensor]], row_dim: RowDim) -> Tensor:
    """Pieces of one tensor, put together in the order of their rows; a single piece is returned as it is."""
    ordered = [tensor for _, tensor in sorted(pieces, key=lambda piece: piece[0])]
    return ordered[0] if len(ordered) == 1 else torch.cat(ordered, row_dim.dim)


def local_rows(slices: Sequence[Slice], microbatch: int, rows: Rows) -> Rows:
    """Where rows of a microbatch stand in the local batch that ``slices`` divide."""
    for part in slices:
        if part.microbatch == microbatch:
            shift = part.local[0] - part.at
            return rows[0] + shift, rows[1] + shift
    raise AssertionError(f"no slice of microbatch {microbatch}")
