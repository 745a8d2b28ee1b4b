"""Parts that stay whole with rows in another dimension than the first, and with what tells where rows begin."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyrannc.capture import Captured, capture
from pyrannc.capture.nodes.dims import Dim
from pyrannc.capture.rows.trial import rows_shown

ROWS, PATCHES, WIDTH = 4, 4, 8


def captured(model: nn.Module, *args: Any, per_row: list[int]) -> Captured:
    return capture(model, args, {}, device=torch.device("cpu"), rows=ROWS, per_row=per_row)


def run(found: Captured, model: nn.Module, *args: Tensor) -> list[Tensor]:
    state = dict(model.named_parameters())
    return list(found.gm(*(state[name] for name in found.params), *args))


def opaque_ops(found: Captured) -> list[dict[str, Any]]:
    return [op for op in json.loads(found.graph_json)["ops"] if op.get("opaque")]


class TimeFirst(nn.Module):
    """Loops over rows, which stand in dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = [self.inner(x[:, row]) for row in range(x.shape[1])]
        made = torch.stack(rows, 1)
        return made, made.sum(0)


class OfTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(WIDTH, WIDTH), TimeFirst(), nn.Linear(2 * WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        made, sums = self.part(self.first(x).transpose(0, 1))
        flat = made.view(-1, 2 * WIDTH)
        return self.last(flat).view(made.shape[0], -1, 3).sum(0) + self.last(sums)  # type: ignore[no-any-return]


def test_rows_may_stand_in_another_dimension() -> None:
    model = OfTime()
    found = captured(model, torch.randn(ROWS, 5, WIDTH), per_row=[1])
    assert [kept.paths for kept in found.kept_whole] == [("part",)]
    assert found.row_wise == (True,)
    x = torch.randn(7, 5, WIDTH)
    (made,) = run(found, model, x)
    expected = model(x)
    assert torch.allclose(made, expected, atol=1e-6)
    for mine, right in zip(
        *(torch.autograd.grad(y.square().sum(), list(model.parameters())) for y in (made, expected)), strict=True
    ):
        assert torch.allclose(mine, right, rtol=1e-4, atol=1e-5)


class Writes(nn.Module):
    """Changes rows in dimension 1 in place, in a loop over them."""

    def forward(self, x: Tensor) -> Tensor:
        for row in range(x.shape[1]):
            x[:, row] *= 0.5 * float(x[:, row].detach().numpy().size > 0)
        return x


class OfWrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(WIDTH, WIDTH), Writes(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).transpose(0, 1).contiguous()
        returned = self.part(y)
        return self.last((y + returned * 10).sum(0))  # type: ignore[no-any-return]


def test_rows_in_another_dimension_may_be_changed_in_place() -> None:
    model = OfWrites()
    found = captured(model, torch.randn(ROWS, 5, WIDTH), per_row=[1])
    assert [kept.paths for kept in found.kept_whole] == [("part",)]
    assert found.row_wise == (True,)
    x = torch.randn(7, 5, WIDTH)
    assert torch.allclose(run(found, model, x)[0], model(x), atol=1e-5)


class Attention(nn.Module):
    """Attends within each image of a packed batch."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, begins: Tensor) -> Tensor:
        lengths = (begins[1:] - begins[:-1]).tolist()
        pairs = zip(self.query(x).split(lengths, 1), self.value(x).split(lengths, 1), strict=True)
        return x + torch.cat([F.scaled_dot_product_attention(q, q, v) for q, v in pairs], 1)


class Packed(nn.Module):
    """As vision towers do that take all patches for one sequence, in dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(Attention() for _ in range(3))

    def forward(self, patches: Tensor, grid: Tensor) -> Tensor:
        x = self.first(patches).unsqueeze(0)
        begins = F.pad(grid.prod(1).cumsum(0), (1, 0))
        for layer in self.layers:
            x = layer(x, begins)
        return self.last(x).squeeze(0)  # type: ignore[no-any-return]


def test_layers_of_one_packed_sequence_treat_each_row_by_itself() -> None:
    # As wide as so many times the rows, which must not be taken for them.
    model = Packed()
    patches, grid = torch.randn(ROWS * PATCHES, 6), torch.tensor([[1, 2, 2]] * ROWS)
    found = captured(model, patches, grid, per_row=[PATCHES, 1])
    assert [kept.paths for kept in found.kept_whole] == [("layers.0", "layers.1", "layers.2")]
    assert found.row_wise == (True, True, True)
    assert len(opaque_ops(found)) == 3
    patches, grid = torch.randn(6 * PATCHES, 6), torch.tensor([[1, 2, 2]] * 6)
    assert torch.allclose(run(found, model, patches, grid)[0], model(patches, grid), atol=1e-6)


class HandsOn(nn.Module):
    """Returns an argument beside what it computes."""

    def forward(self, x: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
        return torch.stack([row * 2 for row in x]), grid


class OnlyHandsOn(nn.Module):
    """Returns its argument, and would not run if it gave nothing."""

    def forward(self, x: Tensor) -> Tensor:
        x.detach().numpy()
        return x


class OfHandsOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.part, self.other = HandsOn(), OnlyHandsOn()

    def forward(self, x: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
        y, grid = self.part(self.first(x), grid)
        y += 1
        return self.last(self.other(y)), grid + 1


def test_an_argument_that_is_returned_stays_itself() -> None:
    model = OfHandsOn()
    x, grid = torch.randn(ROWS, WIDTH), torch.ones(ROWS, 3, dtype=torch.long)
    found = captured(model, x, grid, per_row=[1, 1])
    assert [len(op["results"]) for op in opaque_ops(found)] == [1, 1]
    for made, expected in zip(run(found, model, x, grid), model(x, grid), strict=True):
        assert torch.allclose(made, expected)


class _Twice(nn.Module):
    def forward(self, x: Tensor, again: Tensor) -> Tensor:
        assert torch.equal(x, again)
        return torch.stack([row * 2 for row in x])


class OfTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(WIDTH, WIDTH), _Twice()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.part(y, y)  # type: ignore[no-any-return]


def test_what_comes_twice_is_tried_as_one() -> None:
    found = captured(OfTwice(), torch.randn(ROWS, WIDTH), per_row=[1])
    assert [kept.paths for kept in found.kept_whole] == [("part",)]
    assert found.row_wise == (True,)


@pytest.mark.parametrize(("width", "rows", "most"), [(8, 4, 64), (8, 100, 100), (300_000, 4, 8), (300_000, 12, 12)])
def test_what_takes_long_is_tried_with_the_rows_of_the_batch(width: int, rows: int, most: int) -> None:
    tried: list[int] = []

    def call(x: Tensor) -> Tensor:
        tried.append(len(x))
        return x * 2

    operand = torch.empty(1, device="meta"), [Dim(1, 0), Dim(0, width)], False
    assert rows_shown(call, [operand], torch.device("cpu"), rows) == most
    assert max(tried) == most


SCALED: list[int] = []
"""Rows of each call of :func:`scaled`."""


@torch.library.custom_op("rows_first::scaled", mutates_args=())
def scaled(x: Tensor, power: int) -> Tensor:
    SCALED.append(len(x))
    return x * 2.0**power


@scaled.register_fake
def _(x: Tensor, power: int) -> Tensor:
    return torch.empty_like(x)


def _keep_power(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.power = inputs[1]


def _scaled_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad * 2.0**ctx.power, None


scaled.register_autograd(_scaled_gradient, setup_context=_keep_power)


class Scaled(nn.Module):
    def __init__(self, *powers: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.powers = powers

    def forward(self, x: Tensor) -> Tensor:
        for power in self.powers:
            x = scaled(self.layer(x), power)
        return x


def test_an_operator_is_tried_once_for_operands_that_are_alike() -> None:
    def calls(*powers: int) -> int:
        SCALED.clear()
        assert captured(Scaled(*powers), torch.randn(ROWS, WIDTH), per_row=[1]).row_wise == (True,) * len(powers)
        return len(SCALED)

    once = calls(2)
    assert once > 0
    assert calls(2, 2, 2) == once
    assert calls(2, 3, 2) == 2 * once


class OfRows(nn.Module):
    """A recurrent network that takes one row after another."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.lstm(x[row : row + 1])[0] for row in range(x.shape[0])])


def test_what_a_part_that_stays_whole_keeps_is_its_own_where_another_needs_its_results() -> None:
    model = nn.Sequential(OfRows(), nn.Linear(WIDTH, WIDTH), OfRows())
    found = captured(model, torch.randn(ROWS, 5, WIDTH), per_row=[1])
    assert [kept.paths for kept in found.kept_whole] == [("0", "2")]
    assert found.python_state.written == []
