"""Losses that are means over targets, as sums by counts, and opaque calls that treat each row by itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyrannc.capture import Captured, CaptureOptions, capture, lower
from pyrannc.capture.nodes.dims import Dim
from pyrannc.capture.rows import trial
from pyrannc.capture.rows.trial import rows_shown

ROWS, CLASSES, IGNORED = 6, 5, -100
CPU = torch.device("cpu")


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
    found = capture(
        model, [torch.randn(ROWS, 3)], {}, device=torch.device("cpu"), rows=ROWS, options=CaptureOptions(("1",))
    )
    (op,) = (op for op in ops(found) if op.get("opaque"))
    assert op.get("row_wise", False) == row_wise


@torch.jit.script
def longer(x: Tensor, mask: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """What the rows are multiplied by has none itself."""
    return x * 2, mask if x.size(1) > 2 else other


@torch.jit.script
def chosen(x: Tensor, mask: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The rows choose."""
    return x * 2, mask if bool(x[0, 0] > 0) else other


@pytest.mark.parametrize(("function", "row_wise"), [(longer, True), (chosen, False)])
def test_an_operand_without_rows_may_be_a_result(function: Any, row_wise: bool) -> None:
    def call(net: Any, x: Tensor) -> Tensor:
        made, mask = function(x, torch.arange(3), torch.arange(3) + 1)
        return made * mask

    found = captured(call, torch.rand(ROWS, 3) + 1)
    (op,) = (op for op in ops(found) if op.get("opaque"))
    assert op.get("row_wise", False) == row_wise


def test_equal_calls_are_tried_once() -> None:
    """Two of them differ in a number, one in a type."""
    ran = []

    def trial(*given: Any) -> int:
        ran.append(given)
        return rows_shown(*given)

    def call(net: Any, x: Tensor) -> Tensor:
        for number in (1, 2, 1, 2):
            x = shifted(x, number)
        return shifted(x.double(), 1) + shifted(x.double(), 1)

    with patch.object(lower, "rows_shown", trial):
        found = captured(call, torch.randn(ROWS, 3))
    assert [op.get("row_wise", False) for op in ops(found) if op.get("opaque")] == [
        True,
        False,
        True,
        False,
        True,
        True,
    ]
    assert len(ran) == 3


@torch.jit.script
def shifted(x: Tensor, number: int) -> Tensor:
    """From two on, the rows are shifted by their mean."""
    return x + (x.mean(0) if number > 1 else x)


def test_what_is_too_large_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor with as many rows as something smaller."""
    seen = []

    def call(x: Tensor) -> Tensor:
        seen.append(len(x))
        return torch.cat([x, x, x], dim=1)

    operand = torch.empty(1, 64, device="meta"), [Dim(1, 0), Dim(0, 64)], False
    assert rows_shown(call, [operand], CPU, ROWS)
    assert max(seen) == 64
    for rows, found in ((3, False), (5, True), (13, True)):
        seen.clear()
        monkeypatch.setattr(trial, "MOST_BYTES", rows * 64 * 4 * (3 if rows > 5 else 1))
        assert (rows_shown(call, [operand], CPU, ROWS) > 0) is found
        assert max(seen, default=0) == {3: 0, 5: 4, 13: 13}[rows]


def test_what_is_made_inside_is_not_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the scores of attention."""
    seen = []

    def call(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x * (x[:, :, None] * x[:, None]).sum(-1)

    operand = torch.empty(1, 64, device="meta"), [Dim(1, 0), Dim(0, 64)], False
    monkeypatch.setattr(trial, "MOST_BYTES_INSIDE", 10 * 4 * (64 * 64 + 2 * 64))
    assert rows_shown(call, [operand], CPU, ROWS)
    assert max(seen) == 10


def test_for_many_rows_there_has_to_be_time() -> None:
    seen = []

    def call(x: Tensor) -> Tensor:
        seen.append(len(x))
        time.sleep(0.001 * len(x))
        return x * 2

    operand = torch.empty(1, 3, device="meta"), [Dim(1, 0), Dim(0, 3)], False
    with trial.within(30.0):
        assert rows_shown(call, [operand], CPU, 10**6)
    assert trial.MANY <= max(seen) < 10**6


@torch.jit.script
def table(x: Tensor, most: int) -> Tensor:
    return x.clamp(max=most) if x.numel() > 1 else x * torch.tensor(most)


@torch.jit.script
def noisy(x: Tensor, most: int) -> Tensor:
    if x.numel() > 1:
        x = x + torch.rand(x.shape)
    return x


def by_python(x: Tensor) -> Tensor:
    return x + 1


by_python.__annotations__ = {"x": Tensor, "return": Tensor}
torch.jit.ignore(by_python)


@torch.jit.script
def calling(x: Tensor, most: int) -> Tensor:
    return by_python(x)


@pytest.mark.parametrize(("function", "opaque"), [(table, False), (noisy, True), (calling, True)])
def test_a_scripted_function_without_rows_is_an_operator(function: Any, opaque: bool) -> None:
    """One of constants; its name tells what it does."""

    def call(net: Any, x: Tensor) -> Tensor:
        return x * function(torch.arange(3.0), 2) + function(torch.arange(3.0), 1) - function(torch.arange(3.0), 2)

    found = captured(call, torch.randn(ROWS, 3))
    scripted = [op for op in ops(found) if "script" in op["target"]]
    assert [op.get("opaque", False) for op in scripted] == [op.get("random", False) for op in scripted] == [opaque] * 3
    assert len({op["target"] for op in scripted}) == (1 if opaque else 2)


@torch.jit.script
def line(x: Tensor, by: int, more: int) -> Tensor:
    return x * by + more


def test_the_name_of_a_scripted_function_tells_its_arguments() -> None:
    def call(net: Any, x: Tensor) -> Tensor:
        b = torch.arange(3.0)
        return x * line(b, 1, 2) + line(b, 2, 1) - line(b, by=2, more=1) + line(b, more=2, by=1) + line(b, 1, 2)

    found = captured(call, torch.randn(ROWS, 3))
    names = [op["target"] for op in ops(found) if "script" in op["target"]]
    assert len(names) == 5
    assert len(set(names)) == 4
    assert names[0] == names[4]


def test_a_choice_that_depends_on_the_size_of_numbers_is_found() -> None:
    """Of numbers drawn by one law, all make the same choice."""

    def call(x: Tensor, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, one if bool(x.abs().max() > 5) else other

    rows = torch.empty(1, 64, device="meta"), [Dim(1, 0), Dim(0, 64)], False
    fixed = torch.empty(64, device="meta"), [Dim(0, 64)], False
    assert not rows_shown(call, [rows, fixed, fixed], CPU, ROWS)


def test_a_scripted_function_with_gradients_stays_opaque() -> None:
    weight = torch.rand(3, requires_grad=True)
    found = captured(lambda net, x, weight: x * table(weight, 1), torch.randn(ROWS, 3), weight)
    assert any(op.get("opaque") for op in ops(found))
