"""Losses that are means over targets, as sums by counts, and opaque calls that treat each row by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyrannc.capture import Captured, capture

ROWS, CLASSES, IGNORED = 6, 5, -100


class Calls(nn.Module):
    """A function as a model, with class weights."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call
        self.register_buffer("weight", torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64))

    def forward(self, *tensors: Tensor) -> Any:
        return self.call(self, *tensors)


def captured(call: Callable[..., Any], *tensors: Tensor, **kwargs: Any) -> Captured:
    return capture(Calls(call), tensors, {}, device=torch.device("cpu"), rows=ROWS, **kwargs)


def ops(found: Captured) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(found.graph_json)["ops"]
    return listed


LOSSES: dict[str, Callable[..., Tensor]] = {
    "plain": lambda net, x, t: F.cross_entropy(x, t),
    "ignored": lambda net, x, t: F.cross_entropy(x, t, ignore_index=1),
    "weighted": lambda net, x, t: F.cross_entropy(x, t, net.weight),
    "smoothed": lambda net, x, t: F.cross_entropy(x, t, label_smoothing=0.2),
    "all of it": lambda net, x, t: F.cross_entropy(x, t, net.weight, ignore_index=1, label_smoothing=0.2),
    "nll": lambda net, x, t: F.nll_loss(F.log_softmax(x, 1), t, net.weight),
    "pixels": lambda net, x, t: F.nll_loss(x[:, :, None].expand(-1, -1, 3), t[:, None].expand(-1, 3)),
}

DEFAULT = LOSSES.keys() - {"ignored", "all of it"}
"""Those that ignore the usual index."""


@pytest.mark.parametrize("name", LOSSES)
def test_a_mean_over_targets_is_a_sum_by_a_count(name: str) -> None:
    x = torch.randn(ROWS, CLASSES, dtype=torch.float64)
    target = torch.tensor([0, 1, 4, IGNORED if name in DEFAULT else 1, 2, 1])
    found = captured(LOSSES[name], x, target)
    weight = Calls(LOSSES[name]).weight
    torch.testing.assert_close(
        found.gm(weight, x, target)[0], LOSSES[name](Calls(LOSSES[name]), x, target), rtol=1e-10, atol=1e-10
    )
    (loss,) = (op for op in ops(found) if "loss" in op["target"])
    assert loss["args"][3] == {"int": 2}
    places = {json.dumps(op["source"]) for op in ops(found)[ops(found).index(loss) :]}
    assert places == {json.dumps(loss["source"])}


def test_half_precision_does_not_overflow() -> None:
    x = torch.randn(ROWS, CLASSES, dtype=torch.float16) * 100
    found = captured(lambda net, x, t: F.cross_entropy(x, t), x, torch.zeros(ROWS, dtype=torch.long))
    (loss,) = (op for op in ops(found) if "loss" in op["target"])
    values = json.loads(found.graph_json)["values"]
    assert values[loss["results"][0]]["dtype"] == "float32"
    assert values[json.loads(found.graph_json)["outputs"][0]]["dtype"] == "float16"


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class Share(Scale):
    """Its gradient depends on how many rows there are."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / len(grads[0])


class Center(Scale):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Choosy(Scale):
    """It cannot be tried on chance."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if not isinstance(x, torch._subclasses.FakeTensor):
            raise ValueError("not this one")
        return x * 2


@pytest.mark.parametrize(("function", "row_wise"), [(Scale, True), (Share, False), (Center, False), (Choosy, False)])
def test_a_custom_function_is_tried_row_by_row(function: Any, row_wise: bool) -> None:
    found = captured(lambda net, x: function.apply(x), torch.randn(ROWS, 3, requires_grad=True))
    (op,) = (op for op in ops(found) if op.get("opaque"))
    assert op.get("row_wise", False) == row_wise


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize(("inner", "row_wise"), [(nn.Linear(3, 2), True), (Centred(), False)])
def test_a_leaf_module_is_tried_row_by_row(inner: nn.Module, row_wise: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), inner)
    found = capture(model, [torch.randn(ROWS, 3)], {}, device=torch.device("cpu"), rows=ROWS, leaf_modules=["1"])
    (op,) = (op for op in ops(found) if op.get("opaque"))
    assert op.get("row_wise", False) == row_wise
