"""Forwards that take some numbers of rows only: those of the batch decide, not those of a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn

from pyrannc.capture import Answering, Captured, PartOfBatchError, Sample, capture_sample
from pyrannc.capture.nodes.row_conditions import ROWS, RowCondition, is_of_many
from pyrannc.capture.user.source import Place
from pyrannc.errors import CaptureError

WIDTH = 6


class Of(nn.Module):
    """What a function makes of a layer's results."""

    def __init__(self, made: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.made = made

    def forward(self, x: Tensor) -> Tensor:
        return self.made(self.layer(x))


def in_pairs(y: Tensor) -> Tensor:
    return y.view(-1, 2, WIDTH).amax(1).sum()


def reshaped(y: Tensor) -> Tensor:
    return y.reshape(-1, 2 * WIDTH).prod(1).sum()


def in_halves(y: Tensor) -> Tensor:
    first, second = y.chunk(2)
    return (first - second).square().sum()


def beside_half(y: Tensor) -> Tensor:
    first, second = y.view(2, -1, WIDTH)
    return (first - second).square().sum()


def beside_counted_half(y: Tensor) -> Tensor:
    return y.view(2, y.shape[0] // 2, -1).prod(0).sum()


def captured(made: Callable[[Tensor], Tensor], rows: int, all_rows: int) -> Captured:
    sample = Sample.of(Of(made), (torch.randn(rows, WIDTH),), {}, torch.device("cpu"), rows)
    return capture_sample(sample, all_rows=all_rows, answers=Answering(part_of_batch=rows < all_rows))


@pytest.mark.parametrize("made", [in_pairs, reshaped, beside_half, beside_counted_half])
@pytest.mark.parametrize("rows", [8, 5, 3, 2, 1])
def test_a_rank_with_odd_or_few_rows_captures_what_the_even_batch_does(made: Any, rows: int) -> None:
    found = captured(made, rows, 8)
    assert not found.kept_whole
    assert all(condition.holds(8) for condition in found.row_conditions)
    assert captured(made, 4, 8).graph_json.replace('"sample_rows":4', "") == found.graph_json.replace(
        f'"sample_rows":{rows}', ""
    )


def test_halves_are_asked_of_the_whole_batch() -> None:
    found = captured(in_halves, 8, 8)
    assert not found.kept_whole
    assert [all(asked.holds(rows) for asked in found.row_conditions) for rows in (1, 16)] == [False, True]
    with pytest.raises(PartOfBatchError):
        captured(in_halves, 5, 8)


@pytest.mark.parametrize("rows", [6, 12])
def test_rows_that_another_extent_equals(rows: int) -> None:
    assert not captured(in_pairs, rows, rows).kept_whole


def test_an_odd_batch_is_refused_with_what_to_do() -> None:
    with pytest.raises(CaptureError) as caught:
        captured(in_pairs, 5, 9)
    place, *_ = str(caught.value).splitlines()
    assert "test_rows_of_batch.py:" in place
    assert "is the number of rows" in place
    assert "pad the batch" in place


def test_a_question_that_a_number_of_rows_leaves_without_an_answer_is_answered_otherwise() -> None:
    asked = RowCondition(sympy.Eq(sympy.floor(ROWS / (ROWS - 1)), 1), True, Place(""))
    assert asked.holds(4)
    assert not asked.holds(1)


def test_a_number_of_many_batches() -> None:
    symbol = sympy.Symbol("s", integer=True, positive=True)
    assert is_of_many(sympy.ceiling(symbol / sympy.ceiling(symbol / 2)), symbol, 5, sympy.Integer(2))
    assert not is_of_many(sympy.floor(symbol / 2), symbol, 8, sympy.Integer(4))
    assert not is_of_many(symbol - sympy.Symbol("length"), symbol, 8, sympy.Integer(4))
