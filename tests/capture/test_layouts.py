"""What reads memory by strides: as views of dimensions where it is that, else as it was laid out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyrannc.capture import Captured, capture

LENGTH, WIDTH = 6, 4
Read = Callable[[Tensor], Tensor]


class Reading(nn.Module):
    def __init__(self, read: Read) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.first(x)).tanh()


def windows(x: Tensor) -> Tensor:
    """Chunks of four tokens, half of each in the next one too."""
    row, token, across = x.stride()
    return x.as_strided((x.shape[0], 2, 4, WIDTH), (row, 2 * token, token, across))


def windows_of_chunks(x: Tensor) -> Tensor:
    """Likewise of tokens that lie as steps of a sequence do, and in chunks already."""
    chunks = x.transpose(0, 1).contiguous().transpose(0, 1).unflatten(1, (3, 2))
    row, chunk, token, across = chunks.stride()
    return chunks.as_strided((x.shape[0], 5, 2, WIDTH), (row, chunk // 2, token, across))


def turned(x: Tensor) -> Tensor:
    row, token, across = x.stride()
    return x.as_strided((WIDTH, x.shape[0], LENGTH), (across, row, token))


def diagonal(x: Tensor) -> Tensor:
    row, token, across = x.stride()
    return x.as_strided((x.shape[0], WIDTH), (row, token + across))


def over_rows(x: Tensor) -> Tensor:
    """Windows that reach into the next row."""
    _, token, across = x.stride()
    return x.as_strided((2 * x.shape[0] - 1, LENGTH, WIDTH), (3 * token, token, across))


def from_another_place(x: Tensor) -> Tensor:
    row, token, across = x.stride()
    return x.as_strided((x.shape[0], 2, 3, WIDTH), (row, 2 * token, token, across), x.storage_offset() + token)


def call(rows: int) -> Any:
    torch.manual_seed(rows)
    return (torch.randn(rows, LENGTH, WIDTH, dtype=torch.float64),), {}


def targets(captured: Captured) -> list[str]:
    return [op["target"] for op in json.loads(captured.graph_json)["ops"]]


@pytest.mark.parametrize("read", [windows, windows_of_chunks, turned])
def test_views_by_strides_are_views_of_dimensions(read: Read, assert_equals_model: Callable[..., Captured]) -> None:
    found = targets(assert_equals_model(Reading(read).double(), call))
    assert not any("as_strided" in target for target in found)


@pytest.mark.parametrize("read", [diagonal, over_rows, from_another_place])
def test_what_are_no_such_views_stays(read: Read) -> None:
    args, kwargs = call(4)
    found = targets(capture(Reading(read).double(), args, kwargs, device=torch.device("cpu"), rows=4))
    assert any("as_strided" in target for target in found)
