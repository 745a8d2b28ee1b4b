"""The number of rows as Python asks for it."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyrannc.capture import Captured, CaptureError, capture

LENGTH, WIDTH = 3, 4


class ByLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.first(x).reshape(len(x) * LENGTH, len(self.first.weight))
        sizes = [len(x), *torch.ones(len([x]) + LENGTH - 1).shape]
        return tokens.tanh().view(*sizes, WIDTH).sum() / len(x)


class RowByRow(ByLength):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.first(x[row]) * row for row in range(len(x))])


def call(rows: int) -> Any:
    torch.manual_seed(rows)
    return (torch.randn(rows, LENGTH, WIDTH, dtype=torch.float64),), {}


def test_a_length_is_an_extent(assert_equals_model: Callable[..., Captured]) -> None:
    plain = builtins.len
    found = assert_equals_model(ByLength().double(), call)
    assert (found.kept_whole, found.assumptions) == ((), [])
    assert builtins.len is plain


def test_a_loop_over_rows_needs_a_number() -> None:
    args, kwargs = call(4)
    with pytest.raises(CaptureError, match="works for one batch size only"):
        capture(RowByRow().double(), args, kwargs, device=torch.device("cpu"), rows=4)
