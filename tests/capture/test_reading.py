"""Tensors that must have the rows of the batch are told from those that only have as many elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyrannc.capture import (
    NO_OPTIONS,
    CaptureOptions,
    Sample,
    can_be_traced,
    capture_sample,
    first_that_may_lack_rows,
)
from pyrannc.capture.rows import reading
from pyrannc.capture.trace import tracer

Reading = Callable[[Tensor, Tensor], Tensor]


class _Model(nn.Module):
    def __init__(self, reading: Reading) -> None:
        super().__init__()
        self.reading = reading

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.reading(x, other)


def _sample(model: nn.Module, arguments: tuple[Tensor, ...], rows: int, per_row: tuple[int, ...]) -> Sample:
    return Sample(model, arguments, {}, torch.device("cpu"), rows, per_row)


def _by_row_number(x: Tensor, other: Tensor) -> Tensor:
    return x + other[torch.arange(x.shape[0])]


def _of_two(x: Tensor, other: Tensor) -> Tensor:
    return x + other[torch.arange(2)].sum()


@pytest.mark.parametrize(
    ("reading", "lacks"),
    [
        (lambda x, other: x + other, False),
        (lambda x, other: F.mse_loss(x, other), False),
        (lambda x, other: torch.cat([x, other], 1), False),
        (_by_row_number, False),
        (lambda x, other: x * 2, False),
        (lambda x, other: other * 2, False),
        (_of_two, True),
        (lambda x, other: x * other.sum(), True),
        (lambda x, other: x @ other.T, True),
    ],
)
@pytest.mark.parametrize("rows", [1, 4])
def test_what_a_tensor_can_be(reading: Reading, lacks: bool, rows: int) -> None:
    arguments = torch.zeros(rows, 3), torch.zeros(rows, 3)
    found = first_that_may_lack_rows(_sample(_Model(reading), arguments, rows, (1, 1)), [1])
    assert found == (1 if lacks else None)


def test_what_follows_an_index_past_the_end_is_not_traced() -> None:
    # What is in a list is put back.
    after = bytearray()

    def reading(x: Tensor, other: Tensor) -> Tensor:
        x = _by_row_number(x, other)
        after.append(1)
        return x * other.sum()

    arguments = torch.zeros(4, 3), torch.zeros(4, 3)
    assert first_that_may_lack_rows(_sample(_Model(reading), arguments, 4, (1, 1)), [1]) is None
    assert not after
    capture_sample(_sample(_Model(reading), arguments, 4, (1, 1)))
    assert after


def _caught(x: Tensor, other: Tensor) -> Tensor:
    try:
        return _by_row_number(x, other)
    except Exception:
        return x * other.sum()


def _unused(x: Tensor, other: Tensor) -> Tensor:
    _ = other[torch.arange(x.shape[0])]
    return x * other.sum()


def _with_number_of_data(x: Tensor, other: Tensor) -> Tensor:
    count = (x[:, 0] > 1e3).nonzero().shape[0]
    return x + other[torch.arange(count)].sum(0) + other.sum(0)


def _behind_a_mask(x: Tensor, other: Tensor) -> Tensor:
    table = other.sum(0)[None, :2, None].expand(1, 2, 100)
    return x * table[torch.tensor([[True, False]]), torch.arange(x.shape[0])][:, None]


def _written_through_a_view(x: Tensor, other: Tensor) -> Tensor:
    index = torch.arange(x.shape[0])
    index[:] = 0
    return x + other[index] + other.sum(0)


def _at_most_the_last(x: Tensor, other: Tensor) -> Tensor:
    return x + other[torch.arange(x.shape[0]).clamp(max=1)] + other.sum(0)


@pytest.mark.parametrize(
    ("reading", "lacks"),
    [
        (_caught, False),
        (_unused, False),
        (_with_number_of_data, True),
        (_behind_a_mask, True),
        (_written_through_a_view, True),
        (_at_most_the_last, True),
    ],
)
def test_only_what_the_number_of_rows_decides_is_past_the_end(reading: Reading, lacks: bool) -> None:
    arguments = torch.rand(4, 3), torch.rand(4, 3)
    found = first_that_may_lack_rows(_sample(_Model(reading), arguments, 4, (1, 1)), [1])
    assert found == (1 if lacks else None)


def test_of_packed_rows_the_others_are_rows() -> None:
    """Patches of images beside a size of each."""

    def reading(x: Tensor, other: Tensor) -> Tensor:
        return x.view(other.shape[0], -1, 3).sum(1) * other

    arguments = torch.zeros(8, 3), torch.zeros(4, 3)
    packed, of_two, added = (
        _sample(_Model(read), arguments, 4, (2, 1)) for read in (reading, _of_two, lambda x, other: x + other)
    )
    assert first_that_may_lack_rows(packed, [1]) is None
    assert can_be_traced(packed)
    assert first_that_may_lack_rows(of_two, [1]) == 1
    assert not can_be_traced(added)


class _Loss(nn.Module):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return F.mse_loss(x, other)


class _Both(nn.Module):
    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return x + other, x


class _AsksItsData(nn.Module):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x + other if bool((x.abs() < 10).all()) else x - other


class _AsksWhetherTraced(nn.Module):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise RuntimeError("this cannot be traced")
        return x + other


@pytest.mark.parametrize(
    ("model", "options", "is_plain"),
    [
        (_Loss(), NO_OPTIONS, True),
        (_AsksItsData(), NO_OPTIONS, False),
        (_AsksWhetherTraced(), NO_OPTIONS, False),
        (nn.Bilinear(3, 3, 2), CaptureOptions(leaf_modules=[""], allow_uncut=True), False),
        (_Both(), CaptureOptions(outputs=[0]), False),
    ],
)
def test_a_plain_capture_need_not_be_traced_again(
    model: nn.Module, options: CaptureOptions, is_plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That all have rows is a trace more where something else may have failed."""
    sample = _sample(model, (torch.zeros(4, 3), torch.zeros(4, 3)), 4, (1, 1))
    assert capture_sample(sample, options=options).is_plain is is_plain
    traces = []

    def count(sample: Sample, leaves: Sequence[str], **how: Any) -> tracer.Trace:
        traces.append(sample.per_row)
        return tracer.trace(sample, leaves, **how)

    monkeypatch.setattr(reading, "trace", count)
    for known in (False, True):
        assert first_that_may_lack_rows(sample, [1], is_plain=known) is None
    if is_plain:
        assert traces == [(1, 0), (1, 1), (1, 0)]


def test_models_are_left_as_they_were() -> None:
    model = nn.Bilinear(3, 3, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    arguments = torch.zeros(4, 3), torch.zeros(4, 3)
    assert first_that_may_lack_rows(_sample(model, arguments, 4, (1, 1)), [0]) is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def _asks_more(x: Tensor, other: Tensor) -> Tensor:
    return x + (other.mean(0, keepdim=True) if x.shape[0] != other.shape[0] else other)


def _asks_less(x: Tensor, other: Tensor) -> Tensor:
    return x + (other.mean(0, keepdim=True) if x.shape[0] > other.shape[0] else other)


def _tries(x: Tensor, other: Tensor) -> Tensor:
    try:
        return x + other
    except RuntimeError:
        return x + other.mean(0)


@pytest.mark.parametrize("read", [_of_two, _asks_more, _asks_less, _tries, lambda x, other: x @ other.T])
@pytest.mark.parametrize("per_row", [1, 2])
def test_among_several_the_one_that_lacks_rows_is_found(read: Reading, per_row: int) -> None:
    class Several(nn.Module):
        def forward(self, x: Tensor, by_row: Tensor, other: Tensor, target: Tensor) -> Tensor:
            x = x.unflatten(0, (-1, per_row)).sum(1) * by_row
            return F.cross_entropy(read(x, other), target)

    arguments = torch.zeros(4 * per_row, 3), torch.zeros(4, 3), torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)
    sample = _sample(Several(), arguments, 4, (per_row, 1, 1, 1))
    assert first_that_may_lack_rows(sample, [0, 1, 2, 3]) == 2
    assert first_that_may_lack_rows(sample, [0, 1, 3]) is None
