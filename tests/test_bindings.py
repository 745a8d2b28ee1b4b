"""Python's bindings compute what the operators do that they stand for, on the same arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyrannc.blocks.bindings import BINDINGS

_aten = torch.ops.aten


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


X, Y, IMAGE, VOLUME = floats(2, 3, 4), floats(2, 4, 5), floats(2, 4, 6, 6), floats(1, 2, 4, 4, 4)
HEADS = floats(2, 2, 3, 4)

CASES: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (_aten.add.Tensor, (X, X), {"alpha": 2}),
    (_aten.add.Tensor, (X, 2.5), {}),
    (_aten.sub.Tensor, (X, floats(4)), {"alpha": 3}),
    (_aten.mul.Tensor, (X, 3), {}),
    (_aten.mul.Tensor, (torch.arange(4), 0.5), {}),
    (_aten.div.Tensor, (X, torch.arange(1, 5)), {}),
    (_aten.linear.default, (X, floats(5, 4)), {}),
    (_aten.linear.default, (X, floats(5, 4), floats(5)), {}),
    (_aten.matmul.default, (X, floats(4)), {}),
    (_aten.bmm.default, (X, Y), {}),
    (_aten.conv2d.default, (IMAGE, floats(4, 2, 3, 3), None, [2, 1], [1, 1], [1, 1], 2), {}),
    (_aten.conv3d.default, (VOLUME, floats(3, 2, 3, 3, 3), floats(3)), {}),
    (_aten.embedding.default, (floats(5, 3), torch.tensor([[1, 4], [0, 2]]), 2, True), {}),
    (_aten.layer_norm.default, (X, [4], floats(4), floats(4), 1e-3), {}),
    (_aten.group_norm.default, (IMAGE, 2, floats(4), floats(4), 1e-3), {}),
    (_aten.softmax.int, (X, -1), {}),
    (_aten.softmax.int, (X, 1, torch.float64), {}),
    (_aten.scaled_dot_product_attention.default, (HEADS, HEADS, HEADS, None, 0.0, True), {"scale": 0.3}),
    (_aten.dropout.default, (X, 0.5, False), {}),
    (_aten.relu.default, (X,), {}),
    (_aten.gelu.default, (X,), {"approximate": "tanh"}),
    (_aten.silu.default, (X,), {}),
    (_aten.tanh.default, (X,), {}),
    (_aten.view.default, (X, [3, -1]), {}),
    (_aten.reshape.default, (X.transpose(0, 1), [6, 4]), {}),
    (_aten.transpose.int, (X, 0, -1), {}),
    (_aten.permute.default, (X, [2, 0, 1]), {}),
    (_aten.unsqueeze.default, (X, -1), {}),
    (_aten.expand.default, (floats(1, 4), [3, -1]), {}),
    (_aten.cat.default, ([X, X], 1), {}),
]


def test_every_binding_is_tried() -> None:
    assert {operator for operator, _, _ in CASES} == BINDINGS.keys()


@pytest.mark.parametrize(("operator", "args", "kwargs"), CASES, ids=[f"{op}-{i}" for i, (op, _, _) in enumerate(CASES)])
def test_binding(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    found, expected = BINDINGS[operator](*args, **kwargs), operator(*args, **kwargs)
    assert torch.equal(found, expected)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    leaves = [item for item in args if isinstance(item, Tensor) and item.requires_grad]
    if leaves:
        seed = torch.ones_like(expected)
        grads = [torch.autograd.grad(made, leaves, seed, retain_graph=True) for made in (found, expected)]
        assert all(map(torch.equal, *grads))
