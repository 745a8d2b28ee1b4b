"""Lists with an item for each row, which parts that stay whole return beside other results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyrannc.capture import capture
from pyrannc.errors import CaptureError


class RowByRow(nn.Module):
    """Attends row by row, and returns the weights of each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        weights = [(row @ row.T).softmax(-1) for row in self.layer(x)[: int(x.shape[0])]]
        return torch.stack([own @ row for own, row in zip(weights, x, strict=True)]), weights


class Packed(RowByRow):
    """Likewise, of rows that stand one after another, whose numbers of elements are data."""

    def forward(self, x: Tensor, begins: Tensor) -> tuple[Tensor, list[Tensor]]:  # type: ignore[override]  # it takes more
        rows = torch.split(self.layer(x), (begins[1:] - begins[:-1]).tolist())
        weights = [(row @ row.T).softmax(-1) for row in rows]
        return torch.cat([own @ row for own, row in zip(weights, rows, strict=True)]), weights


class Around(nn.Module):
    """Takes the results of a part apart."""

    def __init__(self, then: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.inner = RowByRow()
        self.then = then

    def forward(self, x: Tensor) -> Any:
        return self.then(*self.inner(x + 1))


class PackedAround(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Packed()

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        ends = torch.repeat_interleave(grid[:, 1], grid[:, 0]).cumsum(0)
        made, _ = self.inner(x, nn.functional.pad(ends, (1, 0)))
        return made * 2  # type: ignore[no-any-return]


def tokens(rows: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    return (torch.randn(rows, 3, 4, dtype=torch.float64),), {}


def packed(rows: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    return (torch.randn(3 * rows, 4, dtype=torch.float64), torch.tensor([[1, 3]] * rows)), {}


def test_a_list_that_nobody_uses_is_left_out(assert_equals_model: Any) -> None:
    captured = assert_equals_model(Around(lambda made, weights: made * 2), tokens)
    assert [kept.paths for kept in captured.kept_whole] == [("inner",)]


def test_a_list_as_long_as_data_say_is_left_out(assert_equals_model: Any) -> None:
    captured = assert_equals_model(PackedAround(), packed, per_row=(3, 1))
    assert captured.kept_whole[0].paths == ("inner",)


@pytest.mark.parametrize(
    "then",
    [
        lambda made, weights: made * len(weights),
        lambda made, weights: made if isinstance(weights, Tensor) else made * weights[0].sum(),
        lambda made, weights: (made, weights),
    ],
)
def test_a_list_that_is_used_stays_inside(then: Callable[[Tensor, Any], Any]) -> None:
    (x,), _ = tokens(4)
    with pytest.raises(CaptureError, match=r"'inner'.*list whose length depends on the batch"):
        capture(Around(then), (x,), {}, device=torch.device("cpu"), rows=4)


def test_a_part_round_the_use_is_kept_whole_instead(assert_equals_model: Any) -> None:
    around = Around(lambda made, weights: made * torch.stack(weights).sum((1, 2), keepdim=True))
    captured = assert_equals_model(nn.Sequential(around, nn.Linear(4, 4, dtype=torch.float64)), tokens)
    assert captured.kept_whole[0].paths == ("0",)
