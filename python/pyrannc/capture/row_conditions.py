"""What a forward asks of the number of rows to go one way or another, as ``if x.shape[0] > 12`` does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sympy

from .source import Place


@dataclass(frozen=True)
class RowCondition:
    """A question about the number of rows, and the answer that a captured form goes by.

    Attributes:
        asked: an expression in one symbol, for the rows.
        answer: what came of it.
        where: it is asked.
    """

    asked: sympy.Basic
    answer: bool
    where: Place

    def holds(self, rows: int) -> bool:
        """True when a batch of so many rows has the same answer."""
        return (
            bool(self.asked.xreplace({symbol: sympy.Integer(rows) for symbol in self.asked.free_symbols}))
            == self.answer
        )

    def __str__(self) -> str:
        names = {symbol: sympy.Symbol("rows") for symbol in self.asked.free_symbols}
        return f"{self.asked.xreplace(names)} ({'yes' if self.answer else 'no'})"


def first_other(conditions: Iterable[RowCondition], rows: int) -> RowCondition | None:
    """The first of some conditions that a batch of so many rows answers in another way."""
    return next((condition for condition in conditions if not condition.holds(rows)), None)
