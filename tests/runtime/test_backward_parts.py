"""Backwards that are compiled in two parts, where one operator makes gradients of both."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from pyrannc.blocks.split_backward import SplitBackward
from tests.test_spans import ROWS

from .equivalence import double_precision
from .test_compiled import compiled


class Images(nn.Module):
    """Convolutions there and back, each followed by statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ConvTranspose2d(4, 3, 4, stride=2, padding=1)
        self.norms = nn.ModuleList((nn.GroupNorm(1, 4), nn.GroupNorm(1, 3)))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        made = self.norms[0](self.down(x)).relu()
        return (self.norms[1](self.up(made)) + x,)


class Looks(nn.Module):
    """Attention, of which one operator makes all gradients: those of keys and values are there with that of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = (nn.Parameter(torch.randn(1, 1, 5, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        keys, values = (each.expand(x.shape[0], x.shape[1], -1, -1) for each in (self.keys, self.values))
        return (functional.scaled_dot_product_attention(x, keys, values),)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("make", "precision", "tolerance"), [(Images, double_precision, 1e-12), (Looks, nullcontext, 1e-5)]
)
def test_gradients_that_one_operator_makes_may_come_later(
    make: Callable[[], nn.Module], precision: Callable[[], Any], tolerance: float, tmp_path: Path
) -> None:
    with precision():
        torch.manual_seed(0)
        model, x = make(), torch.randn(ROWS, 3, 8, 8, requires_grad=True)
        stage, refusals = compiled(model, x, str(tmp_path), in_parts=True)
    assert set(refusals) == {None}
    (result,) = model(x)
    seed = torch.randn_like(result)
    expected = torch.autograd.grad(result, [x, *model.parameters()], seed)
    split = SplitBackward([get_gradient_edge(stage(x)[0])], [seed], [x])
    split.run_inputs()
    assert all(param.grad is None for param in model.parameters())
    split.run_weights(keep_graph=False)
    for leaf, right in zip((x, *model.parameters()), expected, strict=True):
        torch.testing.assert_close(leaf.grad, right, rtol=tolerance, atol=tolerance)
