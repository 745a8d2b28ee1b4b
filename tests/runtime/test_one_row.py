"""Batches of one row, which is no number to trace with: held against the model, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pyrannc
from tests.ranks import RankPool

WIDTH = 4


class Asks(nn.Module):
    """Goes another way with one row, which comes to the same or not."""

    def __init__(self, *, differs: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.factor = 2.0 if differs else 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y * self.factor if x.shape[0] == 1 else y)  # type: ignore[no-any-return]


def asked(differs: bool, training: bool, before: bool) -> None:
    torch.manual_seed(0)
    model = Asks(differs=differs).train(training)
    module = pyrannc.RaNNCModule(model)
    with torch.set_grad_enabled(training):
        if before:
            module(torch.randn(4, WIDTH))
        x = torch.randn(1, WIDTH)
        if differs:
            with pytest.raises(pyrannc.CaptureError):
                module(x)
            return
        torch.testing.assert_close(module(x), model.last(model.first(x)))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("differs", [False, True])
def test_one_row(ranks: Callable[[int], RankPool], differs: bool, training: bool, before: bool) -> None:
    ranks(1).run(asked, differs, training, before)
