"""Parts of equal extents: how many there are follows from what they are parts of."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyrannc.capture import capture
from pyrannc.errors import CaptureError

ROWS = 4
BATCHES = 6

Apart = Callable[[Tensor, int], Sequence[Tensor]]


class Joined(nn.Module):
    """Some batches one after another, with one row more where that is asked for, and taken apart again."""

    def __init__(self, apart: Apart, more: int = 0) -> None:
        super().__init__()
        self.apart = apart
        self.more = more

    def forward(self, x: Tensor) -> list[Tensor]:
        joined = torch.cat([x * (place + 1) for place in range(BATCHES)] + [x[:1]] * self.more)
        return list(self.apart(joined, x.shape[0]))


def ops(model: nn.Module) -> list[dict[str, Any]]:
    found = capture(model, (torch.randn(ROWS, 3),), {}, device=torch.device("cpu"), rows=ROWS)
    made: list[dict[str, Any]] = json.loads(found.graph_json)["ops"]
    return made


def extents(model: nn.Module) -> list[tuple[int, int]]:
    """Of each part, ``per_row`` and ``fixed``."""
    (last,) = (op for op in ops(model) if "split" in op["target"])
    assert "split_with_sizes" in last["target"]
    sizes = (item["dim"] for item in last["args"][1]["list"])
    return [(size["per_row"], size["fixed"]) for size in sizes]


@pytest.mark.parametrize(
    ("apart", "count"),
    [
        (lambda joined, rows: joined.chunk(3), 3),
        (lambda joined, rows: joined.chunk(BATCHES, 0), BATCHES),
        (lambda joined, rows: joined.split(rows), BATCHES),
        (lambda joined, rows: joined.split(2 * rows, dim=-2), 3),
        (lambda joined, rows: torch.split(joined.t(), rows, 1), BATCHES),
        (lambda joined, rows: torch.unsafe_chunk(joined, 2), 2),
        (lambda joined, rows: torch.unsafe_split(joined, rows), BATCHES),
    ],
)
def test_so_many_batches_have_so_many_parts(apart: Apart, count: int) -> None:
    assert extents(Joined(apart)) == [(BATCHES // count, 0)] * count


def test_parts_of_what_has_some_more() -> None:
    model = Joined(lambda joined, rows: joined.split(3 * rows + 1), more=2)
    assert extents(model) == [(3, 1)] * 2


def test_what_does_not_grow_with_the_rows_is_left_alone() -> None:
    (last,) = (op for op in ops(Joined(lambda joined, rows: joined.chunk(3, 1))) if "chunk" in op["target"])
    assert last["args"][1] == {"int": 3}


def test_the_last_part_may_have_less() -> None:
    (last,) = (op for op in ops(Joined(lambda joined, rows: joined.split(4 * rows))) if "split" in op["target"])
    assert len(last["results"]) == 2


@pytest.mark.parametrize("apart", [lambda joined, rows: joined.chunk(4), lambda joined, rows: joined.split(2)])
def test_parts_are_refused_whose_number_the_rows_decide(apart: Apart) -> None:
    with pytest.raises(CaptureError):
        ops(Joined(apart))
