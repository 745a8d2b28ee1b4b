"""Which hooks of gradients may get those of parts of the batch is tried."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor

from pyrannc.capture.nodes.dims import Dim
from pyrannc.capture.rows.gradient_hooks import takes_parts

WIDTH = 5
ROWS, WIDE = Dim(1, 0), Dim(0, WIDTH)
TOKENS = Dim(3, 0)

Hook = Callable[[Tensor], Any]


def _fails(gradient: Tensor) -> Tensor:
    raise ValueError(gradient.shape)


def _limits_in_place(gradient: Tensor) -> None:
    gradient.clamp_(-1, 1)


def _norm_of_small_ones(gradient: Tensor) -> Tensor:
    assert gradient.abs().max() < 20
    return gradient / gradient.norm()


def _divides_in_place(gradient: Tensor) -> None:
    gradient.div_(gradient.norm())


def _takes_parts(hook: Hook, *extents: Dim | None, dtype: torch.dtype = torch.float32) -> bool:
    return takes_parts(hook, torch.empty(1, dtype=dtype), extents, torch.device("cpu"))


OF_EACH: dict[str, Hook] = {
    "limits": lambda g: g.clamp(-1, 1),
    "in place": _limits_in_place,
    "looks": lambda g: print(g.norm()),
    "row's norm": lambda g: g / g.norm(dim=-1, keepdim=True),
    "rounds": lambda g: g.to(torch.bfloat16).to(g.dtype),
    "draws": lambda g: g + torch.randn_like(g),
    "fails": _fails,
    "divides by nothing": lambda g: g / 0,
    "softmax of each row": lambda g: g.softmax(-1),
}
OF_ALL: dict[str, Hook] = {
    "norm": lambda g: g / g.norm(),
    "norm, if it is large": lambda g: g * (1 / g.norm()).clamp(max=1),
    "mean": lambda g: g - g.mean(0),
    "largest": lambda g: torch.where(g.abs() == g.abs().max(), 0, g),
    "count": lambda g: g * len(g),
    "a little of the mean": lambda g: g - 0.3 * g.mean(0),
    "norm of small ones": _norm_of_small_ones,
    "sign of the mean": lambda g: g + 0.01 * g.mean(0).sign(),
    "in place": _divides_in_place,
}


@pytest.mark.parametrize("name", sorted(OF_EACH))
@pytest.mark.parametrize("rows", [ROWS, TOKENS])
def test_a_hook_of_each_row_may_get_them_in_parts(name: str, rows: Dim) -> None:
    said = StringIO()
    with contextlib.redirect_stdout(said):
        assert _takes_parts(OF_EACH[name], rows, WIDE)
    assert said.getvalue() == ""


@pytest.mark.parametrize("name", sorted(OF_ALL))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_hook_of_all_rows_may_not(name: str, dtype: torch.dtype) -> None:
    assert not _takes_parts(OF_ALL[name], ROWS, WIDE, dtype=dtype)


def test_rows_may_lie_in_any_dimension() -> None:
    assert _takes_parts(lambda g: g - g.mean(0), WIDE, ROWS)
    assert not _takes_parts(lambda g: g - g.mean(1, keepdim=True), WIDE, ROWS)


def test_of_what_has_no_rows_parts_add_up() -> None:
    assert _takes_parts(lambda g: g * torch.arange(WIDTH), WIDE, WIDE)
    assert _takes_parts(lambda g: g - g.mean(0), WIDE, WIDE)
    assert not _takes_parts(lambda g: g.clamp(-1, 1), WIDE, WIDE)
    assert not _takes_parts(lambda g: g / g.norm(), WIDE, WIDE)
    assert not _takes_parts(torch.sign, WIDE)
    assert not _takes_parts(lambda g: g + 0.5, WIDE, WIDE)
    assert _takes_parts(lambda g: g.to(torch.bfloat16).to(g.dtype), WIDE, WIDE)


def test_large_gradients_are_made_up_shorter() -> None:
    sizes: list[int] = []
    assert _takes_parts(lambda g: sizes.append(g.numel()), ROWS, Dim(0, 100_000), Dim(0, 1000))
    assert max(sizes) <= 4 * 256 * 256


def test_a_trial_draws_nothing() -> None:
    before = torch.get_rng_state()
    assert _takes_parts(lambda g: g + torch.rand_like(g), ROWS, WIDE)
    assert torch.equal(torch.get_rng_state(), before)
