"""The extents that the results of what stays whole had when it was captured, as a function of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyrannc.errors import CaptureError

from .dims import AffineReader, Dim


@dataclass(frozen=True)
class Form:
    """What the results of a call must look like.

    Attributes:
        title: what is called, for messages.
        advice: what else than other extents may help.
        rows_in: the operand and dimension that tell the number of rows, and how; None where none does.
        results: by tensor among the results, its extents.
    """

    title: str
    advice: str
    rows_in: tuple[int, int, Dim] | None
    results: tuple[tuple[Dim, ...], ...]

    @staticmethod
    def of(
        operands: Sequence[Any], results: Sequence[Any], reader: AffineReader, title: str, advice: str = ""
    ) -> Form | None:
        """From tensors of the trace; None where an extent is not of the form ``per_row * rows + fixed``."""
        shapes = [_extents(item, reader) for item in results if isinstance(item, Tensor)]
        if any(shape is None for shape in shapes):
            return None
        return Form(title, advice, _rows_in(operands, reader), tuple(shape for shape in shapes if shape is not None))

    def check(self, operands: Sequence[Any], made: Any) -> None:
        """Raises CaptureError unless results have their extents."""
        tensors = [item for item in ([made] if isinstance(made, Tensor) else made) if isinstance(item, Tensor)]
        rows = None
        if self.rows_in is not None:
            place, dim, extent = self.rows_in
            rows = (operands[place].shape[dim] - extent.fixed) // extent.per_row
        for tensor, dims in zip(tensors, self.results, strict=True):
            expected = [None if dim.per_row and rows is None else dim.at(rows or 0) for dim in dims]
            if len(expected) != tensor.dim() or any(
                size is not None and size != found for size, found in zip(expected, tensor.shape, strict=True)
            ):
                raise CaptureError(
                    f"{self.title} stays whole and has made a tensor of shape {tuple(tensor.shape)} where it had "
                    f"{tuple(expected)} when it was captured: what leaves it must have extents that do not depend on "
                    f"data; pad, or use a mask{self.advice}"
                )


def _extents(tensor: Tensor, reader: AffineReader) -> tuple[Dim, ...] | None:
    found = [reader.read(size) for size in tensor.shape]
    return None if any(dim is None for dim in found) else tuple(dim for dim in found if dim is not None)


def _rows_in(operands: Sequence[Any], reader: AffineReader) -> tuple[int, int, Dim] | None:
    for place, operand in enumerate(operands):
        if isinstance(operand, Tensor):
            for dim, size in enumerate(operand.shape):
                extent = reader.read(size)
                if extent is not None and extent.per_row:
                    return place, dim, extent
    return None
