"""What a GPU would end the process for is refused before an operator meets it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pyrannc.capture.nodes.bounds import Bounds

CASES: dict[str, Callable[[Tensor, int], object]] = {
    "gather": lambda x, n: x.gather(1, torch.tensor([[0, n, 2]])),
    "scatter": lambda x, n: x.scatter(1, torch.tensor([[0, n, 2]]), 1.0),
    "scatter_add": lambda x, n: x.scatter_add(0, torch.tensor([[0, n, 2]]), torch.ones(1, 3)),
    "index_select": lambda x, n: x.index_select(-1, torch.tensor([n, 0])),
    "index_add_": lambda x, n: x.clone().index_add_(0, torch.tensor([n]), torch.ones(1, 4)),
    "embedding": lambda x, n: F.embedding(torch.tensor([n, 1]), x),
    "embedding_bag": lambda x, n: F.embedding_bag(torch.tensor([[n, 1]]), x),
    "nll_loss": lambda x, n: F.nll_loss(x, torch.tensor([n, 0, -100, 1])),
    "cross_entropy of images": lambda x, n: F.cross_entropy(x[None, :, :, None], torch.tensor([[[n], [0], [1], [2]]])),
}
FROM_END: dict[str, Callable[[Tensor, int], object]] = {
    "index": lambda x, n: x[:, torch.tensor([0, n])],
    "index behind a mask": lambda x, n: x[None][torch.tensor([True]), torch.tensor([n])],
    "index_put": lambda x, n: x.index_put((torch.tensor([n]),), torch.ones(4)),
    "index_fill": lambda x, n: x.index_fill(0, torch.tensor([n]), 0.0),
    "take": lambda x, n: x.take(torch.tensor([4 * n + 3])),
}


def held(call: Callable[[Tensor, int], object], number: int) -> object:
    with Bounds():  # type: ignore[no-untyped-call]
        return call(torch.rand(4, 4), number)


@pytest.mark.parametrize("name", [*CASES, *FROM_END])
def test_numbers_are_held_against_what_they_number(name: str) -> None:
    call = (CASES | FROM_END)[name]
    for number in (0, 3):
        held(call, number)
    with pytest.raises(IndexError, match=r"is given the number \d+, where there are \d+"):
        held(call, 9)
    if name in CASES:
        with pytest.raises(IndexError, match="is given the number -1"):
            held(call, -1)
    else:
        held(call, -1)
        with pytest.raises(IndexError, match="is given the number -"):
            held(call, -9)


GIVEN: dict[str, tuple[Callable[[Tensor], object], Sequence[float], Sequence[float]]] = {
    "bernoulli": (torch.bernoulli, (0.0, 0.5, 1.0), (-0.5, 1.5, math.nan)),
    "bernoulli of a shape": (lambda p: torch.bernoulli(p, 0.5), (-3.0, 3.0), ()),
    "bernoulli of another's shape": (
        lambda p: torch.ops.aten.bernoulli.Tensor(torch.full((4, 4), -3.0), p),
        (0.0, 1.0),
        (1.5,),
    ),
    "bernoulli_": (lambda p: torch.rand(4, 4).bernoulli_(p), (0.0, 1.0), (-0.5, 1.5)),
    "binary_cross_entropy": (lambda p: F.binary_cross_entropy(p, torch.ones(4, 4)), (0.0, 1.0), (-0.5, 1.5)),
    "poisson": (torch.poisson, (0.0, 5.0), (-1.0,)),
    "multinomial": (lambda p: p.multinomial(1), (0.5, 3.0), (-1.0, 0.0, math.inf)),
    "_assert_async": (lambda p: torch._assert_async(p.amax()), (1.0, 2.0), (0.0,)),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_an_operator_has_no_answer_for(name: str) -> None:
    call, right, wrong = GIVEN[name]
    for number in right:
        with Bounds():  # type: ignore[no-untyped-call]
            call(torch.full((4, 4), number))
    for number in wrong:
        with Bounds(), pytest.raises(ValueError, match="is given what it has no answer for"):  # type: ignore[no-untyped-call]
            call(torch.full((4, 4), number))


def test_a_source_that_is_too_short() -> None:
    mask = torch.tensor([True, True, False, False])
    with Bounds():  # type: ignore[no-untyped-call]
        torch.zeros(2, 4).masked_scatter(mask, torch.ones(4))
        torch.zeros(4).masked_scatter(mask & False, torch.ones(0))
        with pytest.raises(IndexError, match="is given the number 3, where there are 3"):
            torch.zeros(2, 4).masked_scatter(mask, torch.ones(3))


def test_tensors_without_data_are_not_looked_at() -> None:
    def looked_up(x: Tensor, places: Tensor) -> Tensor:
        return F.embedding(places, x).gather(1, places[:, None]) + torch.bernoulli(x[:2, :1])

    places = torch.tensor([0, 9])
    with Bounds():  # type: ignore[no-untyped-call]
        assert looked_up(torch.rand(4, 4, device="meta"), places.to("meta")).shape == (2, 1)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert looked_up(torch.rand(4, 4), torch.zeros(2, dtype=torch.long)).shape == (2, 1)


def test_what_has_no_numbers_runs() -> None:
    with Bounds():  # type: ignore[no-untyped-call]
        x = torch.rand(3, 4)
        assert x[torch.zeros(0, dtype=torch.long)].shape == (0, 4)
        assert x[:, torch.tensor([True, False, True, False])].shape == (3, 2)
        assert torch.equal(x.index_fill(0, torch.tensor([1]), 0.0)[1], torch.zeros(4))
