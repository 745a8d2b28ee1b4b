"""What is relied upon of torch's private names in ``operators.py``: a test for each, under its own name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.capture.tracing import X, targets, traced
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from pyrannc.capture.torch_internals import operators, patching


def test_safe_softmax() -> None:
    scores = torch.tensor([[0.0, -math.inf], [-math.inf, -math.inf]], dtype=torch.float64, requires_grad=True)
    found = operators.safe_softmax(scores)
    assert found.tolist() == [[1.0, 0.0], [0.0, 0.0]]
    (grad,) = torch.autograd.grad(found[:, 0].sum(), scores)
    assert grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_assert_on_device() -> None:
    operators.assert_on_device(torch.tensor(True), "fine")
    with pytest.raises(RuntimeError, match="not fine"):
        operators.assert_on_device(torch.tensor(False), "not fine")


def test_OpOverload() -> None:
    assert all(isinstance(target, operators.OpOverload) for target in targets(traced(lambda x: x.sin() + 1, X)))


def test_HigherOrderOperator() -> None:
    gm = traced(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), X)
    assert any(isinstance(target, operators.HigherOrderOperator) for target in targets(gm))


def test_schema() -> None:
    found = operators.schema(torch.ops.aten.add_.Tensor)
    written, other, alpha = found.arguments
    assert (found.name, found.is_mutable, len(found.returns)) == ("aten::add_", True, 1)
    assert written.alias_info is not None
    assert written.alias_info.is_write
    assert found.returns[0].alias_info is not None
    assert found.returns[0].alias_info.before_set == written.alias_info.before_set
    assert (other.name, other.kwarg_only, alpha.kwarg_only, alpha.default_value) == ("other", False, True, 1)


def test_overload_name() -> None:
    assert operators.overload_name(torch.ops.aten.add_.Tensor) == "Tensor"


def test_SET_GRAD_ENABLED() -> None:
    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x + 1
        return y * 2

    assert targets(traced(call, X)).count(operators.SET_GRAD_ENABLED) == 2
    before = torch.is_grad_enabled()
    operators.SET_GRAD_ENABLED(not before)
    assert torch.is_grad_enabled() is not before
    operators.SET_GRAD_ENABLED(before)


def autocast_targets() -> list[Any]:
    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x.T

    return targets(traced(call, X))


def test_ENTER_AUTOCAST() -> None:
    assert autocast_targets()[0] is operators.ENTER_AUTOCAST


def test_EXIT_AUTOCAST() -> None:
    assert autocast_targets()[-1] is operators.EXIT_AUTOCAST


def test_autocast_kernel() -> None:
    linear, relu = torch.ops.aten.linear.default, torch.ops.aten.relu.default
    assert operators.autocast_kernel(linear, "cpu") is None
    with torch.autocast("cpu", torch.bfloat16):
        kernel = operators.autocast_kernel(linear, "cpu")
        assert kernel is not None
        assert kernel(X, torch.ones(3, 2)).dtype == torch.bfloat16
        assert operators.autocast_kernel(relu, "cpu") is None
        assert operators.autocast_kernel(linear, "cuda") is None


def test_autocast_kernel_calls_the_operator_again_in_the_trace() -> None:
    aten, original = torch.ops.aten, patching.PROXY_CALL.original

    def call(mode: Any, op: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        kernel = operators.autocast_kernel(op, "cpu")
        if kernel is None:
            return original(mode, op, pre_dispatch, args, kwargs)
        with mode:
            return kernel(*args, **kwargs)

    with patching.PROXY_CALL.replaced_by(call), torch.autocast("cpu", torch.bfloat16):
        found = targets(traced(lambda x: torch.mm(x, x.T), X))
    assert found == [aten.numpy_T.default, aten.to.dtype, aten.to.dtype, aten.mm.default]


def test_decomposition() -> None:
    einsum = operators.decomposition(torch.ops.aten.einsum.default)
    assert einsum is not None
    assert torch.equal(einsum("ij->ji", [X]), X.T)
    assert operators.decomposition(torch.ops.aten.mm.default) is None


def _sloped(score: Tensor, _b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - (i - j).abs()


def test_flex_attention_operator() -> None:
    heads = torch.randn(2, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 3, 3, device="cpu").as_tuple()
    found = operators.flex_attention_operator(heads, heads, heads, _sloped, blocks, 0.5, {}, (), ())
    distances = (torch.arange(3).unsqueeze(1) - torch.arange(3)).abs()
    scores = (heads @ heads.mT * 0.5 - distances).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)
    expected = scores.softmax(-1) @ heads
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(*(torch.autograd.grad(item.sin().sum(), heads)[0] for item in (found[0], expected)))


def test_flex_attention_results() -> None:
    query, value = torch.randn(2, 5, 3, 4).transpose(1, 2), torch.randn(2, 3, 5, 8)
    attended, total, largest = operators.flex_attention_results(query, value)
    assert attended.shape == (2, 3, 5, 8)
    assert attended.transpose(1, 2).is_contiguous()
    assert total.shape == largest.shape == (2, 3, 5)
    assert total.dtype == largest.dtype == torch.float32


def test_lookup() -> None:
    table = torch.randn(3, 4, requires_grad=True)
    place = [torch.tensor(2), torch.tensor(1)]
    found = operators.lookup()(table, place)
    assert found == table[2, 1]
    found.backward()
    assert table.grad is not None
    assert table.grad.nonzero().tolist() == [[2, 1]]
