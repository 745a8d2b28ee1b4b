"""What is looked up inside of ``torch.vmap`` by numbers of rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

# What libraries switch on where they make masks; it has no public name.
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from pyrannc.capture import Captured, capture

ROWS, LENGTH = 4, 5
Choose = Callable[[Tensor, Tensor, Tensor], Tensor]


class Masked(nn.Module):
    """Hides what ``choose`` tells of a mask and the numbers of a row and a column."""

    def __init__(self, choose: Choose) -> None:
        super().__init__()
        self.linear = nn.Linear(LENGTH, LENGTH)
        self.choose = choose
        self.register_buffer("table", torch.arange(LENGTH) > 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, columns = torch.arange(x.shape[0]), torch.arange(x.shape[1])
        with TransformGetItemToIndex():
            of_row = torch.vmap(lambda row, column: self.choose(mask, row, column), in_dims=(None, 0))
            shown = torch.vmap(of_row, in_dims=(0, None))(rows, columns)
        return self.linear(x) * shown  # type: ignore[no-any-return]


def own_and_earlier(mask: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return mask[row, column] & (column > 0)


def of_the_last(mask: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return mask[mask.shape[0] - 1 - row, column]


def of_no_row(mask: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return (column > 1) & (row >= 0)


def call(rows: int) -> Any:
    return (torch.randn(rows, LENGTH, dtype=torch.float64), torch.rand(rows, LENGTH) > 0.4), {}


def lookups(captured: Captured) -> list[dict[str, Any]]:
    return [op for op in json.loads(captured.graph_json)["ops"] if op["target"].startswith("pyrannc.opaque.lookup")]


@pytest.mark.parametrize("choose", [own_and_earlier, of_the_last, of_no_row])
def test_equals_model(choose: Choose, assert_equals_model: Callable[..., Captured]) -> None:
    assert not assert_equals_model(Masked(choose).double(), call).kept_whole


@pytest.mark.parametrize(("choose", "found"), [(own_and_earlier, [True]), (of_the_last, [None]), (of_no_row, [])])
def test_trials_tell_whether_rows_look_at_others(choose: Choose, found: list[bool | None]) -> None:
    args, kwargs = call(ROWS)
    captured = capture(Masked(choose).double(), args, kwargs, device=torch.device("cpu"), rows=ROWS)
    assert [op.get("row_wise") for op in lookups(captured)] == found


class Straight(torch.autograd.Function):
    """The sign, whose gradient is that of its operand."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def test_a_function_with_a_backward_of_its_own_keeps_it_under_vmap(
    assert_equals_model: Callable[..., Captured],
) -> None:
    class Signs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(Straight.apply)(x)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.signs, self.last = nn.Linear(LENGTH, LENGTH), Signs(), nn.Linear(LENGTH, LENGTH)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.last(self.signs(self.first(x))) * mask  # type: ignore[no-any-return]

    captured = assert_equals_model(Around().double(), call)
    assert [kept.paths for kept in captured.kept_whole] == [("signs",)]
