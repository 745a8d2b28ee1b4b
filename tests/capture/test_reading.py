"""Tensors that must have the rows of the batch are told from those that only have as many elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    reading,
    tracer,
)
from pyrannc.capture.tied_rows import tied_rows

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

    def count(sample: Sample, leaves: Sequence[str]) -> tracer.Trace:
        traces.append(sample.per_row)
        return tracer.trace(sample, leaves)

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


class _Several(nn.Module):
    def forward(self, x: Tensor, added: Tensor, asked: Tensor, summed: Tensor, unused: Tensor) -> Tensor:
        x = x + added
        x = x * summed.sum() if summed.shape[0] > 1 else x
        return x * asked if asked.shape[0] == x.shape[0] else x + asked.sum()


def _several(rows: int = 4) -> Sample:
    return _sample(_Several(), tuple(torch.zeros(rows, 3) for _ in range(5)), rows, (1, 1, 1, 1, 1))


def test_operators_tell_of_several_in_one_trace() -> None:
    """What the model itself asks, and sums, tell nothing."""
    assert tied_rows(_several(), range(5)) == {0, 1}
    assert tied_rows(_several(), [1]) == {1}
    assert tied_rows(_several(), [2, 3]) == set()
    alone = _sample(_Model(lambda x, other: x * 2), (torch.zeros(4, 3), torch.zeros(4, 3)), 4, (1, 1))
    assert tied_rows(alone, [0, 1]) == {1}


@pytest.mark.parametrize(
    ("reading", "tied"),
    [
        (lambda x, other: x + other, {0, 1}),
        (lambda x, other: torch.stack([x, other], 1), {0, 1}),
        (lambda x, other: torch.cat([x, other]), set()),
        (lambda x, other: x @ other.T, set()),
        (lambda x, other: x.T @ other, set()),
        (lambda x, other: torch.bmm(x[:, None], other[:, :, None]), {0, 1}),
        (lambda x, other: F.mse_loss(x, other), set()),
        (lambda x, other: torch.ops.aten.mse_loss(x, other), {0, 1}),
        (lambda x, other: F.scaled_dot_product_attention(*(t[:, None] for t in (x, other, other))), {0, 1}),
        (lambda x, other: F.cross_entropy(x, other.long().amax(1)), {0, 1}),
        (lambda x, other: x.view(other.shape[0], -1) + other, set()),
        (lambda x, other: x.view(other.shape[0], -1) + other.sum(), set()),
        (lambda x, other: x + other if x.shape[0] == other.shape[0] else x, set()),
        (lambda x, other: x[:, None] * (other if x.shape == other.shape else other[:1])[:, None], set()),
        (lambda x, other: x + other[: int(x.shape[0])], set()),
    ],
)
@pytest.mark.parametrize("rows", [0, 1, 4])
def test_which_operators_tell(reading: Reading, tied: set[int], rows: int) -> None:
    arguments = torch.zeros(rows, 3), torch.zeros(rows, 3)
    assert tied_rows(_sample(_Model(reading), arguments, rows, (1, 1)), [0, 1]) == tied


def test_packed_rows_are_told_by_operators() -> None:
    arguments = torch.zeros(8, 3), torch.zeros(4, 3)

    def reading(x: Tensor, other: Tensor) -> Tensor:
        return x.unflatten(0, (-1, 2)).sum(1) * other

    assert tied_rows(_sample(_Model(reading), arguments, 4, (2, 1)), [0, 1]) == {0, 1}
