"""Integers that are affine in the batch size."""

from __future__ import annotations

from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor

from pyrannc.capture.torch_internals.symbols import SYMBOLIC, expression, simplified


class Dim(NamedTuple):
    """An extent or an integer argument: ``per_row * rows + fixed``."""

    per_row: int
    fixed: int

    def at(self, rows: int) -> int:
        """The integer for a batch of ``rows`` rows."""
        return self.per_row * rows + self.fixed


def symbols_in(value: Any) -> frozenset[sympy.Symbol]:
    """What stands for numbers in the extents of tensors, or in numbers of a trace."""
    if isinstance(value, (list, tuple)):
        return frozenset().union(*map(symbols_in, value))
    sizes = value.shape if isinstance(value, Tensor) else (value,)
    numbers = (size for size in sizes if isinstance(size, SYMBOLIC))
    return frozenset().union(*(expression(number).free_symbols for number in numbers))


class AffineReader:
    """Reads symbolic integers as :class:`Dim` of one batch symbol."""

    def __init__(self, symbol: sympy.Symbol | None) -> None:
        self.symbol = symbol
        self._known: dict[Any, Dim | None] = {}

    def read(self, size: Any) -> Dim | None:
        """``size`` (an int, SymInt or whole SymFloat) as a :class:`Dim`; None if it is not affine in the batch."""
        if isinstance(size, int):
            return Dim(0, int(size))
        if not isinstance(size, (torch.SymInt, torch.SymFloat)):
            return None
        expr = expression(size)
        if expr not in self._known:
            self._known[expr] = self._read_expression(simplified(size))
        return self._known[expr]

    def _read_expression(self, expr: sympy.Expr) -> Dim | None:
        # float(batch) is written ToFloat(s); an operator takes the integer as well.
        if type(expr).__name__ == "ToFloat":
            expr = expr.args[0]
        if expr.is_Integer:
            return Dim(0, int(expr))
        if self.symbol is None or expr.free_symbols != {self.symbol}:
            return None
        expr = sympy.expand(expr)
        per_row = expr.coeff(self.symbol, 1)
        fixed = sympy.expand(expr - per_row * self.symbol)
        if per_row.is_Integer and fixed.is_Integer:
            return Dim(int(per_row), int(fixed))
        return None
