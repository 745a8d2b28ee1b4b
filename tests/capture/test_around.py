"""What stays whole around one sub-module, and what is said where nothing can."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pyrannc.capture import capture
from pyrannc.errors import CaptureError

WIDTH = 6
ROWS = 4


class Around(nn.Module):
    """Decides by what it computes, so that nothing but the layer can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def before(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.before(x))
        return y.reshape(-1).split(int(y.shape[0]) * WIDTH)[0].sum()


class Drawing(Around):
    def before(self, x: Tensor) -> Tensor:
        return x + torch.rand(1)


class Joining(Around):
    def before(self, x: Tensor) -> Tensor:
        return torch.cat([x, x + 1.0])


def error(model: nn.Module) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(model, (torch.randn(ROWS, WIDTH),), {}, device=torch.device("cpu"), rows=ROWS)
    return str(caught.value)


def test_the_rest_stays_whole_around_a_layer() -> None:
    found = capture(Around(), (torch.randn(ROWS, WIDTH),), {}, device=torch.device("cpu"), rows=ROWS)
    assert [path for kept in found.kept_whole for path in kept.paths] == [">layer"]


def test_what_draws_is_told_after_what_failed_first() -> None:
    text = error(Drawing())
    assert "as what draws random numbers does" in text
    assert text.startswith("the model (")
    assert "works for one batch size only" in text.splitlines()[0]


def test_joined_batches_are_not_said_to_draw() -> None:
    text = error(Joining())
    assert "random" not in text
    assert text.startswith("the model (")
