"""Several batches that run as one: none of it mixes rows where each is taken apart again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyrannc._native import Graph
from pyrannc.capture import Captured
from pyrannc.core.tail import DividedFacts

WIDTH = 6

Join = Callable[[Tensor, Tensor], Tensor]
Apart = Callable[[Tensor, int], Sequence[Tensor]]


class Views(nn.Module):
    """Encodes two views of each row together."""

    def __init__(self, join: Join, result: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.join, self.result = join, result

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.result(torch.tanh(self.linear(self.join(x, other))), len(x))


def call(rows: int) -> Any:
    return (torch.randn(rows, WIDTH, dtype=torch.double), torch.randn(rows, WIDTH, dtype=torch.double)), {}


def tail_of(captured: Captured) -> list[str]:
    """The operators that run on all rows."""
    divided = DividedFacts.from_json(Graph.from_json(captured.graph_json).divide_tail("batch").to_json())
    ops = json.loads(captured.graph_json)["ops"]
    return [ops[op]["target"].split(".")[1] for op in divided.tail.ops]


@pytest.mark.parametrize(
    "apart",
    [
        lambda y, rows: y.chunk(2),
        lambda y, rows: y.view(2, rows, WIDTH),
        lambda y, rows: y.view(2, y.shape[0] // 2, -1),
        lambda y, rows: y.reshape(2, -1, WIDTH).unbind(0),
        lambda y, rows: y.unflatten(0, (2, -1)),
    ],
)
@pytest.mark.parametrize(
    "join",
    [
        lambda x, other: torch.cat([x, other]),
        lambda x, other: torch.stack([x, other]).flatten(0, 1),
        lambda x, other: torch.stack([x, other]).view(2 * x.shape[0], WIDTH),
        lambda x, other: (x + other).repeat(2, 1),
        lambda x, other: (x + other).expand(2, -1, -1).reshape(-1, WIDTH),
    ],
)
def test_batches_run_as_one_and_are_taken_apart(join: Join, apart: Apart, assert_equals_model: Any) -> None:
    def result(y: Tensor, rows: int) -> Tensor:
        first, second = apart(y, rows)
        return F.mse_loss(first, second.square())

    assert tail_of(assert_equals_model(Views(join, result).double(), call)) == []


def test_batches_that_meet_do_not_keep_others_from_being_followed(assert_equals_model: Any) -> None:
    def result(y: Tensor, rows: int) -> Tensor:
        first, second = y.chunk(2)
        both = torch.cat([first, second.square()])
        return F.mse_loss(first, second) + (both @ both.t()).mean()

    model = Views(lambda x, other: torch.cat([x, other]), result).double()
    assert "linear" not in tail_of(assert_equals_model(model, call))


def test_a_loss_of_steps_that_come_before_rows_joins_as_a_sum(assert_equals_model: Any) -> None:
    def result(y: Tensor, rows: int) -> Tensor:
        steps = y.unsqueeze(1).repeat(1, 3, 1).transpose(0, 1)
        labels = steps.detach().argmax(2)
        return F.cross_entropy(steps.reshape(-1, WIDTH), labels.reshape(-1), ignore_index=1)

    model = Views(torch.add, result).double()
    assert tail_of(assert_equals_model(model, call)) == ["div"]
