"""Numbers of elements outside of what there is are refused before an operator meets them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

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


def test_what_has_no_numbers_runs() -> None:
    with Bounds():  # type: ignore[no-untyped-call]
        x = torch.rand(3, 4)
        assert x[torch.zeros(0, dtype=torch.long)].shape == (0, 4)
        assert x[:, torch.tensor([True, False, True, False])].shape == (3, 2)
        assert torch.equal(x.index_fill(0, torch.tensor([1]), 0.0)[1], torch.zeros(4))
