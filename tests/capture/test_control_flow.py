"""Operators that are given functions: ``torch.cond``, ``torch.while_loop`` and ``flex_attention``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pyrannc.capture import Captured, capture
from pyrannc.capture.nodes.facts import GRAD_ENABLED
from pyrannc.capture.nodes.one_call import as_one_function
from pyrannc.capture.trace.grad_mode import GradMode

WIDTH, LENGTH = 4, 16


class Branching(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.one, self.other = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("sign", torch.ones(()))
        self.seen: Any = None
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.first(x)).sum(1)


class Whole(nn.Module):
    """A model with such a part in its middle."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.before, self.part = nn.Linear(WIDTH, WIDTH), Branching(function)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.before(x)).tanh()  # type: ignore[no-any-return]


def call(rows: int) -> Any:
    torch.manual_seed(rows)
    return (torch.randn(rows, WIDTH, dtype=torch.float64),), {}


def targets(captured: Captured) -> list[str]:
    return [op["target"].rpartition(".")[0] for op in json.loads(captured.graph_json)["ops"]]


def branches(model: Branching, y: Tensor) -> Tensor:
    """Layers, sizes and tensors of the outside in both branches."""
    late = y * 2
    taken = torch.cond(
        model.sign > 0,
        lambda y: (model.one(y).view(y.shape[0], -1) + late).view(late.shape),
        lambda y: model.other(y),
        (y,),
    )
    assert isinstance(taken, Tensor)
    return taken * 3 + late.view(y.shape[0], WIDTH)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_branches(assert_equals_model: Callable[..., Captured], sign: float) -> None:
    model = Branching(branches).double()
    model.sign.fill_(sign)
    captured = assert_equals_model(model, call)
    assert "torch.cond" in targets(captured)
    assert not captured.kept_whole


def without_operands(model: Branching, y: Tensor) -> Tensor:
    return torch.cond(model.sign > 0, lambda: model.one(y), lambda: y + 1)  # type: ignore[return-value]


def by_the_batch(model: Branching, y: Tensor) -> Tensor:
    return torch.cond(y.shape[0] > 2, lambda y: model.one(y), lambda y: y + 1, (y,))  # type: ignore[return-value]


@pytest.mark.parametrize(("function", "is_op"), [(without_operands, True), (by_the_batch, False)])
def test_other_branches(
    assert_equals_model: Callable[..., Captured], function: Callable[..., Tensor], is_op: bool
) -> None:
    captured = assert_equals_model(Branching(function).double(), call)
    assert ("torch.cond" in targets(captured)) == is_op
    assert not captured.kept_whole


@pytest.mark.parametrize("turns", [1, 3])
def test_turns(assert_equals_model: Callable[..., Captured], turns: int) -> None:
    def loop(model: Branching, y: Tensor) -> Tensor:
        started = (torch.tensor(0), y, model.sign)
        turn = lambda i, y, sign: (i + 1, model.one(y) * sign, sign.clone())  # noqa: E731
        return torch.while_loop(lambda i, y, sign: i < turns, turn, started)[1]  # type: ignore[no-any-return]

    captured = assert_equals_model(Branching(loop).double(), call)
    assert "torch.while_loop" in targets(captured)
    assert not captured.kept_whole


def drawing(model: Branching, y: Tensor) -> Tensor:
    return torch.cond(model.sign > 0, lambda y: nn.functional.dropout(y), lambda y: y + 1, (y,))  # type: ignore[return-value]


def handing_on(model: Branching, y: Tensor) -> Tensor:
    def one(y: Tensor) -> Tensor:
        model.seen = y * 2
        return model.one(y)

    return torch.cond(model.sign > 0, one, lambda y: y + 1, (y,)) + model.seen  # type: ignore[operator]


def changing(model: Branching, y: Tensor) -> Tensor:
    counted = torch.zeros(())

    def one(y: Tensor) -> Tensor:
        counted.add_(1)
        return model.one(y)

    return torch.cond(model.sign > 0, one, lambda y: y + 1, (y,)) + counted


def reading(model: Branching, y: Tensor) -> Tensor:
    def one(y: Tensor) -> Tensor:
        return y * y.abs().max().item()

    return torch.cond(model.sign > 0, one, lambda y: y + 1, (y,))  # type: ignore[return-value]


def of_other_shapes(model: Branching, y: Tensor) -> Tensor:
    return torch.cond(model.sign > 0, lambda y: y.sum(1, keepdim=True), lambda y: y + 1, (y,))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (drawing, "draws random numbers"),
        (handing_on, "hands on more than its result"),
        (changing, "changes in place"),
        (of_other_shapes, "other shapes"),
    ],
)
def test_what_shows_outside_stays_whole(function: Callable[..., Tensor], cause: str) -> None:
    args, kwargs = call(4)
    captured = capture(Whole(function).double(), args, kwargs, device=torch.device("cpu"), rows=4)
    kept = captured.kept_whole
    assert [item.paths for item in kept] == [("part",)]
    assert cause in kept[0].cause


def test_numbers_that_are_read_inside(assert_equals_model: Callable[..., Captured]) -> None:
    captured = assert_equals_model(Whole(reading).double(), call)
    assert "torch.cond" in targets(captured)
    assert not any(op.get("row_wise") for op in json.loads(captured.graph_json)["ops"])


class Attention(nn.Module):
    """Of packed documents, with a slope by head; on processors torch has no gradients for it."""

    def __init__(self, *, masks_documents: bool) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("slopes", torch.randn(2))
        self.masks_documents = masks_documents

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        heads = x.unflatten(2, (2, -1)).transpose(1, 2)
        same = lambda b, h, i, j: documents[b, i] == documents[b, j]  # noqa: E731
        earlier = lambda b, h, i, j: i >= j  # noqa: E731
        asked, rows = (same, x.shape[0]) if self.masks_documents else (earlier, None)
        mask = create_block_mask(asked, rows, None, LENGTH, LENGTH, device=x.device.type)
        sloped = lambda score, b, h, i, j: score + self.slopes[h] * (i - j).abs() + 0.1 * documents[b, i]  # noqa: E731
        attended = flex_attention(heads, heads * 2, heads + 1, score_mod=sloped, block_mask=mask)
        assert isinstance(attended, Tensor)
        return self.last(attended.transpose(1, 2).flatten(2)).sum((1, 2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("masks_documents", [False, True])
def test_attention_with_functions(assert_equals_model: Callable[..., Captured], masks_documents: bool) -> None:
    def packed(rows: int) -> Any:
        (x,), _ = call(rows)
        documents = torch.randint(0, 3, (rows, LENGTH)).sort().values
        return (x.unsqueeze(1) * torch.randn(rows, LENGTH, 1, dtype=x.dtype), documents), {}

    captured = assert_equals_model(Attention(masks_documents=masks_documents).double(), packed)
    ops = json.loads(captured.graph_json)["ops"]
    assert [op.get("row_wise") for op in ops if op["target"].startswith("torch.flex_attention.")] == [True]
    assert not captured.kept_whole


def by_number(score: Tensor, b: Tensor, _h: Tensor, _i: Tensor, _j: Tensor, documents: Tensor) -> Tensor:
    return score + 0.1 * b + documents[b, 0]


def of_other_rows(score: Tensor, b: Tensor, _h: Tensor, _i: Tensor, _j: Tensor, documents: Tensor) -> Tensor:
    return score + documents[0, 1] + documents[b, 0]


def of_a_table_without_rows(score: Tensor, b: Tensor, _h: Tensor, _i: Tensor, _j: Tensor, _: Tensor) -> Tensor:
    return score + torch.arange(64.0)[b]


def of_its_own_row(score: Tensor, b: Tensor, _h: Tensor, _i: Tensor, _j: Tensor, documents: Tensor) -> Tensor:
    return score + documents[b, 0]


class ByRowNumbers(nn.Module):
    def __init__(self, function: Callable[..., Tensor], times: int) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.function, self.times = function, times

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        documents = documents.repeat_interleave(self.times, 0)
        score = lambda *items: self.function(*items, documents)  # noqa: E731
        attended = flex_attention(x, x, x, score_mod=score)
        assert isinstance(attended, Tensor)
        return self.last(attended).sum((1, 2, 3))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("function", "times"), [(by_number, 1), (of_other_rows, 1), (of_a_table_without_rows, 1), (of_its_own_row, 2)]
)
def test_attention_that_knows_of_other_rows(
    assert_equals_model: Callable[..., Captured], function: Callable[..., Tensor], times: int
) -> None:
    def packed(rows: int) -> Any:
        torch.manual_seed(rows)
        return (torch.randn(rows, 1, LENGTH, WIDTH).double(), torch.randint(0, 3, (rows, LENGTH))), {}

    captured = assert_equals_model(ByRowNumbers(function, times).double(), packed)
    assert "torch.flex_attention" in targets(captured)
    assert not any(op.get("row_wise") for op in json.loads(captured.graph_json)["ops"])


@pytest.mark.parametrize("records", [True, False])
def test_a_function_holds_nothing_of_the_trace_that_it_is_cut_out_of(records: bool) -> None:
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    node.meta[GRAD_ENABLED] = records
    with GradMode().answering():
        function, _ = as_one_function([node], node.all_input_nodes, [node], torch.device("cpu"))
    compiled: Any = torch.compile(function, fullgraph=True, backend="eager")
    x = torch.ones(3, requires_grad=True)
    assert compiled(x)[0].requires_grad is records
