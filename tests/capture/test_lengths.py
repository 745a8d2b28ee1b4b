"""Numbers of rows as Python asks for them, and traces that stand for any length."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pyrannc._native import Graph
from pyrannc.capture import Captured, CaptureError, FixedLengthError, LengthTrace, Sample, capture

LENGTH, WIDTH = 3, 4


class ByLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.first(x).reshape(len(x) * LENGTH, len(self.first.weight))
        sizes = [len(x), *torch.ones(len([x]) + LENGTH - 1).shape]
        return tokens.tanh().view(*sizes, WIDTH).sum() / len(x)


class RowByRow(ByLength):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.first(x[row]) * row for row in range(len(x))])


def call(rows: int) -> Any:
    torch.manual_seed(rows)
    return (torch.randn(rows, LENGTH, WIDTH, dtype=torch.float64),), {}


def test_a_length_is_an_extent(assert_equals_model: Callable[..., Captured]) -> None:
    plain = builtins.len
    found = assert_equals_model(ByLength().double(), call)
    assert (found.kept_whole, found.assumptions) == ((), [])
    assert builtins.len is plain


def test_a_loop_over_rows_needs_a_number() -> None:
    args, kwargs = call(4)
    with pytest.raises(CaptureError, match="works for one batch size only"):
        capture(RowByRow().double(), args, kwargs, device=torch.device("cpu"), rows=4)


class Work(nn.Module):
    """Does something to rows of some length."""

    def __init__(self, work: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.embedding = nn.Linear(WIDTH, WIDTH), nn.Embedding(64, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, stride=2)
        self.register_buffer("table", torch.randn(41, WIDTH))
        self.work = work

    def forward(self, x: Tensor) -> Tensor:
        return self.work(self, self.first(x))


def positions(model: Any, x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1])
    return x + model.embedding((places[None] - places[:, None]).clamp(-8, 8) + 8).sum(1)  # type: ignore[no-any-return]


def half_zeros(model: Any, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, : x.shape[1] // 2] = 0
    return x


def causal(model: Any, x: Tensor) -> Tensor:
    hidden = torch.full((x.shape[1], x.shape[1]), -1e9, dtype=x.dtype).triu(1)
    return (x @ x.transpose(1, 2) + hidden).softmax(-1) @ x


def kept(model: Any, x: Tensor) -> Tensor:
    model.mask = torch.arange(x.shape[1], dtype=x.dtype)
    return x + model.mask[: x.shape[1], None]  # type: ignore[no-any-return]


FREE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "attention": lambda model, x: model.attention(x, x, x)[0],
    "buffer": lambda model, x: x + model.table[: x.shape[1]],
    "causal": causal,
    "convolution": lambda model, x: model.convolution(x.transpose(1, 2)),
    "dropout": lambda model, x: functional.dropout(x, 0.1),
    "half": lambda model, x: x[:, : x.shape[1] // 2].sum(1),
    "half zeros": half_zeros,
    "kept": kept,
    "last": lambda model, x: x[:, -1],
    "loss": lambda model, x: functional.cross_entropy(x.flatten(0, 1), torch.zeros(len(x) * x.shape[1]).long()),
    "merged": lambda model, x: model.first(x.reshape(-1, WIDTH)).view(x.shape[0], x.shape[1], WIDTH),
    "padded": lambda model, x: functional.pad(x, (0, 0, 0, max(0, 24 - x.shape[1]))),
    "positions": positions,
    "power": lambda model, x: x * x.shape[1] ** -0.5,
    "reciprocal": lambda model, x: x * (1 / x.shape[1]),
    "shifted": lambda model, x: x[:, 1:] - x[:, :-1],
    "whole": lambda model, x: x[:, :42],
}
"""What works for any length."""
BOUND: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "branch": lambda model, x: x * 2 if x.shape[1] > 16 else x + 1,
    "chunks": lambda model, x: torch.cat([part * place for place, part in enumerate(x.split(8, 1))], 1),
    "parity": lambda model, x: x.reshape(x.shape[0], -1, 2 * WIDTH) if x.shape[1] % 2 == 0 else x,
}
"""What goes by its length."""
FIXED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "data": lambda model, x: x * 2 if bool((x.detach() < 9).all()) else x,
    "item": lambda model, x: x * torch.ones(x.shape[1]).sum().item(),
    "key": lambda model, x: x * {12: 3.0}.get(x.shape[1], 2.0),
    "loop": lambda model, x: torch.stack([x[:, place] * place for place in range(x.shape[1])], 1),
    "number": lambda model, x: x / int(x.shape[1]),
    "returned": lambda model, x: (x, x.shape[1]),  # type: ignore[dict-item, return-value]  # on purpose
    "levels": lambda model, x: torch.vmap(lambda row: row * row.shape[0])(x),
    "text": lambda model, x: x * {"12": 3.0}.get(f"{x.shape[1]}", 2.0),
}
"""What needs a number."""


def of_length(length: int) -> tuple[Tensor]:
    return (torch.randn(3, length, WIDTH),)


def any_length(work: Callable[[Any, Tensor], Tensor]) -> tuple[Work, LengthTrace]:
    model = Work(work)
    return model, LengthTrace(Sample(model, of_length(12), {}, torch.device("cpu"), 3, (1,)), ({1},))


def captured(model: Work, length: int, **options: Any) -> str:
    found = capture(model, of_length(length), {}, device=torch.device("cpu"), rows=3, **options)
    return Graph.from_json(found.graph_json).hash()


def served(work: Callable[[Any, Tensor], Tensor], lengths: range) -> list[int]:
    """The lengths that a trace of another one stands for; what it gives is what a trace of their own gives."""
    model, tracing = any_length(work)
    found = []
    for length in lengths:
        try:
            made = captured(model, length, tracing=tracing)
        except FixedLengthError:
            continue
        assert made == captured(model, length)
        found.append(length)
    return found


@pytest.mark.parametrize("work", FREE)
def test_a_trace_for_any_length(work: str) -> None:
    assert served(FREE[work], range(5, 42, 9)) == [5, 14, 23, 32, 41]


def test_a_trace_for_lengths_that_go_the_same_way() -> None:
    assert served(BOUND["branch"], range(15, 19)) == [15, 16]
    assert served(BOUND["chunks"], range(7, 18, 2)) == [11, 13, 15]
    assert served(BOUND["parity"], range(6, 11)) == [6, 8, 10]


@pytest.mark.parametrize("work", FIXED)
def test_a_length_that_must_be_a_number(work: str) -> None:
    with pytest.raises(CaptureError):
        any_length(FIXED[work])


def test_a_trace_knows_the_tensors_of_its_model() -> None:
    model, tracing = any_length(FREE["buffer"])
    model.table = torch.zeros(30, WIDTH)
    with pytest.raises(FixedLengthError, match="other parameters or buffers"):
        captured(model, 9, tracing=tracing)


def test_conditions_are_told_of_shapes() -> None:
    assert str(any_length(BOUND["branch"])[1]) == "lengths with x0.shape[1] <= 16"
