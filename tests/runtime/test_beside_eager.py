"""Compiled Spans are compared on made-up data that their operators have an answer for."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.test_spans import ROWS

from .test_compiled import TOKENS, WIDTH, compiled


class OneWord(nn.Module):
    """Looks up in a table with one row, as for types of tokens where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1, WIDTH)

    def forward(self, places: Tensor) -> Tensor:
        return self.words(places).tanh()


class Shares(nn.Module):
    """Takes numbers between zero and one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + functional.binary_cross_entropy(x, torch.ones_like(x), reduction="none")


class Table(nn.Module):
    """No row that is made up is one of it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, WIDTH)

    def forward(self, places: Tensor) -> Tensor:
        return self.words(places - 7).tanh()


def test_made_up_data_are_such_as_operators_have_an_answer_for(tmp_path: Path) -> None:
    places = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    for model, x in ((OneWord(), places), (Shares(), torch.rand(ROWS, WIDTH))):
        _, refusals = compiled(model, x, str(tmp_path))
        assert set(refusals) == {None}
    _, refusals = compiled(Table(), places + 8, str(tmp_path))
    assert "it cannot be run on made-up data" in refusals
