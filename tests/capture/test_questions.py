"""What a model asks its data at a capture is answered as if it ran on the batch as it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyrannc._native import Graph
from pyrannc.capture import Answering, PartOfBatchError, capture
from pyrannc.capture.nodes.oracle import _Samples
from pyrannc.errors import CaptureError

_ROWS = 6
"""As many as features: a trace takes another number of rows then."""


def written_through_view(x: Tensor) -> object:
    copied = x.clone()
    copied[0] = 9
    return copied.max() > 5


def view_of_what_is_written(x: Tensor) -> object:
    copied = x.clone()
    first = copied[:3]
    copied.fill_(9)
    return first.min() > 5


def changed_in_place(x: Tensor) -> object:
    return x.clone().mul_(0).sum() == 0


def input_written(x: Tensor) -> object:
    x[0] = 9
    return x.max() > 5


def written_after_the_question(x: Tensor) -> object:
    copied = x.clone()
    large = copied.max() > 5
    copied[0] = 9
    return large


def whole_number(x: Tensor) -> object:
    return int((x == x).sum()) == _ROWS * _ROWS


def by_number_of_rows(x: Tensor) -> object:
    return (x == x).sum() / x.shape[0] == _ROWS


class Asks(nn.Module):
    def __init__(self, question: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.question = question

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if self.question(x) else x * 2


ASKED = [
    written_through_view, view_of_what_is_written, changed_in_place, input_written, written_after_the_question,
    whole_number, by_number_of_rows,
]  # fmt: skip


@pytest.mark.parametrize("asked", ASKED)
def test_the_answer_is_that_of_a_run(asked: Callable[[Tensor], object]) -> None:
    x = torch.randn(_ROWS, _ROWS)
    expected = Asks(asked)(x.clone())
    before = x.clone()
    captured = capture(Asks(asked), (x,), {}, device=torch.device("cpu"), rows=_ROWS)
    assert torch.equal(x, before)
    assert torch.equal(captured.gm(x.clone())[0], expected)
    for assumption in captured.assumptions:
        if assumption.question is not None:
            assert assumption.question.holds([float(number) for number in assumption.question.ask([x])])


def test_what_draws_nothing_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    redrawn: list[int] = []
    anew = _Samples.anew
    monkeypatch.setattr(_Samples, "anew", lambda self: redrawn.append(0) or anew(self))
    x = torch.ones(_ROWS, _ROWS)
    capture(Asks(lambda x: F.dropout(x, 0.0).sum() > 0), (x,), {}, device=torch.device("cpu"), rows=_ROWS)
    assert not redrawn
    with pytest.raises(CaptureError, match="decides by a random number"):
        capture(Asks(lambda x: F.dropout(x, 0.5)[0, 0] > 0), (x,), {}, device=torch.device("cpu"), rows=_ROWS)
    assert redrawn


def test_part_of_a_batch_does_not_answer() -> None:
    x = torch.randn(_ROWS, 3)
    with pytest.raises(PartOfBatchError, match="test_questions"):
        capture(Asks(whole_number), (x,), {}, device=torch.device("cpu"), rows=_ROWS, answers=Answering(True))


def test_nothing_is_traced_after_a_question_that_part_of_a_batch_does_not_answer() -> None:
    # What is in a list is put back.
    asked = itertools.count()

    def caught(x: Tensor) -> object:
        next(asked)
        try:
            return whole_number(x)
        finally:
            next(asked)

    x = torch.randn(_ROWS, 3)
    model = nn.Sequential(Asks(caught), Asks(caught))
    with pytest.raises(PartOfBatchError, match="test_questions"):
        capture(model, (x,), {}, device=torch.device("cpu"), rows=_ROWS, answers=Answering(True))
    assert next(asked) == 2


def test_answers_from_before_are_taken_again() -> None:
    x = torch.randn(_ROWS, _ROWS)
    first = capture(Asks(whole_number), (x,), {}, device=torch.device("cpu"), rows=_ROWS)
    answers = Answering(before=first.assumptions)
    again = capture(Asks(whole_number), (x[:2],), {}, device=torch.device("cpu"), rows=2, answers=answers)
    assert Graph.from_json(again.graph_json).hash() == Graph.from_json(first.graph_json).hash()


class AsksBuffer(nn.Module):
    """Most of it stands round any layer, and what it asks is no argument."""

    def __init__(self, *, counts: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_ROWS, _ROWS) for _ in range(4))
        self.counts = counts
        self.register_buffer("share", torch.ones(2))
        self.share: Tensor

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = x * 2 if self.share[1] < 1 else x + 1
        if self.counts:
            self.share -= 0.5
        return x


def test_a_buffer_answers_where_nothing_small_can_stay_whole() -> None:
    model, x = AsksBuffer(), torch.randn(3, _ROWS)
    captured = capture(model, (x,), {}, device=torch.device("cpu"), rows=3)
    assert not captured.kept_whole
    (question,) = (assumption.question for assumption in captured.assumptions)
    assert question is not None
    assert [buffer.name for buffer in question.buffers] == ["share"]
    assert question.holds([float(number) for number in question.ask([x])])
    model.share[1] = 0.5
    assert not question.holds([float(number) for number in question.ask([x])])


def test_a_buffer_that_the_call_changes_is_asked_again() -> None:
    model, x = AsksBuffer(counts=True), torch.randn(3, _ROWS)
    captured = capture(model, (x,), {}, device=torch.device("cpu"), rows=3)
    (question,) = (assumption.question for assumption in captured.assumptions)
    assert question is not None
    assert question.holds([float(number) for number in question.ask([x])])
    model(x)
    assert not question.holds([float(number) for number in question.ask([x])])


class CountsFirst(AsksBuffer):
    """Asks its buffer for what the same call has written into it."""

    def forward(self, x: Tensor) -> Tensor:
        self.share -= 0.1
        return super().forward(x)


def test_a_question_about_what_the_call_has_written_leaves_the_buffer_as_it_is() -> None:
    model, x = CountsFirst(), torch.randn(3, _ROWS)
    captured = capture(model, (x,), {}, device=torch.device("cpu"), rows=3)
    (question,) = (assumption.question for assumption in captured.assumptions)
    assert question is not None
    before = model.share.clone()
    assert question.holds([float(number) for number in question.ask([x])])
    assert torch.equal(model.share, before)
    model.share += 1
    assert not question.holds([float(number) for number in question.ask([x])])


class TakesCount(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Linear(_ROWS, _ROWS)
        self.register_buffer("count", torch.tensor(2, dtype=dtype))
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x[:, : int(self.count)].sum(1, keepdim=True) * float(self.count)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_the_number_in_a_buffer_without_dimensions_is_read_at_each_call(dtype: torch.dtype) -> None:
    captured = capture(TakesCount(dtype), (torch.randn(3, _ROWS),), {}, device=torch.device("cpu"), rows=3)
    assert captured.kept_whole
