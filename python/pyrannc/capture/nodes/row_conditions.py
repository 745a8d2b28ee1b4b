"""What a forward asks of the number of rows to go one way or another, as ``if x.shape[0] > 12`` does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import sympy

from pyrannc.capture.user.source import Place
from pyrannc.errors import CaptureError

ROWS = sympy.Symbol("rows", integer=True, positive=True)
"""Stands for their number in what is asked."""


_TIMES = (2, 3, 7, 1009)
"""Multiples that stand for all."""


class OtherRowsError(CaptureError):
    """The forward goes by the number of rows, and the batch answers otherwise than what was traced."""


@dataclass(frozen=True)
class RowCondition:
    """A question about the number of rows, and the answer that a captured form goes by.

    Attributes:
        asked: an expression in :data:`ROWS`, and in symbols for lengths where these have no number yet.
        answer: what came of it.
        where: it is asked.
    """

    asked: sympy.Basic
    answer: bool
    where: Place

    def holds(self, rows: int) -> bool:
        """True when a batch of so many rows has the same answer."""
        return _answer(self.asked, rows) is self.answer

    def with_lengths(self, bound: Mapping[Any, Any]) -> RowCondition:
        """The same with numbers in the place of symbols for lengths."""
        return replace(self, asked=self.asked.xreplace(bound))

    def __str__(self) -> str:
        return f"{self.asked} ({'yes' if self.answer else 'no'})"


def is_of_many(number: sympy.Basic, symbol: sympy.Symbol, rows: int, value: sympy.Basic) -> bool:
    """True for a number computed from that of the rows that has one value for any multiple of so many rows.

    Args:
        number: an expression in ``symbol`` alone, which stands for the rows.
        value: what it is for so many.
    """
    if number.free_symbols != {symbol}:
        return False
    return all(number.xreplace({symbol: sympy.Integer(rows * times)}) == value for times in _TIMES)


@lru_cache(4096)
def _answer(asked: sympy.Basic, rows: int) -> bool | None:
    """None for so many rows that it cannot be asked, as of what a number of rows below two leaves of their half."""
    try:
        return bool(asked.xreplace({ROWS: sympy.Integer(rows)}))
    except ZeroDivisionError:
        return None


def first_other(conditions: Iterable[RowCondition], rows: int) -> RowCondition | None:
    """The first of some conditions that a batch of so many rows answers in another way."""
    return next((condition for condition in conditions if not condition.holds(rows)), None)


def other_rows(asked: RowCondition, rows: int) -> OtherRowsError:
    """The error for a batch that answers otherwise."""
    return OtherRowsError(
        f"{asked.where} goes by the number of rows ({asked}), and a batch of {rows} answers otherwise: rows are "
        "captured as a number of at least two that no other extent has. Leave out the question, or ask it before the "
        "call, of what is the same on all ranks, and pass the answer as an argument"
    )
