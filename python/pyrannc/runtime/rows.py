"""Rows of tensors: taken out, put together, and found in a local batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Pieces:
    """Pieces of one tensor, in the order of their rows.

    Attributes:
        tensors: at least one.
        dim: of their rows, where there are several.
    """

    tensors: Sequence[Tensor]
    dim: int = 0

    @staticmethod
    def of(pieces: Iterable[tuple[Rows, Tensor]], row_dim: RowDim) -> Pieces:
        """Puts pieces in the order of their rows."""
        return Pieces([tensor for _, tensor in sorted(pieces, key=lambda piece: piece[0])], row_dim.dim)

    def joined(self) -> Tensor:
        """The tensor; a single piece as it is."""
        return self.tensors[0] if len(self.tensors) == 1 else torch.cat(list(self.tensors), self.dim)

    def like(self) -> Tensor:
        """A tensor of the form of all of them, without contents."""
        return Pieces([torch.empty_like(tensor, device="meta") for tensor in self.tensors], self.dim).joined()

    def places_in(self, whole: Tensor) -> Sequence[Tensor]:
        """Where they are in the tensor."""
        return (
            torch.split(whole, [tensor.size(self.dim) for tensor in self.tensors], self.dim) if whole.dim() else [whole]
        )


def join_rows(pieces: Iterable[tuple[Rows, Tensor]], row_dim: RowDim) -> Tensor:
    """Pieces of one tensor, put together in the order of their rows; a single piece is returned as it is."""
    return Pieces.of(pieces, row_dim).joined()


def local_rows(slices: Sequence[Slice], microbatch: int, rows: Rows) -> Rows:
    """Where rows of a microbatch stand in the local batch that ``slices`` divide."""
    for part in slices:
        if part.microbatch == microbatch:
            shift = part.local[0] - part.at
            return rows[0] + shift, rows[1] + shift
    raise AssertionError(f"no slice of microbatch {microbatch}")
