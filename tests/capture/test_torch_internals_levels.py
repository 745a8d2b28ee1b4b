"""What is relied upon of torch's private names in ``levels.py``: a test for each, under its own name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.capture.tracing import X, targets, traced
from torch import Tensor
from torch.autograd import forward_ad

from pyrannc.capture.torch_internals import levels, operators, tracing


def vmap_names() -> list[str]:
    with tracing.compiling_state():
        return [getattr(target, "__name__", "") for target in targets(traced(torch.vmap(torch.sin), X))]


def test_VMAP_BEGIN() -> None:
    assert vmap_names().count(levels.VMAP_BEGIN) == 1


def test_VMAP_END() -> None:
    assert vmap_names().count(levels.VMAP_END) == 1


def test_functorch_is_active() -> None:
    assert not levels.functorch_is_active()

    def call(x: Tensor) -> Tensor:
        assert levels.functorch_is_active()
        return x

    torch.vmap(call)(X)


def test_transforms_are_active() -> None:
    seen = []

    def call(x: Tensor) -> Tensor:
        seen.append(levels.transforms_are_active())
        return x

    call(X)
    torch.vmap(call)(X)
    with forward_ad.dual_level():
        call(X)
    call(X)
    assert seen == [False, True, True, False]


class _Seen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[bool]) -> Tensor:
        ctx.seen = seen
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.seen += [levels.is_batched_backward(), levels.is_batched(grads[0])]
        return grads[0] * 2, None


def test_is_batched_backward() -> None:
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    for seeds in (torch.ones(2), torch.ones(3, 2)):
        torch.autograd.grad(_Seen.apply(x, seen), x, seeds, is_grads_batched=seeds.dim() == 2)  # type: ignore[no-untyped-call]  # torch has no types for it
    assert seen == [False, False, True, True]


def test_is_batched() -> None:
    seen = []
    torch.vmap(lambda x: seen.append(levels.is_batched(x)) or x)(torch.ones(3, 2))
    assert seen == [True]
    assert not any(map(levels.is_batched, (torch.ones(2), torch.ones(2).expand(3, 2), torch.ones(2).to_sparse())))


def test_only_vmap_is_active() -> None:
    assert not levels.only_vmap_is_active()
    seen = []

    def call(x: Tensor) -> Tensor:
        seen.append(levels.only_vmap_is_active())
        return x.sum()

    torch.vmap(call)(X)
    torch.func.grad(call)(X)
    torch.func.grad(lambda x: torch.vmap(call)(x).sum())(X)
    assert seen == [True, False, False]


def _open_all() -> None:
    """Opens what captured Ops open."""
    torch._C._functorch._vmap_increment_nesting(2, "error")
    torch._C._functorch._vmap_increment_nesting(3, "error")
    operators.ENTER_AUTOCAST("cpu", torch.float16, True, False)
    operators.ENTER_AUTOCAST("cuda", torch.float16, False, None)
    operators.SET_GRAD_ENABLED(False)
    assert levels.functorch_is_active()


def _fails() -> None:
    _open_all()
    raise ValueError("inside")


def _all_that_is_open() -> list[object]:
    kinds = ("cpu", "cuda")
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    settings = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return [levels.functorch_is_active(), torch.is_grad_enabled(), nesting, torch.is_autocast_cache_enabled(), settings]


def test_regions_ended() -> None:
    before = _all_that_is_open()
    with levels.regions_ended():
        _open_all()
    assert _all_that_is_open() == before


def test_ending_regions() -> None:
    call = levels.ending_regions(_fails)
    before = _all_that_is_open()
    with pytest.raises(ValueError, match="inside"):
        call()
    assert _all_that_is_open() == before
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        outer = _all_that_is_open()
        with pytest.raises(ValueError, match="inside"):
            call()
        assert _all_that_is_open() == outer
    assert levels.ending_regions(lambda x: x + 1)(1) == 2


def test_ending_regions_forgets_casts() -> None:
    weight, x = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)

    def fails() -> None:
        operators.ENTER_AUTOCAST("cpu", torch.bfloat16, True, True)
        torch.mm(x, weight)
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        levels.ending_regions(fails)()
    with torch.no_grad():
        weight.zero_()
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.mm(x, weight).any()


def test_without_levels() -> None:
    own = X.clone().requires_grad_()

    def call(x: Tensor) -> Tensor:
        assert not x.requires_grad
        assert levels.without_levels(x) is not x
        assert levels.without_levels(x).requires_grad
        return x

    torch.vmap(torch.vmap(call))(own)
    assert levels.without_levels(own) is own
