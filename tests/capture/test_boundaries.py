"""What tells where rows begin is made by each user of its own rows, so that a graph can be cut between the users."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyrannc._native import Graph
from pyrannc.capture import Answering, Captured, PartOfBatchError, capture
from pyrannc.core.tail import DividedFacts

PATCHES, WIDTH = 4, 3


class Within(nn.Module):
    """Lets the patches of each image meet."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, begins: Tensor) -> Tensor:
        lengths = begins[1:] - begins[:-1]
        return x + torch.cat([image.cumsum(0) for image in torch.split(self.inner(x), lengths.tolist())])


class Tower(nn.Module):
    def __init__(self, *, frames: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Within() for _ in range(3))
        self.frames = frames

    def forward(self, patches: Tensor, grid: Tensor) -> Tensor:
        sizes = grid[:, 1] * grid[:, 2]
        sizes = torch.repeat_interleave(sizes, grid[:, 0]) if self.frames else sizes * grid[:, 0]
        begins = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
        for block in self.blocks:
            patches = block(patches, begins)
        return patches


def captured(model: nn.Module, sizes: Sequence[Sequence[int]] = ((1, 2, 2),) * 4, **options: Any) -> Captured:
    rows = len(sizes)
    return capture(
        model,
        (torch.randn(PATCHES * rows, WIDTH), torch.tensor(sizes)),
        {},
        device=torch.device("cpu"),
        rows=rows,
        per_row=(PATCHES, 1),
        **options,
    )


def in_tail(found: Captured) -> int:
    divided = DividedFacts.from_json(Graph.from_json(found.graph_json).divide_tail("batch").to_json())
    return len(divided.tail.ops)


@pytest.mark.parametrize("frames", [True, False])
def test_each_user_has_boundaries_of_its_own(frames: bool) -> None:
    found = captured(Tower(frames=frames))
    ops = json.loads(found.graph_json)["ops"]
    assert len(ops) == 3
    assert all(op["row_wise"] for op in ops)
    assert in_tail(found) == 0


def test_rows_that_are_no_images_are_in_the_tail() -> None:
    assert in_tail(captured(Tower(frames=True), ((1, 1, 2), (1, 2, 3), (1, 2, 2), (1, 2, 2)))) > 0


def test_what_was_tried_is_asked_for() -> None:
    (assumption,) = captured(Tower(frames=True), ((1, 2, 2), (1, 4, 1))).assumptions
    question = assumption.question
    assert question is not None
    assert question.takes == {1}

    def holds(*sizes: tuple[int, int, int]) -> bool:
        return question.holds([float(number) for number in question.ask([torch.empty(0), torch.tensor(sizes)])])

    assert holds((1, 4, 1), (1, 4, 1), (1, 2, 2))
    assert not holds((1, 4, 1), (1, 1, 4))


def test_the_whole_batch_tells_which_sizes_there_are() -> None:
    with pytest.raises(PartOfBatchError, match="whole batch"):
        captured(Tower(frames=True), answers=Answering(part_of_batch=True))
