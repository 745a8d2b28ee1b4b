"""What is relied upon of torch's private names in ``levels.py``: a test for each, under its own name."""

from __future__ import annotations

import pytest
import torch
from tests.capture.tracing import X, targets, traced
from torch import Tensor

from pyrannc.capture.torch_internals import levels, tracing


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


def _fails_inside() -> None:
    with levels.vmap_levels_ended():
        torch._C._functorch._vmap_increment_nesting(2, "error")
        assert levels.functorch_is_active()
        raise ValueError("inside")


def test_vmap_levels_ended() -> None:
    with pytest.raises(ValueError, match="inside"):
        _fails_inside()
    assert not levels.functorch_is_active()


def test_without_levels() -> None:
    own = X.clone().requires_grad_()

    def call(x: Tensor) -> Tensor:
        assert not x.requires_grad
        assert levels.without_levels(x) is not x
        assert levels.without_levels(x).requires_grad
        return x

    torch.vmap(torch.vmap(call))(own)
    assert levels.without_levels(own) is own
