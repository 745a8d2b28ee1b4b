"""What one Op draws: whose words, and for which elements of the global batch.

Element ``(o, line, i)`` of a tensor of shape ``[outer, lines, inner]`` has the number ``(line * outer + o) * inner +
i``, where ``line`` counts in the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from pyrannc._native import RandomStream
from pyrannc.core.program import Rows


class CallKey:
    """The number drawn for a call.

    On a device it is a tensor: kernels read it there, so that work captured once can be replayed under another key.
    """

    def __init__(self, number: int, device: torch.device) -> None:
        self.number = number
        self._device = device

    def begin(self, number: int) -> None:
        """Makes it the key of another call, for what reads it on the device."""
        self.number = number
        self.on_device.fill_(number)

    @cached_property
    def on_device(self) -> Tensor:
        """One int64."""
        return torch.full((1,), self.number, dtype=torch.int64, device=self._device)


class RowsInHand:
    """Which rows of the global batch are computed: runs, in the order of the rows here."""

    def __init__(self, runs: Sequence[Rows], device: torch.device) -> None:
        self.runs = tuple(runs)
        self.count = sum(hi - lo for lo, hi in runs)
        self._device = device

    @cached_property
    def on_device(self) -> Tensor:
        """One int64 for each row."""
        rows = [torch.arange(lo, hi, device="cpu") for lo, hi in self.runs]
        return torch.cat(rows or [torch.empty(0, dtype=torch.int64, device="cpu")]).to(self._device)


class Draw(NamedTuple):
    """The words that one Op draws for the rows in hand, one for each element of a tensor.

    Attributes:
        key: the call's.
        op: the drawing Op.
        salt: tells apart draws that have no place in the global batch.
        rows: the rows in hand.
        outer: elements before the dimension of the rows.
        per_row: lines of a row.
        inner: elements of a line.
    """

    key: CallKey
    op: int
    salt: int
    rows: RowsInHand
    outer: int
    per_row: int
    inner: int

    @property
    def lines(self) -> int:
        """Lines in hand."""
        return self.rows.count * self.per_row

    @property
    def numel(self) -> int:
        """Number of words."""
        return self.outer * self.lines * self.inner

    def times(self, words: int) -> Draw:
        """So many words for each element."""
        return self._replace(inner=self.inner * words)

    @property
    def stream(self) -> RandomStream:
        """The stream on the host."""
        return RandomStream(self.key.number, self.op, self.salt)

    @property
    def shape(self) -> tuple[int, int, list[Rows]]:
        """``outer``, ``inner`` and the runs of lines."""
        return self.outer, self.inner, [(lo * self.per_row, hi * self.per_row) for lo, hi in self.rows.runs]
