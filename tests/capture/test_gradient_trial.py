"""Which hooks of gradients, and which backwards of what has no rows, may get their gradients in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyrannc.capture import capture

ROWS, TIMES, WIDTH = 4, 3, 6
MASK = (torch.arange(WIDTH) % 2).float()

Change = Callable[[Tensor], Tensor]


def limited(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.1, 0.1)


def masked(gradient: Tensor) -> Tensor:
    return gradient * MASK


def masked_in_place(gradient: Tensor) -> Tensor:
    return gradient.mul_(MASK)


def rounded(gradient: Tensor) -> Tensor:
    return (gradient.bfloat16() * 2).to(gradient.dtype)


def of_norm_one(gradient: Tensor) -> Tensor:
    return gradient / gradient.norm()


def less_the_mean_row(gradient: Tensor) -> Tensor:
    return gradient - gradient.mean(0, keepdim=True)


class Hooked(nn.Module):
    """A hook on results, whose rows are in this dimension, or on what is computed of a weight."""

    def __init__(self, hook: Change, dim: int | None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.hook = hook
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight * 2
        y = nn.functional.linear(x, weight)
        hooked = weight if self.dim is None else y.movedim(0, self.dim)
        hooked.register_hook(self.hook)
        return y if self.dim is None else hooked.movedim(self.dim, 0)


class OwnBackward(nn.Module):
    """A custom function of a weight, whose backward does this to its gradient."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

        class Own(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  # torch has any arguments
                return change(gradient)

        self.own = Own

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.own.apply(self.linear.weight))


def stays_whole(part: nn.Module) -> bool:
    x = torch.randn(ROWS, TIMES, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), part)
    found = capture(model, (x,), {}, device=torch.device("cpu"), rows=ROWS)
    return [path for kept in found.kept_whole for path in kept.paths] == ["1"]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("hook", "whole"), [(limited, False), (masked_in_place, False), (rounded, False), (of_norm_one, True)]
)
def test_hooks_of_rows(hook: Change, dim: int, whole: bool) -> None:
    assert stays_whole(Hooked(hook, dim)) == whole


def test_a_hook_that_mixes_rows_by_a_sum_stays_whole() -> None:
    assert stays_whole(Hooked(less_the_mean_row, 0))
    assert not stays_whole(Hooked(less_the_mean_row, 1))


SUMS = [(masked, False), (rounded, False), (less_the_mean_row, False), (limited, True), (of_norm_one, True)]


@pytest.mark.parametrize(("hook", "whole"), SUMS)
def test_hooks_of_sums(hook: Change, whole: bool) -> None:
    assert stays_whole(Hooked(hook, None)) == whole


@pytest.mark.parametrize(("change", "whole"), SUMS)
def test_backwards_of_sums(change: Change, whole: bool) -> None:
    assert stays_whole(OwnBackward(change)) == whole


def test_a_backward_that_cannot_be_tried_is_taken_as_it_is() -> None:
    def only_of_ones(gradient: Tensor) -> Tensor:
        assert bool((gradient == 1).all())
        return gradient

    assert not stays_whole(OwnBackward(only_of_ones))


def test_a_trial_leaves_attributes_as_they_were() -> None:
    part = Hooked(masked, 0)
    part.seen = []  # type: ignore[assignment]  # torch takes it for a tensor

    def noted(gradient: Tensor) -> Tensor:
        part.seen.append(gradient)  # type: ignore[operator,union-attr]  # likewise
        return gradient

    part.hook = noted
    assert not stays_whole(part)
    assert part.seen == []
