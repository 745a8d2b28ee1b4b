"""What a forward sets to the elements of a parameter in place, once a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyrannc.capture import Captured, capture
from pyrannc.errors import CaptureError

CPU = torch.device("cpu")


class Changes(nn.Module):
    """A layer whose weight is changed before it is used."""

    def __init__(self, change: Callable[[nn.Linear], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.layer)
        return self.layer(x)  # type: ignore[no-any-return]


@torch.no_grad()
def clamped(layer: nn.Linear) -> None:
    layer.weight.clamp_(max=0.1)


def captured_call(model: nn.Module) -> Captured:
    return capture(model, (torch.randn(4, 4),), {}, device=CPU, rows=4)


@pytest.mark.parametrize("change", [clamped, lambda layer: layer.weight.data.clamp_(-0.1, 0.1)])
def test_limit_is_set_before_the_call(change: Callable[[nn.Linear], Any], assert_equals_model: Any) -> None:
    model = Changes(change)
    before = model.layer.weight.detach().clone()
    captured = captured_call(model)
    assert model.layer.weight.equal(before)
    (limit,) = captured.limits
    limit.set(dict(model.named_parameters()))
    assert not model.layer.weight.equal(before)
    assert model.layer.weight.max() <= 0.1
    assert_equals_model(model, lambda rows: ((torch.randn(rows, 4),), {}))


def test_limit_that_is_set_again_is_one() -> None:
    model = Changes(clamped)
    (limit,) = captured_call(nn.Sequential(model, model)).limits
    assert limit.param == "0.layer.weight"


def read_before(layer: nn.Linear) -> Tensor:
    total = layer.weight.sum()
    layer.weight.data.clamp_(-0.1, 0.1)
    return total


def two_limits(layer: nn.Linear) -> None:
    layer.weight.data.clamp_(-0.1, 0.1)
    layer.weight.data.clamp_(-0.2, 0.2)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.weight.data.mul_(0.9),
        lambda layer: layer.weight.data[0].clamp_(-0.1, 0.1),
        lambda layer: layer.weight.data.clamp_(max=layer.bias.data),
        lambda layer: setattr(layer.weight, "data", layer.weight.data.clamp(-0.1, 0.1)),
        read_before,
        two_limits,
    ],
)
def test_other_changes_of_parameters_are_refused(change: Callable[[nn.Linear], Any]) -> None:
    with pytest.raises(CaptureError, match=r"changes parameter 'layer.weight' in place"):
        captured_call(Changes(change))


def test_data_of_what_is_computed_stays_its_own() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            doubled = x * 2
            doubled.data = x.data + 1
            return doubled

    with pytest.raises(CaptureError, match=r"tensor's `.data`"):
        captured_call(Net())


def test_data_of_a_buffer_is_its_contents(assert_equals_model: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.steps.data = self.steps.data + 1
            return x * self.steps

    assert_equals_model(Net(), lambda rows: ((torch.randn(rows, 4),), {}))
